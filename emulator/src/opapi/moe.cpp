// Token routing for mixtures of experts. T tokens, K experts a token, H hidden size.
#include "launch.h"

namespace {
constexpr int64_t kSortKeyLimit = 16777215;  // the sort uses float32 keys

int64_t experts_per_token(In indices) { return indices->view.dim() == 1 ? 1 : indices->view.size(1); }

// row[i] is the place of the flat entry i after a stable sort by expert.
Tensor sorted_places(const Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
}

void check_expert_indices(const Op& op, In x, In indices, std::initializer_list<at::ScalarType> dtypes) {
  op.require_dtype("tokens", x);
  op.require_dtype("indices", indices, dtypes);
  op.require(x->view.size(0) == indices->view.size(0), "tokens and indices must have the same number of rows, not ",
             x->view.size(0), " and ", indices->view.size(0));
  op.require(indices->view.numel() < kSortKeyLimit, "T * K must be below ", kSortKeyLimit);
}

// For each flat entry (t, k): its row among the permuted ones, and whether it has one (entries beyond were dropped).
struct Places {
  Tensor rows, kept;  // int64 [T * K], bool [T * K]
  Places(const Op& op, In sorted_indices, int64_t permuted_rows) : rows(sorted_indices->view.to(at::kLong)) {
    op.require_value(rows.ge(0).all().item<bool>(), "sorted_indices must not be negative");
    kept = rows < permuted_rows;
  }
  Tensor gather(const Tensor& permuted) const {  // [T * K, H]; zero where dropped
    auto safe = rows.masked_fill(~kept, 0);
    if (permuted.size(0) == 0) return permuted.new_zeros({rows.numel(), permuted.size(1)});
    return permuted.index_select(0, safe).masked_fill_(~kept.unsqueeze(1), 0);
  }
};

void check_unpermute(const Op& op, In sorted_indices, In probs, bool padded_mode) {
  op.require(!padded_mode, "padded_mode=True is not supported");
  op.require_dtype("sorted_indices", sorted_indices, at::kInt);
  if (!probs) return;
  op.require_dtype("probs", probs);
  op.require(probs->view.dim() == 2 && probs->view.numel() == sorted_indices->view.numel(),
             "probs must be [T, K] with T * K = ", sorted_indices->view.numel(), ", not ", probs->view.sizes());
  op.require(probs->view.size(1) <= 512, "K must be at most 512, not ", probs->view.size(1));
}
}  // namespace

// sorted_indices[t * K + k] is the row of permuted where entry (t, k) went; rows beyond num_out_tokens are dropped.
ACLNN(aclnnMoeTokenPermute, (In tokens, In indices, int64_t, bool padded_mode, Out permuted, Out sorted_indices), {
  op.require(!padded_mode, "padded_mode=True is not supported");
  check_expert_indices(op, tokens, indices, {at::kInt, at::kLong});
  int64_t k = experts_per_token(indices);
  op.require(k <= 512, "K must be at most 512, not ", k);
  op.reads({tokens, indices}).writes({permuted, sorted_indices});
  return [=, &op] {
    auto experts = indices->view.flatten();
    op.require_value(experts.numel() == 0 || experts.max().item<int64_t>() < kSortKeyLimit, "indices must be below ",
                     kSortKeyLimit);
    auto order = experts.argsort(/*stable=*/true, 0, /*descending=*/false);
    sorted_indices->view.copy_(sorted_places(order));
    auto kept = order.slice(0, 0, permuted->view.size(0));
    permuted->view.copy_(tokens->view.index_select(0, kept.floor_divide(k)));
  };
})

