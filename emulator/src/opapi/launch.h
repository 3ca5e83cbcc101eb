// How an aclnn operator is written here. An operator is two C functions: aclnnXGetWorkspaceSize checks the arguments
// and makes an executor, aclnnX runs it. ACLNN() defines both from a signature and one body. The body is the first
// phase: it states the rules and the traffic with the calls of `op` below and returns the kernel, which is the second
// phase.
//
//   ACLNN(aclnnSwiGlu, (In x, int64_t dim, Out y), {
//     op.require(x->view.size(dim) % 2 == 0, "dimension ", dim, " of x must be even");
//     op.reads({x}).writes({y});
//     return [=] { auto half = f32(x).chunk(2, dim); y->view.copy_(at::silu(half[0]) * half[1]); };
//   })
//
// aclnn arguments are untyped: torch_npu casts the function pointer to whatever it passes. A wrong signature here
// computes on garbage, which is why each operator has a numeric test.
#pragma once
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "tensor.h"

using In = const aclTensor*;
using Out = const aclTensor*;
using InList = const aclTensorList*;
using Ints = const aclIntArray*;
using Kernel = std::function<void()>;
using at::Tensor;

// Return codes of aclnn (aclnn_base.h).
constexpr int kParamInvalid = 161002, kTilingFailed = 561002, kRuntimeError = 361001;

struct Refusal : std::runtime_error {
  int code;
  Refusal(int code, const std::string& rule) : std::runtime_error(rule), code(code) {}
};

struct aclOpExecutor {
  std::string name;
  uint64_t bytes_read = 0, bytes_written = 0;
  std::vector<std::pair<uint64_t, uint64_t>> copies;  // bytes read and written by each copy to contiguous memory
  Kernel kernel;

  template <typename... Parts>
  [[noreturn]] void refuse(int code, const Parts&... rule) const {
    throw Refusal(code, c10::str(rule...));
  }
  template <typename... Parts>
  void require(bool holds, const Parts&... rule) const {
    if (!holds) refuse(kParamInvalid, rule...);
  }
  // A rule about values in device memory: the hardware would read or write out of bounds, so it is checked at launch.
  template <typename... Parts>
  void require_value(bool holds, const Parts&... rule) const {
    if (!holds) refuse(kRuntimeError, rule...);
  }
  // Dtype in `allowed`, by default the floating-point types of 910B.
  void require_dtype(const char* argument, In tensor,
                     at::ArrayRef<at::ScalarType> allowed = {at::kHalf, at::kBFloat16, at::kFloat}) const;
  void require_same_dtype(const char* a, In x, const char* b, In y) const;
  void require_same_shape(const char* a, In x, const char* b, In y) const;

  // Inputs, read once each; null is an absent optional. A non-contiguous input of an AutoContiguous operator is first
  // copied by a launch of its own.
  aclOpExecutor& reads(std::initializer_list<In> inputs);
  // Outputs, written once each.
  aclOpExecutor& writes(std::initializer_list<Out> outputs);
};
using Op = aclOpExecutor;

inline Tensor f32(In tensor) { return tensor->view.to(at::kFloat); }
// What Ascend leaves uninitialised: NaN for floating-point types, the smallest value for integers.
void leave_uninitialised(const Tensor& tensor);

int plan(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, const std::function<Kernel(Op&)>& body);
int launch(aclOpExecutor* executor);

#define UNPACK(...) __VA_ARGS__
#define EXPORT extern "C" __attribute__((visibility("default")))
#define ACLNN(name, signature, ...)                                                                         \
  EXPORT int name##GetWorkspaceSize(UNPACK signature, uint64_t* workspace_size, aclOpExecutor** executor) { \
    return plan(#name, workspace_size, executor, [&](Op& op)->Kernel __VA_ARGS__);                          \
  }                                                                                                         \
  EXPORT int name(void*, uint64_t, aclOpExecutor* executor, void*) { return launch(executor); }
