// Tests of the table of kernels, with a driver and a compiler that count and fail on request.
// test_kernel_table.py builds this and passes the name of a test. Exit status 0 means that it
// passed.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/launch.h"

#define EXPECT(...)                                                           \
  do {                                                                        \
    if (!(__VA_ARGS__)) {                                                     \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      std::exit(1);                                                           \
    }                                                                         \
  } while (false)

// --- The compiler, which does what a kernel's name says ------------------------------------------

namespace fused_op::cuda {

const SourceFile kSourceFiles[] = {{"", ""}};
const int kSourceFileCount = 0;
const char* const kSourceDigest = "of the test";
std::atomic<int> compilations{0};

Image compile(const KernelSource& source, int, std::string*) {
  ++compilations;
  if (source.name.starts_with("slow")) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  if (source.name == "faulty") {
    throw CompileError("the log of faulty");
  }
  if (source.name == "no symbol") {
    return {"other", "good"};
  }
  return {"symbol", source.name == "not for this driver" ? source.name : "good"};
}
std::string compiler_identity() { return "of the test"; }
std::string compile_options() { return ""; }

}  // namespace fused_op::cuda

// --- The runtime, which knows the kernels of the extension ---------------------------------------

static const char for_other_gpus = 0;
cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(entry));
  return entry == &for_other_gpus ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }

namespace {

using namespace fused_op::cuda;

template <typename T>
T& fake(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY);
  return *static_cast<T*>(dlsym(library, name));
}
int count(const char* name) { return fake<int>(name); }

DeviceInfo device(int index, int arch = 90) {
  return {index, 132, 232448, arch >= 90 ? 16 : 0, arch};
}

int sources = 0;
const Kernel* find(std::uint64_t low, const char* name = "good", int index = 0, int arch = 90) {
  return find_kernel({low, 0}, device(index, arch), [&] {
    ++sources;
    return KernelSource{"toy.cuh", name};
  });
}

// --- Tests ---------------------------------------------------------------------------------------

void test_found_once() {
  const Kernel* const kernel = find(1);
  EXPECT(kernel != nullptr && kernel->function() != nullptr);
  EXPECT(kernel->origin() == Origin::kCompiled);
  EXPECT(kernel->registers() == 64 && kernel->local_bytes() == 8);
  EXPECT(kernel->shared_bytes() == 1000);
  EXPECT(find(1) == kernel && sources == 1 && compilations == 1);
  EXPECT(count("fake_loads") == 1 && count("fake_functions") == 1);
  // Other kernels: one for another architecture, and one that differs in the other half of the key.
  const Kernel* const older = find(1, "good", 1, 80);
  const Kernel* const higher =
      find_kernel({0, 1}, device(0), [] { return KernelSource{"toy.cuh", "higher"}; });
  EXPECT(older != nullptr && older != kernel && higher != nullptr && higher != kernel);
  EXPECT(find(1) == kernel && find(1, "good", 1, 80) == older);
  EXPECT(compilations == 3);
}

void test_every_device() {
  // An architecture has one library. Its code is put on each device before a launch there.
  const Kernel* const kernel = find(1);
  EXPECT(count("fake_retained") == 1);  // there was no current context
  EXPECT(find(1, "good", 63) == kernel && find(1, "good", 63) == kernel);
  EXPECT(count("fake_loads") == 1 && count("fake_functions") == 2 && sources == 1);
  EXPECT(find(1) == kernel && count("fake_functions") == 2 && count("fake_retained") == 1);
}

void test_during_a_capture() {
  find(1);
  find(1, "good", 1);
  find(2, "not for this driver");
  EXPECT(count("fake_forbidden") == 0);
  const int mode = reinterpret_cast<int (*)()>(&fake<char>("fake_mode_now"))();
  EXPECT(mode == 0);  // the global mode, as before
}

void test_failures_are_remembered() {
  const std::map<std::string, std::string> problems = {
      {"faulty", "the log of faulty"},
      {"not for this driver", "cuLibraryLoadData failed: CUDA_ERROR_INVALID_IMAGE"},
      {"no symbol", "cuLibraryGetKernel failed: unknown error"}};
  std::uint64_t key = 0;
  for (const auto& [name, problem] : problems) {
    ++key;
    for (int i = 0; i < 3; ++i) {
      EXPECT(find(key, name.c_str()) == nullptr);
      EXPECT(why_no_kernel() == problem);
    }
    EXPECT(sources == static_cast<int>(key) && compilations == static_cast<int>(key));
  }
  EXPECT(count("fake_loads") == count("fake_unloads"));
  EXPECT(find(key + 1) != nullptr);
  EXPECT(find(1, "faulty") == nullptr && why_no_kernel() == "the log of faulty");
}

