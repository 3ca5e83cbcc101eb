// Grouped matrix products y_g = x_g @ w_g (+ bias_g), accumulated in float32. Strides matter here: a view that swaps
// the last two dimensions of contiguous memory is "transposed" and costs nothing; anything else is first copied to
// contiguous memory (CANN's aclnn_grouped_matmul.cpp: IsTransposeLastTwoDims, ParamsDataContiguous).
#include "launch.h"

#include "../footprint.h"
#include "../traffic.h"

namespace {
constexpr int64_t kNoSplit = -1, kSplitM = 0, kSplitK = 2;
constexpr int64_t kCumulative = 0, kCounts = 1;

bool transposed(const Tensor& tensor) {
  return !tensor.is_contiguous() && tensor.dim() >= 2 && tensor.transpose(-1, -2).is_contiguous();
}

void count_copy(Op& op, const Tensor& tensor) {
  if (!tensor.is_contiguous() && !transposed(tensor)) op.copies.emplace_back(footprint(tensor), tensor.nbytes());
}

struct Arguments {
  InList x, w, bias, y;
  int64_t split_item, group_type;
  bool single_y() const { return split_item >= 2; }
  const Tensor& first_w() const { return w->tensors[0]->view; }
  // Groups that one 3-D weight or a list of 2-D weights stands for.
  int64_t weights() const { return first_w().dim() == 3 ? first_w().size(0) : static_cast<int64_t>(w->tensors.size()); }
  Tensor weight(int64_t group) const { return first_w().dim() == 3 ? first_w()[group] : w->tensors[group]->view; }
  Tensor bias_of(int64_t group) const {
    if (!bias || bias->tensors.empty()) return {};
    return bias->tensors.size() == 1 && bias->tensors[0]->view.dim() == 2 ? bias->tensors[0]->view[group]
                                                                          : bias->tensors[group]->view;
  }
};

void check_operands(Op& op, const Arguments& a) {
  In first = a.x->tensors[0];
  auto dtype = first->view.scalar_type();
  op.require_dtype("x", first);
  bool all_single = a.x->tensors.size() == 1 && a.w->tensors.size() == 1 && a.y->tensors.size() == 1;
  op.require(dtype != at::kFloat || all_single, "float32 is supported only where x, weight and y are single tensors");
  bool w_transposed = transposed(a.first_w());
  for (In x : a.x->tensors) {
    int64_t inner = x->view.size(a.group_type == kSplitK ? -2 : -1);  // as it lies in memory: M where x is transposed
    op.require(inner <= 65535, "the inner axis of x must be at most 65535, not ", inner);
    op.require(a.group_type == kSplitK || !transposed(x->view), "x must not be transposed unless K is split");
    count_copy(op, x->view);
  }
  for (In w : a.w->tensors) {
    op.require_same_dtype("weight", w, "x", first);
    int64_t inner = w->view.size(w_transposed ? -2 : -1);
    op.require(inner <= 65535, "the inner axis of weight must be at most 65535, not ", inner);
    op.require(transposed(w->view) == w_transposed, "all weights must be transposed or none");
    count_copy(op, w->view);
    op.require(w->view.dim() == 2 || (w->view.dim() == 3 && a.w->tensors.size() == 1),
               "weight must be a list of 2-D tensors or one 3-D tensor");
  }
  if (!a.bias || a.bias->tensors.empty()) return;
  auto bias_dtype = dtype == at::kHalf ? at::kHalf : at::kFloat;
  bool stacked = a.first_w().dim() == 3;
  op.require(a.group_type != kSplitK, "bias is not supported with group_type 2");
  op.require(a.bias->tensors.size() == a.w->tensors.size(), "bias must be a list as long as weight");
  for (size_t i = 0; i < a.bias->tensors.size(); ++i) {
    In bias = a.bias->tensors[i];
    op.require(bias->view.scalar_type() == bias_dtype, "bias must be ", bias_dtype, " for x of dtype ", dtype, ", not ",
               bias->view.scalar_type());
    auto expected = stacked ? std::vector<int64_t>{a.weights(), a.first_w().size(-1)}
                            : std::vector<int64_t>{a.w->tensors[i]->view.size(-1)};
    op.require(bias->view.sizes() == expected, "bias must be of shape ", at::IntArrayRef(expected), ", not ",
               bias->view.sizes());
  }
}

void check_inner(const Op& op, const Tensor& x, const Tensor& w) {
  op.require(x.size(-1) == w.size(-2), "x of shape ", x.sizes(), " and weight of shape ", w.sizes(), " differ in K");
}

// End of every group along the axis of length `rows`, from cumulative ends or counts in device memory.
// Where one tensor holds all groups, rows after the last one take no part: aclnn's own page lets the list end early.
std::vector<int64_t> group_ends(const Op& op, const Tensor& list, int64_t list_type, int64_t rows) {
  std::vector<int64_t> ends;
  int64_t previous = 0;
  for (int64_t i = 0; i < list.numel(); ++i) {
    int64_t value = list[i].item<int64_t>(), end = list_type == kCounts ? previous + value : value;
    op.require_value(value >= 0, "group_list must not be negative, but entry ", i, " is ", value);
    op.require_value(end >= previous, "cumulative group_list must not decrease, but entry ", i, " is ", value);
    ends.push_back(previous = end);
  }
  op.require_value(previous <= rows, "group_list covers ", previous, " rows, but x has ", rows);
  return ends;
}

void check_group_list(const Op& op, In list, int64_t list_type, int64_t groups) {
  op.require(list != nullptr, "group_list is required for this group_type");
  op.require_dtype("group_list", list, at::kLong);
  op.require(list_type == kCumulative || list_type == kCounts,
             "group_list_type must be 0 (cumulative) or 1 (counts); key-value lists need int8 operands");
  op.require(list->view.dim() == 1 && list->view.size(0) == groups, "group_list of shape ", list->view.sizes(),
             " must have one entry for each of the ", groups, " weights");
}

// One product, counted. Groups without rows read nothing, not even their weight.
void multiply(Op& op, const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y) {
  if (y.numel() == 0) return;
  op.bytes_read += footprint(x) + footprint(w) + footprint(bias);
  op.bytes_written += footprint(y);
  if (emulator_skip_matmuls()) {
    y.zero_();
    return;
  }
  auto product = at::matmul(x.to(at::kFloat), w.to(at::kFloat));
  y.copy_(bias.defined() ? product + bias.to(at::kFloat) : product);
}

Kernel each_pair(Op& op, const Arguments& a) {
  for (size_t i = 0; i < a.x->tensors.size(); ++i) check_inner(op, a.x->tensors[i]->view, a.w->tensors[i]->view);
  return [&op, a] {
    for (size_t i = 0; i < a.x->tensors.size(); ++i)
      multiply(op, a.x->tensors[i]->view, a.w->tensors[i]->view, a.bias_of(i), a.y->tensors[i]->view);
  };
}

// Rows of x (or of the list of x, one after the other) that belong to each weight.
Kernel split_rows(Op& op, const Arguments& a, const std::function<std::vector<int64_t>(int64_t)>& ends_of) {
  auto x_tensors = a.x->tensors;
  op.require(a.weights() <= (a.first_w().dim() == 3 ? 1024 : 128), "at most 1024 groups (128 in a list), not ",
             a.weights());
  op.require(x_tensors.size() == 1 || static_cast<int64_t>(x_tensors.size()) == a.weights(),
             "x must be one tensor or one for each weight");
  int64_t rows = 0;
  for (In x : x_tensors) {
    op.require(x->view.dim() == 2, "x must be 2-D where M is split, not ", x->view.dim(), "-D");
    check_inner(op, x->view, a.first_w());
    rows += x->view.size(0);
  }
  for (In w : a.w->tensors)
    op.require(w->view.size(-1) == a.first_w().size(-1) && w->view.size(-2) == a.first_w().size(-2),
               "all weights must have one shape where M is split");
  return [&op, a, rows, ends_of] {
    auto ends = ends_of(rows);
    auto part = [&](InList list, int64_t group, int64_t begin, int64_t end) {
      return list->tensors.size() == 1 ? list->tensors[0]->view.slice(0, begin, end) : list->tensors[group]->view;
    };
    for (int64_t g = 0, begin = 0; g < a.weights(); begin = ends[g++]) {
      auto x = part(a.x, g, begin, ends[g]), y = part(a.y, g, begin, ends[g]);
      op.require_value(x.size(0) == ends[g] - begin && y.size(0) == x.size(0), "group ", g, " has ", ends[g] - begin,
                       " rows in group_list, ", x.size(0), " in x and ", y.size(0), " in y");
      multiply(op, x, a.weight(g), a.bias_of(g), y);
    }
    if (a.y->tensors.size() == 1) leave_uninitialised(a.y->tensors[0]->view.slice(0, ends.back()));
  };
}

// x is [M, K], transposed in memory, weight [K, N]; y[g] = x[:, rows of g] @ weight[rows of g]. Empty groups give
// zeros.
void check_split_inner(const Op& op, In x, In w) {
  op.require(x->view.dim() == 2 && x->view.t().is_contiguous(),
             "x must be a transposed view [M, K] of contiguous [K, M] where K is split");
  op.require(w->view.dim() == 2 && !transposed(w->view), "weight must be a plain [K, N] where K is split");
  check_inner(op, x->view, w->view);
}

Kernel grouped_matmul(Op& op, const Arguments& a, InList quantization, In group_list, int64_t list_type,
                      int64_t act_type) {
  op.require(!quantization || quantization->tensors.empty(), "quantised grouped matmul is not emulated");
  op.require(act_type == 0, "act_type is supported with per-token quantisation only, not ", act_type);
  check_operands(op, a);
  if (group_list) op.reads({group_list});
  if (a.group_type == kNoSplit) {
    op.require(!group_list && !a.single_y(), "group_type -1 needs split_item 0 or 1 and no group_list");
    return each_pair(op, a);
  }
  op.require(a.single_y(), "group_type ", a.group_type, " needs split_item 2 or 3");
  if (a.group_type == kSplitM) {
    if (group_list || a.x->tensors.size() == 1) check_group_list(op, group_list, list_type, a.weights());
    return split_rows(op, a, [=, &op](int64_t rows) {
      if (group_list) return group_ends(op, group_list->view, list_type, rows);
      std::vector<int64_t> ends;
      for (In x : a.x->tensors) ends.push_back((ends.empty() ? 0 : ends.back()) + x->view.size(0));
      return ends;
    });
  }
  op.require(a.x->tensors.size() == 1 && a.w->tensors.size() == 1,
             "group_type 2 needs x and weight to be single tensors");
  In x = a.x->tensors[0], w = a.w->tensors[0], y = a.y->tensors[0];
  check_group_list(op, group_list, list_type, y->view.size(0));
  check_split_inner(op, x, w);
  return [=, &op] {
    auto ends = group_ends(op, group_list->view, list_type, w->view.size(0));
    for (int64_t g = 0, begin = 0; g < y->view.size(0); begin = ends[g++]) {
      if (begin == ends[g]) {
        y->view[g].zero_();
        op.bytes_written += y->view[g].nbytes();
      } else {
        multiply(op, x->view.slice(1, begin, ends[g]), w->view.slice(0, begin, ends[g]), {}, y->view[g]);
      }
    }
  };
}
}  // namespace

