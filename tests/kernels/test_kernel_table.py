"""The table of loaded kernels (csrc/cuda/kernels.h), on a driver and a compiler that are fakes.

What a GPU has to show is that the driver's functions do what the fakes of fake_cuda.cpp do.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import build_backend

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")
FILES = ("cuda/kernels.cpp", "cuda/driver.cpp", "cuda/kernel_files.cpp", "cuda/kernel_folder.cpp")

TESTS = {  # name: what it catches
    "found_once": "a kernel that is looked for, compiled or loaded again; keys taken for another",
    "every_device": "a second device whose first launch would load the code, or a second library",
    "during_a_capture": "loading in a capture mode that forbids it, and a mode that stays relaxed",
    "failures_are_remembered": "a compilation at each call that cannot succeed",
    "out_of_memory_is_tried_again": "a kernel that is lost since memory was short once",
    "package": "the compiler where the package has the kernel, or a package that ends a search",
    "package_alone": "FUSED_OP_JIT=0 with a compiler, or without a reason",
    "built_in": "a compilation of what the extension contains, or none for another GPU",
    "unknown_value": "a value of FUSED_OP_JIT that is taken for another",
    "no_driver": "a call of a function that the driver does not have",
    "attributes": "a launch without the attribute, or a question to the driver at each launch",
    "many_keys": "keys that are lost or slow among others",
    "threads": "a kernel that two threads compile, or one that is half in the table",
    "fork": "a lock that is held in the parent at the fork, and so in the child for ever",
    "grids": "a grid whose size is cut off, so that most rows are left out",
    "speed": "nothing: it prints the time of a look-up",
}
JIT = {"package_alone": "0", "unknown_value": "yes"}


def cuda_includes() -> list[Path]:
    """Folders with CUDA's headers: of the toolkit, or of wheels."""
    home = build_backend.find_cuda_home()
    if home and home.joinpath("include", "cuda.h").exists():
        return [home / "include"]
    return build_backend.find_cuda_headers((torch.version.cuda or "13").split(".")[0])


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    includes = cuda_includes()
    if COMPILER is None or not includes:
        pytest.skip("no C++ compiler, or no cuda.h")
    folder = tmp_path_factory.mktemp("program")
    flags = [COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += [f"-I{ROOT / 'csrc'}", *(f"-isystem{include}" for include in includes)]
    for name, macro in (("driver", "-DNEW_DRIVER"), ("old_driver", "-DOLD_DRIVER")):
        (folder / name).mkdir()
        fake = ["-shared", "-fPIC", macro, str(ROOT / "tests" / "kernels" / "fake_cuda.cpp")]
        subprocess.run([*flags, *fake, "-o", folder / name / "libcuda.so.1"], check=True)
    sources = [ROOT / "csrc" / file for file in (*FILES, "cuda/sha256.cpp")]
    sources.append(ROOT / "tests" / "kernels" / "kernel_table.cpp")
    program = folder / "kernel_table"
    subprocess.run([*flags, *map(str, sources), "-ldl", "-o", program], check=True)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_table(program, tmp_path, name):
    here = shutil.copy(program, tmp_path)  # beside it is the folder of its package
    driver = program.parent / ("old_driver" if name == "no_driver" else "driver")
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "FUSED_OP_CACHE_DIR": str(tmp_path / "cache"),
        "FUSED_OP_JIT": JIT.get(name, ""),
    }
    done = subprocess.run([here, name], env=env, capture_output=True, text=True, timeout=120)
    print(done.stdout)
    assert done.returncode == 0, (TESTS[name], done.stdout, done.stderr)
