#include "cuda/kernel_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace fused_op::cuda {
namespace {

constexpr std::int64_t kMostBytes = 64 << 20;  // a kernel has 20 to 100 KiB

class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::string because_of_errno() { return std::string(" (") + std::strerror(errno) + ')'; }

// Why this process must not run the content of a file or folder, as a clause; empty if it may.
std::string distrust(const struct stat& status) {
  if (status.st_uid != ::geteuid() && status.st_uid != 0) {
    return "belongs to user " + std::to_string(status.st_uid);
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return "can be written to by other users";
  }
  return {};
}

void make_folders(const std::string& path, mode_t mode) {
  for (std::size_t end = path.find('/', 1); end != std::string::npos;
       end = path.find('/', end + 1)) {
    ::mkdir(path.substr(0, end).c_str(), mode);  // open() will report an error
  }
  ::mkdir(path.c_str(), mode);
}

bool write_all(int file, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(file, content.data(), content.size());
    if (written < 0 && errno != EINTR) {
      return false;
    }
    content.remove_prefix(written < 0 ? 0 : static_cast<std::size_t>(written));
  }
  return true;
}

std::optional<std::string> read_all(int file, std::int64_t bytes) {
  std::string content(static_cast<std::size_t>(bytes), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t count = ::read(file, content.data() + done, content.size() - done);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      return std::nullopt;
    }
    done += static_cast<std::size_t>(count);
  }
  return content;
}

std::string random_suffix() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    number = static_cast<std::uint64_t>(::getpid());  // O_EXCL prevents a clash
  }
  return '.' + std::to_string(number) + ".tmp";
}

}  // namespace

FolderLock::~FolderLock() {
  if (file_ >= 0) {
    // Whoever has opened the file before can still lock it, and another one a new file of the name.
    // Both then compile the kernel, and the second one's file replaces the first one's.
    ::unlinkat(folder_, name_.c_str(), 0);
    ::flock(file_, LOCK_UN);  // close() would leave the lock to a child forked in the meantime
    ::close(file_);
  }
}

KernelFolder::KernelFolder(const std::string& path, Access access, bool create)
    : path_(path), access_(access) {
  const bool is_private = access == Access::kPrivate;
  if (create) {
    make_folders(path, is_private ? 0700 : 0755);
  }
  const int no_links = is_private ? O_NOFOLLOW : 0;
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | no_links));
  if (folder.get() < 0) {
    struct stat status;
    if (is_private && ::lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) {
      throw FolderError(path + " is a symbolic link");
    }
    throw FolderError(path + " cannot be opened" + because_of_errno());
  }
  struct stat status;
  if (::fstat(folder.get(), &status) != 0) {
    throw FolderError(path + " cannot be examined" + because_of_errno());
  }
  if (const std::string reason = is_private ? distrust(status) : ""; !reason.empty()) {
    throw FolderError(path + ' ' + reason);
  }
  folder_ = folder.release();
}

KernelFolder::~KernelFolder() { ::close(folder_); }

std::optional<std::string> KernelFolder::read(const std::string& name) const {
  const bool is_private = access_ == Access::kPrivate;
  // Non-blocking, in case the file is a pipe.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (is_private ? O_NOFOLLOW : 0);
  const Descriptor file(::openat(folder_, name.c_str(), flags));
  struct stat status;
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size > kMostBytes || (is_private && !distrust(status).empty())) {
    return std::nullopt;
  }
  return read_all(file.get(), status.st_size);
}

void KernelFolder::write(const std::string& name, std::string_view content) const {
  const std::string temporary = name + random_suffix();
  const auto fail = [&](const char* what) {
    const std::string reason = because_of_errno();
    ::unlinkat(folder_, temporary.c_str(), 0);
    throw FolderError(std::string(what) + ' ' + path_ + reason);
  };
  {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const mode_t mode = access_ == Access::kPrivate ? 0600 : 0644;
    const Descriptor file(::openat(folder_, temporary.c_str(), flags, mode));
    if (file.get() < 0) {
      throw FolderError("no file can be created in " + path_ + because_of_errno());
    }
    // Flushed before it gets its name: a power failure could leave the name without the content.
    if (!write_all(file.get(), content) || ::fsync(file.get()) != 0) {
      fail("a file cannot be written to");
    }
  }
  if (::renameat(folder_, temporary.c_str(), folder_, name.c_str()) != 0) {
    fail("a file cannot be renamed in");
  }
}

bool KernelFolder::is_writable() const { return ::faccessat(folder_, ".", W_OK, AT_EACCESS) == 0; }

FolderLock KernelFolder::try_lock(const std::string& name) const {
  using State = FolderLock::State;
  const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC;
  Descriptor file(::openat(folder_, name.c_str(), flags, 0600));
  if (file.get() < 0) {
    return FolderLock(State::kImpossible);
  }
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    return FolderLock(errno == EWOULDBLOCK ? State::kTaken : State::kImpossible);
  }
  return FolderLock(folder_, name, file.release());
}

std::vector<KernelFolder::File> KernelFolder::files() const {
  std::vector<File> found;
  // A second descriptor, because closedir() closes the one it is given.
  DIR* const folder = ::fdopendir(::openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* const entry = ::readdir(folder)) {
    struct stat status;
    if (::fstatat(folder_, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(status.st_mode)) {
      found.push_back({entry->d_name, status.st_size});
    }
  }
  ::closedir(folder);
  return found;
}

bool KernelFolder::remove(const std::string& name) const {
  return ::unlinkat(folder_, name.c_str(), 0) == 0 || errno == ENOENT;
}

}  // namespace fused_op::cuda
