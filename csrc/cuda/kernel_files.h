// Where a compiled kernel comes from: the installed package, the user's cache, or NVRTC. Called by
// kernels.cpp, which loads it. Host code without CUDA headers or torch.
//
//   package  fused_op/_kernels beside the extension module; written by write_package() alone
//   cache    $FUSED_OP_CACHE_DIR, or fused_op in $XDG_CACHE_HOME or ~/.cache
//
// A file holds the text of its key, the symbol and the code, after a checksum. A file whose content
// is not as expected is compiled again.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "cuda/compile.h"

namespace fused_op::cuda {

// $FUSED_OP_JIT, read once.
enum class Jit {
  kOff,  // "0": no compiler runs and no cache is read; only the core table and the package are used
  kOn,   // "1", "require", or not set
};
Jit jit_mode();  // throws std::runtime_error for any other value

// $FUSED_OP_MAX_KERNELS, read once: after so many kernels, a process compiles none for a single
// width (see has_too_many_kernels). Throws std::runtime_error unless it is a positive integer.
int max_kernels();

enum class Origin { kCore, kPackage, kCache, kCompiled };

struct FoundImage {
  Image image;
  Origin origin;
};

// Everything that the code depends on, one item a line, then an empty line. Kernels of the package
// may come from any compiler, because none is needed where they run; `compiler` is then empty.
std::string kernel_key(const KernelSource& source, int arch, const std::string& compiler);

// A cubin runs on later GPUs of its major version: one for 8.0 is also found on 8.6.
std::optional<Image> read_package(const KernelSource& source, int arch);
// `folder` is package_folder(), or one that will be moved there. Throws std::runtime_error if it is
// not writable.
void write_package(const KernelSource& source, int arch, const Image& image,
                   const std::string& folder);

// How long a process waits for another one that compiles the same kernel. That takes half a second.
constexpr std::chrono::milliseconds kLockPatience{10'000};

// If several processes want a kernel at the same time, one compiles it. An unusable cache costs
// compilations but is no error. Throws CompileError.
FoundImage read_cache_or_compile(const KernelSource& source, int arch,
                                 std::chrono::milliseconds patience = kLockPatience);

// Tries the package, then the cache and the compiler, as jit_mode() allows. Throws CompileError.
FoundImage find_image(const KernelSource& source, int arch,
                      std::chrono::milliseconds patience = kLockPatience);

std::string package_folder();
std::string cache_folder();  // empty without a home directory

struct CacheInfo {
  std::string problem;  // why kernels are not kept, as a clause; empty if they are
  int kernels = 0;
  std::int64_t bytes = 0;
};
CacheInfo cache_info();  // creates the folder, as the first kernel would
// Removes the files of kernels and returns their number. Throws std::runtime_error if it cannot.
int clear_cache();

}  // namespace fused_op::cuda
