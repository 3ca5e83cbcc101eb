// libaten.so: the ordinary aten ops of the npu key, computed by PyTorch's CPU kernels on device memory.
//
// Every aten op for which torch_npu registers a kernel is registered again as one boxed kernel, DeviceOp. It makes CPU
// tensors that alias the device memory of the arguments, runs the op's CPU kernel on them, and reports one launch. What
// torch_npu leaves to PyTorch's composite kernels or to its own CPU fallback takes that way here too.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "footprint.h"
#include "traffic.h"

extern "C" const char* aclGetRecentErrMsg();

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;
constexpr auto NPU = c10::DeviceType::PrivateUse1;

bool on_npu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == NPU; }

// ---- which ops are special, by name without overload

const std::set<std::string> torch_npus_own = {
    // Allocation, storage and copies to and from the host.
    "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_", "aten::is_set_to",
    "aten::record_stream", "aten::is_pinned", "aten::pin_memory", "aten::_pin_memory", "aten::_copy_from",
    "aten::_copy_from_and_resize", "aten::_local_scalar_dense",
    // These lead to aclnn functions: the fused attention, and GELU, whose form torch_npu chooses by chip and option.
    "aten::scaled_dot_product_attention", "aten::_fused_sdp_choice", "aten::gelu", "aten::gelu_backward"};

const std::set<std::string> allocations = {"aten::empty", "aten::empty_strided", "aten::empty_like",
                                           "aten::new_empty_strided"};

// Copies within a device are launches; to and from the host they are torch_npu's own.
const std::set<std::string> copies = {"aten::copy_", "aten::_to_copy"};

// In-place ops that do not look at what they overwrite. In-place random ops are known by their tag.
const std::set<std::string> overwriting = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_",
                                           "aten::_foreach_copy_"};

// The sets from here on hold names without the _ of in-place forms.

// Computed or, inside count(skip_matmuls=True), not.
const std::set<std::string> matrix_products = {
    "aten::mm", "aten::bmm",   "aten::addmm", "aten::baddbmm", "aten::addbmm",
    "aten::mv", "aten::addmv", "aten::dot",   "aten::matmul",  "aten::matmul_backward"};

// Ops that look at their argument's shape only.
const std::set<std::string> shape_only = {"aten::ones_like", "aten::zeros_like", "aten::full_like"};

// Ops that read as much of their first argument as they return.
const std::set<std::string> gathering = {"aten::index", "aten::index_select", "aten::embedding", "aten::gather",
                                         "aten::take"};

// Ops that in place touch as much of their first argument as their largest other one has; some add to what is there.
const std::set<std::string> scattering = {"aten::index_put", "aten::_index_put_impl", "aten::index_copy",
                                          "aten::scatter",   "aten::scatter_add",     "aten::index_add"};
const std::set<std::string> adding = {"aten::scatter_add", "aten::index_add"};

// Index tensors of these may be on the host; torch_npu moves them.
const std::set<std::string> host_indices = {"aten::index", "aten::index_put", "aten::_index_put_impl"};

// The npu has integer kernels for these, the CPU has not.
const std::set<std::string> widened = {"aten::histc"};

// ---- what torch_npu has and the CPU lacks gets a CPU kernel here

std::tuple<Tensor, Tensor> matmul_backward(const Tensor& grad_output, const Tensor& self, const Tensor& other,
                                           std::array<bool, 2> mask) {
  const Tensor left = self.dim() == 1 ? self.unsqueeze(0) : self, right = other.dim() == 1 ? other.unsqueeze(1) : other;
  Tensor grad = other.dim() == 1 ? grad_output.unsqueeze(-1) : grad_output;
  if (self.dim() == 1) grad = grad.unsqueeze(-2);
  Tensor grad_self, grad_other;
  if (mask[0]) grad_self = at::sum_to(at::matmul(grad, right.mT()), left.sizes()).view(self.sizes());
  if (mask[1]) {
    const bool linear_layer = right.dim() == 2 && left.dim() > 2;  // one product over all rows
    grad_other = linear_layer ? at::mm(left.flatten(0, -2).t(), grad.flatten(0, -2))
                              : at::sum_to(at::matmul(left.mT(), grad), right.sizes());
    grad_other = grad_other.view(other.sizes());
  }
  return {grad_self, grad_other};
}

