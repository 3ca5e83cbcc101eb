// Flash attention for training. Every layout is a list of sequences, and one sequence is q [N, Sq, D], k and v [Nkv,
// Skv, D]. A mask element of 1 is left out. Everything is computed in float32.
#include "launch.h"

#include <limits>

#include "../traffic.h"

namespace {
constexpr float kMasked = -std::numeric_limits<float>::max();
constexpr int64_t kCompressedMask = 2048;

struct Attention {
  In q, k, v, pse, mask;
  double scale;
  int64_t pre_tokens, next_tokens, heads;
  std::string layout;
  int64_t inner_precise, sparse_mode;
  std::vector<int64_t> q_ends, kv_ends;  // TND: cumulative ends of the sequences
  bool stats_as_input = false;           // TND: softmax_max and softmax_sum in TND instead of NTD order

  bool packed() const { return layout == "TND"; }
  int64_t sequences() const { return packed() ? q_ends.size() : q->view.size(layout == "SBH" ? 1 : 0); }
  int64_t kv_heads() const {
    if (layout == "BNSD" || packed()) return k->view.size(1);
    if (layout == "BSND") return k->view.size(2);
    return k->view.size(2) / (q->view.size(2) / heads);
  }
  // Trailing sequences of length 0 in a list are written as 0: they take no part.
  static std::pair<int64_t, int64_t> range(const std::vector<int64_t>& ends, int64_t i) {
    int64_t begin = i == 0 ? 0 : ends[i - 1];
    return {begin, std::max(begin, ends[i])};
  }
  // Sequence i of a tensor with `n` heads, as [n, S, D] on the tensor's own memory.
  Tensor sequence(const Tensor& tensor, int64_t n, const std::vector<int64_t>& ends, int64_t i) const {
    if (layout == "BNSD") return tensor[i];
    if (layout == "BSND") return tensor[i].transpose(0, 1);
    if (layout == "BSH") return tensor[i].unflatten(-1, {n, -1}).transpose(0, 1);
    if (layout == "SBH") return tensor.select(1, i).unflatten(-1, {n, -1}).transpose(0, 1);
    auto [begin, end] = range(ends, i);
    return tensor.slice(0, begin, end).transpose(0, 1);
  }
  Tensor queries(const Tensor& tensor, int64_t i) const { return sequence(tensor, heads, q_ends, i); }
  Tensor keys(const Tensor& tensor, int64_t i) const { return sequence(tensor, kv_heads(), kv_ends, i); }
  // softmax_max or softmax_sum of sequence i as [N, Sq, 8]. Packed, each sequence is a block of its own in NTD order.
  Tensor stats(const Tensor& tensor, int64_t i) const {
    if (!packed()) return tensor[i];
    auto [begin, end] = range(q_ends, i);
    if (stats_as_input) return tensor.slice(0, begin, end).transpose(0, 1);
    return tensor.slice(0, begin, end).view({heads, end - begin, 8});
  }
  // Elements left out of sequence i, [Sq, Skv] or [N, Sq, Skv]; undefined where there is no mask.
  Tensor left_out(int64_t i, int64_t sq, int64_t skv) const {
    if (!mask) return {};
    auto offset = at::arange(skv).unsqueeze(0) - at::arange(sq).unsqueeze(1);  // how far the key lies after the query
    auto outside = [&](int64_t diagonal) {
      return (offset - diagonal > next_tokens).logical_or(diagonal - offset > pre_tokens);
    };
    switch (sparse_mode) {
      case 2: return offset > 0;
      case 3: return offset > skv - sq;
      case 4: return outside(skv - sq);
    }
    auto given = mask->view.to(at::kBool);
    if (given.dim() == 4) given = given[given.size(0) == 1 ? 0 : i];
    else given = given.slice(0, 0, sq).slice(1, 0, skv);
    return sparse_mode == 0 ? given.logical_or(outside(0)) : given;
  }
  std::pair<int64_t, int64_t> longest() const {
    int64_t sq = 0, skv = 0;
    for (int64_t i = 0; i < sequences(); ++i) {
      sq = std::max(sq, queries(q->view, i).size(1));
      skv = std::max(skv, keys(k->view, i).size(1));
    }
    return {sq, skv};
  }
  // Bytes of the mask that are read: of a compressed one, the corner that the sequences reach.
  uint64_t mask_bytes() const {
    if (!mask || sparse_mode < 2) return mask ? mask->view.nbytes() : 0;
    auto [sq, skv] = longest();
    return std::min(sq, kCompressedMask) * std::min(skv, kCompressedMask);
  }
  // Rows without any key are zeroed where the operator can tell (or is told to): otherwise they average all values.
  bool zeroes_empty_rows() const { return inner_precise == 2 || sparse_mode >= 2; }
};

// One sequence, widened to float32 and with the key and value heads repeated for the queries that share them.
struct Sequence {
  Tensor q, k, v, scores, empty_rows;

