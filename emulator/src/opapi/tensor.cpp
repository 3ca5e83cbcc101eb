// Creation and destruction of the aclnn handles that the emulated operators take; torch_npu finds these functions by
// name in libopapi.so.
#include "tensor.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
// Values of aclDataType (acl_base.h).
at::ScalarType scalar_type(int acl_type) {
  switch (acl_type) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 9: return at::kLong;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
  }
  TORCH_CHECK(false, "aclDataType ", acl_type, " is not emulated");
}

template <typename T>
at::Scalar read(const void* value) {
  return at::Scalar(*static_cast<const T*>(value));
}
}  // namespace

EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, int acl_type, const int64_t* strides,
                                  int64_t offset, int /*format*/, const int64_t* /*storage_sizes*/,
                                  uint64_t /*storage_dims*/, void* data) {
  auto dtype = scalar_type(acl_type);
  char* start = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
  return new aclTensor{at::from_blob(start, {sizes, dims}, {strides, dims}, at::TensorOptions(dtype))};
}

EXPORT aclScalar* aclCreateScalar(const void* value, int acl_type) {
  switch (scalar_type(acl_type)) {
    case at::kDouble: return new aclScalar{read<double>(value)};
    case at::kLong: return new aclScalar{read<int64_t>(value)};
    case at::kBool: return new aclScalar{read<bool>(value)};
    default: TORCH_CHECK(false, "a scalar of aclDataType ", acl_type, " is not emulated");
  }
}

EXPORT aclIntArray* aclCreateIntArray(const int64_t* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* v, uint64_t n) {
  return new aclTensorList{{v, v + n}};
}

EXPORT int aclDestroyTensor(const aclTensor* handle) {
  delete handle;
  return 0;
}
EXPORT int aclDestroyScalar(const aclScalar* handle) {
  delete handle;
  return 0;
}
EXPORT int aclDestroyIntArray(const aclIntArray* handle) {
  delete handle;
  return 0;
}
EXPORT int aclDestroyTensorList(const aclTensorList* handle) {  // the list owns its tensors
  for (auto* tensor : handle->tensors) delete tensor;
  delete handle;
  return 0;
}