// The gradient of `forward` at `input`, by PyTorch's own CPU derivative.
Tensor derivative(const Tensor& grad, const Tensor& input, const std::function<Tensor(const Tensor&)>& forward) {
  const c10::impl::ForceDispatchKeyGuard with_autograd(c10::default_included_set, c10::default_excluded_set);
  at::AutoGradMode enable(true);
  const Tensor leaf = input.detach().requires_grad_();
  return torch::autograd::grad({forward(leaf)}, {leaf}, {grad})[0];
}

Tensor l1_loss_backward(const Tensor& grad, const Tensor& input, const Tensor& target, int64_t reduction) {
  return derivative(grad, input, [&](const Tensor& x) { return at::l1_loss(x, target, reduction); });
}
Tensor kl_div_backward(const Tensor& grad, const Tensor& input, const Tensor& target, int64_t reduction,
                       bool log_target) {
  return derivative(grad, input, [&](const Tensor& x) { return at::kl_div(x, target, reduction, log_target); });
}
Tensor kl_div_target_backward(const Tensor& grad, const Tensor& input, const Tensor& target, int64_t reduction,
                              bool log_target) {
  return derivative(grad, target, [&](const Tensor& x) { return at::kl_div(input, x, reduction, log_target); });
}
Tensor binary_cross_entropy_with_logits_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                 const std::optional<Tensor>& weight,
                                                 const std::optional<Tensor>& pos_weight, int64_t reduction) {
  return derivative(grad, input, [&](const Tensor& x) {
    return at::binary_cross_entropy_with_logits(x, target, weight, pos_weight, reduction);
  });
}
Tensor gather_backward(const Tensor& grad, c10::SymIntArrayRef sizes, int64_t dim, const Tensor& index, bool) {
  return at::zeros(C10_AS_INTARRAYREF_SLOW(sizes), grad.options()).scatter_add_(dim, index, grad);
}
Tensor repeat_interleave_backward_int(const Tensor& grad, const Tensor& input, c10::SymInt repeats,
                                      std::optional<int64_t> dim) {
  const int64_t count = repeats.expect_int();
  return derivative(grad, input, [&](const Tensor& x) { return at::repeat_interleave(x, count, dim); });
}
Tensor repeat_interleave_backward_tensor(const Tensor& grad, const Tensor& input, const Tensor& repeats,
                                         std::optional<int64_t> dim) {
  return derivative(grad, input, [&](const Tensor& x) { return at::repeat_interleave(x, repeats, dim); });
}
Tensor dtype_cast(const Tensor& input, int64_t dtype, std::optional<int64_t>) {
  return input.to(at::ScalarType(dtype), /*non_blocking=*/false, /*copy=*/true);
}

std::vector<std::pair<const char*, torch::CppFunction>> cpu_kernels_of_npu_ops() {
  std::vector<std::pair<const char*, torch::CppFunction>> kernels;
  kernels.emplace_back("l1_loss_backward", l1_loss_backward);
  kernels.emplace_back("kl_div_backward", kl_div_backward);
  kernels.emplace_back("kl_div_target_backward", kl_div_target_backward);
  kernels.emplace_back("npu_binary_cross_entropy_with_logits_backward", binary_cross_entropy_with_logits_backward);
  kernels.emplace_back("npu_gather_backward", gather_backward);
  kernels.emplace_back("repeat_interleave_backward_int", repeat_interleave_backward_int);
  kernels.emplace_back("repeat_interleave_backward_tensor", repeat_interleave_backward_tensor);
  kernels.emplace_back("npu_dtype_cast", dtype_cast);
  return kernels;
}

