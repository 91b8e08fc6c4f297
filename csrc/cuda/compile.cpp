#include "cuda/compile.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <type_traits>

namespace fused_op::cuda {
namespace {

constexpr std::array kOptions = {
    "-std=c++20",
    "-default-device",  // functions without a qualifier are device code
    "-fmad=false",      // as for nvcc in setup.py: products and sums fuse where the source says so
};

// Declared here, because a machine without a toolkit lacks nvrtc.h. nvrtcProgram is a pointer,
// nvrtcResult an enum.
using Program = void*;
struct Nvrtc {
  int (*version)(int* major, int* minor);
  const char* (*error_string)(int result);
  int (*supported_arch_count)(int*);
  int (*supported_archs)(int*);
  int (*create_program)(Program*, const char* source, const char* name, int headers,
                        const char* const* texts, const char* const* paths);
  int (*destroy_program)(Program*);
  int (*add_name_expression)(Program, const char*);
  int (*compile_program)(Program, int options, const char* const*);
  int (*lowered_name)(Program, const char*, const char**);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);

  std::string identity;
  std::string why_not = {};  // a clause; empty if all functions were found
};

void resolve_all(void* library, Nvrtc& nvrtc) {
  const auto get = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      nvrtc.why_not = std::string("NVRTC has no function ") + name;
    }
  };
  get("nvrtcVersion", nvrtc.version);
  get("nvrtcGetErrorString", nvrtc.error_string);
  get("nvrtcGetNumSupportedArchs", nvrtc.supported_arch_count);
  get("nvrtcGetSupportedArchs", nvrtc.supported_archs);
  get("nvrtcCreateProgram", nvrtc.create_program);
  get("nvrtcDestroyProgram", nvrtc.destroy_program);
  get("nvrtcAddNameExpression", nvrtc.add_name_expression);
  get("nvrtcCompileProgram", nvrtc.compile_program);
  get("nvrtcGetLoweredName", nvrtc.lowered_name);
  get("nvrtcGetProgramLogSize", nvrtc.log_size);
  get("nvrtcGetProgramLog", nvrtc.log);
  get("nvrtcGetCUBINSize", nvrtc.cubin_size);
  get("nvrtcGetCUBIN", nvrtc.cubin);
  get("nvrtcGetPTXSize", nvrtc.ptx_size);
  get("nvrtcGetPTX", nvrtc.ptx);
}

bool holds(const dl_phdr_info& object, std::uintptr_t address) {
  return std::any_of(
      object.dlpi_phdr, object.dlpi_phdr + object.dlpi_phnum, [&](const ElfW(Phdr) & segment) {
        const std::uintptr_t first = object.dlpi_addr + segment.p_vaddr;
        return segment.p_type == PT_LOAD && address >= first && address < first + segment.p_memsz;
      });
}

std::string hex(std::string_view bytes) {
  std::string digits;
  for (const char byte : bytes) {
    digits += "0123456789abcdef"[static_cast<unsigned char>(byte) / 16];
    digits += "0123456789abcdef"[static_cast<unsigned char>(byte) % 16];
  }
  return digits;
}

// The build id in the notes of a segment; empty if there is none.
std::string build_id_in(std::string_view notes, std::size_t alignment) {
  const auto padded = [&](std::size_t size) {
    return (size + alignment - 1) / alignment * alignment;
  };
  while (notes.size() > sizeof(ElfW(Nhdr))) {
    const auto* const note = reinterpret_cast<const ElfW(Nhdr)*>(notes.data());
    const std::size_t body = padded(sizeof(*note) + note->n_namesz);
    const std::size_t end = body + note->n_descsz;
    if (end > notes.size()) {
      break;
    }
    if (note->n_type == NT_GNU_BUILD_ID &&
        notes.substr(sizeof(*note), note->n_namesz) == std::string_view("GNU", 4)) {
      return hex(notes.substr(body, note->n_descsz));
    }
    notes.remove_prefix(std::min(padded(end), notes.size()));
  }
  return {};
}

