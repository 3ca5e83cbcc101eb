// Rotary position embeddings. The layout of x is inferred from the dimensions of cos that are one.
#include "launch.h"

extern "C" const char* aclrtGetSocName();

namespace {
constexpr int64_t kHalf = 0, kInterleave = 1;

// The quarter turn that multiplies sin.
Tensor rotated(const Tensor& x, int64_t mode) {
  if (mode == kHalf) {
    auto parts = x.chunk(2, -1);
    return at::cat({-parts[1], parts[0]}, -1);
  }
  auto pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

// Vector cores of the chip; tiling of the unaligned path depends on them.
int64_t vector_cores() {
  std::string soc = aclrtGetSocName();
  bool small = soc.rfind("Ascend910B3", 0) == 0 || soc.rfind("Ascend910B4", 0) == 0;
  return small ? 40 : 48;
}

// Why cos cannot be read as [batch, heads, sequence] at dimensions (b, n, s) of x, or "" if it can. `code` is the
// return code that goes with the reason.
std::string mismatch(In x, In cos, int64_t b, int64_t n, int64_t s, int64_t mode, bool cos_gradients, int& code) {
  auto xs = x->view.sizes(), cs = cos->view.sizes();
  auto size = [&](int64_t dim) { return dim < 0 ? 1 : xs[dim]; };
  auto broadcast = [&](int64_t dim) { return dim < 0 || (cs[dim] == 1 && xs[dim] > 1); };
  int64_t batch = size(b), heads = size(n), sequence = size(s), width = xs.back();
  code = kParamInvalid;
  for (int64_t dim : {b, n, s})
    if (dim >= 0 && cs[dim] != 1 && cs[dim] != xs[dim]) return "is not broadcastable to x";
  if (broadcast(s)) return "must have the sequence length of x";
  bool per_batch = batch > 1 && !broadcast(b), per_head = heads > 1 && !broadcast(n);
  if (batch > 1 && per_head && !per_batch) return "must not be per head and shared by the batch";
  if (mode == kInterleave && (per_batch || per_head)) return "must be shared by batch and heads in interleave mode";
  if (mode == kInterleave && batch * heads >= 1000) return "needs B * N < 1000 in interleave mode";
  if (batch >= 1000 || heads >= 1000) return "needs B < 1000 and N < 1000";
  if (cos_gradients && batch * heads > 1024) return "needs B * N <= 1024 where cos and sin require gradients";
  // Tiling of BNSD with cos [1, 1, S, D] keeps all B * N rows of a position together and runs out of room.
  bool bnsd_shared = b == 0 && n == 1 && batch > 1 && heads > 1 && !per_batch;
  if (mode == kHalf && bnsd_shared) {
    code = kTilingFailed;
    bool aligned = width / 2 * x->view.element_size() % 32 == 0;
    int64_t rows = batch * heads, per_core = (sequence + vector_cores() - 1) / vector_cores();
    if (aligned ? rows > 8 * sequence : (width < 80 && 2 * rows > per_core))
      return "[1, 1, S, D] with BNSD x: B*N is large for this sequence length (561002); use cos of [B, 1, S, D]";
  }
  return "";
}

void check(const Op& op, In x, In cos, In sin, int64_t mode, bool cos_gradients) {
  auto xs = x->view.sizes(), cs = cos->view.sizes();
  op.require_dtype("x", x);
  op.require_same_shape("sin", sin, "cos", cos);
  op.require(xs.size() == 3 || xs.size() == 4, "x must have 3 (TND) or 4 dimensions, not ", xs.size());
  op.require(cs.size() == xs.size(), "cos must have as many dimensions as x, not ", cs.size(), " and ", xs.size());
  op.require(cs.back() == xs.back(), "cos of head dimension ", cs.back(), " must have that of x, ", xs.back());
  op.require(xs.back() % 2 == 0 && xs.back() < 896, "head dimension must be even and below 896, not ", xs.back());
  struct Layout {
    int64_t b, n, s;
  };
  static const std::vector<Layout> tnd{{-1, 1, 0}}, dense{{0, 1, 2}, {0, 2, 1}, {1, 2, 0}};  // BNSD, BSND, SBND
  std::string first;
  int code = 0;
  for (auto [b, n, s] : xs.size() == 3 ? tnd : dense) {
    int why;
    auto reason = mismatch(x, cos, b, n, s, mode, cos_gradients, why);
    if (reason.empty()) return;
    if (first.empty() || why == kTilingFailed) first = reason, code = why;
  }
  op.refuse(code, "cos of shape ", cs, " for x of shape ", xs, " ", first);
}

Kernel rotate(In x, In cos, In sin, int64_t mode, In matrix, Out y) {
  return [=] {
    auto wide = f32(x);
    auto turned = matrix ? at::matmul(wide, f32(matrix)) : rotated(wide, mode);
    y->view.copy_(wide * f32(cos) + turned * f32(sin));
  };
}
}  // namespace

ACLNN(aclnnRotaryPositionEmbedding, (In x, In cos, In sin, int64_t mode, Out y), {
  check(op, x, cos, sin, mode, /*cos_gradients=*/false);
  op.reads({x, cos, sin}).writes({y});
  return rotate(x, cos, sin, mode, /*matrix=*/nullptr, y);
})

ACLNN(aclnnRotaryPositionEmbeddingV2, (In x, In cos, In sin, int64_t mode, In matrix, Out y), {
  check(op, x, cos, sin, mode, /*cos_gradients=*/false);
  if (matrix) {
    int64_t width = x->view.size(-1);
    op.require_same_dtype("rotate", matrix, "x", x);
    op.require(matrix->view.sizes() == at::IntArrayRef({width, width}), "rotate must be of shape [", width, ", ", width,
               "]");
  }
  op.reads({x, cos, sin, matrix}).writes({y});
  return rotate(x, cos, sin, mode, matrix, y);
})

// x is absent where cos and sin need no gradients; their gradients then stay uninitialised.
ACLNN(aclnnRotaryPositionEmbeddingGrad, (In dy, In cos, In sin, In x, int64_t mode, Out dx, Out dcos, Out dsin), {
  check(op, dy, cos, sin, mode, /*cos_gradients=*/x != nullptr);
  op.reads({dy, cos, sin, x}).writes({dx});
  if (x) op.writes({dcos, dsin});
  return [=] {
    auto wide = f32(dy);
    dx->view.copy_(wide * f32(cos) - rotated(wide * f32(sin), mode));  // a quarter turn's transpose is its negative
    if (x) {
      dcos->view.copy_(at::sum_to(wide * f32(x), dcos->view.sizes()));
      dsin->view.copy_(at::sum_to(wide * rotated(f32(x), mode), dsin->view.sizes()));
    } else {
      leave_uninitialised(dcos->view);
      leave_uninitialised(dsin->view);
    }
  };
})

// Rotates query and key in place. Half-precision float16 keeps float16 between the steps; bfloat16 is widened.
ACLNN(aclnnApplyRotaryPosEmbV2, (Out query, Out key, In cos, In sin, int64_t layout, const char* mode), {
  auto q = query->view.sizes(), k = key->view.sizes();
  op.require_dtype("query", query);
  for (auto [name, other] : {std::pair{"key", key}, {"cos", cos}, {"sin", sin}})
    op.require_same_dtype(name, other, "query", query);
  op.require(std::string(mode) == "half", "rotary_mode must be half on this chip, not ", mode);
  op.require(layout == 1 || layout == 4, "layout must be BSND or TND on this chip");
  op.require(q.size() == (layout == 4 ? 3 : 4) && k.size() == q.size(), "query and key must be ",
             layout == 4 ? "TND (3-D)" : "BSND (4-D)", ", not ", q.size(), "-D");
  op.require(q.back() == 64 || q.back() == 128, "head dimension must be 64 or 128, not ", q.back());
  auto table = q.vec();
  table[table.size() - 2] = 1;
  op.require(k.slice(0, k.size() - 2) == q.slice(0, q.size() - 2) && k.back() == q.back(),
             "query and key may differ in the number of heads only, not ", q, " and ", k);
  op.require(cos->view.sizes() == table && sin->view.sizes() == table, "cos and sin must be of shape ",
             at::IntArrayRef(table), " (no broadcast), not ", cos->view.sizes());
  op.reads({query, key, cos, sin}).writes({query, key});
  return [=] {
    auto step = query->view.scalar_type() == at::kHalf ? at::kHalf : at::kFloat;
    for (Out x : {query, key}) {
      auto wide = x->view.to(step);
      x->view.copy_(wide * cos->view.to(step) + rotated(wide, kHalf) * sin->view.to(step));
    }
  };
})