// ---- tensors on both sides

// CPU tensors on the memory of npu tensors, for one call. Tensors that share storage share it here too, so that the CPU
// kernels' checks for overlap see what is there. A kernel that resizes an output moves it to host memory of its own.
class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(storage_of(tensor), c10::DispatchKeySet(DispatchKey::CPU),
                                                            tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
  }
  // The npu tensor of the same storage, if `tensor` is an alias or a view of one.
  std::optional<Tensor> original(const Tensor& tensor) const {
    for (const auto& [npu, cpu] : pairs_)
      if (tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return npu;
    return std::nullopt;
  }

 private:
  c10::Storage storage_of(const Tensor& tensor) {
    for (const auto& [npu, cpu] : pairs_)
      if (npu.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) return cpu;
    const auto& storage = tensor.storage();
    c10::DataPtr data(storage.mutable_data(), c10::Device(c10::kCPU));
    c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
                       true);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }
  std::vector<std::pair<Tensor, c10::Storage>> pairs_;
};

thread_local bool poisoning = true;

// Device memory that the caller writes at once.
Tensor unpoisoned(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options) {
  struct Off {
    Off() { poisoning = false; }
    ~Off() { poisoning = true; }
  } off;
  return at::empty_strided(sizes, strides, options);
}

Tensor to_npu(const Tensor& result, c10::Device device) {
  const Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  Tensor tensor = unpoisoned(dense.sizes(), dense.strides(), dense.options().device(device));
  if (dense.is_conj()) tensor._set_conj(true);
  if (dense.is_neg()) tensor._set_neg(true);
  if (dense.numel()) std::memcpy(tensor.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
  return tensor;
}

// Applies `change` to every tensor in a value: a tensor, a list of them, or a list of optional ones.
void for_each_tensor(IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = change(tensor);
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    value = changed;
  }
}