void test_out_of_memory_is_tried_again() {
  fake<bool>("fake_out_of_memory") = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT(find(1) == nullptr);
    EXPECT(why_no_kernel() == "cuLibraryLoadData failed: CUDA_ERROR_OUT_OF_MEMORY");
  }
  fake<bool>("fake_out_of_memory") = false;
  EXPECT(find(1) != nullptr && sources == 3);
  EXPECT(compilations == 1);  // the others were read from the cache
}

void test_package() {
  write_package({"toy.cuh", "good"}, 80, {"symbol", "good"}, package_folder());
  write_package({"toy.cuh", "refused"}, 80, {"symbol", "not for this driver"}, package_folder());
  EXPECT(find(1, "good", 0, 86)->origin() == Origin::kPackage && compilations == 0);
  // If the driver refuses the package's code, the kernel is compiled.
  EXPECT(find(2, "refused", 0, 80)->origin() == Origin::kCompiled && compilations == 1);
}

void test_package_alone() {  // FUSED_OP_JIT=0
  write_package({"toy.cuh", "good"}, 90, {"symbol", "good"}, package_folder());
  write_package({"toy.cuh", "refused"}, 90, {"symbol", "not for this driver"}, package_folder());
  EXPECT(find(1)->origin() == Origin::kPackage);
  EXPECT(find(2, "refused") == nullptr);
  EXPECT(why_no_kernel() == "cuLibraryLoadData failed: CUDA_ERROR_INVALID_IMAGE");
  EXPECT(find(3, "other") == nullptr);
  EXPECT(why_no_kernel() == "FUSED_OP_JIT is 0, and the package does not have the kernel other");
  EXPECT(compilations == 0);
}

void test_built_in() {
  static const char here = 0;
  const auto find_built_in = [](std::uint64_t low, const void* built_in) {
    return find_kernel({low, 0}, device(0), [&] {
      return KernelSource{.header = "toy.cuh", .name = "good", .built_in = built_in};
    });
  };
  const Kernel* const kernel = find_built_in(1, &here);
  EXPECT(kernel != nullptr && kernel->origin() == Origin::kCore && kernel->function() == &here);
  EXPECT(kernel->registers() == 64 && compilations == 0 && count("fake_loads") == 0);
  EXPECT(find_built_in(1, &here) == kernel && count("fake_forbidden") == 0);
  // If the extension was compiled for other GPUs, the kernel is compiled for this one.
  const Kernel* const other = find_built_in(2, &for_other_gpus);
  EXPECT(other != nullptr && other->origin() == Origin::kCompiled && compilations == 1);
}

void test_unknown_value() {  // FUSED_OP_JIT=yes
  for (int i = 0; i < 2; ++i) {
    try {
      find(1);
      EXPECT(false);
    } catch (const std::runtime_error& error) {
      EXPECT(std::string(error.what()) == "FUSED_OP_JIT must be 0, 1 or require, got 'yes'");
    }
  }
  EXPECT(compilations == 0);
}

void test_no_driver() {
  EXPECT(find(1) == nullptr && find(1) == nullptr);
  EXPECT(why_no_kernel() == "the CUDA driver is too old: it has no cuKernelSetAttribute");
  EXPECT(compilations == 0);
}

void test_attributes() {
  const Kernel& kernel = *find(1);
  const int most = 232448 - 1000;
  EXPECT(kernel.allow_shared(0, device(0)) && kernel.allow_shared((48 << 10) - 1000, device(0)));
  EXPECT(!kernel.allow_shared(most + 1, device(0)));
  EXPECT(count("fake_attributes") == 0);
  EXPECT(kernel.allow_shared((48 << 10) - 999, device(0)) && kernel.allow_shared(most, device(0)));
  EXPECT(count("fake_attributes") == 1);  // to all there is: the next launch may need more
  const int* const last = &fake<int>("fake_last_attribute");
  EXPECT(last[0] == 8 /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */ && last[1] == most);
  EXPECT(kernel.allow_shared(most, device(5)) && kernel.allow_shared(most, device(5)));
  EXPECT(count("fake_attributes") == 2 && last[2] == 5);
  EXPECT(kernel.allow_large_clusters(device(0)) && kernel.allow_large_clusters(device(0)));
  EXPECT(count("fake_attributes") == 3 && last[1] == 1);
  for (int i = 0; i < 32; ++i) {
    const int cluster = 1 + i % 16;
    EXPECT(kernel.active_clusters(128, 1024, cluster, device(0)) == 132 / cluster);
  }
  EXPECT(count("fake_questions") == 16);
  kernel.active_clusters(128, 1024, 2, device(63));
  EXPECT(count("fake_questions") == 17);
  EXPECT(kernel.active_clusters(128, 1024, 17, device(0)) == 0);
}

