"""What the examples print of themselves: `python -m benchmarks.examples --json FILE`.

Each is copied, built and run in a folder of its own, as tests/test_examples.py does. The file goes
to benchmarks/results/examples; `python -m benchmarks.docs_table` shows it in examples/README.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
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


def printed(name: str, script: str, arguments: list[str]) -> str:
    """The output of the script in a built copy of the example."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env.setdefault("CUDA_HOME", str(find_cuda_home() or ""))
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / name
        shutil.copytree(
            ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("build", "*.so")
        )
        env["TORCH_EXTENSIONS_DIR"] = directory
        build = ["setup.py", "-q", "build_ext", "--inplace"]
        if not (folder / "setup.py").exists():
            build = ["-c", "import load_jit; load_jit.square_ext()"]
        for command in (build, [script, *arguments]):
            done = subprocess.run(
                [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(f"{name}: {command} failed:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", action="append", choices=SCRIPTS)
    parser.add_argument("arguments", nargs="*", help="for the scripts, after --")
    options = parser.parse_args()
    outputs = {}
    for name in options.only or SCRIPTS:
        outputs[name] = printed(name, SCRIPTS[name], options.arguments)
        print(f"{name}\n{outputs[name]}\n", flush=True)
    command = shlex.join(sys.orig_argv)
    write_json(
        options.json,
        {"environment": environment(default_device(), (), command), "printed": outputs},
    )


if __name__ == "__main__":
    main()