std::vector<Tensor> tensors_in(IValue value) {
  std::vector<Tensor> tensors;
  for_each_tensor(value, [&](const Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

uint64_t npu_bytes(const IValue& value) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors_in(value))
    if (on_npu(tensor)) bytes += footprint(tensor);
  return bytes;
}

// ---- the kernels

enum class Access { read, update, out };  // update: an in-place argument

class DeviceOp : public c10::OperatorKernel {
 public:
  DeviceOp(const c10::OperatorHandle& op, c10::SafeKernelFunction torch_npus)
      : torch_npus_(std::move(torch_npus)), name_(op.schema().name()), base_name_(name_) {
    if (base_name_.back() == '_') base_name_.pop_back();
    for (const auto& argument : op.schema().arguments()) {
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      access_.push_back(!written ? Access::read : argument.kwarg_only() ? Access::out : Access::update);
      if (argument.type()->str().find("Generator") != std::string::npos) generator_ = access_.size() - 1;
      if (argument.name() == "device") device_ = access_.size() - 1;
    }
    random_ = op.hasTag(at::Tag::nondeterministic_seeded);
    waits_ = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t base = stack->size() - access_.size();
    const std::vector<IValue> arguments(stack->begin() + base, stack->end());
    if (copies.count(name_) && crosses_devices(arguments)) return torch_npus_.callBoxed(op, keys, stack);

    const c10::Device device = common_device(arguments);
    const c10::DeviceGuard device_guard(device);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    TORCH_CHECK(!emulator_should_fail(name_.c_str()), aclGetRecentErrMsg());

    if (emulator_skip_matmuls() && matrix_products.count(base_name_))
      fill_with_zeros(op, *stack, base, arguments, device);
    else
      compute(op, *stack, base, arguments, device);
    account(arguments, std::vector<IValue>(stack->begin() + base, stack->end()), op.schema());
  }

 private:
  bool crosses_devices(const std::vector<IValue>& arguments) const {
    const Tensor& self = arguments[0].toTensor();
    if (name_ == "aten::copy_") return self.device() != arguments[1].toTensor().device();
    if (arguments[*device_].isNone()) return false;
    const c10::Device target = arguments[*device_].toDevice();
    return target.type() != NPU || (target.has_index() && target != self.device());
  }

  // The device of the npu arguments. A 0-dim tensor on the host is a number; anything else on another device is a
  // mistake.
  c10::Device common_device(const std::vector<IValue>& arguments) const {
    std::optional<c10::Device> device;
    for (const auto& argument : arguments)
      for (const auto& tensor : tensors_in(argument))
        if (on_npu(tensor) && !device) device = tensor.device();
    if (!device && device_ && arguments[*device_].isDevice()) device = arguments[*device_].toDevice();
    const auto current = c10::impl::getDeviceGuardImpl(NPU)->getDevice();
    if (!device || !device->has_index()) return current;
    for (size_t i = 0; i < arguments.size(); ++i)
      for (const auto& tensor : tensors_in(arguments[i]))
        TORCH_CHECK(!tensor.defined() || tensor.device() == *device || (tensor.is_cpu() && tensor.dim() == 0) ||
                        (tensor.is_cpu() && arguments[i].isOptionalTensorList() && host_indices.count(base_name_)),
                    "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                    tensor.device(), "! (when checking the arguments of ", name_, ")");
    return *device;
  }

  void compute(const c10::OperatorHandle& op, Stack& stack, size_t base, const std::vector<IValue>& arguments,
               c10::Device device) const {
    Aliases aliases;
    auto to_alias = [&](const Tensor& tensor) { return on_npu(tensor) ? aliases.of(tensor) : tensor; };
    for (size_t i = base; i < stack.size(); ++i) {
      for_each_tensor(stack[i], to_alias);
      if (stack[i].isDevice()) stack[i] = c10::Device(c10::kCPU);
    }
    const std::vector<IValue> on_cpu(stack.begin() + base, stack.end());

    const bool widen = widened.count(name_) && !stack[base].toTensor().is_floating_point();
    if (widen) stack[base] = stack[base].toTensor().to(at::kDouble);
    {
      const RandomSource random(*this, arguments, device, generator_ ? &stack[base + *generator_] : nullptr);
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
    }
    if (widen) stack.back() = stack.back().toTensor().to(arguments[0].toTensor().scalar_type());

    for (size_t i = 0; i < arguments.size(); ++i)
      if (access_[i] != Access::read) write_back(arguments[i], on_cpu[i]);
    const auto& returns = op.schema().returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& result = stack[stack.size() - returns.size() + i];
      if (const auto* alias = returns[i].alias_info(); alias && alias->isWrite()) {
        for (size_t k = 0; k < arguments.size(); ++k)
          if (const auto* written = op.schema().arguments()[k].alias_info(); written && *written == *alias)
            result = arguments[k];
      } else {
        for_each_tensor(result, [&](const Tensor& tensor) {
          if (auto original = aliases.original(tensor))
            return original->as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
          return to_npu(tensor, device);
        });
      }
    }
  }

  // Where the CPU kernel resized an output, the npu tensor follows.
  static void write_back(const IValue& argument, const IValue& on_cpu) {
    const auto originals = tensors_in(argument), computed = tensors_in(on_cpu);
    for (size_t i = 0; i < originals.size(); ++i) {
      if (!on_npu(originals[i])) continue;
      if (originals[i].sizes() != computed[i].sizes()) originals[i].resize_(computed[i].sizes());
      if (computed[i].numel() && computed[i].const_data_ptr() != originals[i].const_data_ptr())
        Aliases().of(originals[i]).copy_(computed[i]);
    }
  }

  // What a matrix product would return, as zeros: shapes come from the op's meta kernel.
  void fill_with_zeros(const c10::OperatorHandle& op, Stack& stack, size_t base, const std::vector<IValue>& arguments,
                       c10::Device device) const {
    for (size_t i = base; i < stack.size(); ++i)
      for_each_tensor(stack[i], [](const Tensor& tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
      });
    const std::vector<IValue> on_meta(stack.begin() + base, stack.end());
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &stack);
    auto zero = [](const Tensor& tensor) {
      if (tensor.numel()) Aliases().of(tensor).zero_();
      return tensor;
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (access_[i] == Access::read) continue;
      const Tensor& written = arguments[i].toTensor();
      if (written.sizes() != on_meta[i].toTensor().sizes()) written.resize_(on_meta[i].toTensor().sizes());
      stack[base] = zero(written);
    }
    for (size_t i = base; i < stack.size(); ++i)
      for_each_tensor(stack[i], [&](const Tensor& result) {
        if (!result.is_meta()) return result;
        return zero(unpoisoned(result.sizes(), result.strides(), result.options().device(device)));
      });
  }

  // Random ops draw from a CPU generator keyed by the npu generator's seed and offset, and move the offset on, so that
  // the npu's generator alone decides. An op without a generator argument draws from the default one, which is set for
  // its sake.
  class RandomSource {
   public:
    RandomSource(const DeviceOp& op, const std::vector<IValue>& arguments, c10::Device device, IValue* generator) {
      if (!op.random_) return;
      at::Generator npu = at::globalContext().defaultGenerator(device);
      if (generator && generator->isGenerator()) {
        npu = generator->toGenerator();
        TORCH_CHECK(npu.device().type() == NPU, "Expected a 'npu' device type for generator but found '",
                    npu.device().type(), "'");
      }
      const uint64_t key = advance(npu, arguments);
      if (generator) {
        *generator = at::detail::createCPUGenerator(key);
        return;
      }
      default_ = at::detail::getDefaultCPUGenerator();
      std::lock_guard<std::mutex> lock(default_->mutex());
      saved_ = default_->get_state();
      default_->set_current_seed(key);
    }
    ~RandomSource() {
      if (!default_) return;
      std::lock_guard<std::mutex> lock(default_->mutex());
      default_->set_state(saved_);
    }

   private:
    static uint64_t advance(at::Generator& generator, const std::vector<IValue>& arguments) {
      int64_t numbers = 4;  // the device draws four at a time
      for (const auto& argument : arguments)
        for (const auto& tensor : tensors_in(argument)) numbers = std::max(numbers, tensor.numel());
      std::lock_guard<std::mutex> lock(generator.mutex());
      const uint64_t offset = generator.get_offset();
      generator.set_offset(offset + (numbers + 3) / 4 * 4);
      return generator.current_seed() * 0x9E3779B97F4A7C15ull ^
             (offset + 0x632BE59BD9B4E019ull) * 0xD1342543DE82EF95ull;
    }
    std::optional<at::Generator> default_;
    Tensor saved_;
  };

  // One launch: every argument is read once, every result written once; README.md states the rules.
  void account(const std::vector<IValue>& arguments, const std::vector<IValue>& results,
               const c10::FunctionSchema& schema) const {
    uint64_t read = 0, written = 0, elements = 0;
    for (size_t i = 0; i < results.size(); ++i)
      if (!schema.returns()[i].alias_info()) written += npu_bytes(results[i]);
    bool in_place = !arguments.empty() && access_[0] == Access::update, masked = false, adds = adding.count(base_name_);
    for (size_t i = 1; i < arguments.size(); ++i) {
      for (const auto& tensor : tensors_in(arguments[i])) {
        if (access_[i] == Access::out)
          in_place |= arguments[0].isTensor() && tensor.is_same(arguments[0].toTensor());
        else
          elements = std::max<uint64_t>(elements, tensor.numel());
        masked |= arguments[i].isOptionalTensorList() &&
                  at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && tensor.element_size() == 1;
      }
      adds |= schema.arguments()[i].name() == "accumulate" && arguments[i].toBool();
    }
    const bool rows_only = in_place && scattering.count(base_name_);
    for (size_t i = 0; i < arguments.size(); ++i) {
      uint64_t bytes = npu_bytes(arguments[i]);
      if (rows_only && (i == 0 || access_[i] == Access::out))
        bytes = std::min<uint64_t>(bytes, elements * arguments[0].toTensor().element_size());
      if (i == 0 && gathering.count(base_name_)) bytes = std::min(bytes, written);
      if (access_[i] != Access::read) written += bytes;
      const bool unread = access_[i] == Access::out || shape_only.count(name_) || (rows_only && i == 0 && !adds) ||
                          (access_[i] == Access::update && (random_ || overwriting.count(name_)));
      if (!unread) read += bytes;
    }
    if (read + written > 0) emulator_record_launch(name_.c_str(), read, written);
    if (waits_ && (base_name_ != "aten::index" || masked)) emulator_record_host_sync();
  }

  c10::SafeKernelFunction torch_npus_;
  std::string name_, base_name_;  // the second without the _ of in-place forms
  std::vector<Access> access_;
  std::optional<size_t> generator_, device_;
  bool random_ = false, waits_ = false;
};

