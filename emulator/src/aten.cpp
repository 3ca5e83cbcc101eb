// Re-registers every ordinary aten op of the PrivateUse1 (npu) key as one boxed kernel that runs the CPU kernel on
// aliases of the emulated device memory. npu::* ops and the allocation / view / copy ops stay torch_npu's own.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
using at::Tensor; using c10::IValue;
static bool is_npu(const Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1; }
static Tensor alias_cpu(const Tensor& t) {
  Tensor r = t.numel() == 0 && !t.has_storage() ? at::empty_strided(t.sizes(), t.strides(), t.dtype()) :
      at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
static Tensor to_npu(const Tensor& c, c10::Device dev) {
  if (!c.defined() || c.device().type() != c10::DeviceType::CPU) return c;
  Tensor o = at::empty_strided(c.sizes(), c.strides(), c.options().device(dev));
  if (c.numel()) alias_cpu(o).copy_(c);
  return o;
}
static std::map<std::string, int64_t> g_calls; static std::mutex g_mu;
static bool g_count = getenv("EMUL_COUNT") != nullptr;

static void cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (g_count) { std::lock_guard<std::mutex> l(g_mu); g_calls[schema.name() + "." + schema.overload_name()]++; }
  at::AutoDispatchBelowADInplaceOrView guard;
  const size_t na = schema.arguments().size(), base = stack->size() - na;
  c10::Device dev = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice(); bool have = false;
  std::vector<IValue> orig(stack->begin() + base, stack->end());
  auto cvt = [&](const Tensor& t, bool out) {
    if (!is_npu(t)) return t;
    if (!have) { dev = t.device(); have = true; }
    if (out && t.numel() == 0) return at::empty(t.sizes(), t.options().device(c10::kCPU));
    return alias_cpu(t);
  };
  for (size_t i = 0; i < na; i++) {
    IValue& v = (*stack)[base + i];
    const auto* ai = schema.arguments()[i].alias_info(); bool wr = ai && ai->isWrite();
    if (v.isTensor()) v = cvt(v.toTensor(), wr);
    else if (v.isTensorList()) { auto l = v.toTensorVector(); for (auto& t : l) t = cvt(t, wr); v = l; }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> n;
      for (std::optional<Tensor> t : v.toOptionalTensorList()) n.push_back(t ? std::optional<Tensor>(cvt(*t, false)) : t);
      v = n;
    }
    else if (v.isDevice() && v.toDevice().type() == c10::DeviceType::PrivateUse1) { if (!have && v.toDevice().has_index()) dev = v.toDevice(); v = c10::Device(c10::kCPU); }
    else if (v.isGenerator() && v.toGenerator().device().type() == c10::DeviceType::PrivateUse1) v = IValue();
  }
  static const std::set<std::string> mixed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  if (have && !mixed.count(schema.name())) for (auto& v : orig) if (v.isTensor()) { auto& t = v.toTensor();
    TORCH_CHECK(!t.defined() || t.dim() == 0 || (is_npu(t) && t.device() == dev), "Expected all tensors to be on the same device, but found at least two devices, ", dev, " and ", t.device(), " in ", schema.name()); }
  std::vector<IValue> args(stack->begin() + base, stack->end());
  static const std::set<std::string> widen = {"aten::histc", "aten::histc.out"};   // npu has integer kernels here, the CPU does not
  std::optional<at::ScalarType> narrow;
  if (widen.count(schema.name()) && !at::isFloatingType((*stack)[base].toTensor().scalar_type())) {
    narrow = (*stack)[base].toTensor().scalar_type(); (*stack)[base] = (*stack)[base].toTensor().to(at::kDouble);
  }
  // random ops: draw from a CPU generator keyed by the npu generator's (seed, offset), then move the offset on
  for (size_t i = 0; i < na; i++) if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
    IValue& v = (*stack)[base + i]; const IValue& o = orig[i];
    if (!v.isNone()) break;                                                  // a CPU generator given explicitly
    at::Generator g = o.isGenerator() ? o.toGenerator() : at::globalContext().defaultGenerator(dev);
    std::lock_guard<std::mutex> l(g.mutex()); uint64_t seed = g.current_seed(), off = g.get_offset();
    uint64_t h = seed * 0x9E3779B97F4A7C15ull ^ (off + 0x632BE59BD9B4E019ull) * 0xD1342543DE82EF95ull;
    int64_t n = 4; for (auto& a : orig) if (a.isTensor() && a.toTensor().defined()) n = std::max<int64_t>(n, a.toTensor().numel());
    g.set_offset(off + (n + 3) / 4 * 4); v = at::detail::createCPUGenerator(h); break;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  // outputs written through aliases: grow the npu tensor where the CPU kernel resized its stand-in
  for (size_t i = 0; i < na; i++) {
    const auto* ai = schema.arguments()[i].alias_info();
    if (!(ai && ai->isWrite())) continue;
    auto fix = [&](const Tensor& o, const Tensor& c) {
      if (!is_npu(o)) return;
      if (!o.sizes().equals(c.sizes())) o.resize_(c.sizes());
      if (c.numel() && c.data_ptr() != o.data_ptr()) alias_cpu(o).copy_(c);
    };
    if (orig[i].isTensor()) fix(orig[i].toTensor(), args[i].toTensor());
    else if (orig[i].isTensorList()) { auto a = orig[i].toTensorVector(), b = args[i].toTensorVector(); for (size_t k = 0; k < a.size(); k++) fix(a[k], b[k]); }
  }
  if (narrow) stack->back() = stack->back().toTensor().to(*narrow);
  const size_t nr = schema.returns().size(), rb = stack->size() - nr;
  for (size_t r = 0; r < nr; r++) {
    IValue& v = (*stack)[rb + r];
    const auto* ra = schema.returns()[r].alias_info();
    if (ra && ra->isWrite()) {
      for (size_t i = 0; i < na; i++) { const auto* ai = schema.arguments()[i].alias_info(); if (ai && *ai == *ra) v = orig[i]; }
    } else if (v.isTensor()) v = to_npu(v.toTensor(), dev);
    else if (v.isTensorList()) { auto l = v.toTensorVector(); for (auto& t : l) t = to_npu(t, dev); v = l; }
  }
}
extern "C" __attribute__((visibility("default"))) void emul_dump_counts() {
  for (auto& kv : g_calls) fprintf(stderr, "[aten] %6ld %s\n", (long)kv.second, kv.first.c_str());
}
static torch::Library& lib() { static torch::Library l(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__); return l; }
extern "C" __attribute__((visibility("default"))) int emulator_install_aten() {
  static const std::set<std::string> keep = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::as_strided", "aten::as_strided_", "aten::view", "aten::_reshape_alias",
    "aten::unfold", "aten::resize_", "aten::set_", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy", "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::pin_memory", "aten::_local_scalar_dense", "aten::clone", "aten::contiguous", "aten::is_set_to",
    "aten::resize_as_", "aten::_resize_output_", "aten::alias", "aten::detach", "aten::_has_compatible_shallow_copy_type", "aten::set_data",
    "aten::view_as_real", "aten::view_as_complex", "aten::_nested_tensor_from_mask"};
  auto& D = c10::Dispatcher::singleton(); int n = 0;
  for (const auto& name : D.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || keep.count(name.name)) continue;
    auto h = D.findSchema(name); if (!h) continue;
    const bool cpu = h->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    const bool comp = h->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) || h->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) || h->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    const bool pu = h->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    if (!(cpu || (pu && comp))) continue;
    bool view = false, odd = false;
    for (auto& r : h->schema().returns()) if (r.alias_info() && !r.alias_info()->isWrite()) view = true;
    for (auto& a : h->schema().arguments()) if (a.type()->str().find("Storage") != std::string::npos) odd = true;
    if (view || odd) continue;
    std::string nm = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    lib().impl(nm.c_str(), torch::CppFunction::makeFromBoxedFunction<&cpu_kernel>()); n++;
  }
  return n;
}