// The linker's build id of the library that contains `address`. Patch releases of NVRTC share a
// version number but generate different code.
std::string build_id(const void* address) {
  struct Search {
    std::uintptr_t address;
    std::string id = {};
  } search{reinterpret_cast<std::uintptr_t>(address)};
  const auto visit = [](dl_phdr_info* object, std::size_t, void* data) {
    auto& wanted = *static_cast<Search*>(data);
    if (!holds(*object, wanted.address)) {
      return 0;
    }
    for (int i = 0; i < object->dlpi_phnum && wanted.id.empty(); ++i) {
      const ElfW(Phdr) & segment = object->dlpi_phdr[i];
      if (segment.p_type == PT_NOTE) {
        const auto* const first =
            reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
        wanted.id = build_id_in({first, segment.p_memsz}, segment.p_align == 8 ? 8 : 4);
      }
    }
    return 1;
  };
  dl_iterate_phdr(visit, &search);
  return search.id;
}

// Size and time of the file of the library that contains `address`. In the wheels of NVRTC 12, a
// tool moved the build id away from where the headers say that it is.
std::string file_stamp(const void* address) {
  Dl_info library{};
  struct stat file{};
  if (dladdr(address, &library) == 0 || stat(library.dli_fname, &file) != 0) {
    return {};
  }
  return std::to_string(file.st_size) + '_' + std::to_string(file.st_mtime);
}

// The NVRTC of the CUDA version that this module was built for. No path is searched:
// libtorch_cuda.so is linked with NVRTC and has loaded it.
void load(Nvrtc& nvrtc) {
  const std::string_view version = FUSED_OP_CUDA_VERSION;
  const std::string name = "libnvrtc.so." + std::string(version.substr(0, version.find('.')));
  void* const library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    nvrtc.why_not = std::string("NVRTC cannot be loaded: ") + dlerror();
    return;
  }
  resolve_all(library, nvrtc);
  if (nvrtc.why_not.empty()) {
    int major = 0, minor = 0;
    nvrtc.version(&major, &minor);
    const void* const address = reinterpret_cast<const void*>(nvrtc.version);
    const std::string id = build_id(address);
    nvrtc.identity = "NVRTC " + std::to_string(major) + '.' + std::to_string(minor) + ' ' +
                     (id.empty() ? file_stamp(address) : id);
  }
}

// Held while NVRTC is loaded or compiles. A thread that forks waits for it, so the child finds
// NVRTC and this mutex unused.
constinit std::mutex nvrtc_mutex;
[[maybe_unused]] const int fork_handler_status = pthread_atfork(
    [] { nvrtc_mutex.lock(); }, [] { nvrtc_mutex.unlock(); }, [] { nvrtc_mutex.unlock(); });

// Needs nvrtc_mutex. Never unloaded: the order of destruction at exit is unknown.
const Nvrtc& loaded_nvrtc() {
  static Nvrtc* loaded = nullptr;
  if (loaded == nullptr) {
    auto* const nvrtc = new Nvrtc{};
    load(*nvrtc);
    loaded = nvrtc;
  }
  return *loaded;
}

void check(const Nvrtc& nvrtc, int result, const char* what) {
  if (result != 0) {
    throw CompileError(std::string("NVRTC could not ") + what + ": " + nvrtc.error_string(result));
  }
}

// "sm_90", or "compute_90" if NVRTC does not know this GPU and 9.0 is the newest before it.
std::string target_of(const Nvrtc& nvrtc, int arch) {
  int count = 0;
  check(nvrtc, nvrtc.supported_arch_count(&count), "list its targets");
  std::vector<int> known(static_cast<std::size_t>(count));
  check(nvrtc, nvrtc.supported_archs(known.data()), "list its targets");
  int newest = 0;
  for (const int each : known) {
    newest = each <= arch ? std::max(newest, each) : newest;
  }
  if (newest == 0) {
    throw CompileError(nvrtc.identity + " has no target for compute capability " +
                       std::to_string(arch / 10) + '.' + std::to_string(arch % 10));
  }
  return (newest == arch ? "sm_" : "compute_") + std::to_string(newest);
}

