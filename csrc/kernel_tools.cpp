#include "kernel_tools.h"

#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef FUSED_OP_WITH_CUDA
#include "cuda/call_plan.h"
#include "cuda/compile.h"
#include "cuda/kernel_files.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#elif !defined(FUSED_OP_NO_CUDA_REASON)
#define FUSED_OP_NO_CUDA_REASON "the build did not say why"
#endif

namespace py = pybind11;
using pybind11::literals::operator""_a;

namespace fused_op {
namespace {

using Headers = std::map<std::string, std::string>;  // path -> text

#ifdef FUSED_OP_WITH_CUDA
cuda::KernelSource source_of(const std::string& header, const std::string& name,
                             const Headers& headers) {
  cuda::KernelSource source{.header = header, .name = name};
  for (const auto& [path, text] : headers) {
    source.more_headers.push_back({path, text});
  }
  return source;
}

const char* name_of(cuda::Origin origin) {
  switch (origin) {
    case cuda::Origin::kCore:
      return "core";
    case cuda::Origin::kPackage:
      return "package";
    case cuda::Origin::kCache:
      return "cache";
    case cuda::Origin::kCompiled:
      return "compiled";
  }
  return "";
}

py::tuple compile(const std::string& header, const std::string& name, int arch,
                  const Headers& headers) {
  std::string log;
  cuda::Image image;
  {
    const py::gil_scoped_release released;
    image = cuda::compile(source_of(header, name, headers), arch, &log);
  }
  return py::make_tuple(image.symbol, py::bytes(image.code), log);
}

py::tuple find_kernel(const std::string& header, const std::string& name, int arch,
                      const Headers& headers, double patience_s) {
  cuda::FoundImage found;
  {
    const py::gil_scoped_release released;
    const std::chrono::duration<double> patience(patience_s);
    found = cuda::find_image(source_of(header, name, headers), arch,
                             std::chrono::duration_cast<std::chrono::milliseconds>(patience));
  }
  return py::make_tuple(found.image.symbol, py::bytes(found.image.code), name_of(found.origin));
}

void write_package(const std::string& header, const std::string& name, int arch,
                   const Headers& headers, const std::string& folder) {
  const cuda::KernelSource source = source_of(header, name, headers);
  const py::gil_scoped_release released;
  cuda::write_package(source, arch, cuda::compile(source, arch),
                      folder.empty() ? cuda::package_folder() : folder);
}

DType dtype_of(const std::string& name) {
  const std::map<std::string, DType> dtypes = {{"f16", DType::kFloat16},
                                               {"bf16", DType::kBFloat16},
                                               {"f32", DType::kFloat32},
                                               {"f64", DType::kFloat64}};
  return dtypes.at(name);
}

Rounding rounding_of(const std::string& name) {
  const std::map<std::string, Rounding> roundings = {{"once", Rounding::kOnce},
                                                     {"before_weight", Rounding::kBeforeWeight}};
  return roundings.at(name);
}

// `residual` is empty if there is none.
py::tuple plan(bool backward, bool centred, std::int64_t rows, std::int64_t cols,
               const std::string& input, const std::string& residual, const std::string& parameters,
               const std::string& output, const std::string& rounding, bool dropout,
               bool memory_efficient, bool aligned, int multiprocessors, int shared_bytes, int arch,
               bool fast_memory) {
  if (rows < 1 || cols < 1 || multiprocessors < 1) {
    throw std::invalid_argument("there is a plan for one row, column and multiprocessor, or more");
  }
  cuda::CallShape call;
  call.norm = centred ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  call.backward = backward;
  call.rows = rows;
  call.cols = cols;
  call.input = dtype_of(input);
  call.adds = !residual.empty();
  call.residual = call.sum = dtype_of(call.adds ? residual : input);
  call.parameters = dtype_of(parameters);
  call.output = dtype_of(output);
  call.rounding = rounding_of(rounding);
  call.dropout = dropout;
  call.memory_efficient = memory_efficient;
  call.aligned = aligned;
  cuda::DeviceInfo device{};
  device.multiprocessors = multiprocessors;
  device.shared_bytes = shared_bytes;
  device.arch = arch;
  device.fast_memory = fast_memory;
  device.max_cluster = cuda::max_cluster_of(arch);
  const cuda::CallPlan found = cuda::plan_call(call, device);
  py::dict integers;
  for (const auto& [name, value] : found.integers) {
    integers[py::str(name)] = value;
  }
  py::list kernels;
  for (const cuda::PlannedKernel& kernel : found.kernels) {
    kernels.append(py::make_tuple(kernel.source.header, kernel.source.name, kernel.core));
  }
  return py::make_tuple(integers, kernels);
}

bool has_fast_memory(int device) { return cuda::read_device_info(device).fast_memory; }

std::string kernel_key(const std::string& header, const std::string& name, int arch,
                       const Headers& headers) {
  return cuda::kernel_key(source_of(header, name, headers), arch, cuda::compiler_identity());
}

Headers kernel_sources() {
  Headers sources;
  for (int i = 0; i < cuda::kSourceFileCount; ++i) {
    sources[cuda::kSourceFiles[i].path] = cuda::kSourceFiles[i].text;
  }
  return sources;
}

py::dict cache_info() {
  const cuda::CacheInfo info = cuda::cache_info();
  return py::dict(
      "folder"_a = cuda::cache_folder(), "problem"_a = info.problem, "kernels"_a = info.kernels,
      "bytes"_a = info.bytes, "package_folder"_a = cuda::package_folder(),
      "compiler"_a = cuda::compiler_identity(), "no_compiler_reason"_a = cuda::why_no_compiler());
}

int clear_cache() { return cuda::clear_cache(); }
int max_kernels() { return cuda::max_kernels(); }
std::string compiler_identity() { return cuda::compiler_identity(); }
std::string why_no_compiler() { return cuda::why_no_compiler(); }
#else
[[noreturn]] void fail() {
  throw std::runtime_error("fused_op was built without CUDA: " FUSED_OP_NO_CUDA_REASON);
}
py::tuple compile(const std::string&, const std::string&, int, const Headers&) { fail(); }
py::tuple find_kernel(const std::string&, const std::string&, int, const Headers&, double) {
  fail();
}
void write_package(const std::string&, const std::string&, int, const Headers&,
                   const std::string&) {
  fail();
}
py::tuple plan(bool, bool, std::int64_t, std::int64_t, const std::string&, const std::string&,
               const std::string&, const std::string&, const std::string&, bool, bool, bool, int,
               int, int, bool) {
  fail();
}
bool has_fast_memory(int) { fail(); }
std::string kernel_key(const std::string&, const std::string&, int, const Headers&) { fail(); }
Headers kernel_sources() { fail(); }
py::dict cache_info() { fail(); }
int clear_cache() { fail(); }
int max_kernels() { fail(); }
std::string compiler_identity() { fail(); }
std::string why_no_compiler() { fail(); }
#endif

}  // namespace

void bind_kernel_tools(py::module_& m) {
#ifdef FUSED_OP_WITH_CUDA
  py::register_exception<KernelError>(m, "KernelError", PyExc_RuntimeError);
#else
  m.attr("KernelError") = py::exception<std::nullptr_t>(m, "KernelError", PyExc_RuntimeError);
#endif
  const auto kernel = std::make_tuple(py::arg("header"), py::arg("name"), py::arg("arch"),
                                      py::arg("headers") = Headers());
  const auto def = [&](const char* name, auto function, auto... more) {
    std::apply([&](auto... args) { m.def(name, function, args..., more...); }, kernel);
  };
  def("_compile", &compile);
  def("_find_kernel", &find_kernel, py::arg("patience_s") = 10.0);
  def("_write_package", &write_package, py::arg("folder") = "");
  def("_kernel_key", &kernel_key);
  m.def("_plan", &plan, py::kw_only(), "backward"_a, "centred"_a, "rows"_a, "cols"_a, "input"_a,
        "residual"_a, "parameters"_a, "output"_a, "rounding"_a, "dropout"_a, "memory_efficient"_a,
        "aligned"_a, "multiprocessors"_a, "shared_bytes"_a, "arch"_a = 0, "fast_memory"_a = true);
  m.def("_has_fast_memory", &has_fast_memory);
  m.def("_kernel_sources", &kernel_sources);
  m.def("_cache_info", &cache_info);
  m.def("_clear_cache", &clear_cache);
  m.def("_max_kernels", &max_kernels);
  m.def("_compiler_identity", &compiler_identity);
  m.def("_why_no_compiler", &why_no_compiler);
}

}  // namespace fused_op