// Allocation is torch_npu's own; what it returns holds NaN, so that reading uninitialised memory shows.
class Allocation : public c10::OperatorKernel {
 public:
  explicit Allocation(c10::SafeKernelFunction torch_npus) : torch_npus_(std::move(torch_npus)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    torch_npus_.callBoxed(op, keys, stack);
    const Tensor& tensor = stack->back().toTensor();
    if (!poisoning || !on_npu(tensor) || tensor.numel() == 0 || tensor.scalar_type() == at::kBool) return;
    std::memset(tensor.storage().mutable_data(), 0xFF, tensor.storage().nbytes());
  }

 private:
  c10::SafeKernelFunction torch_npus_;
};

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}

bool has_host_kernel(const c10::OperatorHandle& op) {
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

}  // namespace

// Call after torch_npu is loaded. Returns how many ops were registered.
extern "C" __attribute__((visibility("default"))) int emulator_install_aten() {
  // Registrations last as long as these, which is as long as the process.
  auto library = [](const char* name, DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, name, key, __FILE__, __LINE__);
  };
  library("aten", DispatchKey::CPU)->impl("matmul_backward", matmul_backward);
  library("aten", DispatchKey::Meta)->impl("matmul_backward", matmul_backward);  // for the shapes of skipped products
  torch::Library &aten = *library("aten", DispatchKey::PrivateUse1), &npu = *library("npu", DispatchKey::PrivateUse1);
  torch::Library& npu_on_cpu = *library("npu", DispatchKey::CPU);

  auto& dispatcher = c10::Dispatcher::singleton();
  int installed = 0;
  auto install = [&](torch::Library& target, const c10::OperatorHandle& op) {
    const auto torch_npus = op.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1);
    const std::string& name = op.schema().name();
    const std::string& overload = op.schema().overload_name();
    auto kernel = allocations.count(name)
                      ? torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Allocation>(torch_npus))
                      : torch::CppFunction::makeFromBoxedFunctor(std::make_unique<DeviceOp>(op, torch_npus));
    target.impl((overload.empty() ? name : name + "." + overload).c_str(), std::move(kernel));
    ++installed;
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || torch_npus_own.count(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) && has_host_kernel(*op) &&
        !returns_view(op->schema()))
      install(aten, *op);
  }
  for (auto& [name, kernel] : cpu_kernels_of_npu_ops()) {
    npu_on_cpu.impl(name, std::move(kernel));
    install(npu, *dispatcher.findSchema({std::string("npu::") + name, ""}));
  }
  return installed;
}
