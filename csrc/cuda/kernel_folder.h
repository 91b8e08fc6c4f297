// A folder of machine code, and the checks that make its content safe to run. kernel_files.cpp
// decides the names and the content of files. Host code for Linux, without CUDA or torch.
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

// Whoever can write to a private folder can make this process run their code. The folder and each
// file must therefore belong to this user or root, must not be writable by others, and must not be
// symbolic links. An installed folder is trusted like the extension module beside it.
enum class Access { kPrivate, kInstalled };

// A lock among processes, held during the lifetime of the object. It must not outlive its folder.
class FolderLock {
 public:
  enum class State { kHeld, kTaken, kImpossible };

  explicit FolderLock(State state) : state_(state) {}
  FolderLock(int folder, std::string name, int file)
      : state_(State::kHeld), folder_(folder), name_(std::move(name)), file_(file) {}
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  bool is_taken() const { return state_ == State::kTaken; }  // another process holds it now

 private:
  State state_;
  int folder_ = -1;
  std::string name_ = {};
  int file_ = -1;
};

class KernelFolder {
 public:
  // Opens the folder. Creates it and its parents if `create`. Throws FolderError with the reason,
  // as a clause, if it cannot be used.
  KernelFolder(const std::string& path, Access access, bool create);
  ~KernelFolder();
  KernelFolder(const KernelFolder&) = delete;
  KernelFolder& operator=(const KernelFolder&) = delete;

  // The content of a file. Nothing if it is missing, cannot be read or must not be trusted.
  std::optional<std::string> read(const std::string& name) const;
  // Readers see the whole file or none of it. Throws FolderError.
  void write(const std::string& name, std::string_view content) const;
  bool is_writable() const;

  // Does not wait. Impossible if the folder is read-only or its file system has no locks.
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
