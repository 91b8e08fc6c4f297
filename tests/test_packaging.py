"""The build: which torch and which CUDA it takes, and that a wrong one does not pass silently."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_op
import fused_op_cuda
from fused_op._source_hash import source_hash
from tests.toy_kernel import why_not as why_not_nvrtc

ROOT = Path(__file__).parents[1]
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


def run_python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


# --- The installed package ------------------------------------------------------------------------


def test_build_info_is_about_this_build():
    info = fused_op.build_info()
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{info["version"]}"\n' in pyproject
    assert info["torch"].startswith(f"{TORCH_MINOR}.")
    assert bool(info["cuda"]) == (not info["no_cuda_reason"])
    assert info["cuda"] or not info["cuda_archs"]  # none: a build without nvcc


def test_wheel_requires_the_torch_it_was_built_for():
    # Beside the module and not anywhere: the source tree may hold the metadata of another build.
    installed = [str(Path(fused_op_cuda.__file__).parent)]
    found = list(importlib.metadata.distributions(name="fused_op", path=installed))
    if Path(installed[0]) == ROOT or not found:
        pytest.skip("fused_op was not installed as a wheel")
    assert f"torch=={TORCH_MINOR}.*" in found[0].requires
    public, _, local = found[0].version.partition("+")
    assert public == fused_op.__version__
    has_cuda = bool(fused_op.build_info()["cuda"])
    assert re.fullmatch(f"({'cu[0-9]+' if has_cuda else 'cpu'}torch{TORCH_MINOR})?", local)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("torch.__version__ = '1.2.3'", "was built for torch .*, but torch 1.2.3 is installed"),
        ("sys.modules['fused_op_cuda'] = None", "is not built"),
    ],
)
def test_import_fails_for_another_torch_or_no_module(before, message):
    result = run_python(f"import sys, torch; {before}; import fused_op")
    assert result.returncode == 1
    assert re.search(f"ImportError: fused_op {message}", result.stderr)


@pytest.fixture
def tree(tmp_path):
    """A source tree, without a module."""
    for folder in ("fused_op", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("in_tree", "command"),
    [(True, "python setup.py build_ext --inplace"), (False, "pip install --force-reinstall")],
)
def test_import_fails_for_a_module_of_other_sources(tree, in_tree, command):
    """Catches a change in csrc/ that is tested with the kernels of before it."""
    module = Path(fused_op_cuda.__file__)
    (tree / "elsewhere").mkdir()
    (tree / "" if in_tree else tree / "elsewhere").joinpath(module.name).symlink_to(module)
    path = os.pathsep.join(map(str, (tree, tree / "elsewhere")))

    def import_it() -> str:
        code = "import sys; sys.path.remove(''); import fused_op"
        return run_python(code, PYTHONPATH=path).stderr

    assert import_it() == ""
    with tree.joinpath("csrc", "norm.cpp").open("a") as file:
        file.write("// An edit.\n")
    assert re.search(
        rf"ImportError: .*{module.name} was not built from the .* {command}", import_it()
    )
    shutil.rmtree(tree / "csrc")  # as installed
    assert import_it() == ""


def test_source_hash_sees_every_change(tree):
    """Catches an input of the build that the comparison does not cover, and noise that it does."""
    hashes = [source_hash(tree)]
    assert hashes == [source_hash(ROOT)]

    def changes() -> bool:
        hashes.append(source_hash(tree))
        return hashes[-1] not in hashes[:-1]

    sources = [path for path in tree.joinpath("csrc").rglob("*") if path.is_file()]
    for path in [tree / "setup.py", *sources]:
        path.write_bytes(path.read_bytes() + b"\n")
        assert changes(), path
    sources[0].rename(sources[0].with_stem("renamed"))
    assert changes()
    tree.joinpath("csrc", "core", "new.h").touch()
    assert changes()
    tree.joinpath("csrc", "core", "new.h~").touch()  # of an editor
    tree.joinpath("csrc", "core", "new.o").touch()
    tree.joinpath("csrc", "core", ".#new.h").symlink_to("user@host.1:2")  # Emacs, while one edits
    assert not changes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_brings_no_second_openmp_runtime():
    """Two runtimes keep two pools of threads, which compete for the cores."""
    result = run_python(
        "import torch\n"
        "def runtimes(): return {line.split()[-1] for line in open('/proc/self/maps')"
        " if 'libgomp' in line or 'libomp' in line or 'libiomp' in line}\n"
        "before = runtimes()\n"
        "import fused_op\n"
        "fused_op.layer_norm(torch.ones(1000, 100), (100,))\n"
        "assert runtimes() == before, (before, runtimes())"
    )
    assert result.returncode == 0, result.stderr


# --- build_backend.py -----------------------------------------------------------------------------


def test_backend_finds_torch_from_an_isolated_environment(tmp_path):
    """As pip isolates: without site-packages (-S), but with setuptools from a folder of its own."""
    setuptools = pytest.importorskip("setuptools")
    for name in ("setuptools", "_distutils_hack", "pkg_resources"):  # the last: up to 71
        if (folder := Path(setuptools.__file__).parents[1] / name).exists():
            (tmp_path / name).symlink_to(folder)
    code = (
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "import build_backend\n"
        "print(build_backend._requires())\n"
        "print(build_backend.find_torch())\n"
    )
    result = run_python(code, "-S", PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert result.returncode == 0, result.stderr
    announced, requires, torch_dir = result.stdout.splitlines()
    assert announced.startswith("fused_op: building against ")
    assert "torch" not in requires
    assert Path(torch_dir).samefile(Path(torch.__file__).parent)


PARENTS = """
import os, build_backend
os.geteuid = lambda user=os.geteuid(): user + int(os.environ["OTHER_USER"])
for path in build_backend._parent_interpreters():
    print(path)
