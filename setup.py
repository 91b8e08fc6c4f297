"""Build of the extension module `fused_op_cuda`: CPU backend always, CUDA backend when possible.

With nvcc, the kernels of common calls are compiled into it. With CUDA's headers alone, all kernels
are compiled when they are first called.

Environment variables:
    USE_CUDA=auto|0|1     0: CPU only; 1: fail without CUDA; auto (default): see cuda_support()
    CUDA_HOME             toolkit to use; default: the one nvcc on the PATH belongs to
    TORCH_CUDA_ARCH_LIST  GPUs to build for, e.g. "8.0;9.0+PTX" (GPU_TARGETS is a synonym)
    MAX_JOBS              parallel compilations
    LINEINFO=1            name the source lines of kernels, for profilers (a larger library)
    DEBUG=1               unoptimised, with symbols, for gdb and cuda-gdb (slow, and kernels spill)
    SANITIZE=1            with AddressSanitizer and UndefinedBehaviorSanitizer, for .ci/sanitize
    FUSED_OP_STRICT=1     warnings are errors; for TORCH_CUDA_ARCH_LIST=9.0 so is a register spill
    FUSED_OP_LOOPS        folder of another build's level_*.o, to link and not to compile: .ci/run
    FUSED_OP_REPOSITORY   address of the repository, for the metadata of a release

After `pip install -e .`, `python setup.py build_ext --inplace` compiles again what has changed.

Metadata is in pyproject.toml, the search for torch, nvcc and headers in build_backend.py.
"""

import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import NamedTuple

import torch
from setuptools import Extension, setup

from build_backend import find_cuda_headers, find_cuda_home, headers_version, nvcc_version

DEFAULT_ARCHS = ["7.5", "8.0", "9.0", "10.0", "12.0"]  # 8.6 and 8.9 run the code of 8.0
# Headers of PyTorch that take seconds to read. The sources that include one are compiled together.
SLOW_HEADERS = {"python": r'pybind|"call_keys\.h"', "library": r'torch/library\.h|"variant\.h"'}
ROOT = Path(__file__).parent
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])
# Named after torch: after a change of torch no object is stale.
BUILD_BASE = f"build/torch-{torch.__version__}-{sys.implementation.cache_tag}"
BUILD_TEMP = f"{BUILD_BASE}/temp"
LINEINFO = os.environ.get("LINEINFO", "0") not in ("", "0")
DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("SANITIZE", "0") not in ("", "0")
STRICT = os.environ.get("FUSED_OP_STRICT", "0") not in ("", "0")
# Without those of every pointer: AddressSanitizer reports the access to a bad one, and compilation
# takes two thirds of the time.
POINTERS = "null,vptr,object-size,pointer-overflow,nonnull-attribute,returns-nonnull-attribute"
SANITIZERS = [
    "-fsanitize=address,undefined",
    f"-fno-sanitize={POINTERS}",
    "-fno-sanitize-recover=undefined",
]


class Cuda(NamedTuple):
    """What the CUDA backend is built with: nvcc, or CUDA's headers alone."""

    version: str  # of the CUDA that it is, such as "13.0"
    home: Path | None  # the toolkit with nvcc
    include_dirs: tuple[Path, ...] = ()  # without nvcc


def why_not_nvcc(cuda_home: Path | None) -> str:
    """The reason why nvcc cannot compile for this torch, as a clause; empty if it can."""
    needed = torch.version.cuda.split(".")[0]
    if cuda_home is None:
        return f"there is no nvcc, and torch {torch.__version__} needs one of CUDA {needed}"
    found = nvcc_version(cuda_home)
    if not found:
        return f"there is no working nvcc in {cuda_home}/bin"
    if found.split(".")[0] != needed:  # minor versions are compatible
        return (
            f"nvcc in {cuda_home} is of CUDA {found}, but torch {torch.__version__} was built "
            f"with CUDA {torch.version.cuda}, and the major versions must agree"
        )
    return ""


def find_cuda() -> tuple[Cuda | None, str]:
    """What to build the CUDA backend with, and a clause that says what is missing, if anything."""
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a build without CUDA"
    cuda_home = find_cuda_home()
    problem = why_not_nvcc(cuda_home)
    if not problem:
        return Cuda(nvcc_version(cuda_home), cuda_home), ""
    major = torch.version.cuda.split(".")[0]
    include_dirs = find_cuda_headers(major)
    if not include_dirs:
        return None, f"{problem}; nor are there headers of CUDA {major}"
    return Cuda(headers_version(include_dirs[0]), None, tuple(include_dirs)), problem


