// libascendcl.so: the part of the Ascend runtime ABI that torch_npu needs, on host memory, and the traffic account.
//
// Device memory is host memory. Every stream is synchronous: work is done when the call that launches it returns, so
// waits return at once. What is not emulated returns an error and says its name (see also linked_symbols.txt).
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "traffic.h"

namespace {

constexpr aclError OUT_OF_MEMORY = 207001, NOT_SUPPORTED = 207000, INVALID_DEVICE = 107001, NO_CONTEXT = 107002,
                   INTERNAL_ERROR = 507000;
constexpr int POISON = 0xFF;  // a NaN in every floating-point format
constexpr int CUBE_CORES = 24;

std::string setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

int device_count() {
  static const int count = std::stoi(setting("NPU_EMULATOR_DEVICES", "1"));
  return count;
}

size_t device_memory() {  // bytes, or a number with KiB, MiB or GiB; the Python side has checked the form
  static const size_t bytes = [] {
    const std::string text = setting("NPU_EMULATOR_MEMORY", "16GiB");
    size_t end = 0;
    const size_t number = std::stoull(text, &end);
    const std::string unit = text.substr(end);
    return number << (unit == "GiB" ? 30 : unit == "MiB" ? 20 : unit == "KiB" ? 10 : 0);
  }();
  return bytes;
}

thread_local int current_device = -1;
thread_local std::string recent_error;

int device() { return std::max(current_device, 0); }

aclError not_emulated(const std::string& what) {
  emulator_set_error((what + " is not emulated").c_str());
  return NOT_SUPPORTED;
}

// ---- device memory: who owns how much of which device

struct Block {
  size_t bytes;
  int device;
};

class Memory {
 public:
  bool take(int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > device_memory() - used_[device]) return false;
    used_[device] += bytes;
    return true;
  }
  void give_back(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_[block.device] -= block.bytes;
  }
  size_t used(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_[device];
  }
  void remember(void* address, Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[address] = block;
  }
  bool forget(void* address, Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(address);
    if (found == blocks_.end()) return false;
    *block = found->second;
    blocks_.erase(found);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<int, size_t> used_;
  std::unordered_map<void*, Block> blocks_;
};

// Never destroyed: tensors that outlive main() are still freed.
Memory& memory() {
  static Memory& instance = *new Memory;
  return instance;
}
Memory& address_space() {
  static Memory& instance = *new Memory;
  return instance;
}

// ---- the traffic account

struct OpTraffic {
  uint64_t launches = 0, bytes_read = 0, bytes_written = 0;
};

struct Account {
  std::mutex mutex;
  std::map<std::string, OpTraffic> by_op;
  std::map<std::string, int> failures;
  std::atomic<uint64_t> host_syncs{0};
  std::atomic<int> counting{0}, skipping{0}, failing{0};
};
Account& account() {
  static Account& instance = *new Account;
  return instance;
}

struct Stream {
  int id;
  uint32_t flags;
  std::atomic<bool> host_copy{false};
};
struct Event {
  double milliseconds;
};
std::atomic<int> next_stream{1};

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- what the other libraries and the Python package call

void emulator_record_launch(const char* op, uint64_t bytes_read, uint64_t bytes_written) {
  if (account().counting == 0) return;
  std::lock_guard<std::mutex> lock(account().mutex);
  OpTraffic& traffic = account().by_op[op];
  traffic.launches += 1;
  traffic.bytes_read += bytes_read;
  traffic.bytes_written += bytes_written;
}
void emulator_record_host_sync() {
  if (account().counting > 0) account().host_syncs += 1;
}
bool emulator_skip_matmuls() { return account().skipping > 0; }
void emulator_set_error(const char* message) { recent_error = std::string("[emulated NPU] ") + message; }

bool emulator_should_fail(const char* op) {
  if (account().failing == 0) return false;
  std::lock_guard<std::mutex> lock(account().mutex);
  auto found = account().failures.find(op);
  if (found == account().failures.end()) return false;
  if (--found->second == 0) account().failures.erase(found);
  account().failing -= 1;
  emulator_set_error((std::string(op) + ": device error injected by npu_emulator.fail_next").c_str());
  return true;
}
void emulator_fail_next(const char* op) {
  std::lock_guard<std::mutex> lock(account().mutex);
  account().failures[op] += 1;
  account().failing += 1;
}
void emulator_begin_count(bool skip_matmuls) {
  account().counting += 1;
  account().skipping += skip_matmuls;
}
void emulator_end_count(bool skip_matmuls) {
  account().counting -= 1;
  account().skipping -= skip_matmuls;
}
uint64_t emulator_host_syncs() { return account().host_syncs; }
// One line an op since the process started: name, launches, bytes read, bytes written. Valid until this thread's next
// call.
const char* emulator_traffic() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(account().mutex);
  text.clear();
  for (const auto& [op, traffic] : account().by_op)
    text += op + ' ' + std::to_string(traffic.launches) + ' ' + std::to_string(traffic.bytes_read) + ' ' +
            std::to_string(traffic.bytes_written) + '\n';
  return text.c_str();
}
aclError emulator_not_emulated(const char* function) { return not_emulated(function); }

// ---- life cycle and settings

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() {
  static thread_local std::string returned;
  returned.swap(recent_error);
  recent_error.clear();
  return returned.c_str();
}
void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t, const char* format, ...) {
  static const int threshold = std::stoi(setting("NPU_EMULATOR_LOG_LEVEL", "9"));  // 0 debug ... 3 error
  if (level < threshold) return;
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "[emulated NPU, level %d] %s: ", int(level), function);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}
const char* aclrtGetSocName() {
  static const std::string name = setting("NPU_EMULATOR_SOC", "Ascend910B2");
  return name.c_str();
}
aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, "9.1.0");
  return ACL_SUCCESS;
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof("disable"); }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  std::snprintf(value, size, "disable");
  return ACL_SUCCESS;
}

