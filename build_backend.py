"""PEP 517 backend: setuptools, compiling against the torch that is already installed.

pip and uv build in an isolated environment without torch. Listing torch in `requires` would put
the newest torch there, not the one the extension will be loaded into. So every hook first looks
for the environment that started the build and appends its packages to `sys.path`; where there is no
torch at all, torch becomes a build requirement, and the wheel then requires that same version
(setup.py sees to it). setup.py also uses the search for CUDA from here.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

LOCAL_CUDA = Path("/usr/local/cuda")
_PYTHON_IN_ENV = Path("Scripts/python.exe" if os.name == "nt" else "bin/python3")
_PROBE = """
import importlib.util, json, sys
spec = importlib.util.find_spec("torch")
print(json.dumps([sys.implementation.cache_tag, spec and spec.origin, sys.path]))
"""


# --- The torch of the environment that asked for the build ----------------------------------------


def _ancestors() -> Iterator[Path]:
    """The /proc folders of our ancestors, as far as they are this user's. Linux only."""
    pid = os.getppid()
    try:
        while pid:
            proc = Path("/proc", str(pid))
            if proc.stat().st_uid == os.geteuid():
                yield proc
            pid = int(proc.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return  # no /proc, or a process has ended: the other candidates remain


def _interpreter_of(proc: Path, argv0: str) -> str:
    """The Python that a process runs, by the name that tells its virtual environment.

    A process is free to claim any argv[0]. Only the file that it runs is taken, under the name in
    argv[0] if that leads to this very file, as the link in a virtual environment does.
    """
    exe = proc / "exe"
    if "/" in argv0:
        claimed = os.path.join(os.readlink(proc / "cwd"), argv0)
    else:
        claimed = shutil.which(argv0, path=os.pathsep.join(_search_path())) or ""
    if os.path.exists(claimed) and os.path.samefile(claimed, exe):
        return claimed
    return os.readlink(exe)


def _interpreters_of_uv(proc: Path, argv: str) -> Iterator[str]:
    """What uv installs into: its `--python`, else the activated environment, else the next .venv.

    Its own, not ours: it starts a build in another folder and environment.
    """
    cwd = Path(os.readlink(proc / "cwd"))
    told = re.search(r"\0(?:-p\0?|--python[\0=])([^\0]+)", argv)
    if told:
        path = cwd / told[1]
        yield str(path / _PYTHON_IN_ENV if path.is_dir() else path)
        return
    environ = proc.joinpath("environ").read_bytes().decode(errors="replace")
    activated = re.search(r"(?:^|\0)VIRTUAL_ENV=([^\0]+)", environ)
    folders = [activated[1]] if activated else [path / ".venv" for path in (cwd, *cwd.parents)]
    for folder in folders:
        if (cwd / folder).is_dir():
            yield str(cwd / folder / _PYTHON_IN_ENV)


def _parent_interpreters() -> Iterator[str]:
    """Pythons among our ancestors (`ENV/bin/python -m pip`), and the environments of uv."""
    for proc in _ancestors():
        try:
            name = Path(os.readlink(proc / "exe")).name
            argv = proc.joinpath("cmdline").read_bytes().decode(errors="replace")
            if name.startswith("python"):
                yield _interpreter_of(proc, argv.partition("\0")[0])
            elif name == "uv":
                yield from _interpreters_of_uv(proc, argv)
        except OSError:
            continue  # it has ended, or does not let us look


def _search_path() -> Iterator[str]:
    """PATH without the isolated environment, which pip puts in front."""
    build_env = Path(sys.prefix)
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        if directory and build_env not in Path(directory).parents:
            yield directory


def _candidate_interpreters() -> Iterator[str]:
    """Interpreters that may own the target environment, most certain first."""
    yield sys.executable  # pip's default isolation only patches sys.path: this is the user's Python
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield str(Path(os.environ[variable]) / _PYTHON_IN_ENV)
    yield from _parent_interpreters()
    yield str(Path(".venv") / _PYTHON_IN_ENV)
    yield from (str(Path(directory) / _PYTHON_IN_ENV.name) for directory in _search_path())


def _probe(interpreter: str) -> tuple[str, list[str]] | None:
    """(directory of torch, sys.path) as `interpreter` sees them; None if it is of no use to us."""
    interpreter = os.path.abspath(interpreter)  # not resolve(): a venv's python is a symbolic link
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")  # how pip hides the user's packages
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        result = subprocess.run(
            [interpreter, "-c", _PROBE],
            env=env,
            cwd=os.path.dirname(interpreter),  # -c puts the working directory on sys.path
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        cache_tag, origin, path = json.loads(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if not origin or cache_tag != sys.implementation.cache_tag:
        return None
    return os.path.dirname(origin), [p for p in path if p and os.path.isdir(p)]


def find_torch() -> Path | None:
    """Make torch importable and return its directory; None on a machine without torch."""
    spec = importlib.util.find_spec("torch")  # --no-build-isolation, or we asked for it below
    if spec and spec.origin:
        return Path(spec.origin).parent
    for interpreter in dict.fromkeys(_candidate_interpreters()):
        found = _probe(interpreter)
        if found:
            torch_dir, path = found
            # Append: the isolated environment's setuptools and ninja keep priority.
            sys.path += [p for p in path if p not in sys.path]
            importlib.invalidate_caches()
            print(f"fused_op: building against {torch_dir} (of {interpreter})", flush=True)
            return Path(torch_dir)
    return None


# --- CUDA: nvcc, or the headers alone -------------------------------------------------------------


def find_cuda_home() -> Path | None:
    """Directory whose bin/nvcc compiles the kernels; None when there is no nvcc."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc:
        # Ask instead of guessing from the path: nvcc may be a wrapper script far from its toolkit.
        command = [nvcc, "--dryrun", "-x", "cu", "-c", "-o", os.devnull, os.devnull]
        dryrun = subprocess.run(command, capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
        return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parents[1]
    wheels = [Path(p, "nvidia", f"cu{major}") for p in sys.path for major in (13, 14)]
    for home in (LOCAL_CUDA, *wheels):
        if home.joinpath("bin", "nvcc").exists():
            return home
    return None


def nvcc_version(cuda_home: Path | None) -> str:
    """CUDA version of the toolkit, e.g. "13.0"; empty if there is none or its nvcc does not run."""
    if cuda_home is None:
        return ""
    command = [str(cuda_home / "bin" / "nvcc"), "--version"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    release = re.search(r"release (\d+\.\d+)", result.stdout)
    return release[1] if release else ""


def headers_version(folder: Path) -> str:
    """CUDA version of the runtime's header in a folder, e.g. "13.0"; empty if it is not there."""
    header = folder / "cuda_runtime_api.h"
    if not header.exists():
        return ""
    version = re.search(r"define CUDART_VERSION +(\d+)", header.read_text(errors="replace"))
    return f"{int(version[1]) // 1000}.{int(version[1]) % 1000 // 10}" if version else ""


def find_cuda_headers(major: str) -> list[Path]:
    """Where g++ finds CUDA's headers of a major version; empty where some of them are missing.

    torch's wheels have the runtime's, without crt/, which a wheel of its own or of nvcc brings.
    Triton, which comes with torch, has them all; they may be of another version than torch's.
    """
    toolkits = [home for home in (find_cuda_home(), LOCAL_CUDA) if home]
    wheels = [f"nvidia/cu{major}", "triton/backends/nvidia"]
    if major == "12":
        wheels[:1] = ["nvidia/cuda_runtime", "nvidia/cuda_nvcc"]
    homes = toolkits + [Path(p, wheel) for wheel in wheels for p in sys.path if p]
    folders = [home / "include" for home in homes]
    fitting = [f for f in folders if headers_version(f).split(".")[0] in ("", major)]
    runtime = next((f for f in fitting if headers_version(f)), None)
    crt = next((f for f in fitting if f.joinpath("crt", "host_defines.h").exists()), None)
    return list(dict.fromkeys([runtime, crt])) if runtime and crt else []


def _header_wheels(torch_dir: Path | None) -> list[str]:
    """The headers that torch's own wheels lack, where torch has CUDA and the machine has neither.

    Without a torch_dir, torch is about to be installed beside them. Its wheels for CUDA 13 pin
    cuda-toolkit, and hence the headers, to the version that they were built with.
    """
    if os.environ.get("USE_CUDA") == "0":
        return []
    if torch_dir is None:
        return [] if find_cuda_home() else ["cuda-toolkit[crt]"]
    version = torch_dir.joinpath("version.py").read_text()
    cuda = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", version, re.MULTILINE)
    if not cuda or int(cuda[1]) < 12:
        return []
    if nvcc_version(find_cuda_home()).split(".")[0] == cuda[1] or find_cuda_headers(cuda[1]):
        return []
    # CUDA 12 has them in the wheel of nvcc alone, 40 MB, which does not have nvcc itself.
    package = "nvidia-cuda-nvcc-cu12" if cuda[1] == "12" else "cuda-toolkit[crt]"
    return [f"{package}=={cuda[1]}.{cuda[2]}.*"]


# --- PEP 517 and PEP 660 hooks --------------------------------------------------------------------


def _requires(config_settings: Any = None) -> list[str]:
    """Build requirements beyond pyproject.toml. setup.py is not run for them: it would add none."""
    torch_dir = find_torch()
    # torch first: the version of what follows depends on it.
    return ([] if torch_dir else ["torch"]) + _header_wheels(torch_dir)


def _with_torch(hook: Callable[..., str]) -> Callable[..., str]:
    def wrapper(*args: Any, **kwargs: Any) -> str:
        if find_torch() is None:  # only without isolation: else _requires() has asked for it
            raise SystemExit("fused_op: there is no torch to build for. Run: pip install torch")
        return hook(*args, **kwargs)

    return wrapper


get_requires_for_build_sdist = _requires
get_requires_for_build_wheel = _requires
get_requires_for_build_editable = _requires
prepare_metadata_for_build_wheel = _with_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_torch(build_meta.prepare_metadata_for_build_editable)
build_sdist = _with_torch(build_meta.build_sdist)
build_wheel = _with_torch(build_meta.build_wheel)
build_editable = _with_torch(build_meta.build_editable)
