// What every part of the emulator reports to: one launch, with the bytes that it read and wrote, under the op's name.
// Defined in runtime.cpp (libascendcl.so), which all other libraries link to, so that one process has one account.
#pragma once
#include <cstdint>

extern "C" {
void emulator_record_launch(const char* op, uint64_t bytes_read, uint64_t bytes_written);
// The host waited for a value that the device computes (a device-to-host copy, a shape that depends on data).
void emulator_record_host_sync();
// True inside `npu_emulator.count(skip_matmuls=True)`: matrix products are counted and their result is filled with
// zeros.
bool emulator_skip_matmuls();
// True if `npu_emulator.fail_next(op)` asked for this launch to fail. It asks once: a true answer clears the request
// and sets the error message, so that an aclnn function only has to return EMULATOR_DEVICE_ERROR.
bool emulator_should_fail(const char* op);
// What aclGetRecentErrMsg() returns next on this thread; torch_npu appends it to the exception that it raises.
void emulator_set_error(const char* message);
}
constexpr int EMULATOR_DEVICE_ERROR = 507015;  // ACL_ERROR_RT_AICORE_EXCEPTION
