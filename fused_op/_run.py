"""``python -m fused_op run``: a program as it is, with the norms of this package."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
from typing import Any

from ._override import TorchOverride, override_torch


def add_run_command(commands: Any) -> None:
    """Add ``run`` to the commands of ``python -m fused_op``."""
    about = "run a program in which PyTorch's layer and RMS norms are those of fused_op"
    run = commands.add_parser("run", help=about, description=about.capitalize() + ".")
    run.add_argument("-m", dest="is_module", action="store_true", help="it is a module, not a file")
    run.add_argument(
        "--keep-compiled",
        action="store_true",
        help="leave the norms in code that Inductor compiles to Inductor",
    )
    run.add_argument("--quiet", action="store_true", help="do not report what ran, at the end")
    run.add_argument("program", help="the file, or the module with -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the program")


def run_program(options: argparse.Namespace) -> int:
    """Run the program under :func:`override_torch`; its errors and its exit are its own.

    The override ends with the process: the program's threads and ``atexit`` functions are a part of
    it, and only Python's own exit ends the idle threads of a ``concurrent.futures`` pool.
    """
    override = override_torch(compiled=not options.keep_compiled)
    atexit.register(_end, override, options.quiet)
    sys.argv = [options.program, *options.arguments]
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        return 0
    if not getattr(sys.flags, "safe_path", False):  # of Python 3.11 on
        # As python does for a script, links followed, which runpy leaves to its caller.
        sys.path[0] = os.path.dirname(os.path.realpath(options.program))
    runpy.run_path(options.program, run_name="__main__")
    return 0


def _end(override: TorchOverride, is_quiet: bool) -> None:
    override.undo()
    if not is_quiet:
        print(override.report(), file=sys.stderr)
