"""``python -m fused_op run``: a program as it is, with the norms of this package."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from typing import Any

from ._override import override_torch


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
    """Run the program under :func:`override_torch`; its errors and its exit are its own."""
    sys.argv = [options.program, *options.arguments]
    with override_torch(compiled=not options.keep_compiled) as override:
        try:
            if options.is_module:
                runpy.run_module(options.program, run_name="__main__", alter_sys=True)
            else:  # as python does for a script, which runpy leaves to its caller
                sys.path[0] = os.path.dirname(os.path.abspath(options.program))
                runpy.run_path(options.program, run_name="__main__")
        finally:
            _await_threads()
            if not options.quiet:
                print(override.report(), file=sys.stderr)
    return 0


def _await_threads() -> None:
    """Wait for the threads that Python would wait for at its exit: they are part of the program."""
    this = threading.current_thread()
    while others := [t for t in threading.enumerate() if not t.daemon and t is not this]:
        others[0].join()