ACLNN(aclnnMoeTokenPermuteGrad, (In dpermuted, In sorted_indices, int64_t k, bool padded_mode, Out dtokens), {
  check_unpermute(op, sorted_indices, /*probs=*/nullptr, padded_mode);
  op.require_dtype("grad_permuted_tokens", dpermuted);
  op.require(k <= 512, "K must be at most 512, not ", k);
  op.reads({dpermuted, sorted_indices}).writes({dtokens});
  return [=, &op] {
    Places places(op, sorted_indices, dpermuted->view.size(0));
    dtokens->view.copy_(places.gather(f32(dpermuted)).view({-1, k, dpermuted->view.size(1)}).sum(1));
  };
})

// Without probs K is one: every row of the output is one permuted row.
ACLNN(aclnnMoeTokenUnpermute, (In permuted, In sorted_indices, In probs, bool padded_mode, Ints, Out tokens), {
  check_unpermute(op, sorted_indices, probs, padded_mode);
  op.require_dtype("permuted_tokens", permuted);
  op.reads({permuted, sorted_indices, probs}).writes({tokens});
  return [=, &op] {
    Places places(op, sorted_indices, permuted->view.size(0));
    auto rows = places.gather(f32(permuted));
    if (probs) rows = rows * f32(probs).reshape({-1, 1});
    tokens->view.copy_(rows.view({-1, probs ? probs->view.size(1) : 1, permuted->view.size(1)}).sum(1));
  };
})

// permuted_tokens is absent where nothing needs it (no probs). Rows that no entry points to stay uninitialised.
ACLNN(aclnnMoeTokenUnpermuteGrad,
      (In permuted, In dtokens, In sorted_indices, In probs, bool padded_mode, Ints, Out dpermuted, Out dprobs), {
        check_unpermute(op, sorted_indices, probs, padded_mode);
        op.require_dtype("grad_unpermuted_tokens", dtokens);
        op.require(!probs || permuted, "permuted_tokens is required where probs is given");
        op.reads({probs ? permuted : nullptr, dtokens, sorted_indices, probs})
            .writes({dpermuted, probs ? dprobs : nullptr});
        return [=, &op] {
          Places places(op, sorted_indices, dpermuted->view.size(0));
          int64_t k = probs ? probs->view.size(1) : 1;
          auto spread = f32(dtokens).repeat_interleave(k, 0);
          auto weighted = probs ? spread * f32(probs).reshape({-1, 1}) : spread;
          leave_uninitialised(dpermuted->view);
          auto kept = places.kept.nonzero().flatten();
          dpermuted->view.index_copy_(0, places.rows.index_select(0, kept),
                                      weighted.index_select(0, kept).to(dpermuted->view.scalar_type()));
          if (probs) dprobs->view.copy_((places.gather(f32(permuted)) * spread).sum(1).view_as(probs->view));
          else leave_uninitialised(dprobs->view);
        };
      })

// row_idx[t, k] = k * T + t, and the outputs use that column-major numbering.
ACLNN(aclnnMoeInitRouting,
      (In x, In row_idx, In expert_idx, int64_t, Out expanded_x, Out expanded_row_idx, Out expanded_expert_idx), {
        check_expert_indices(op, x, expert_idx, {at::kInt});
        op.reads({x, row_idx, expert_idx}).writes({expanded_x, expanded_row_idx, expanded_expert_idx});
        return [=] {
          auto experts = expert_idx->view.flatten();
          auto order = experts.argsort(/*stable=*/true, 0, /*descending=*/false);
          auto source = row_idx->view.flatten().index_select(0, order).to(at::kLong);
          expanded_expert_idx->view.copy_(experts.index_select(0, order));
          expanded_row_idx->view.copy_(sorted_places(source));
          auto used = source.slice(0, 0, expanded_x->view.size(0));
          expanded_x->view.copy_(x->view.index_select(0, used.remainder(x->view.size(0))));
        };
      })

