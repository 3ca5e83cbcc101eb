// Bytes that a kernel moves when it touches a tensor once: an expanded dimension (stride 0) is read once.
#pragma once
#include <ATen/core/Tensor.h>

#include "traffic.h"

inline uint64_t footprint(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  uint64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0) elements *= tensor.size(dim);
  return elements * tensor.element_size();
}

// What CANN's AutoContiguous does to an input that is not contiguous: one more kernel, which copies it.
inline at::Tensor auto_contiguous(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_contiguous()) return tensor;
  emulator_record_launch("AutoContiguous", footprint(tensor), uint64_t(tensor.numel()) * tensor.element_size());
  return tensor.contiguous();
}
