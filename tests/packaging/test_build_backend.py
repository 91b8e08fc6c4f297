"""build_backend.py: which torch, nvcc and headers a build takes, and which it has installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.packaging.builds import ROOT, make_headers, make_nvcc, run_python


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
