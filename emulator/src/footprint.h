// Bytes that a kernel moves when it touches a tensor once: an expanded dimension (stride 0) is read once.
#pragma once
#include <ATen/core/Tensor.h>

inline uint64_t footprint(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  uint64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0) elements *= tensor.size(dim);
  return elements * tensor.element_size();
}
