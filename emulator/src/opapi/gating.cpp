// Router scores and top-k selection, in float32. Equal scores go to the lower expert id.
#include "launch.h"

#include <limits>

namespace {
struct TopK {
  Tensor values, indices;
};  // [rows, k]

TopK top_k(const Tensor& scores, int64_t k) {
  auto [values, indices] = scores.sort(/*stable=*/true, -1, /*descending=*/true);
  return {values.narrow(-1, 0, k), indices.narrow(-1, 0, k)};
}

void check_k(const Op& op, int64_t k) { op.require(k <= 1024, "k must be at most 1024, not ", k); }

// Rows that are finished are sent to no expert: the id is the number of experts.
void write_experts(const Tensor& indices, In finished, int64_t experts, Out expert_idx) {
  expert_idx->view.copy_(indices);
  if (finished) expert_idx->view.masked_fill_(finished->view.unsqueeze(-1), experts);
}
}  // namespace

ACLNN(aclnnMoeGatingTopKSoftmax, (In x, In finished, int64_t k, Out y, Out expert_idx, Out row_idx), {
  check_k(op, k);
  op.reads({x, finished}).writes({y, expert_idx, row_idx});
  return [=] {
    auto chosen = top_k(f32(x).softmax(-1), k);
    y->view.copy_(chosen.values);
    write_experts(chosen.indices, finished, x->view.size(-1), expert_idx);
    int64_t rows = y->view.numel() / k;
    row_idx->view.copy_(at::arange(rows * k).view({k, rows}).t().reshape(row_idx->view.sizes()));  // column-major
  };
})

ACLNN(aclnnMoeGatingTopKSoftmaxV2,
      (In x, In finished, int64_t k, int64_t renorm, bool output_softmax, Out y, Out expert_idx, Out softmax), {
        check_k(op, k);
        op.reads({x, finished}).writes({y, expert_idx, output_softmax ? softmax : nullptr});
        return [=] {
          auto scores = f32(x).softmax(-1);
          auto chosen = top_k(scores, k);
          y->view.copy_(renorm ? chosen.values / chosen.values.sum(-1, /*keepdim=*/true) : chosen.values);
          write_experts(chosen.indices, finished, x->view.size(-1), expert_idx);
          if (output_softmax) softmax->view.copy_(scores);
          else leave_uninitialised(softmax->view);
        };
      })

// DeepSeek's gate: the bias takes part in the selection only. `norm` is written only where out_flag asks for it.
ACLNN(aclnnMoeGatingTopK,
      (In x, In bias, int64_t k, int64_t k_group, int64_t group_count, int64_t group_select_mode, int64_t renorm,
       int64_t norm_type, bool out_flag, double routed_scaling_factor, double eps, Out y, Out expert_idx, Out norm),
      {
        int64_t experts = x->view.size(1);
        op.require(experts <= 2048, "at most 2048 experts, not ", experts);
        op.require(group_count >= 1 && experts % group_count == 0, "group_count ", group_count, " must divide the ",
                   experts, " experts");
        op.require(k_group >= 1 && k_group <= group_count, "k_group must be 1 to group_count, not ", k_group);
        int64_t width = experts / group_count;
        op.require(k >= 1 && k <= k_group * width, "k must be 1 to the ", k_group * width,
                   " experts of the chosen groups, not ", k);
        op.require(group_select_mode == 0 || (group_select_mode == 1 && width >= 2),
                   "group_select_mode must be 0 (max) or 1 (sum of the two best, of at least 2 experts a group)");
        op.require(norm_type == 0 || norm_type == 1, "norm_type must be 0 (softmax) or 1 (sigmoid), not ", norm_type);
        op.require(renorm == 0, "renorm must be 0, not ", renorm);
        op.reads({x, bias}).writes({y, expert_idx, out_flag ? norm : nullptr});
        return [=] {
          auto scores = norm_type == 0 ? f32(x).softmax(-1) : f32(x).sigmoid();
          auto choice = bias ? scores + f32(bias) : scores;
          if (k_group < group_count) {
            auto grouped = choice.unflatten(-1, {group_count, width});
            auto strength = top_k(grouped, group_select_mode == 0 ? 1 : 2).values.sum(-1);
            auto left_out = at::ones_like(strength, at::kBool).scatter_(-1, top_k(strength, k_group).indices, false);
            choice = grouped.masked_fill(left_out.unsqueeze(-1), -std::numeric_limits<float>::infinity()).flatten(-2);
          }
          auto chosen = top_k(choice, k).indices;
          auto weights = scores.gather(-1, chosen);
          if (norm_type == 1) weights = weights / (weights.sum(-1, /*keepdim=*/true) + eps);
          y->view.copy_(weights * routed_scaling_factor);
          expert_idx->view.copy_(chosen);
          if (out_flag) norm->view.copy_(scores);
          else leave_uninitialised(norm->view);
        };
      })

ACLNN(aclnnMoeGatingTopKBackward,
      (In norm, In dy, In expert_idx, int64_t renorm, int64_t norm_type, double routed_scaling_factor, double eps,
       Out dx),
      {
        op.require_dtype("x_norm", norm, at::kFloat);
        op.require_dtype("grad_y", dy);
        op.require_dtype("expertIdx", expert_idx, at::kInt);
        op.require(renorm == 0 && (norm_type == 0 || norm_type == 1), "renorm must be 0 and norm_type 0 or 1");
        op.reads({norm, dy, expert_idx}).writes({dx});
        return [=] {
          auto chosen = expert_idx->view.to(at::kLong);
          auto dweights = f32(dy) * routed_scaling_factor;
          if (norm_type == 1) {
            auto picked = norm->view.gather(-1, chosen), sum = picked.sum(-1, true) + eps;
            dweights = (dweights - (dweights * picked / sum).sum(-1, true)) / sum;
          }
          auto dnorm = at::zeros_like(norm->view).scatter_add_(-1, chosen, dweights);
          dx->view.copy_(norm_type == 1 ? dnorm * norm->view * (1 - norm->view)
                                        : norm->view * (dnorm - (dnorm * norm->view).sum(-1, true)));
        };
      })