"""


def parent_interpreters(
    executable: Path, argv0: str, *options: str, cwd: Path, other_user: bool = False
) -> list[str]:
    """What a build finds whose parent is `executable`, a copy of the shell, by the name `argv0`."""
    pytest.importorskip("setuptools")
    if not os.path.exists("/proc/self/exe"):
        pytest.skip("reads /proc")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "BUILD": PARENTS, "OTHER_USER": f"{other_user:d}"}
    result = subprocess.run(
        [argv0, "-c", f'{sys.executable} -c "$BUILD"; true', *options],
        executable=executable,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture
def shell(tmp_path):
    """A program that runs a command, for the places of Python and uv."""
    return Path(shutil.copy(shutil.which("sh"), tmp_path / "shell"))


def test_backend_trusts_no_process_name(tmp_path, shell):
    """Catches a build that executes what another process pretends to be."""
    claimed = tmp_path / "claimed" / "python3"
    claimed.parent.mkdir()
    shutil.copy(shell, claimed)
    assert str(claimed) not in parent_interpreters(shell, str(claimed), cwd=tmp_path)
    python = shell.rename(tmp_path / "python3")  # another name of it is no better
    assert parent_interpreters(python, str(claimed), cwd=tmp_path)[0] == str(python)
    assert parent_interpreters(python, "no/such/python3", cwd=tmp_path)[0] == str(python)


def test_backend_takes_interpreters_of_its_user_alone(tmp_path, shell):
    python = shell.rename(tmp_path / "python3")
    assert str(python) in parent_interpreters(python, str(python), cwd=tmp_path)
    assert parent_interpreters(python, str(python), cwd=tmp_path, other_user=True) == []
    uv = shutil.copy(python, tmp_path / "uv")
    options = ("pip", "install", "--python", str(tmp_path))
    assert parent_interpreters(uv, "uv", *options, cwd=tmp_path, other_user=True) == []


@pytest.mark.parametrize("argv0", ["{}/env/bin/python", "env/bin/python", "python"])
def test_backend_finds_the_virtual_environment_of_a_parent(tmp_path, shell, monkeypatch, argv0):
    """Catches the torch of the base installation where the environment has another."""
    link = tmp_path / "env" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(shell.rename(tmp_path / "python3.11"))
    monkeypatch.setenv("PATH", str(link.parent), prepend=os.pathsep)
    assert parent_interpreters(link, argv0.format(tmp_path), cwd=tmp_path)[0] == str(link)


@pytest.mark.parametrize("option", [("--python", "env"), ("--python=env",), ("-p", "env")])
def test_backend_finds_the_environment_that_uv_is_told(tmp_path, shell, option):
    """Relative to the folder that uv was started in, which is not that of the build."""
    (tmp_path / "env").mkdir()
    uv = shell.rename(tmp_path / "uv")
    found = parent_interpreters(uv, "uv", "pip", "install", *option, cwd=tmp_path)
    assert found[0] == str(tmp_path / "env" / "bin" / "python3")


@pytest.mark.parametrize("activated", [None, "active"])
def test_backend_finds_the_environment_of_uv(tmp_path, shell, monkeypatch, activated):
    """Catches the torch of a notebook or task runner, a Python too, that has started uv."""
    for env in (".venv", "active"):
        (tmp_path / env).mkdir()
    folder = tmp_path / "inner"
    folder.mkdir()
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if activated:
        monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / activated))
    found = parent_interpreters(shell.rename(tmp_path / "uv"), "uv", "pip", cwd=folder)
    assert found[0] == str(tmp_path / (activated or ".venv") / "bin" / "python3")


@pytest.mark.parametrize("use_cuda", [None, "auto", "0", "1"])
@pytest.mark.parametrize("nvcc", ["", "12.8", "13.0", "broken"])
@pytest.mark.parametrize("has_headers", [False, True])
@pytest.mark.parametrize("cuda", ["no torch", "None", "'11.8'", "'12.8'", "'13.0'", "'13.2'"])
def test_backend_requires_torch_and_headers(
    tmp_path, monkeypatch, cuda, has_headers, nvcc, use_cuda
):
    """Catches a build for the CPU, or an error, where torch comes with CUDA and headers lack."""
    pytest.importorskip("setuptools")
    import build_backend

    tmp_path.joinpath("version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    if nvcc:
        make_nvcc(tmp_path, nvcc)
    has_torch = cuda != "no torch"
    monkeypatch.setattr(build_backend, "find_torch", lambda: tmp_path if has_torch else None)
    monkeypatch.setattr(build_backend, "find_cuda_home", lambda: tmp_path if nvcc else None)
    monkeypatch.setattr(
        build_backend, "find_cuda_headers", lambda major: [tmp_path] if has_headers else []
    )
    monkeypatch.delenv("USE_CUDA", raising=False)
    if use_cuda:
        monkeypatch.setenv("USE_CUDA", use_cuda)

    headers = {
        "'12.8'": ["nvidia-cuda-nvcc-cu12==12.8.*"],
        "'13.0'": ["cuda-toolkit[crt]==13.0.*"],
        "'13.2'": ["cuda-toolkit[crt]==13.2.*"],
    }.get(cuda, [])
    if not has_torch:
        headers = [] if nvcc else ["cuda-toolkit[crt]"]  # of the version that this torch requires
    elif has_headers or nvcc.split(".")[0] == cuda.strip("'").split(".")[0]:
        headers = []
    if use_cuda == "0":
        headers = []
    expected = headers if has_torch else ["torch", *headers]
    for kind in ("wheel", "editable", "sdist"):
        assert getattr(build_backend, f"get_requires_for_build_{kind}")() == expected


def make_headers(folder: Path, version: int = 0, crt: bool = False) -> Path:
    """A folder of CUDA's headers: the runtime's, those in crt/, or both."""
    folder.mkdir(parents=True, exist_ok=True)
    if version:
        text = f"#define CUDART_VERSION  {version}\n"
        folder.joinpath("cuda_runtime_api.h").write_text(text)
    if crt:
        folder.joinpath("crt").mkdir()
        folder.joinpath("crt", "host_defines.h").touch()
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Where wheels are installed, and nothing else of CUDA is."""
    pytest.importorskip("setuptools")
    import build_backend

    folder = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path / "overlay")])
    monkeypatch.setattr(build_backend, "find_cuda_home", lambda: None)
    monkeypatch.setattr(build_backend, "LOCAL_CUDA", tmp_path / "local" / "cuda")
    return folder


