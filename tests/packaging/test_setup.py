"""setup.py: with which CUDA, for which GPUs and by which name it builds, and when it refuses."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_op._source_hash import source_hash
from tests.kernels.toy_kernel import why_not as why_not_nvrtc
from tests.packaging.builds import ROOT, make_headers, make_nvcc


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module, for a CUDA 13.0 torch without GPU, nvcc and headers."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("USE_CUDA", "TORCH_CUDA_ARCH_LIST", "GPU_TARGETS", "FUSED_OP_LOOPS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "find_cuda_home", lambda: None)
    monkeypatch.setattr(module, "find_cuda_headers", lambda major: [])
    return module


def test_cuda_build_without_gpu(setup_py, monkeypatch, tmp_path):
    home = make_nvcc(tmp_path, "13.2")  # another minor version than torch's
    monkeypatch.setattr(setup_py, "find_cuda_home", lambda: home)
    assert setup_py.cuda_support() == (setup_py.Cuda("13.2", home), "")
    monkeypatch.setenv("USE_CUDA", "0")
    assert setup_py.cuda_support() == (None, "USE_CUDA was 0 when fused_op was built")


def test_cpu_build_without_gpu_gives_the_reason(setup_py, monkeypatch, tmp_path):
    assert re.search(r"there is no nvcc.*; nor are there headers of", setup_py.cuda_support()[1])
    monkeypatch.setattr(setup_py, "find_cuda_home", lambda: tmp_path)
    assert "no working nvcc" in setup_py.cuda_support()[1]
    make_nvcc(tmp_path, "12.8")
    assert re.search(r"of CUDA 12\.8, but torch .* with CUDA 13\.0", setup_py.cuda_support()[1])
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA" in setup_py.cuda_support()[1]


@pytest.mark.parametrize("use_cuda", ["auto", "1"])
@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(
    ("nvcc", "message"),
    [
        ("", "there is no nvcc, and torch .* needs one of CUDA 13"),
        ("broken", "there is no working nvcc in"),
        ("12.8", r"nvcc in .* is of CUDA 12\.8, but torch .* with CUDA 13\.0"),
    ],
)
def test_cuda_build_without_nvcc(
    setup_py, monkeypatch, tmp_path, capsys, nvcc, message, has_gpu, use_cuda
):
    """Catches an error, or a build for the CPU, where g++ and NVRTC are all that is needed."""
    headers = [make_headers(tmp_path / "runtime", version=13010), tmp_path / "crt"]
    if nvcc:
        make_nvcc(tmp_path, nvcc)
    monkeypatch.setattr(setup_py, "find_cuda_home", lambda: tmp_path if nvcc else None)
    monkeypatch.setattr(
        setup_py, "find_cuda_headers", lambda major: headers if major == "13" else []
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("USE_CUDA", use_cuda)
    assert setup_py.cuda_support() == (setup_py.Cuda("13.1", None, tuple(headers)), "")
    printed = capsys.readouterr().out
    assert re.search(f"^fused_op: {message}.* only the C\\+\\+ is compiled", printed)
    assert printed.count("\n") == 1 and f" {headers[0]}, " in printed


def test_extension_without_nvcc(setup_py, monkeypatch, tmp_path):
    """Catches kernels that nvcc would have to compile, and libraries that are not linked."""
    monkeypatch.chdir(ROOT)
    libs = tmp_path / "nvidia" / "cu13" / "lib"
    libs.mkdir(parents=True)
    library = libs / "libcudart.so.13"
    library.touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    headers = make_headers(tmp_path / "include", version=13000)
    ext = setup_py.extension(setup_py.Cuda("13.0", None, (headers,)), "")
    assert "csrc/cuda/launch.cpp" in ext.sources
    assert not [path for path in ext.sources if path.endswith(".cu")]
    macros = dict(ext.define_macros)
    assert macros["FUSED_OP_CUDA_VERSION"] == '"13.0"' and macros["FUSED_OP_CUDA_ARCHS"] == '""'
    assert {"FUSED_OP_WITH_CUDA", "FUSED_OP_NO_CORE_TABLE"} <= macros.keys()
    assert "FUSED_OP_NO_CUDA_REASON" not in macros
    assert str(headers) in ext.include_dirs
    assert {"c10_cuda", "torch_cuda"} <= set(ext.libraries)
    assert "cudart" not in ext.libraries and str(library) in ext.extra_link_args


def why_no_build_without_nvcc() -> str:
    """Why g++ cannot build the CUDA backend here; empty if it can."""
    if torch.version.cuda is None:
        return "torch is a build without CUDA"
    if not all(map(importlib.util.find_spec, ("setuptools", "ninja"))):
        return "needs setuptools and ninja"
    import build_backend

    found = build_backend.find_cuda_headers(torch.version.cuda.split(".")[0])
    return "" if found else "there are no headers of CUDA"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_build_without_nvcc()), reason=why_no_build_without_nvcc())
def test_build_without_nvcc(tree, tmp_path):
    """A real one, of a minute: what it has no kernel of, it compiles."""
    for name in ("build_backend.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    no_nvcc = tree / "no-nvcc"
    no_nvcc.mkdir()
    env = {**os.environ, "USE_CUDA": "1", "CUDA_HOME": str(no_nvcc), "PYTHONPATH": str(tree)}
    env |= {"FUSED_OP_CACHE_DIR": str(tree / "cache"), "DEBUG": "1"}  # unoptimised: sooner done
    env["CFLAGS"] = "-DFUSED_OP_CPU_X86=0"  # the loops of other CPUs, which nothing else compiles

    def run(*command: str) -> str:
        command = (sys.executable, *command)
        result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    built = run("setup.py", "build_ext", "--inplace")
    assert f"there is no working nvcc in {no_nvcc}/bin" in built
    info = run("-c", "import fused_op; print(fused_op.build_info())")
    assert "'cuda_archs': ''" in info and "'no_cuda_reason': ''" in info
    plan = "plan --op layer_norm --rows 4096 --cols 768 --dtype bf16 --arch 9.0"
    planned = run("-m", "fused_op", *plan.split())
    assert "code    compiled with the extension" not in planned
    if not why_not_nvrtc():
        assert "code    compiled now" in planned


@pytest.mark.parametrize("cause", ["there is a GPU", "USE_CUDA is 1"])
def test_no_silent_cpu_build(setup_py, monkeypatch, cause):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cause == "there is a GPU")
    monkeypatch.setenv("USE_CUDA", "1" if cause == "USE_CUDA is 1" else "auto")
    with pytest.raises(SystemExit, match=f"{cause}, but .* there is no nvcc"):
        setup_py.cuda_support()


def test_unknown_use_cuda(setup_py, monkeypatch):
    monkeypatch.setenv("USE_CUDA", "yes")
    with pytest.raises(SystemExit, match="USE_CUDA must be auto, 0 or 1, got 'yes'"):
        setup_py.cuda_support()


def test_architectures(setup_py, monkeypatch, tmp_path):
    home = make_nvcc(tmp_path, "13.0")
    assert setup_py.cuda_archs(home) == "7.5;9.0;10.0+PTX"  # of the defaults, those nvcc knows

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(10, 0), (9, 0)][index])
    assert setup_py.cuda_archs(home) == "9.0;10.0+PTX"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (13, 0))
    assert setup_py.cuda_archs(home) == "10.0+PTX"  # the driver compiles it for the newer GPU

    monkeypatch.setenv("GPU_TARGETS", "8.0")
    assert setup_py.cuda_archs(home) == "8.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert setup_py.cuda_archs(home) == "Hopper"


def test_local_version_tells_wheels_apart(setup_py, monkeypatch, tmp_path):
    """Catches a CPU and a CUDA wheel of one name, and an sdist whose wheel pip would refuse."""
    cuda = setup_py.Cuda("13.0", tmp_path)
    monkeypatch.setattr(setup_py, "TORCH_MINOR", "2.14")
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    assert setup_py.local_version(cuda) == "+cu130torch2.14"
    assert setup_py.local_version(None) == "+cputorch2.14"
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist", "--formats", "gztar"])
    assert setup_py.local_version(cuda) == setup_py.local_version(None) == ""
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    tmp_path.joinpath("PKG-INFO").touch()
    assert setup_py.local_version(cuda) == setup_py.local_version(None) == ""
    assert setup_py.local_version(cuda, released=True) == "+cu130torch2.14"


def test_links_of_the_description_lead_to_the_repository(setup_py):
    """Catches links that work in the repository and nowhere else, as on the page of an index."""
    address = f"https://example.org/fused_op/blob/v{setup_py.VERSION}/"
    text = setup_py.metadata("https://example.org/fused_op")["long_description"]
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(target.startswith(("http", "#")) for target in targets)
    ours = [target.removeprefix(address) for target in targets if target.startswith(address)]
    assert len(ours) > 5 and all((ROOT / path.partition("#")[0]).exists() for path in ours)
    assert setup_py.metadata("")["long_description"] == (ROOT / "README.md").read_text()


def test_source_lines_only_on_request(setup_py, monkeypatch):
    assert "-lineinfo" not in setup_py.compile_flags("9.0")["nvcc"]
    monkeypatch.setattr(setup_py, "LINEINFO", True)
    assert "-lineinfo" in setup_py.compile_flags("9.0")["nvcc"]
    monkeypatch.setattr(setup_py, "DEBUG", True)
    assert "-lineinfo" not in setup_py.compile_flags("9.0")["nvcc"]  # nvcc warns: -G overrides it


def test_builds_of_every_kind_share_their_objects(setup_py, tmp_path):
    """Catches an editable install after which the first `build_ext` compiles everything again."""
    from setuptools import Distribution

    folders = {}
    for editable in (False, True):
        distribution = Distribution({"ext_modules": []})
        build = distribution.get_command_obj("build")
        build.build_base, build.build_temp = setup_py.BUILD_BASE, setup_py.BUILD_TEMP
        if editable:  # as setuptools' editable_wheel does
            build.build_temp = str(tmp_path)
        command = setup_py.build_command()(distribution)
        command.editable_mode = editable
        command.ensure_finalized()
        folders[editable] = command.build_temp
        assert os.path.join(sys.exec_prefix, "include") not in command.include_dirs
    assert folders == {False: setup_py.BUILD_TEMP, True: setup_py.BUILD_TEMP}


def test_source_hash_is_written_once(setup_py, tmp_path):
    """Catches a build that compiles and links although nothing has changed."""
    path = Path(setup_py.write_source_hash(tmp_path / "temp"))
    assert f'"{source_hash(ROOT)}"' in path.read_text()
    os.utime(path, (0, 0))
    setup_py.write_source_hash(tmp_path / "temp")
    assert path.stat().st_mtime == 0
    path.write_text("of other sources")
    setup_py.write_source_hash(tmp_path / "temp")
    assert f'"{source_hash(ROOT)}"' in path.read_text()


def test_every_source_is_compiled_once(setup_py, monkeypatch, tmp_path):
    """Catches a source that no bundle and no command names, or two do."""
    monkeypatch.chdir(ROOT)
    sources = setup_py.extension(None, "no reason").sources
    found = []
    for path in setup_py.write_bundles(tmp_path, sources):
        included = re.findall('#include "(.+)"', Path(path).read_text())
        is_bundle = Path(path).parent == tmp_path
        found += [f"csrc/{name}" for name in included] if is_bundle else [path]
        assert not is_bundle or len(included) > 3
    assert sorted(found) == sorted(sources)


def test_loops_of_another_build_are_linked(setup_py, monkeypatch, tmp_path):
    """Catches loops that are compiled although they are there, or neither compiled nor linked."""
    monkeypatch.chdir(ROOT)
    every = setup_py.extension(None, "no reason").sources
    monkeypatch.setenv("FUSED_OP_LOOPS", str(tmp_path))
    with pytest.raises(SystemExit, match="where no level_"):
        setup_py.extension(None, "no reason")
    loops = tmp_path / "level_avx2.o"
    loops.touch()
    ext = setup_py.extension(None, "no reason")
    assert ext.extra_objects == [str(loops)]
    assert sorted([*ext.sources, "csrc/cpu/level_avx2.cpp"]) == sorted(every)


def test_kernel_sources_are_written_once(setup_py, monkeypatch, tree):
    """Catches a build that compiles although nothing has changed, and a digest that stays although
    something has: kernels of an edit ago would be taken from the cache."""
    monkeypatch.setattr(setup_py, "ROOT", tree)

    def digest() -> str:
        path = Path(setup_py.write_kernel_sources(tree / "temp"))
        os.utime(path, (0, 0))
        setup_py.write_kernel_sources(tree / "temp")
        assert path.stat().st_mtime == 0
        return re.search('kSourceDigest = "([0-9a-f]{64})"', path.read_text())[1]

    seen = [digest()]
    for name in setup_py.kernel_sources():
        path = tree / "csrc" / (name if "/" in name else f"rtc/{name}")
        path.write_bytes(path.read_bytes() + b"\n")
        seen.append(digest())
    path.rename(path.with_name("renamed"))
    seen.append(digest())
    assert len(set(seen)) == len(seen) > 20
    for lock in ("core/.#new.h", "rtc/.#new"):  # Emacs, while one edits
        (tree / "csrc" / lock).symlink_to("user@host.1:2")
    (tree / "csrc" / "rtc" / "new~").touch()
    assert digest() == seen[-1]