class OwnedProgram {
 public:
  OwnedProgram(const Nvrtc& nvrtc, const KernelSource& source) : nvrtc_(nvrtc) {
    std::vector<const char*> texts, paths;
    const auto add = [&](const char* path, const char* text) {
      paths.push_back(path);
      texts.push_back(text);
    };
    for (int i = 0; i < kSourceFileCount; ++i) {
      add(kSourceFiles[i].path, kSourceFiles[i].text);
    }
    for (const Header& header : source.more_headers) {
      add(header.path.c_str(), header.text.c_str());
    }
    std::string text = "#include \"" + source.header + "\"\n";
    if (!source.structs.empty()) {
      text += "#include \"" + source.structs + "\"\n";
    }
    check(nvrtc_,
          nvrtc_.create_program(&program_, text.c_str(), "fused_op.cu",
                                static_cast<int>(paths.size()), texts.data(), paths.data()),
          "take the sources");
  }
  ~OwnedProgram() { nvrtc_.destroy_program(&program_); }
  OwnedProgram(const OwnedProgram&) = delete;
  OwnedProgram& operator=(const OwnedProgram&) = delete;

  Program get() const { return program_; }

  std::string log() const {
    std::size_t size = 0;
    nvrtc_.log_size(program_, &size);
    std::string text(size, '\0');
    if (size > 0) {
      nvrtc_.log(program_, text.data());
    }
    return text.c_str();  // without the terminating zero, which NVRTC counts
  }

  std::string code(bool is_cubin) const {
    std::size_t size = 0;
    check(nvrtc_, (is_cubin ? nvrtc_.cubin_size : nvrtc_.ptx_size)(program_, &size),
          "size the code");
    std::string bytes(size, '\0');
    check(nvrtc_, (is_cubin ? nvrtc_.cubin : nvrtc_.ptx)(program_, bytes.data()),
          "return the code");
    return bytes;
  }

 private:
  const Nvrtc& nvrtc_;
  Program program_ = nullptr;
};

}  // namespace

Image compile(const KernelSource& source, int arch, std::string* log) {
  const std::lock_guard<std::mutex> lock(nvrtc_mutex);
  const Nvrtc& nvrtc = loaded_nvrtc();
  if (!nvrtc.why_not.empty()) {
    throw CompileError(nvrtc.why_not);
  }
  const std::string target = target_of(nvrtc, arch);
  const std::string target_option = "--gpu-architecture=" + target;
  std::vector<const char*> options(kOptions.begin(), kOptions.end());
  options.push_back(target_option.c_str());
  if (log != nullptr) {
    options.push_back("--ptxas-options=-v");
  }

  const OwnedProgram program(nvrtc, source);
  check(nvrtc, nvrtc.add_name_expression(program.get(), source.name.c_str()), "take the name");
  const int result =
      nvrtc.compile_program(program.get(), static_cast<int>(options.size()), options.data());
  const std::string messages = program.log();
  if (result != 0) {
    throw CompileError(nvrtc.identity + " could not compile " + source.name + " for " + target +
                       ": " + nvrtc.error_string(result) + '\n' + messages);
  }
  if (log != nullptr) {
    *log = messages;
  }
  const char* symbol = nullptr;
  check(nvrtc, nvrtc.lowered_name(program.get(), source.name.c_str(), &symbol), "mangle the name");
  return {symbol, program.code(target.starts_with("sm_"))};
}

std::string compiler_identity() {
  const std::lock_guard<std::mutex> lock(nvrtc_mutex);
  return loaded_nvrtc().identity;
}

std::string why_no_compiler() {
  const std::lock_guard<std::mutex> lock(nvrtc_mutex);
  return loaded_nvrtc().why_not;
}

std::string compile_options() {
  std::string joined;
  for (const char* const option : kOptions) {
    joined += (joined.empty() ? "" : " ") + std::string(option);
  }
  return joined;
}

}  // namespace fused_op::cuda
