// What every part of the emulator reports to: one launch, with the bytes that it read and wrote, under the op's name.
// Defined in runtime.cpp (libascendcl.so), which all other libraries link to, so that one process has one account.
#pragma once
#include <cstdint>

extern "C" {
void emulator_record_launch(const char* op, uint64_t bytes_read, uint64_t bytes_written);
// True inside `npu_emulator.count(skip_matmuls=True)`: matrix products are counted and their result is filled with zeros.
bool emulator_skip_matmuls();
// What aclGetRecentErrMsg() returns next on this thread; torch_npu appends it to the exception that it raises.
void emulator_set_error(const char* message);
}