def cuda_support() -> tuple[Cuda | None, str]:
    """(what to build the CUDA backend with, ""), or (None, reason) for a CPU-only build.

    A machine with a GPU never gets a CPU-only build unasked: pip hides the output of a build that
    succeeds, and the user would find out much later. Without a GPU it is what one expects.
    """
    use_cuda = os.environ.get("USE_CUDA") or "auto"
    if use_cuda not in ("auto", "0", "1"):
        raise SystemExit(f"fused_op: USE_CUDA must be auto, 0 or 1, got {use_cuda!r}")
    if use_cuda == "0":
        return None, "USE_CUDA was 0 when fused_op was built"
    cuda, problem = find_cuda()
    if cuda and problem:
        print(
            f"fused_op: {problem}. So only the C++ is compiled, with the headers in "
            f"{cuda.include_dirs[0]}, and every kernel is compiled when it is first called. nvcc "
            "would put the kernels of common calls into the extension.",
            flush=True,
        )
    if cuda:
        return cuda, ""
    if use_cuda == "1" or torch.cuda.is_available():
        cause = "USE_CUDA is 1" if use_cuda == "1" else "there is a GPU"
        raise SystemExit(
            f"fused_op: {cause}, but the CUDA backend cannot be built: {problem}.\n"
            "Either install a CUDA build of torch and a CUDA toolkit of the same major version "
            "(CUDA_HOME names it if it is not on the PATH), or set USE_CUDA=0 to build for the CPU."
        )
    return None, problem


def cuda_archs(cuda_home: Path) -> str:
    """The value of TORCH_CUDA_ARCH_LIST: as given, else the visible GPUs, else DEFAULT_ARCHS."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST") or os.environ.get("GPU_TARGETS")
    if given:
        return given
    # Not left to torch, which fails with an IndexError where no GPU is visible.
    command = [str(cuda_home / "bin" / "nvcc"), "--list-gpu-arch"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    known = re.findall(r"compute_(\d+)(\d)\b", listed)
    known = sorted(((int(major), int(minor)) for major, minor in known))
    visible = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    wanted = visible or {tuple(map(int, arch.split("."))) for arch in DEFAULT_ARCHS}
    # A GPU newer than nvcc runs the newest PTX that nvcc can make.
    chosen = sorted(wanted.intersection(known)) or known[-1:]
    return ";".join(f"{major}.{minor}" for major, minor in chosen) + "+PTX"


def link_cudart(extension: Extension, cuda: Cuda) -> None:
    """Link libcudart by path where the toolkit has no libcudart.so: torch's wheels have none."""
    places = [cuda.home] if cuda.home else [path.parent for path in cuda.include_dirs]
    libs = [place / lib for place in places for lib in ("lib64", "lib")]
    if cuda.home and any((lib / "libcudart.so").exists() for lib in libs):
        return
    soname = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    packages = Path(torch.__file__).parents[1]
    libs += [*packages.glob("nvidia/*/lib"), packages / "torch" / "lib"]
    for lib in libs:
        if (lib / soname).exists():
            extension.libraries.remove("cudart")
            extension.extra_link_args.append(str(lib / soname))
            return


def compile_flags(archs: str) -> dict[str, list[str]]:
    """What g++ and nvcc get on top of torch's own flags."""
    # Products and sums are fused where the source says so and nowhere else: two kernels that treat
    # the same row (aligned and not, alone and beside others), and the CPU's levels of instructions,
    # then round alike, bit for bit.
    cxx = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off"]
    cxx += ["-fno-math-errno"]  # a root is then one instruction, of many values at a time
    cxx += ["-fopenmp-simd"]  # for `#pragma omp simd`, also where torch has no OpenMP
    cxx += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"]
    if SANITIZE:
        cxx += ["-Wno-maybe-uninitialized"]  # g++'s own false alarm, which this mode is known for
        # Of the symbols, reports need no more than the lines.
        cxx += [*SANITIZERS, "-O1", "-g1", "-fno-omit-frame-pointer"]
    if torch.backends.openmp.is_available():
        # For at::parallel_for. Not a link flag: the OpenMP runtime has to be the one of torch.
        cxx += ["-fopenmp"]

    nvcc = ["-std=c++20", "-Xcompiler=-fvisibility=hidden", "-Xfatbin=-compress-all"]
    nvcc += ["-fmad=false"]  # as above
    nvcc += ["-O0", "-g", "-G"] if DEBUG else ["-O3"]
    if LINEINFO and not DEBUG:  # -G has the lines, and changes the code, which this does not
        nvcc += ["-lineinfo"]
    # torch switches the operators of __half off; the kernels are the same with plain nvcc.
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"):
        nvcc += [f"-U__CUDA_NO_{name}__"]

    if STRICT:
        cxx += ["-Werror"]
        nvcc += ["-Werror=all-warnings"]
        if archs == "9.0":  # what the tiles are tuned for; elsewhere some kernels may spill
            nvcc += ["-Xptxas=--warn-on-spills"]
    return {"cxx": cxx, "nvcc": nvcc}


