#include "cuda/kernel_files.h"

#include <dlfcn.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>

#include "cuda/kernel_folder.h"
#include "cuda/sha256.h"

namespace fused_op::cuda {
namespace {

constexpr std::string_view kMagic = "fused_op kernel 1\n";
constexpr std::size_t kDigits = 64;  // digits of a SHA-256
constexpr char kKernelSuffix[] = ".kernel";
constexpr char kLockSuffix[] = ".lock";

std::string file_name(const std::string& key) { return sha256(key) + kKernelSuffix; }

std::string encode(const std::string& key, const Image& image) {
  const std::string body = key + image.symbol + '\n' + image.code;
  return std::string(kMagic) + sha256(body) + '\n' + body;
}

std::optional<Image> decode(const std::string& key, std::string_view content) {
  const std::size_t head = kMagic.size() + kDigits + 1;
  if (content.size() < head || !content.starts_with(kMagic)) {
    return std::nullopt;
  }
  const std::string_view body = content.substr(head);
  if (content.substr(kMagic.size(), kDigits) != sha256(body) || !body.starts_with(key)) {
    return std::nullopt;
  }
  const std::string_view rest = body.substr(key.size());
  const std::size_t end = rest.find('\n');
  if (end == std::string_view::npos) {
    return std::nullopt;
  }
  return Image{std::string(rest.substr(0, end)), std::string(rest.substr(end + 1))};
}

std::optional<Image> read(const KernelFolder& folder, const std::string& key) {
  const std::optional<std::string> content = folder.read(file_name(key));
  return content ? decode(key, *content) : std::nullopt;
}

// Empty if the variable is not set, or if the program runs with more rights than its user.
std::string environment(const char* name) {
  const char* const value = ::secure_getenv(name);
  return value == nullptr ? "" : value;
}

// An absolute path without a slash at the end, which would make O_NOFOLLOW follow a link. Empty if
// the working directory no longer exists.
std::string as_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::string text = std::filesystem::absolute(path, error).lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') {
    text.pop_back();
  }
  return text;
}

// The cache. If null, `problem` has the reason.
std::unique_ptr<KernelFolder> open_cache(std::string& problem) {
  const std::string path = cache_folder();
  if (path.empty()) {
    problem = "there is no home directory, and FUSED_OP_CACHE_DIR names no folder";
    return nullptr;
  }
  try {
    return std::make_unique<KernelFolder>(path, Access::kPrivate, /*create=*/true);
  } catch (const FolderError& error) {
    problem = error.what();
    return nullptr;
  }
}

FoundImage compile_and_keep(const KernelSource& source, int arch, const KernelFolder& cache,
                            const std::string& key) {
  FoundImage found{compile(source, arch), Origin::kCompiled};
  try {
    cache.write(file_name(key), encode(key, found.image));
  } catch (const FolderError&) {
    // The disk is read-only or full. The kernel stays in memory, and cache_info() reports it.
  }
  return found;
}

bool is_kernel(const std::string& name) {
  return name.size() == kDigits + sizeof(kKernelSuffix) - 1 && name.ends_with(kKernelSuffix);
}

// Whether this code creates files with such names. The folder may contain others.
bool is_ours(const std::string& name) {
  constexpr char kHex[] = "0123456789abcdef";
  return name.find_first_not_of(kHex) == kDigits &&
         (name.substr(kDigits).starts_with(kKernelSuffix) || name.substr(kDigits) == kLockSuffix);
}

}  // namespace

Jit jit_mode() {
  // Not a static local: a child forked while another thread initialises one would wait forever.
  static constinit std::atomic<int> known{-1};
  int mode = known.load(std::memory_order_relaxed);
  if (mode < 0) {
    const char* const given = std::getenv("FUSED_OP_JIT");
    const std::string_view value = given == nullptr ? "" : given;
    if (value != "" && value != "0" && value != "1" && value != "require") {
      throw std::runtime_error("FUSED_OP_JIT must be 0, 1 or require, got '" + std::string(value) +
                               "'");
    }
    mode = static_cast<int>(value == "0" ? Jit::kOff : Jit::kOn);
    known.store(mode, std::memory_order_relaxed);
  }
  return static_cast<Jit>(mode);
}

int max_kernels() {
  static constinit std::atomic<int> known{0};
  int count = known.load(std::memory_order_relaxed);
  if (count == 0) {
    constexpr int kDefault = 512;
    const char* const given = std::getenv("FUSED_OP_MAX_KERNELS");
    const std::string_view value = given == nullptr ? "" : given;
    count = kDefault;
    if (!value.empty()) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
      if (error != std::errc() || end != value.data() + value.size() || count <= 0) {
        throw std::runtime_error("FUSED_OP_MAX_KERNELS must be a positive integer, got '" +
                                 std::string(value) + "'");
      }
    }
    known.store(count, std::memory_order_relaxed);
  }
  return count;
}