ACLNN(aclnnGroupedMatmulV5,
      (InList x, InList w, InList bias, InList scale, InList offset, InList antiquant_scale, InList antiquant_offset,
       InList per_token_scale, In group_list, InList, InList, InList, int64_t split_item, int64_t group_type,
       int64_t group_list_type, int64_t act_type, Ints, InList y, InList, InList),
      {
        for (InList other : {offset, antiquant_scale, antiquant_offset, per_token_scale})
          op.require(!other || other->tensors.empty(), "quantised grouped matmul is not emulated");
        return grouped_matmul(op, {x, w, bias, y, split_item, group_type}, scale, group_list, group_list_type,
                              act_type);
      })

// torch_npu asks for this symbol before it accepts a tensor as group_list, and then calls V5.
ACLNN(aclnnGroupedMatmulV4, (In), { op.refuse(kParamInvalid, "superseded by aclnnGroupedMatmulV5"); })

// The older call, of npu_grouped_matmul.List: group_list is a host list of cumulative ends.
ACLNN(aclnnGroupedMatmul,
      (InList x, InList w, InList bias, InList scale, InList, InList, InList, Ints group_list, int64_t split_item,
       InList y),
      {
        bool listed = group_list && !group_list->values.empty();
        Arguments a{x, w, bias, y, split_item, listed || split_item >= 2 ? kSplitM : kNoSplit};
        if (!listed) return grouped_matmul(op, a, scale, nullptr, kCumulative, 0);
        op.require(!scale || scale->tensors.empty(), "quantised grouped matmul is not emulated");
        check_operands(op, a);
        auto ends = group_list->values;
        op.require(a.first_w().dim() == 2, "weight must be a list of 2-D tensors where group_list is a host list");
        op.require(static_cast<int64_t>(ends.size()) == a.weights(), "group_list must have one entry for each of the ",
                   a.weights(), " weights, not ", ends.size());
        return split_rows(op, a, [&op, ends](int64_t rows) {
          op.require_value(ends.back() == rows, "the last entry of group_list must be the ", rows, " rows of x, not ",
                           ends.back());
          return group_ends(op, at::tensor(ends, at::kLong), kCumulative, rows);
        });
      })