// ---- devices

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = device_count();
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t index) {
  if (index < 0 || index >= device_count()) {
    emulator_set_error(
        ("device " + std::to_string(index) + " of " + std::to_string(device_count()) + " (NPU_EMULATOR_DEVICES)")
            .c_str());
    return INVALID_DEVICE;
  }
  current_device = index;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* index) {
  if (current_device < 0) return NO_CONTEXT;
  *index = current_device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
// A context is its device's number plus one, so that none is null.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<aclrtContext>(uintptr_t(device() + 1));
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = int(reinterpret_cast<uintptr_t>(context)) - 1;
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = CUBE_CORES;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = CUBE_CORES;
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// ---- streams and events

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t flags) {
  *stream = new Stream{next_stream++, flags};
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : 0;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) {
  if (stream && static_cast<Stream*>(stream)->host_copy.exchange(false)) emulator_record_host_sync();
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event{now()};
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->milliseconds = now();
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = float(static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds);
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = uint64_t(static_cast<Event*>(event)->milliseconds * 1000);
  return ACL_SUCCESS;
}
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream) {
  function(data);
  return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* data) {
  function(data);
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  if (status) *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model) *model = nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) {
  not_emulated("graph capture");
  return INTERNAL_ERROR;  // torch_npu only warns where a feature is not supported
}

// ---- memory

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  // 32 bytes of slack, as on the device: kernels may read past the end of a tensor in whole blocks.
  const size_t rounded = (bytes + 32 + 511) / 512 * 512;
  if (!memory().take(device(), rounded)) {
    emulator_set_error("device memory is exhausted (NPU_EMULATOR_MEMORY)");
    return OUT_OF_MEMORY;
  }
  *address = std::aligned_alloc(512, rounded);
  if (!*address) {
    memory().give_back({rounded, device()});
    return OUT_OF_MEMORY;
  }
  std::memset(*address, POISON, rounded);
  memory().remember(*address, {rounded, device()});
  return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}
aclError aclrtFree(void* address) {
  Block block;
  if (!memory().forget(address, &block)) {
    emulator_set_error("aclrtFree: not a device allocation");
    return ACL_ERROR_INVALID_PARAM;
  }
  memory().give_back(block);
  std::free(address);
  return ACL_SUCCESS;
}
aclError aclrtMallocHost(void** address, size_t bytes) {
  *address = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  return *address ? ACL_SUCCESS : OUT_OF_MEMORY;
}
aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}
aclError aclrtFreeHost(void* address) {
  std::free(address);
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *total = device_memory();
  *free = *total - memory().used(device());
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void* target, size_t, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST) emulator_record_host_sync();
  if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) emulator_record_launch("aclrtMemcpy", bytes, bytes);
  std::memmove(target, source, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void* target, size_t, const void* source, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  // A copy to the host is a wait only once somebody waits for its stream.
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST && stream) static_cast<Stream*>(stream)->host_copy = true;
  if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE) emulator_record_launch("aclrtMemcpy", bytes, bytes);
  std::memmove(target, source, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsyncWithCondition(void* target, size_t size, const void* source, size_t bytes,
                                       aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(target, size, source, bytes, kind, stream);
}
aclError aclrtMemset(void* target, size_t, int32_t value, size_t bytes) {
  emulator_record_launch("aclrtMemset", 0, bytes);
  std::memset(target, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* target, size_t size, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(target, size, value, bytes);
}
aclError aclrtPointerGetAttributes(const void*, aclrtPtrAttributes*) { return NOT_SUPPORTED; }

// Expandable segments: an address range is reserved once; physical blocks, which count against the device, are mapped
// in.
aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) return OUT_OF_MEMORY;
  address_space().remember(*address, {bytes, 0});
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* address) {
  Block range;
  if (!address_space().forget(address, &range)) return ACL_ERROR_INVALID_PARAM;
  munmap(address, range.bytes);
  return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                             uint64_t) {
  const int owner = properties ? int(properties->location.id) : device();
  if (!memory().take(owner, bytes)) return OUT_OF_MEMORY;
  *handle = new Block{bytes, owner};
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* block = static_cast<Block*>(handle);
  memory().give_back(*block);
  delete block;
  return ACL_SUCCESS;
}
aclError aclrtMapMem(void* address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  std::memset(address, POISON, bytes);
  return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void*) { return ACL_SUCCESS; }

// ---- the older aclop path: its descriptors are built but never read, and running one fails by name

namespace {
char opaque;
}
aclopAttr* aclopCreateAttr() { return reinterpret_cast<aclopAttr*>(&opaque); }
void aclopDestroyAttr(const aclopAttr*) {}
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}
aclTensorDesc* aclCreateTensorDesc(aclDataType, int, const int64_t*, aclFormat) {
  return reinterpret_cast<aclTensorDesc*>(&opaque);
}
void aclDestroyTensorDesc(const aclTensorDesc*) {}
void aclSetTensorDescName(aclTensorDesc*, const char*) {}
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return reinterpret_cast<aclDataBuffer*>(&opaque); }
aclError aclDestroyDataBuffer(const aclDataBuffer*) { return ACL_SUCCESS; }
aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return not_emulated(std::string("aclop ") + op);
}
aclError aclopCompileAndExecuteV2(const char* op, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return not_emulated(std::string("aclop ") + op);
}

// ---- the profiler is told nothing and has nothing to report

int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
uint64_t MsprofSysCycleTime() { return 0; }

}  // extern "C"
#pragma GCC visibility pop