  Sequence(const Attention& a, int64_t i) : q(a.queries(a.q->view, i).to(at::kFloat)) {
    auto widen = [&](In tensor) {
      return a.keys(tensor->view, i).to(at::kFloat).repeat_interleave(a.heads / a.kv_heads(), 0);
    };
    k = widen(a.k);
    v = widen(a.v);
    scores = at::matmul(q, k.transpose(-1, -2));
    if (a.pse) scores = scores + f32(a.pse)[a.pse->view.size(0) == 1 ? 0 : i];
    scores = scores * a.scale;
    auto left_out = a.left_out(i, q.size(1), k.size(1));
    if (!left_out.defined()) return;
    scores = scores.masked_fill(left_out, kMasked);
    if (a.zeroes_empty_rows()) empty_rows = left_out.all(-1, /*keepdim=*/true);
  }
  Tensor without_empty_rows(const Tensor& x) const { return empty_rows.defined() ? x.masked_fill(empty_rows, 0) : x; }
};

Attention checked(const Op& op, Attention a, In drop_mask, In padding_mask, double keep_prob) {
  op.require(keep_prob == 1 && !drop_mask, "dropout (keep_prob below 1) is not emulated");
  op.require(!padding_mask, "padding_mask is not supported");
  bool four = a.layout == "BNSD" || a.layout == "BSND";
  op.require_dtype("query", a.q);
  op.require_same_dtype("key", a.k, "query", a.q);
  op.require_same_dtype("value", a.v, "query", a.q);
  for (In tensor : {a.q, a.k, a.v})
    op.require(tensor->view.dim() == (four ? 4 : 3), "query, key and value must be ", four ? 4 : 3, "-D in layout ",
               a.layout);
  auto k = a.k->view.sizes(), v = a.v->view.sizes();
  op.require(k.slice(0, k.size() - 1) == v.slice(0, v.size() - 1) && k.back() >= v.back(),
             "key and value must have the same shape (value may be narrower), not ", k, " and ", v);
  bool folded = a.layout == "BSH" || a.layout == "SBH";
  int64_t n = folded ? a.heads : a.q->view.size(a.layout == "BSND" ? 2 : 1);
  op.require(a.heads >= 1 && a.heads <= 256 && n == a.heads, "head_num must be 1 to 256 and that of query, not ",
             a.heads, " and ", n);
  op.require(!folded || a.q->view.size(2) % a.heads == 0, "hidden size ", a.q->view.size(2),
             " is not a multiple of head_num ", a.heads);
  int64_t width = folded ? a.q->view.size(2) / a.heads : a.q->view.size(-1);
  op.require(width >= 1 && width <= 768, "head dimension must be 1 to 768, not ", width);
  op.require(folded ? k.back() % width == 0 : k.back() == width, "query and key must have the same head dimension");
  int64_t kv = a.kv_heads();
  op.require(kv >= 1 && a.heads % kv == 0, "query heads ", a.heads, " must be a multiple of key heads ", kv);
  op.require(a.sparse_mode >= 0 && a.sparse_mode <= 4, "sparse_mode ", a.sparse_mode, " is not emulated (0 to 4 are)");
  int64_t sq = 0, skv = 0;
  if (a.packed()) {
    for (auto [name, ends, rows] :
         {std::tuple{"actual_seq_qlen", &a.q_ends, a.q->view.size(0)}, {"actual_seq_kvlen", &a.kv_ends, k[0]}}) {
      for (size_t i = 0; i < ends->size(); ++i) {
        int64_t previous = i == 0 ? 0 : (*ends)[i - 1], end = (*ends)[i];
        op.require((end >= previous || end == 0) && end <= rows, name, " must be cumulative ends of at most ", rows,
                   ", not ", at::IntArrayRef(*ends));
      }
    }
  } else {
    int64_t batch = a.layout == "SBH" ? 1 : 0, s = a.layout == "BNSD" ? 2 : 1 - batch;
    op.require(a.q->view.size(batch) == k[batch], "query and key must have the same batch size, not ",
               a.q->view.size(batch), " and ", k[batch]);
    sq = a.q->view.size(s), skv = k[s];
  }
  if (a.pse) {
    op.require(!a.packed(), "pse in layout TND is not emulated");
    op.require_same_dtype("pse", a.pse, "query", a.q);
    auto p = a.pse->view.sizes();
    op.require(p.size() == 4 && (p[0] == 1 || p[0] == a.sequences()) && p[1] == a.heads && (p[2] == 1 || p[2] == sq) &&
                   p[3] == skv,
               "pse must be [B or 1, N, Sq or 1, Skv], not ", p);
  }
  if (!a.mask) return a;
  op.require_dtype("atten_mask", a.mask, {at::kBool, at::kByte});
  auto m = a.mask->view.sizes();
  if (a.sparse_mode >= 2) {
    op.require(m == at::IntArrayRef({kCompressedMask, kCompressedMask}), "sparse_mode ", a.sparse_mode,
               " needs the compressed upper triangular atten_mask of shape [2048, 2048], not ", m);
  } else if (a.packed()) {
    auto [longest_q, longest_kv] = a.longest();
    op.require(m.size() == 2 && m[0] >= longest_q && m[1] >= longest_kv,
               "atten_mask must be [max Sq, max Skv] in layout TND, not ", m);
  } else {
    bool full = m.size() == 4 && (m[0] == 1 || m[0] == a.sequences()) && (m[1] == 1 || m[1] == a.heads);
    op.require((m.size() == 2 || full) && m[m.size() - 2] == sq && m.back() == skv,
               "atten_mask must be [B or 1, N or 1, Sq, Skv] or [Sq, Skv], not ", m);
  }
  return a;
}

// The compressed mask is trusted by the hardware; its corners tell whether it is the triangle that the mode means.
void check_compressed_mask(const Op& op, const Attention& a) {
  if (!a.mask || a.sparse_mode < 2) return;
  auto at_corner = [&](int64_t i, int64_t j) { return a.mask->view[i][j].item<bool>(); };
  op.require_value(at_corner(0, 1) && at_corner(0, kCompressedMask - 1) && !at_corner(0, 0) && !at_corner(1, 0),
                   "sparse_mode ", a.sparse_mode, " needs ones above the diagonal of atten_mask and zeros elsewhere");
}

Kernel forward(Op& op, const Attention& a, Out softmax_max, Out softmax_sum, Out out) {
  op.reads({a.q, a.k, a.v, a.pse}).writes({softmax_max, softmax_sum, out});
  op.bytes_read += a.mask_bytes();
  return [=, &op] {
    check_compressed_mask(op, a);
    for (Out tensor : {out, softmax_max, softmax_sum}) {
      if (emulator_skip_matmuls()) tensor->view.zero_();
      else leave_uninitialised(tensor->view);
    }
    if (emulator_skip_matmuls()) return;
    for (int64_t i = 0; i < a.sequences(); ++i) {
      Sequence s(a, i);
      if (s.q.size(1) == 0) continue;
      if (s.k.size(1) == 0) {
        a.queries(out->view, i).zero_();
        continue;
      }
      auto max = s.scores.amax(-1, /*keepdim=*/true), exponent = at::exp(s.scores - max), sum = exponent.sum(-1, true);
      a.queries(out->view, i).copy_(s.without_empty_rows(at::matmul(exponent / sum, s.v)));
      a.stats(softmax_max->view, i).copy_(max.expand({-1, -1, 8}));
      a.stats(softmax_sum->view, i).copy_(sum.expand({-1, -1, 8}));
    }
  };
}

Kernel backward(Op& op, const Attention& a, In dout, In softmax_max, In softmax_sum, In out, Out dq, Out dk, Out dv,
                Out dpse) {
  op.require_same_dtype("dy", dout, "query", a.q);
  for (auto [name, tensor] :
       {std::pair{"softmax_max", softmax_max}, {"softmax_sum", softmax_sum}, {"attention_in", out}})
    op.require(tensor != nullptr, name, " is required");
  if (!a.pse) dpse = nullptr;
  op.reads({a.q, a.k, a.v, dout, a.pse, softmax_max, softmax_sum, out}).writes({dq, dk, dv, dpse});
  op.bytes_read += a.mask_bytes();
  return [=, &op] {
    check_compressed_mask(op, a);
    for (Out gradient : {dq, dk, dv, dpse}) {
      if (!gradient) continue;
      if (emulator_skip_matmuls() || gradient == dpse) gradient->view.zero_();
      else leave_uninitialised(gradient->view);
    }
    if (emulator_skip_matmuls()) return;
    int64_t shared = a.heads / a.kv_heads();
    auto of_each_key_head = [&](const Tensor& gradient) { return gradient.unflatten(0, {-1, shared}).sum(1); };
    for (int64_t i = 0; i < a.sequences(); ++i) {
      Sequence s(a, i);
      if (s.q.size(1) == 0 || s.k.size(1) == 0) {
        for (auto gradient : {a.queries(dq->view, i), a.keys(dk->view, i), a.keys(dv->view, i)}) gradient.zero_();
        continue;
      }
      auto max = a.stats(softmax_max->view, i).narrow(-1, 0, 1), sum = a.stats(softmax_sum->view, i).narrow(-1, 0, 1);
      auto p = s.without_empty_rows(at::exp(s.scores - max) / sum);
      auto d = a.queries(dout->view, i).to(at::kFloat), o = a.queries(out->view, i).to(at::kFloat);
      auto dscores = p * (at::matmul(d, s.v.transpose(-1, -2)) - (d * o).sum(-1, true)) * a.scale;
      a.queries(dq->view, i).copy_(at::matmul(dscores, s.k));
      a.keys(dk->view, i).copy_(of_each_key_head(at::matmul(dscores.transpose(-1, -2), s.q)));
      a.keys(dv->view, i).copy_(of_each_key_head(at::matmul(p.transpose(-1, -2), d)));
      if (dpse) {
        auto target = dpse->view[dpse->view.size(0) == 1 ? 0 : i];
        target.copy_(target.to(at::kFloat) + at::sum_to(dscores, target.sizes()));
      }
    }
  };
}

std::vector<int64_t> values(Ints array) { return array ? array->values : std::vector<int64_t>{}; }
}  // namespace

