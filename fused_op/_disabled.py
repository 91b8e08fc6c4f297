"""The switch that turns the kernels off. The routes look at it.

It is one for the process, like ``torch.backends.cudnn.flags``, and not one for each thread: on
CUDA, autograd runs backward in threads of its own, where activation checkpointing calls forward
again. And it is a plain global because ``torch.compile`` guards those: it has no guard on
thread-locals, and cannot trace a ``ContextVar``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.compiler import is_dynamo_compiling

import fused_op_cuda

# An entry for each block that is open: kernels run while there is none. A list, because threads may
# enter and leave in any order, and append and pop cannot be interrupted.
open_blocks: list[None] = []


@contextmanager
def disabled() -> Iterator[None]:
    """Run no kernel of this package inside, to answer "is it the kernel?".

    Use it as ``with disabled():``, or as ``@disabled()`` over a function. Every function and module
    computes its formula of :mod:`fused_op.reference` with PyTorch operations, and refuses the same
    arguments as ever. Blocks may be nested. They hold for the whole process: the kernels come back
    when the last block ends, in whichever thread.

    Backward runs no kernel inside the block either, even of a graph that was recorded before it. A
    graph that was recorded inside never runs one. Under activation checkpointing, forward and
    backward should both be inside or both be outside.

    ``torch.compile`` respects the block, both around a compiled function, which is compiled once
    more for it, and in one. Compiled code does not notice dtypes that only the kernels refuse. A
    compiled backward uses kernels if its forward did. Captured code keeps its kernels: CUDA graphs,
    ``torch.export``, ``make_fx``.
    """
    open_blocks.append(None)
    is_eager = not is_dynamo_compiling()  # compiled code records no nodes
    if is_eager:
        fused_op_cuda.open_disabled_block()
    try:
        yield
    finally:
        open_blocks.pop()
        if is_eager:
            fused_op_cuda.close_disabled_block()