std::string kernel_key(const KernelSource& source, int arch, const std::string& compiler) {
  std::string key = std::string("sources ") + kSourceDigest + '\n';
  for (const Header& header : source.more_headers) {
    key += "header " + header.path + ' ' + sha256(header.text) + '\n';
  }
  if (!compiler.empty()) {
    key += "compiler " + compiler + '\n';
  }
  return key + "arch " + std::to_string(arch) + "\noptions " + compile_options() + "\ninclude " +
         source.header + (source.structs.empty() ? "" : " and " + source.structs) + "\nkernel " +
         source.name + "\n\n";
}

std::string package_folder() {
  Dl_info module;
  if (::dladdr(reinterpret_cast<const void*>(&package_folder), &module) == 0 ||
      module.dli_fname == nullptr) {
    return {};
  }
  const std::filesystem::path path = module.dli_fname;
  return as_folder(path.parent_path() / "fused_op" / "_kernels");
}

std::string cache_folder() {
  if (const std::string given = environment("FUSED_OP_CACHE_DIR"); !given.empty()) {
    return as_folder(given);
  }
  if (const std::string caches = environment("XDG_CACHE_HOME"); caches.starts_with('/')) {
    return as_folder(caches + "/fused_op");
  }
  const std::string home = environment("HOME");
  return home.starts_with('/') ? as_folder(home + "/.cache/fused_op") : "";
}

std::optional<Image> read_package(const KernelSource& source, int arch) {
  try {
    const KernelFolder folder(package_folder(), Access::kInstalled, /*create=*/false);
    for (int built = arch; built >= arch / 10 * 10; --built) {
      if (std::optional<Image> image = read(folder, kernel_key(source, built, ""))) {
        return image;
      }
    }
  } catch (const FolderError&) {
    // Most installations have no such folder.
  }
  return std::nullopt;
}

void write_package(const KernelSource& source, int arch, const Image& image,
                   const std::string& folder) {
  const KernelFolder package(as_folder(folder), Access::kInstalled, /*create=*/true);
  const std::string key = kernel_key(source, arch, "");
  package.write(file_name(key), encode(key, image));
}

FoundImage read_cache_or_compile(const KernelSource& source, int arch,
                                 std::chrono::milliseconds patience) {
  using Clock = std::chrono::steady_clock;
  std::string problem;
  const std::unique_ptr<KernelFolder> cache = open_cache(problem);
  if (cache == nullptr) {
    return {compile(source, arch), Origin::kCompiled};
  }
  const std::string key = kernel_key(source, arch, compiler_identity());
  if (std::optional<Image> image = read(*cache, key)) {
    return {*std::move(image), Origin::kCache};
  }
  const Clock::time_point deadline = Clock::now() + patience;
  while (true) {
    const FolderLock lock = cache->try_lock(sha256(key) + kLockSuffix);
    if (std::optional<Image> image = read(*cache, key)) {  // written by the last holder of the lock
      return {*std::move(image), Origin::kCache};
    }
    if (!lock.is_taken() || Clock::now() >= deadline) {
      return compile_and_keep(source, arch, *cache, key);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

FoundImage find_image(const KernelSource& source, int arch, std::chrono::milliseconds patience) {
  const Jit mode = jit_mode();
  if (std::optional<Image> image = read_package(source, arch)) {
    return {*std::move(image), Origin::kPackage};
  }
  if (mode == Jit::kOff) {
    throw CompileError("FUSED_OP_JIT is 0, and the package does not have the kernel " +
                       source.name);
  }
  return read_cache_or_compile(source, arch, patience);
}

CacheInfo cache_info() {
  CacheInfo info;
  const std::unique_ptr<KernelFolder> cache = open_cache(info.problem);
  if (cache == nullptr) {
    return info;
  }
  if (!cache->is_writable()) {
    info.problem = cache_folder() + " cannot be written to";
  }
  for (const KernelFolder::File& file : cache->files()) {
    if (is_ours(file.name)) {
      info.kernels += is_kernel(file.name);
      info.bytes += file.bytes;
    }
  }
  return info;
}

int clear_cache() {
  std::string problem;
  const std::unique_ptr<KernelFolder> cache = open_cache(problem);
  if (cache == nullptr) {
    throw std::runtime_error(problem);
  }
  int kernels = 0;
  for (const KernelFolder::File& file : cache->files()) {
    if (is_ours(file.name)) {
      if (!cache->remove(file.name)) {
        throw std::runtime_error(cache_folder() + '/' + file.name + " cannot be removed");
      }
      kernels += is_kernel(file.name);
    }
  }
  return kernels;
}

}  // namespace fused_op::cuda