def link_flags() -> list[str]:
    # Where the compiler links libstdc++ statically, its symbols stay inside the module: mixed with
    # torch's, the first number printed into an error message would crash.
    flags = ["-Wl,--exclude-libs,ALL"]
    if SANITIZE:
        return flags + SANITIZERS
    # The names of functions that nobody calls from outside are a tenth of the module.
    return flags if DEBUG or LINEINFO else [*flags, "-Wl,--strip-all"]


def compiled_loops() -> dict[str, str]:
    """Sources in csrc/cpu -> their objects, which include no header of torch, of FUSED_OP_LOOPS."""
    given = os.environ.get("FUSED_OP_LOOPS")
    if not given:
        return {}
    objects = sorted((ROOT / given).resolve().glob("level_*.o"))
    if not objects:
        raise SystemExit(f"fused_op: FUSED_OP_LOOPS is {given}, where no level_*.o is")
    return {f"csrc/cpu/{path.stem}.cpp": str(path) for path in objects}


def extension(cuda: Cuda | None, no_cuda_reason: str) -> Extension:
    has_nvcc = cuda is not None and cuda.home is not None
    archs = cuda_archs(cuda.home) if has_nvcc else ""
    macros = {
        "FUSED_OP_VERSION": VERSION,
        # Compared at import: a module built for another torch may load and misbehave silently.
        "FUSED_OP_TORCH_VERSION": str(torch.__version__),
        "FUSED_OP_CUDA_VERSION": cuda.version if cuda else "",
        "FUSED_OP_CUDA_ARCHS": archs,
    }
    loops = compiled_loops()
    sources = [path for path in glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp") if path not in loops]
    if cuda:
        sources += glob("csrc/cuda/*.cpp")
        macros["FUSED_OP_WITH_CUDA"] = 1
    else:
        macros["FUSED_OP_NO_CUDA_REASON"] = no_cuda_reason
    if has_nvcc:
        sources += glob("csrc/cuda/*.cu")
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
        os.environ["CUDA_HOME"] = str(cuda.home)  # read once, by the import below
    elif cuda:
        macros["FUSED_OP_NO_CORE_TABLE"] = 1
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    ext = (CUDAExtension if has_nvcc else CppExtension)(
        name="fused_op_cuda",
        sources=sorted(sources),
        extra_objects=list(loops.values()),
        depends=[
            path
            for kind in ("*.h", "*.cpp", "*.cuh", "rtc/*")
            for path in glob(f"csrc/**/{kind}", recursive=True)
        ],
        define_macros=[(name, json.dumps(value)) for name, value in macros.items()],
        extra_compile_args=compile_flags(archs),
        extra_link_args=link_flags(),
    )
    if cuda and not has_nvcc:  # CUDAExtension insists on a toolkit
        ext.include_dirs += map(str, cuda.include_dirs)
        ext.libraries += ["cudart", "c10_cuda", "torch_cuda"]
    # A directory that is both -I and -isystem counts as the latter: torch's headers do not warn.
    ext.extra_compile_args["cxx"] += [f"-isystem{path}" for path in ext.include_dirs]
    ext.include_dirs.insert(0, str(Path("csrc").resolve()))
    if cuda:
        link_cudart(ext, cuda)
    return ext


def local_version(cuda: Cuda | None, released: bool = False) -> str:
    """What tells wheels of one version apart, e.g. "+cu130torch2.14"; always in a released wheel.

    A source distribution has none. Neither has what is built from one: to pip, a wheel of another
    version than the file that it came from is a mistake of the package.
    """
    if not released and ("sdist" in sys.argv or (ROOT / "PKG-INFO").exists()):
        return ""
    backend = f"cu{torch.version.cuda.replace('.', '')}" if cuda else "cpu"
    return f"+{backend}torch{TORCH_MINOR}"


def metadata(repository: str) -> dict[str, object]:
    """The README and the URLs of the package; with an address, links in the README lead there."""
    text, urls = (ROOT / "README.md").read_text("utf-8"), {}
    if repository:

        def absolute(match: re.Match[str]) -> str:
            kind = "raw" if match[1].startswith("!") else "blob"  # an image, or a page
            return f"{match[1]}{repository}/{kind}/v{VERSION}/"

        text = re.sub(r"(!?\[[^]]*\]\()(?!https?:|#)", absolute, text)
        urls = {
            "Source": repository,
            "Documentation": f"{repository}/blob/v{VERSION}/docs/index.md",
            "Changelog": f"{repository}/blob/v{VERSION}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
    return {
        "long_description": text,
        "long_description_content_type": "text/markdown",
        "project_urls": urls,
    }


def build_command() -> type:
    from torch.utils.cpp_extension import BuildExtension  # after extension() has set CUDA_HOME

    class Build(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            if self.editable_mode:
                # Not setuptools' temporary folder: `build_ext --inplace` goes on from here.
                self.build_temp = BUILD_TEMP
            # Nothing is in there, and the path of an isolated environment is new every time: with
            # another command line, ninja would compile everything again.
            environment = os.path.join(sys.exec_prefix, "include")
            self.include_dirs = [path for path in self.include_dirs if path != environment]

        def build_extensions(self) -> None:
            sources, folder = self.extensions[0].sources, Path(self.build_temp)
            if "csrc/cuda/compile.cpp" in sources:  # with CUDA
                sources.append(write_kernel_sources(folder))
            sources[:] = [*write_bundles(folder, sources), write_source_hash(folder)]
            super().build_extensions()

    return Build


def write_bundles(folder: Path, sources: list[str]) -> list[str]:
    """Write a C++ file for each of SLOW_HEADERS that includes its sources; return what to compile.

    Such a source takes several seconds alone, nearly all of them for the header. In the unnamed
    namespaces of a bundle no name may occur twice.
    """
    rest = sources
    bundles = []
    for name, header in SLOW_HEADERS.items():
        bundled = [path for path in rest if re.search(header, (ROOT / path).read_text("utf-8"))]
        rest = [path for path in rest if path not in bundled]
        code = "".join(f'#include "{Path(path).relative_to("csrc")}"\n' for path in bundled)
        bundles.append(write_if_new(folder / f"bundle_{name}.cpp", code))
    return rest + bundles


def write_source_hash(folder: Path) -> str:
    """Write the C++ file that fused_op/__init__.py compares the sources with; return its path.

    Not a macro: a new command line would compile all files again.
    """
    source_hash = runpy.run_path(str(ROOT / "fused_op" / "_source_hash.py"))["source_hash"]
    code = (
        "namespace fused_op {\n"
        "extern const char* const kSourceHash;\n"
        f'const char* const kSourceHash = "{source_hash(ROOT)}";\n'
        "}  // namespace fused_op\n"
    )
    return write_if_new(folder / "source_hash.cpp", code)


def kernel_sources(csrc: Path | None = None) -> dict[str, str]:
    """What a kernel that is compiled at its first use may include: path there -> text."""
    csrc = csrc or ROOT / "csrc"
    found = {
        path.relative_to(csrc).as_posix(): path.read_text("utf-8")
        for kind in ("core/*.h", "cuda/*.h", "cuda/*.cuh")
        for path in csrc.glob(kind)
        if not path.name.startswith(".")  # the lock of an editor
    }
    stand_ins = [path for path in (csrc / "rtc").iterdir() if path.name.isidentifier()]
    found |= {path.name: path.read_text("utf-8") for path in stand_ins}
    return dict(sorted(found.items()))


def write_kernel_sources(folder: Path, csrc: Path | None = None) -> str:
    """Write the C++ file that defines what csrc/cuda/compile.h declares; return its path."""
    sources = kernel_sources(csrc)
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    entries = "".join(
        f'    {{"{path}", R"fused_op({text})fused_op"}},\n' for path, text in sources.items()
    )
    code = (
        '#include "cuda/compile.h"\n\n'
        "namespace fused_op::cuda {\n"
        f"const SourceFile kSourceFiles[] = {{\n{entries}}};\n"
        f"const int kSourceFileCount = {len(sources)};\n"
        f'const char* const kSourceDigest = "{digest}";\n'
        "}  // namespace fused_op::cuda\n"
    )
    return write_if_new(folder / "kernel_sources.cpp", code)


def write_if_new(path: Path, text: str) -> str:
    """Write a file of the build unless it holds the text already: ninja goes by its date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
    return str(path)


if __name__ == "__main__":
    cuda, no_cuda_reason = cuda_support()
    wheel = f"fused_op=={VERSION}{local_version(cuda, released=True)}"
    print(f"fused_op: building from source. A release has it compiled as {wheel}.", flush=True)
    setup(
        **metadata(os.environ.get("FUSED_OP_REPOSITORY", "")),
        version=VERSION + local_version(cuda),
        ext_modules=[extension(cuda, no_cuda_reason)],
        cmdclass={"build_ext": build_command()},
        install_requires=[f"torch=={TORCH_MINOR}.*"],  # its C++ ABI holds within a minor version
        options={"build": {"build_base": BUILD_BASE, "build_temp": BUILD_TEMP}},
    )
