"""What tests of the build share: a new process, and an nvcc and headers of CUDA that are none."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    environment = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


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