// y[g] += x_g^T @ w_g on float32 y, for gradients that are accumulated; cumulative group_list only on this chip.
ACLNN(aclnnGroupedMatmulAdd,
      (In x, In w, In group_list, Out y, bool transpose_x, bool transpose_weight, int64_t group_type), {
        op.require(transpose_x && !transpose_weight && group_type == kSplitK,
                   "only transpose_x=True, transpose_weight=False and group_type=2 are supported");
        op.require_dtype("x", x, {at::kHalf, at::kBFloat16});
        op.require_same_dtype("weight", w, "x", x);
        op.require_dtype("y", y, at::kFloat);
        op.require(y->view.dim() == 3 && x->view.dim() == 2 && w->view.dim() == 2, "y must be 3-D, x and weight 2-D");
        check_group_list(op, group_list, kCumulative, y->view.size(0));
        op.require(x->view.size(0) == w->view.size(0) && y->view.size(1) == x->view.size(1) &&
                       y->view.size(2) == w->view.size(1),
                   "x [K, M], weight [K, N] and y [G, M, N] do not match: ", x->view.sizes(), ", ", w->view.sizes(),
                   ", ", y->view.sizes());
        op.reads({x, w, group_list, y}).writes({y});
        return [=, &op] {
          auto ends = group_ends(op, group_list->view, kCumulative, x->view.size(0));
          if (emulator_skip_matmuls()) return;
          for (int64_t g = 0, begin = 0; g < y->view.size(0); begin = ends[g++])
            y->view[g].addmm_(f32(x).slice(0, begin, ends[g]).t(), f32(w).slice(0, begin, ends[g]));
        };
      })