// npu_moe_init_routing_v2: entries whose expert lies in [begin, end) are sorted by expert, the others are left out.
ACLNN(aclnnMoeInitRoutingV3,
      (In x, In expert_idx, In scale, In offset, int64_t active_num, int64_t capacity, int64_t expert_num,
       int64_t drop_pad_mode, int64_t tokens_type, bool tokens_flag, int64_t quant_mode, Ints range,
       int64_t row_idx_type, Out expanded_x, Out expanded_row_idx, Out expert_tokens, Out expanded_scale),
      {
        check_expert_indices(op, x, expert_idx, {at::kInt});
        op.require(quant_mode == -1 && !offset, "quant_mode ", quant_mode, " is not emulated (pass quant_mode=-1)");
        op.require(range && range->values.size() == 2, "active_expert_range must have two entries");
        int64_t begin = range->values[0], end = range->values[1];
        op.require(0 <= begin && begin < end && end <= expert_num && expert_num <= 10240, "active_expert_range [",
                   begin, ", ", end, ") must be increasing and within the ", expert_num, " experts (at most 10240)");
        op.require(active_num >= -1, "active_num must be -1 or more, not ", active_num);
        op.require(drop_pad_mode == 0 ||
                       (drop_pad_mode == 1 && capacity > 0 && begin == 0 && end == expert_num && row_idx_type == 0),
                   "drop_pad_mode 1 needs expert_capacity > 0, the full active_expert_range and row_idx_type 0");
        op.require(tokens_type >= 0 && tokens_type <= 2, "expert_tokens_num_type must be 0, 1 or 2, not ", tokens_type);
        if (scale) op.require_dtype("scale", scale, at::kFloat);
        op.reads({x, expert_idx, scale}).writes({expanded_row_idx, tokens_flag ? expert_tokens : nullptr});
        return [=, &op] {
          int64_t k = expert_idx->view.size(1);
          auto experts = expert_idx->view.flatten().to(at::kLong);
          auto active = (experts >= begin).logical_and(experts < end);
          auto order = experts.masked_fill(~active, expert_num).argsort(/*stable=*/true, 0, /*descending=*/false);
          order = order.slice(0, 0, active.sum().item<int64_t>());  // flat entries, by position
          auto sorted = experts.index_select(0, order);
          auto counts = at::bincount(sorted - begin, {}, end - begin);
          auto starts = counts.cumsum(0) - counts;

          auto position = at::arange(order.numel());
          if (drop_pad_mode == 1) {
            auto slot = position - starts.index_select(0, sorted);
            position = at::where(slot < capacity, sorted * capacity + slot, -1);
          }
          leave_uninitialised(expanded_row_idx->view);
          if (row_idx_type == 0) {
            expanded_row_idx->view.fill_(-1);
            expanded_row_idx->view.index_copy_(0, order, position.to(at::kInt));
          } else {
            expanded_row_idx->view.slice(0, 0, order.numel()).copy_(order);
          }

          // Rows that are written: all of a padded output; otherwise the active ones, cut by active_num.
          auto rows = expanded_x->view.view({-1, x->view.size(1)});
          if (drop_pad_mode == 1) {
            rows.zero_();
            auto kept = (position >= 0).nonzero().flatten();
            order = order.index_select(0, kept);
            position = position.index_select(0, kept);
            op.writes({expanded_x});
          } else {
            leave_uninitialised(rows);
            order = order.slice(0, 0, active_num > 0 ? std::min(active_num, order.numel()) : order.numel());
            position = position.slice(0, 0, order.numel());
            op.bytes_written += order.numel() * rows.size(1) * rows.element_size();
          }
          auto token = order.floor_divide(k);
          rows.index_copy_(0, position, x->view.index_select(0, token));
          leave_uninitialised(expanded_scale->view);
          if (scale) {
            expanded_scale->view.flatten().index_copy_(0, position, scale->view.flatten().index_select(0, token));
            op.bytes_written += position.numel() * sizeof(float);
          }

          leave_uninitialised(expert_tokens->view);
          if (!tokens_flag) return;
          if (tokens_type == 2) {
            auto present = counts.nonzero().flatten();
            expert_tokens->view.zero_();
            expert_tokens->view.slice(0, 0, present.numel())
                .copy_(at::stack({present + begin, counts.index_select(0, present)}, 1));
          } else {
            expert_tokens->view.copy_(tokens_type == 0 ? counts.cumsum(0) : counts);
          }
        };
      })