def test_backend_finds_the_headers_of_wheels(site, tmp_path):
    """As an isolated build has them: one part beside torch, the other in a folder of pip's."""
    import build_backend

    assert build_backend.find_cuda_headers("13") == []
    runtime = make_headers(site / "nvidia" / "cu13" / "include", version=13000)
    assert build_backend.find_cuda_headers("13") == []
    triton = make_headers(site / "triton/backends/nvidia/include", version=13010, crt=True)
    assert build_backend.find_cuda_headers("13") == [runtime, triton]
    crt = make_headers(tmp_path / "overlay" / "nvidia" / "cu13" / "include", crt=True)
    assert build_backend.find_cuda_headers("13") == [runtime, crt]
    assert build_backend.headers_version(runtime) == "13.0"
    assert build_backend.headers_version(triton) == "13.1"
    assert build_backend.headers_version(crt) == ""
    assert build_backend.find_cuda_headers("12") == []


def test_backend_finds_the_headers_of_cuda_12(site):
    import build_backend

    runtime = make_headers(site / "nvidia" / "cuda_runtime" / "include", version=12080)
    crt = make_headers(site / "nvidia" / "cuda_nvcc" / "include", crt=True)
    assert build_backend.find_cuda_headers("12") == [runtime, crt]
    assert build_backend.headers_version(runtime) == "12.8"
    assert build_backend.find_cuda_headers("13") == []


