"""Code that reads an environment variable once in its process, run for many values of it.

`import torch` takes seconds: one process has imported it, and forks a child for each call.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PARENT = """
import json, os, signal, sys, tempfile, traceback
import torch

for line in sys.stdin:
    code, environment, path = json.loads(line)
    outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(outputs, 1):
            os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(path)  # which is first on sys.path
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
    done = [status, *(file.seek(0) or file.read() for file in outputs)]
    print(json.dumps(done), flush=True)
"""


class Done(NamedTuple):
    """What a child has come to."""

    returncode: int
    stdout: str
    stderr: str


@cache
def parent() -> subprocess.Popen[str]:
    """Ends with this process, as its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_children(
    code: str, environments: Sequence[dict[str, str]], path: Path = ROOT
) -> list[Done]:
    """Run the code for each environment; the module that is found in `path` comes first."""
    process = parent()
    found = []
    for environment in environments:
        print(json.dumps([code, {**os.environ, **environment}, str(path)]), file=process.stdin)
        process.stdin.flush()
        found.append(Done(*json.loads(process.stdout.readline())))
    return found