// out[t] = x1[t] + x2[t] + sum over k of scales[t, k] * (rows[index(t, k)] + bias[expert(t, k)]); index -1 drops the
// row.
ACLNN(aclnnMoeFinalizeRoutingV4,
      (In rows, In row_idx, In x1, In x2, In bias, In scales, In expert_idx, In, In, In, In, int64_t drop_pad_mode,
       Ints, Ints, Ints, int64_t, Out out),
      {
        op.require(drop_pad_mode >= 0 && drop_pad_mode <= 3, "drop_pad_mode must be 0 to 3, not ", drop_pad_mode);
        op.require_dtype("expanded_permuted_rows", rows);
        op.require_dtype("expanded_src_to_dst_row", row_idx, at::kInt);
        bool padded = drop_pad_mode == 1 || drop_pad_mode == 3;
        op.require(rows->view.dim() == (padded ? 3 : 2), "expanded_permuted_rows must be ",
                   padded ? "3-D [E, C, H]" : "2-D", " in drop_pad_mode ", drop_pad_mode);
        op.require(x1 || !x2, "skip2 needs skip1");
        op.require(!bias || expert_idx, "bias needs expert_for_source_row");
        int64_t tokens = out->view.size(0), k = tokens == 0 ? 1 : row_idx->view.numel() / tokens;
        op.require(scales || k == 1, "K must be 1 without scales, not ", k);
        for (auto [name, other] : {std::pair{"skip1", x1}, {"skip2", x2}, {"bias", bias}, {"scales", scales}})
          if (other) op.require_same_dtype(name, other, "expanded_permuted_rows", rows);
        if (expert_idx) op.require_dtype("expert_for_source_row", expert_idx, at::kInt);
        op.reads({rows, row_idx, x1, x2, bias, scales, expert_idx}).writes({out});
        return [=, &op] {
          auto index = row_idx->view.to(at::kLong);
          index = drop_pad_mode <= 1 ? index.view({k, tokens}).t() : index.view({tokens, k});
          auto flat = f32(rows).reshape({-1, out->view.size(1)});
          op.require_value(index.numel() == 0 || (index.ge(-1).all() & index.lt(flat.size(0)).all()).item<bool>(),
                           "expanded_src_to_dst_row must be -1 or a row of expanded_permuted_rows");
          auto dropped = at::cat({flat, at::zeros({1, flat.size(1)})});  // index -1 reads the row of zeros
          auto picked = dropped.index_select(0, index.reshape({-1}).remainder(dropped.size(0))).view({tokens, k, -1});
          if (bias)
            picked = picked + f32(bias).index_select(0, expert_idx->view.flatten().to(at::kLong)).view_as(picked);
          if (scales) picked = picked * f32(scales).unsqueeze(-1);
          auto sum = picked.sum(1);
          for (In skip : {x1, x2})
            if (skip) sum = sum + f32(skip);
          out->view.copy_(sum);
        };
      })

// Cumulative number of rows up to and including each expert, from a sorted list of experts.
ACLNN(aclnnMoeComputeExpertTokens, (In sorted_experts, int64_t expert_num, Out expert_tokens), {
  op.require_dtype("sorted_expert_for_source_row", sorted_experts, at::kInt);
  op.require(sorted_experts->view.dim() == 1, "sorted_expert_for_source_row must be 1-D");
  op.require(expert_num >= 1 && expert_num <= 2048, "num_expert must be 1 to 2048, not ", expert_num);
  op.reads({sorted_experts}).writes({expert_tokens});
  return [=] {
    expert_tokens->view.copy_(
        at::searchsorted(sorted_experts->view, at::arange(expert_num, at::kInt), false, /*right=*/true));
  };
})