ACLNN(aclnnFlashAttentionScore,
      (In q, In k, In v, In pse, In drop_mask, In padding_mask, In mask, Ints, double scale, double keep_prob,
       int64_t pre, int64_t next, int64_t heads, const char* layout, int64_t inner_precise, int64_t sparse_mode,
       Out softmax_max, Out softmax_sum, Out, Out out),
      {
        auto a = checked(op, {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode, {}, {}},
                         drop_mask, padding_mask, keep_prob);
        return forward(op, a, softmax_max, softmax_sum, out);
      })

ACLNN(aclnnFlashAttentionScoreGrad,
      (In q, In k, In v, In dout, In pse, In drop_mask, In padding_mask, In mask, In softmax_max, In softmax_sum, In,
       In out, Ints, double scale, double keep_prob, int64_t pre, int64_t next, int64_t heads, const char* layout,
       int64_t inner_precise, int64_t sparse_mode, Out dq, Out dk, Out dv, Out dpse),
      {
        auto a = checked(op, {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode, {}, {}},
                         drop_mask, padding_mask, keep_prob);
        return backward(op, a, dout, softmax_max, softmax_sum, out, dq, dk, dv, dpse);
      })

ACLNN(aclnnFlashAttentionVarLenScore,
      (In q, In k, In v, In pse, In drop_mask, In padding_mask, In mask, Ints, Ints q_ends, Ints kv_ends, double scale,
       double keep_prob, int64_t pre, int64_t next, int64_t heads, const char* layout, int64_t inner_precise,
       int64_t sparse_mode, Out softmax_max, Out softmax_sum, Out, Out out),
      {
        auto a = checked(op,
                         {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode,
                          values(q_ends), values(kv_ends)},
                         drop_mask, padding_mask, keep_prob);
        return forward(op, a, softmax_max, softmax_sum, out);
      })

