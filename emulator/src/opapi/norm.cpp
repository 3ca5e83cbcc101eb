// RMSNorm family. gamma spans the trailing dimensions of x; the statistics and the product are float32.
#include "launch.h"

namespace {
struct Normalized {
  Tensor x, rstd;
};  // float32; rstd keeps the normalized dimensions as ones

std::vector<int64_t> trailing(In gamma) {
  std::vector<int64_t> dims(gamma->view.dim());
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = -1 - static_cast<int64_t>(i);
  return dims;
}

Normalized normalize(const Tensor& x, In gamma, double epsilon) {
  auto rstd = at::rsqrt(x.square().mean(trailing(gamma), /*keepdim=*/true) + epsilon);
  return {x * rstd, rstd};
}

void check_shapes(const Op& op, In x, In gamma) {
  auto sizes = x->view.sizes();
  size_t k = gamma->view.dim();
  op.require(sizes.size() >= 1 && sizes.size() <= 8, "x must have 1 to 8 dimensions, not ", sizes.size());
  op.require(k >= 1 && k <= sizes.size() && sizes.slice(sizes.size() - k) == gamma->view.sizes(), "gamma of shape ",
             gamma->view.sizes(), " must equal the trailing dimensions of x of shape ", sizes);
}

// aclnnRmsNorm takes float32 gamma beside half-precision x, but not the other way round.
void check_gamma_dtype(const Op& op, In x, In gamma) {
  op.require_dtype("x", x);
  op.require(gamma->view.scalar_type() == x->view.scalar_type() || gamma->view.scalar_type() == at::kFloat,
             "gamma of dtype ", gamma->view.scalar_type(), " is not supported with x of dtype ", x->view.scalar_type(),
             " (gamma must have the dtype of x or be Float)");
}
}  // namespace

ACLNN(aclnnRmsNorm, (In x, In gamma, double epsilon, Out y, Out rstd), {
  check_shapes(op, x, gamma);
  check_gamma_dtype(op, x, gamma);
  op.reads({x, gamma}).writes({y, rstd});
  return [=] {
    auto normalized = normalize(f32(x), gamma, epsilon);
    y->view.copy_(normalized.x * f32(gamma));
    rstd->view.copy_(normalized.rstd.view(rstd->view.sizes()));
  };
})

ACLNN(aclnnRmsNormGrad, (In dy, In x, In rstd, In gamma, Out dx, Out dgamma), {
  check_shapes(op, x, gamma);
  check_gamma_dtype(op, x, gamma);
  op.require_same_dtype("dy", dy, "x", x);
  op.require_same_shape("dy", dy, "x", x);
  op.require_dtype("rstd", rstd, at::kFloat);
  op.reads({dy, x, rstd, gamma}).writes({dx, dgamma});
  return [=] {
    auto normalized = f32(x) * rstd->view;
    auto dnormalized = f32(dy) * f32(gamma);
    auto projection = (dnormalized * normalized).mean(trailing(gamma), /*keepdim=*/true);
    dx->view.copy_((dnormalized - normalized * projection) * rstd->view);
    dgamma->view.copy_(at::sum_to(f32(dy) * normalized, dgamma->view.sizes()));
  };
})

ACLNN(aclnnGemmaRmsNorm, (In x, In gamma, double epsilon, Out y, Out rstd), {
  check_shapes(op, x, gamma);
  op.require_dtype("x", x);
  op.require_same_dtype("gamma", gamma, "x", x);
  op.reads({x, gamma}).writes({y, rstd});
  return [=] {
    auto normalized = normalize(f32(x), gamma, epsilon);
    y->view.copy_(normalized.x * (1 + f32(gamma)));
    rstd->view.copy_(normalized.rstd.view(rstd->view.sizes()));
  };
})

// On 910B the sum and the normalized value are each rounded to the dtype before the next step.
ACLNN(aclnnAddRmsNorm, (In x1, In x2, In gamma, double epsilon, Out y, Out rstd, Out x), {
  check_shapes(op, x1, gamma);
  op.require_dtype("x1", x1);
  op.require_same_dtype("x2", x2, "x1", x1);
  op.require_same_shape("x2", x2, "x1", x1);
  op.require_same_dtype("gamma", gamma, "x1", x1);
  op.reads({x1, x2, gamma}).writes({y, rstd, x});
  return [=] {
    at::add_out(const_cast<Tensor&>(x->view), x1->view, x2->view);
    auto normalized = normalize(f32(x), gamma, epsilon);
    y->view.copy_(normalized.x.to(x->view.scalar_type()) * gamma->view);
    rstd->view.copy_(normalized.rstd.view(rstd->view.sizes()));
  };
})
