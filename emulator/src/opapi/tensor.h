// The opaque handles of the aclnn ABI. Device memory is host memory here, so a tensor handle is a CPU alias of it.
#pragma once
#include <ATen/ATen.h>
#include <vector>

struct aclTensor {
  at::Tensor view;  // shape, strides, offset and dtype of the caller's tensor, on the caller's storage
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