ACLNN(aclnnFlashAttentionUnpaddingScoreGrad,
      (In q, In k, In v, In dout, In pse, In drop_mask, In padding_mask, In mask, In softmax_max, In softmax_sum, In,
       In out, Ints, Ints q_ends, Ints kv_ends, double scale, double keep_prob, int64_t pre, int64_t next,
       int64_t heads, const char* layout, int64_t inner_precise, int64_t sparse_mode, Out dq, Out dk, Out dv, Out dpse),
      {
        auto a = checked(op,
                         {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode,
                          values(q_ends), values(kv_ends)},
                         drop_mask, padding_mask, keep_prob);
        return backward(op, a, dout, softmax_max, softmax_sum, out, dq, dk, dv, dpse);
      })

// V4 of the packed calls adds the order of softmax_max and softmax_sum; torch_npu takes it for softmax_layout="TND".
ACLNN(aclnnFlashAttentionVarLenScoreV4,
      (In q, In k, In v, In pse, In drop_mask, In padding_mask, In mask, Ints, Ints q_ends, Ints kv_ends, double scale,
       double keep_prob, int64_t pre, int64_t next, int64_t heads, const char* layout, int64_t inner_precise,
       int64_t sparse_mode, const char* stats_layout, Out softmax_max, Out softmax_sum, Out, Out out),
      {
        auto a = checked(op,
                         {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode,
                          values(q_ends), values(kv_ends), std::string(stats_layout) == "same_as_input"},
                         drop_mask, padding_mask, keep_prob);
        return forward(op, a, softmax_max, softmax_sum, out);
      })

ACLNN(aclnnFlashAttentionUnpaddingScoreGradV4,
      (In q, In k, In v, In dout, In pse, In drop_mask, In padding_mask, In mask, In softmax_max, In softmax_sum, In,
       In out, Ints, Ints q_ends, Ints kv_ends, double scale, double keep_prob, int64_t pre, int64_t next,
       int64_t heads, const char* layout, int64_t inner_precise, int64_t sparse_mode, Out dq, Out dk, Out dv, Out dpse,
       const char* stats_layout),
      {
        auto a = checked(op,
                         {q, k, v, pse, mask, scale, pre, next, heads, layout, inner_precise, sparse_mode,
                          values(q_ends), values(kv_ends), std::string(stats_layout) == "same_as_input"},
                         drop_mask, padding_mask, keep_prob);
        return backward(op, a, dout, softmax_max, softmax_sum, out, dq, dk, dv, dpse);
      })
