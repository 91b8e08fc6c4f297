"""What the examples print: `python -m benchmarks.examples --json FILE`.

Each is copied, built and run in a folder of its own, as tests/packaging/test_examples.py does. The
file goes to benchmarks/results/examples; `python -m benchmarks.tables` shows it in
examples/README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_backend import find_cuda_home

from .report import ROOT, environment, write_json
from .run import default_device

SCRIPTS = {
    "scale_bias_relu": "benchmark.py",
    "reduce_sum": "benchmark.py",
    "square": "load_jit.py",
    "convrnn": "benchmark.py",
}


def built(name: str, folder: Path) -> Path:
    """A copy of the example in the folder, built."""
    shutil.copytree(
        ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("build", "*.so")
    )
    if (folder / "setup.py").exists():
        run(folder, "setup.py", "-q", "build_ext", "--inplace")
    else:
        run(folder, "-c", "import load_jit; load_jit.square_ext()")
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What a Python command prints in the folder."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env.setdefault("CUDA_HOME", str(find_cuda_home() or ""))
    env["TORCH_EXTENSIONS_DIR"] = str(folder / "build")  # of square's JIT build
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{folder.name}: {arguments} failed:\n{done.stderr[-4000:]}")
    lines = (line for line in done.stdout.splitlines() if not line.startswith("ninja:"))
    return "\n".join(lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", action="append", choices=SCRIPTS)
    parser.add_argument("arguments", nargs="*", help="for the scripts, after --")
    options = parser.parse_args()
    names = options.only or list(SCRIPTS)
    outputs = {}
    with tempfile.TemporaryDirectory() as directory:
        with ThreadPoolExecutor() as pool:  # builds run side by side, timed examples alone
            folders = list(pool.map(built, names, (Path(directory) / name for name in names)))
        for name, folder in zip(names, folders, strict=True):
            outputs[name] = run(folder, SCRIPTS[name], *options.arguments)
            print(f"{name}\n{outputs[name]}\n", flush=True)
    write_json(
        options.json,
        {"environment": environment(default_device(), ()), "printed": outputs},
    )


if __name__ == "__main__":
    main()