void test_many_keys() {  // several in each bucket
  std::map<std::uint64_t, const Kernel*> found;
  for (std::uint64_t i = 0; i < 4000; ++i) {
    found[i << 20] = find(i << 20);
  }
  std::vector<int> used(kKernelBuckets, 0);
  for (const auto& [key, kernel] : found) {
    EXPECT(find(key) == kernel);
    ++used[bucket_of({key, 0}, 90)];
  }
  EXPECT(sources == 4000 && count("fake_loads") == 4000);
  for (const int entries : used) {
    EXPECT(entries < 20);
  }
}

void test_threads() {
  constexpr int kThreads = 8, kKeys = 200;
  std::vector<std::vector<const Kernel*>> found(kThreads);
  std::vector<std::thread> threads;
  std::atomic<int> made{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&found, &made, t] {
      for (std::uint64_t key = 0; key < kKeys; ++key) {
        const auto source = [&] {
          ++made;
          return KernelSource{"toy.cuh", std::to_string(key)};
        };
        found[t].push_back(find_kernel({key, key}, device(t % 2), source));
      }
    });
  }
  for (std::thread& each : threads) {
    each.join();
  }
  for (const auto& each : found) {
    EXPECT(each == found[0]);
  }
  EXPECT(made == kKeys && compilations == kKeys && count("fake_loads") == kKeys);
}

void test_fork() {
  // Forks while another thread is at a miss. The child finds its own kernels, and the other
  // thread's.
  find(1);
  std::thread slow([] { find(2, "slow"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(find(1) != nullptr && find(3, "third") != nullptr && find(2, "slow") != nullptr ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  slow.join();
  EXPECT(status == 0);
}

void test_grids() {
  const auto throws = [](std::int64_t x, std::int64_t y) {
    try {
      cta_grid(x, y);
      return false;
    } catch (const fused_op::KernelError&) {
      return true;
    }
  };
  const dim3 grid = cta_grid(0x7fffffff, 0xffff);
  EXPECT(grid.x == 0x7fffffff && grid.y == 0xffff && grid.z == 1);
  EXPECT(throws(0x80000000, 1));
  EXPECT(throws((std::int64_t{1} << 32) + 5, 1));  // 5, if it were cut off
  EXPECT(throws(1, 0x10000));
}

void test_speed() {  // for a reader of the output; nothing is asserted
  for (std::uint64_t i = 0; i < 300; ++i) {
    find(i << 8 | i << 40);
  }
  const DeviceInfo here = device(0);
  constexpr int kTurns = 20'000'000;
  const auto start = std::chrono::steady_clock::now();
  std::uintptr_t sum = 0;
  for (int i = 0; i < kTurns; ++i) {
    const std::uint64_t k = static_cast<std::uint64_t>(i) % 300;
    sum += reinterpret_cast<std::uintptr_t>(
        find_kernel({k << 8 | k << 40, 0}, here, [] { return KernelSource{"", ""}; }));
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  std::printf("%.1f ns a look-up (%d)\n", time.count() / kTurns, static_cast<int>(sum & 1));
}

}  // namespace

int main(int, char** arguments) {
  const std::map<std::string, void (*)()> tests = {
      {"found_once", test_found_once},
      {"every_device", test_every_device},
      {"during_a_capture", test_during_a_capture},
      {"failures_are_remembered", test_failures_are_remembered},
      {"out_of_memory_is_tried_again", test_out_of_memory_is_tried_again},
      {"package", test_package},
      {"package_alone", test_package_alone},
      {"built_in", test_built_in},
      {"unknown_value", test_unknown_value},
      {"no_driver", test_no_driver},
      {"attributes", test_attributes},
      {"many_keys", test_many_keys},
      {"threads", test_threads},
      {"fork", test_fork},
      {"grids", test_grids},
      {"speed", test_speed}};
  tests.at(arguments[1])();
  return 0;
}