def test_backend_finds_the_headers_of_a_toolkit(site, tmp_path, monkeypatch):
    """Also where its nvcc is missing; and never those of another major version."""
    import build_backend

    local = make_headers(tmp_path / "local" / "cuda" / "include", version=12060, crt=True)
    assert build_backend.find_cuda_headers("12") == [local]
    runtime = make_headers(site / "nvidia" / "cu13" / "include", version=13000)
    assert build_backend.find_cuda_headers("13") == []  # not the crt/ of CUDA 12
    named = make_headers(tmp_path / "named" / "include", version=13020, crt=True)
    monkeypatch.setattr(build_backend, "find_cuda_home", lambda: named.parent)
    assert build_backend.find_cuda_headers("13") == [named] != [runtime]


def test_backend_says_that_torch_is_missing(monkeypatch):
    """Without isolation nobody installs what the build requires."""
    pytest.importorskip("setuptools")
    import build_backend

    monkeypatch.setattr(build_backend, "find_torch", lambda: None)
    for hook in (
        "build_wheel",
        "build_editable",
        "build_sdist",
        "prepare_metadata_for_build_wheel",
    ):
        with pytest.raises(SystemExit, match="there is no torch to build for"):
            getattr(build_backend, hook)("unused")


# --- setup.py -------------------------------------------------------------------------------------


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module, for a CUDA 13.0 torch without GPU, nvcc and headers."""
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("USE_CUDA", "TORCH_CUDA_ARCH_LIST", "GPU_TARGETS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(module, "find_cuda_home", lambda: None)
    monkeypatch.setattr(module, "find_cuda_headers", lambda major: [])
    return module


def make_nvcc(home: Path, release: str) -> Path:
    """An nvcc that knows its release and three architectures; returns its CUDA_HOME."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        f"#!/bin/sh\n[ {release} != broken ] || exit 1\n"
        f'[ $1 = --version ] && echo "release {release}, V{release}.1" ||'
        ' printf "compute_75\\ncompute_90\\ncompute_100\\n"\n'
    )
    nvcc.chmod(0o755)
    return home


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


@pytest.mark.skipif(bool(why_no_build_without_nvcc()), reason=why_no_build_without_nvcc())
def test_build_without_nvcc(tree, tmp_path):
    """A real one, of a minute: what it has no kernel of, it compiles."""
    for name in ("build_backend.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    no_nvcc = tree / "no-nvcc"
    no_nvcc.mkdir()
    env = {**os.environ, "USE_CUDA": "1", "CUDA_HOME": str(no_nvcc), "PYTHONPATH": str(tree)}
    env["FUSED_OP_CACHE_DIR"] = str(tree / "cache")

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
