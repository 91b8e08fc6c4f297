// A folder of machine code, and what makes it safe to run what lies in it. kernel_files.cpp decides
// what the files are called and hold. Host code for Linux, without CUDA or torch.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fused_op::cuda {

struct FolderError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Whoever can write to a private folder can make this process run his code. So the folder and each
// file must belong to this user or root, nobody else may write to them, and they must not be
// symbolic links. An installed folder is trusted as the extension module beside it is.
enum class Access { kPrivate, kInstalled };

// A lock among processes, for as long as the object lives, which must not outlive its folder.
class FolderLock {
 public:
  enum class State { kHeld, kTaken, kImpossible };

  explicit FolderLock(State state) : state_(state) {}
  FolderLock(int folder, std::string name, int file)
      : state_(State::kHeld), folder_(folder), name_(std::move(name)), file_(file) {}
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  bool is_held() const { return state_ == State::kHeld; }
  bool is_taken() const { return state_ == State::kTaken; }  // by another process, for now

 private:
  State state_;
  int folder_ = -1;
  std::string name_ = {};
  int file_ = -1;
};

class KernelFolder {
 public:
  // Opens the folder, creating it and those above it if `create`. Throws FolderError with the
  // reason, a clause, why it cannot be used.
  KernelFolder(const std::string& path, Access access, bool create);
  ~KernelFolder();
  KernelFolder(const KernelFolder&) = delete;
  KernelFolder& operator=(const KernelFolder&) = delete;

  // The content of a file; nothing if it is missing, cannot be read or must not be trusted.
  std::optional<std::string> read(const std::string& name) const;
  // Readers see the whole file or none. Throws FolderError.
  void write(const std::string& name, std::string_view content) const;
  bool is_writable() const;

  // Does not wait. Impossible where the folder is read-only or its file system has no locks.
  FolderLock try_lock(const std::string& name) const;

  struct File {
    std::string name;
    std::int64_t bytes;
  };
  std::vector<File> files() const;
  bool remove(const std::string& name) const;

 private:
  std::string path_;
  Access access_;
  int folder_ = -1;
};

}  // namespace fused_op::cuda
