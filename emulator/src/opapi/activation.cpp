// Gated and plain activations. Everything is computed in float32 and rounded once.
#include "launch.h"

namespace {
struct Halves {
  Tensor first, second;
};  // float32

Halves halves(In x, int64_t dim) {
  auto parts = f32(x).chunk(2, dim);
  return {parts[0], parts[1]};
}

void check_split(const Op& op, In x, int64_t dim) {
  op.require_dtype("x", x);
  op.require(x->view.dim() <= 8, "x must have at most 8 dimensions, not ", x->view.dim());
  op.require(x->view.size(dim) % 2 == 0, "dimension ", dim, " of x of shape ", x->view.sizes(),
             " is split in two and must be even");
}

const char* gelu_form(const Op& op, int64_t approximate) {
  op.require(approximate == 0 || approximate == 1, "approximate must be 0 (erf) or 1 (tanh), not ", approximate);
  return approximate ? "tanh" : "none";
}
}  // namespace

ACLNN(aclnnSwiGlu, (In x, int64_t dim, Out y), {
  check_split(op, x, dim);
  op.reads({x}).writes({y});
  return [=] {
    auto [gate, up] = halves(x, dim);
    y->view.copy_(at::silu(gate) * up);
  };
})

ACLNN(aclnnSwiGluGrad, (In dy, In x, int64_t dim, Out dx), {
  check_split(op, x, dim);
  op.require_same_dtype("dy", dy, "x", x);
  op.reads({dy, x}).writes({dx});
  return [=] {
    auto [gate, up] = halves(x, dim);
    auto sigmoid = at::sigmoid(gate);
    auto dgate = f32(dy) * up * sigmoid * (1 + gate * (1 - sigmoid));
    dx->view.copy_(at::cat({dgate, f32(dy) * gate * sigmoid}, dim));
  };
})

ACLNN(aclnnGeGluV3, (In x, int64_t dim, int64_t approximate, bool activate_left, Out y, Out gelu), {
  check_split(op, x, dim);
  const char* form = gelu_form(op, approximate);
  op.reads({x}).writes({y, gelu});
  return [=] {
    auto [first, second] = halves(x, dim);
    auto activated = at::gelu(activate_left ? first : second, form);
    y->view.copy_(activated * (activate_left ? second : first));
    gelu->view.copy_(activated);
  };
})

// The gradient of the linear half uses the saved, rounded gelu.
ACLNN(aclnnGeGluV3Backward, (In dy, In x, In gelu, int64_t dim, int64_t approximate, bool activate_left, Out dx), {
  check_split(op, x, dim);
  const char* form = gelu_form(op, approximate);
  op.require_same_dtype("dy", dy, "x", x);
  op.require_same_shape("dy", dy, "gelu", gelu);
  op.reads({dy, x, gelu}).writes({dx});
  return [=] {
    auto [first, second] = halves(x, dim);
    auto dlinear = f32(dy) * f32(gelu);
    auto dactivated =
        at::gelu_backward(f32(dy) * (activate_left ? second : first), activate_left ? first : second, form);
    dx->view.copy_(activate_left ? at::cat({dactivated, dlinear}, dim) : at::cat({dlinear, dactivated}, dim));
  };
})

// What F.gelu calls on this chip unless torch_npu's compatible implementations are switched on: the tanh form, whatever
// `approximate` says.
ACLNN(aclnnGelu, (In x, Out y), {
  op.require_dtype("x", x);
  op.reads({x}).writes({y});
  return [=] { y->view.copy_(at::gelu(f32(x), "tanh")); };
})

ACLNN(aclnnGeluBackward, (In dy, In x, Out dx), {
  op.require_dtype("x", x);
  op.require_same_dtype("dy", dy, "x", x);
  op.reads({dy, x}).writes({dx});
  return [=] { dx->view.copy_(at::gelu_backward(f32(dy), f32(x), "tanh")); };
})

ACLNN(aclnnGeluV2, (In x, int64_t approximate, Out y), {
  op.require_dtype("x", x);
  const char* form = gelu_form(op, approximate);
  op.reads({x}).writes({y});
  return [=] { y->view.copy_(at::gelu(f32(x), form)); };
})

ACLNN(aclnnGeluBackwardV2, (In dy, In x, const char* approximate, Out dx), {
  op.require_dtype("x", x);
  op.require_same_dtype("dy", dy, "x", x);
  std::string form = approximate;
  op.reads({dy, x}).writes({dx});
  return [=] { dx->view.copy_(at::gelu_backward(f32(dy), f32(x), form)); };
})
