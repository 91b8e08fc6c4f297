// Compiles a kernel with NVRTC, the CUDA compiler as a library, which every CUDA build of torch
// installs. kernel_files.cpp calls it. Host code without CUDA headers or torch: NVRTC is loaded by
// dlopen, and neither a toolkit nor its headers are needed at run time.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace fused_op::cuda {

// A file that a kernel may include: core/*.h, cuda/*.{h,cuh} and the stand-ins for the standard
// library in csrc/rtc. setup.py writes the definitions into the build folder.
struct SourceFile {
  const char* path;  // as in an include: "cuda/forward_rows.cuh", "cstdint"
  const char* text;
};
extern const SourceFile kSourceFiles[];
extern const int kSourceFileCount;
extern const char* const kSourceDigest;  // the SHA-256 of all of them

struct Header {
  std::string path;
  std::string text;
};

// What a kernel is compiled from.
struct KernelSource {
  std::string header;                     // "cuda/forward_rows.cuh"
  std::string name;                       // in C++: "fused_op::cuda::forward_kernel<...>"
  const void* built_in = nullptr;         // the same kernel, if the extension has it (core_table.h)
  std::vector<Header> more_headers = {};  // beyond the embedded ones; for tests
  std::string structs = {};               // a header of a variant's structs, included as well
};

// A kernel as machine code.
struct Image {
  std::string symbol;  // mangled
  std::string code;    // a cubin, or PTX where NVRTC does not know the GPU
};

struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `arch` is ten times the compute capability. `log`, if not null, receives the compiler's messages,
// with the registers and spills of the kernel. Throws CompileError, with the messages if the source
// is at fault. Thread-safe (one compilation at a time), also in a forked child.
Image compile(const KernelSource& source, int arch, std::string* log = nullptr);

// Version and build of NVRTC; empty if it cannot be loaded.
std::string compiler_identity();
std::string why_no_compiler();  // empty if it can be loaded

// The flags of every compilation, separated by spaces. The flag for the GPU is added to them.
std::string compile_options();

}  // namespace fused_op::cuda
