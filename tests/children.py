"""Code that reads an environment variable once in its process, run for many values of it.

`import torch` takes seconds: one new process imports it, and forks a child for each environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PARENT = """
import json, os, sys, tempfile, traceback
import torch
import fused_op_cuda  # which reads no variable before its first call

code, environments = json.load(sys.stdin)
for environment in environments:
    outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(outputs, 1):
            os.dup2(file.fileno(), number)
        os.environ.update(environment)
        status = 1
        try:
            exec(compile(code, "<child>", "exec"), {"__name__": "__main__"})
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, *(file.seek(0) or file.read() for file in outputs)]))
"""


class Done(NamedTuple):
    """What a child has come to."""

    returncode: int
    stdout: str
    stderr: str


def run_children(
    code: str, environments: Sequence[dict[str, str]], path: Path = ROOT
) -> list[Done]:
    """Run the code for each environment; the module that is found in `path` comes first."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT],
        input=json.dumps((code, environments)),
        cwd=path,  # -c puts it first on sys.path
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [Done(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(environments)
    return found
