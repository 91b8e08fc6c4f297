"""One switch for all norms of a process: ``override_torch``.

The kernels are registered in ``csrc/torch_override.cpp``, below PyTorch's autograd.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType
from typing import NamedTuple

import fused_op_cuda

from . import _compiled_norms
from ._inductor import Slot, install

_lock = threading.Lock()
_open: list[TorchOverride] = []
_slots: list[Slot] = []  # at most one


class OverrideReport(NamedTuple):
    """What a :class:`TorchOverride` has seen so far."""

    ops: tuple[str, ...]
    """The overridden ops of PyTorch; ``_fused_rms_norm`` from torch 2.9 on."""
    ours: dict[str, int]
    """Calls that a kernel of this package took, by op."""
    torchs: dict[str, int]
    """Calls that PyTorch's own kernel took, by op and reason."""
    compiled: dict[str, int]
    """Norms in graphs that Inductor compiled: ``replaced`` by ours, or ``kept``. A graph that comes
    out of Inductor's cache counts nothing; its norms are those it was compiled with."""

    def __str__(self) -> str:
        """A line for each op or reason that has a count."""
        lines = [f"fused_op took {n} calls of aten::{op}" for op, n in self.ours.items() if n]
        lines += [f"PyTorch kept {n} calls of aten::{why}" for why, n in self.torchs.items()]
        lines += [f"compiled norms {what}: {n}" for what, n in self.compiled.items() if n]
        return "\n".join(lines or ["fused_op.override_torch: no norm was called"])


class TorchOverride:
    """A handle of :func:`override_torch`, and a context manager."""

    def __init__(self, *, compiled: bool = True) -> None:
        """See :func:`override_torch`."""
        if type(compiled) is not bool:
            raise TypeError(
                f"override_torch: argument 'compiled' must be bool, not {type(compiled).__name__}"
            )
        self._compiled = compiled
        with _lock:
            if not _open:
                _ops[:] = fused_op_cuda.override_torch()
            _open.append(self)
            try:
                _update_slot()
            except BaseException:
                self._close()
                raise
        self._start = _counts()
        self._end: tuple[Counter[str], ...] | None = None

    def undo(self) -> None:
        """Restore PyTorch's kernels, unless another override is open. Twice has no effect."""
        with _lock:
            if self not in _open:
                return
            self._end = _counts()
            self._close()
            _update_slot()

    def _close(self) -> None:
        _open.remove(self)
        if not _open:
            fused_op_cuda.restore_torch()

    def report(self) -> OverrideReport:
        """Count the calls of the process, from the start of this override to now or its end."""
        counts = zip(self._end or _counts(), self._start, strict=True)
        ours, torchs, compiled = (dict(end - start) for end, start in counts)
        return OverrideReport(tuple(_ops), ours, torchs, compiled)

    def __enter__(self) -> TorchOverride:
        """Return the handle itself, which is on from its making."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo."""
        self.undo()


_ops: list[str] = []


def _update_slot() -> None:
    """Have the pass in Inductor while an override that wants it is open."""
    wanted = any(override._compiled for override in _open)
    if wanted and not _slots:
        _slots.append(install("pre_grad_custom_pass", _compiled_norms.replace_norms))
    elif _slots and not wanted:
        _slots.pop().remove()


def _counts() -> tuple[Counter[str], ...]:
    ours, torchs = fused_op_cuda.override_counts()
    return Counter(ours), Counter(torchs), Counter(_compiled_norms.counts)


def override_torch(*, compiled: bool = True) -> TorchOverride:
    """Run the kernels of this package for every layer norm and RMS norm of PyTorch in this process.

    This covers ``F.layer_norm``, ``F.rms_norm``, ``nn.LayerNorm``, ``nn.RMSNorm`` and everything
    that calls them, also from C++, such as the fast path of ``nn.TransformerEncoder``. The kernels
    replace those behind ``aten::native_layer_norm``, ``aten::_fused_rms_norm`` (from torch 2.9 on)
    and their backward, on the CPU and, in a build for it, on CUDA.

    Autograd, autocast, ``torch.func`` and graphs stay PyTorch's, and so do second and higher
    derivatives. A call that no kernel here takes runs PyTorch's kernel. One warning for each reason
    says so, and the report counts the calls. Inside :func:`fused_op.disabled`, PyTorch's kernels
    run.

    PyTorch does not use these ops for an RMS norm whose input is channels-last or differs from its
    weight in dtype. :func:`fused_op.convert` replaces such norms.

    ``torch.compile`` with Inductor decomposes PyTorch's norms. With ``compiled``, they are replaced
    in its graphs. Graphs that already exist do not change, neither now nor after ``undo``: switch
    before the first call, or call ``torch.compiler.reset()``.

    Args:
        compiled: also replace the norms in graphs that Inductor compiles from now on.

    Returns:
        A handle, which is also a context manager. ``undo()``, or the end of the ``with`` block,
        restores PyTorch's kernels and their bits, unless another handle is open. ``report()``
        counts the calls. Do not switch on or off while other threads run ops.

    Raises:
        TypeError: ``compiled`` is not a bool.
    """
    return TorchOverride(compiled=compiled)
