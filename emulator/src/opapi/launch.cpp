#include "launch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>
#include <memory>

#include "../footprint.h"
#include "../traffic.h"

void aclOpExecutor::require_dtype(const char* argument, In tensor, at::ArrayRef<at::ScalarType> allowed) const {
  for (auto dtype : allowed)
    if (tensor->view.scalar_type() == dtype) return;
  refuse(kParamInvalid, argument, " must be one of ", allowed, ", not ", tensor->view.scalar_type());
}

void aclOpExecutor::require_same_dtype(const char* a, In x, const char* b, In y) const {
  require(x->view.scalar_type() == y->view.scalar_type(), a, " and ", b, " must have the same dtype, not ",
          x->view.scalar_type(), " and ", y->view.scalar_type());
}

void aclOpExecutor::require_same_shape(const char* a, In x, const char* b, In y) const {
  require(x->view.sizes() == y->view.sizes(), a, " and ", b, " must have the same shape, not ", x->view.sizes(),
          " and ", y->view.sizes());
}

aclOpExecutor& aclOpExecutor::reads(std::initializer_list<In> inputs) {
  for (In input : inputs) {
    if (!input) continue;
    if (!input->view.is_contiguous()) copies.emplace_back(footprint(input->view), input->view.nbytes());
    bytes_read += input->view.nbytes();
  }
  return *this;
}

aclOpExecutor& aclOpExecutor::writes(std::initializer_list<Out> outputs) {
  for (Out output : outputs)
    if (output) bytes_written += output->view.nbytes();
  return *this;
}

void leave_uninitialised(const Tensor& tensor) {
  if (tensor.is_floating_point()) tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (tensor.scalar_type() == at::kLong) tensor.fill_(std::numeric_limits<int64_t>::min());
  else tensor.fill_(std::numeric_limits<int32_t>::min());
}

namespace {
// Runs one phase; a rule that does not hold becomes a return code, and text for the exception that torch_npu raises.
int guarded(const std::string& name, const std::function<void()>& phase) {
  // The kernels compute on plain CPU tensors: no autograd, no autocast of the caller.
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto fail = [&](int code, const std::string& text) {
    emulator_set_error((name + ": " + text).c_str());
    return code;
  };
  try {
    phase();
    return 0;
  } catch (const Refusal& refusal) { return fail(refusal.code, refusal.what()); } catch (const c10::Error& error) {
    return fail(kRuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) { return fail(kRuntimeError, error.what()); }
}
}  // namespace

int plan(const char* name, uint64_t* workspace_size, aclOpExecutor** executor, const std::function<Kernel(Op&)>& body) {
  *workspace_size = 0;
  *executor = nullptr;
  if (emulator_should_fail(name)) return EMULATOR_DEVICE_ERROR;
  auto op = std::make_unique<Op>();
  op->name = name;
  int code = guarded(op->name, [&] { op->kernel = body(*op); });
  if (code == 0) *executor = op.release();
  return code;
}

int launch(aclOpExecutor* executor) {
  std::unique_ptr<Op> op(executor);
  int code = guarded(op->name, op->kernel);
  if (code != 0) return code;
  for (auto [read, written] : op->copies) emulator_record_launch("aclnnContiguous", read, written);
  emulator_record_launch(op->name.c_str(), op->bytes_read, op->bytes_written);
  return 0;
}
