// Plain operators that torch_npu calls itself on the way to the fused ones, and inside its process group.
#include "launch.h"

#include "../footprint.h"

ACLNN(aclnnCast, (In x, int /*dtype*/, Out y), {
  op.reads({x}).writes({y});
  return [=] { y->view.copy_(x->view); };
})

ACLNN(aclnnInplaceCopy, (Out destination, In source), {
  op.bytes_read += footprint(source->view);
  op.writes({destination});
  return [=] { destination->view.copy_(source->view); };
})

ACLNN(aclnnConstantPadNd, (In x, Ints pad, const aclScalar* value, Out y), {
  op.reads({x}).writes({y});
  return [=] { y->view.copy_(at::constant_pad_nd(x->view, pad->values, value->value)); };
})

ACLNN(aclnnOneHot, (In x, int64_t classes, In on, In off, int64_t axis, Out y), {
  op.require(axis == -1 || axis == x->view.dim(), "axis must be the last one, not ", axis);
  op.reads({x, on, off}).writes({y});
  return [=] {
    auto hit = at::eq(x->view.unsqueeze(-1), at::arange(classes, x->view.options()));
    y->view.copy_(at::where(hit, on->view, off->view));
  };
})
