"""One call of an op: random arguments, its outputs and gradients, and the check against truth.

Every run draws fresh numbers; one that fails prints the seed, and FUSED_OP_SEED=<seed> repeats it.
"""

from __future__ import annotations

import math
import os
import random
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops import F32, F64, TOLERANCE, Op, Pair, condition, steps

SEED = int(os.environ.get("FUSED_OP_SEED", random.SystemRandom().randrange(2**31)))
CHUNK = 2**24  # elements whose fp64 graph is held at once: the largest tensors' fits nowhere


def generator(device: str | torch.device, *what: object) -> torch.Generator:
    """Depends on the seed and on `what` alone, so that one test repeats without the others."""
    return torch.Generator(device).manual_seed(SEED ^ zlib.crc32(repr(what).encode()))


def poison(device: torch.device, *like: Tensor, stats: int) -> None:
    """Leave NaN in the memory that the op gets for its results and statistics next.

    Its outputs and gradients have the sizes of its inputs, so the allocator hands it these blocks.
    """
    dirty = [torch.full(t.shape, math.nan, dtype=t.dtype, device=device) for t in like]
    dirty += [torch.full((2 * stats,), math.nan, dtype=d, device=device) for d in (None, F64)]
    del dirty


class uninitialized_is_nan:
    """torch.empty gives NaN inside: a result or a partial sum that nobody wrote shows.

    That is a part of torch's deterministic mode (torch.utils.deterministic).
    """

    def __enter__(self) -> None:
        self.before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")

    def __exit__(self, *exc: object) -> None:
        torch.set_deterministic_debug_mode(self.before)


def worst(actual: Tensor, truth: Tensor, bound: Tensor | float) -> Tensor:
    """The largest error as a multiple of its bound, left on the device; NaN if a result is."""
    if actual.numel() == 0:
        return torch.zeros((), dtype=F64, device=actual.device)
    return ((actual.to(F64) - truth).abs() / (bound + 1e-300)).max()


@dataclass(frozen=True)
class Case:
    op: Op
    inputs: dict[str, Tensor | None]  # in call order
    grads: tuple[Tensor, ...]  # what arrives at each output in backward
    eps: float = 1e-5
    normalized_shape: tuple[int, ...] | None = None
    note: str = ""

    def __str__(self) -> str:
        def say(t: Tensor | None) -> str:
            return "None" if t is None else f"{t.dtype}{list(t.shape)}".removeprefix("torch.")

        args = ", ".join(f"{name} {say(t)}" for name, t in self.inputs.items())
        return f"{self.op} on {self.device} {self.note}: {args} (FUSED_OP_SEED={SEED})"

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name, t in self.inputs.items() if t is not None)

    @property
    def device(self) -> torch.device:
        return self.inputs["input"].device

    @property
    def options(self) -> dict:
        shape = self.normalized_shape
        return {"eps": self.eps} | ({} if shape is None else {"normalized_shape": shape})

    @property
    def cols(self) -> int:
        shape = self.normalized_shape or self.inputs["input"].shape[-1:]
        return math.prod(shape)

    @property
    def rows(self) -> int:
        return math.prod(self.inputs["input"].shape) // max(self.cols, 1)

    def with_inputs(self, **changes: Tensor) -> Case:
        return replace(self, inputs=self.inputs | changes)

    def leaves(self, wanted: tuple[str, ...]) -> dict[str, Tensor | None]:
        """The inputs as fresh leaves over the same memory, strides and all."""
        return {
            name: t if t is None else t.detach().requires_grad_(name in wanted)
            for name, t in self.inputs.items()
        }

    def run(self, wanted: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """The fused op's outputs, and its gradients of the wanted inputs (all, unless said)."""
        wanted = self.present if wanted is None else wanted
        leaves = self.leaves(wanted)
        memory = [leaves[name] for name in self.present]
        with uninitialized_is_nan():
            poison(self.device, *memory, stats=self.rows)
            outputs = self.op.fused(*leaves.values(), **self.options)
            outputs = outputs if self.op.adds else (outputs,)
            poison(self.device, *memory, stats=self.rows)
            grads = gradients(outputs, [leaves[name] for name in wanted], self.grads)
        results = dict(zip(("output", "sum"), outputs, strict=False))
        results |= {f"grad_{name}": grad for name, grad in zip(wanted, grads, strict=True)}
        return {name: t.detach() for name, t in results.items()}

    def check(self, results: dict[str, Tensor]) -> None:
        """Each result has its dtype and shape, is dense, and is as near to truth as derived."""
        for name, t in results.items():
            like = self.inputs[name.removeprefix("grad_") if "grad_" in name else "input"]
            got, want = (t.dtype, t.shape, t.device), (like.dtype, like.shape, like.device)
            assert got == want, f"{self}: {name} is {got}, not {want}"
            assert t.is_contiguous(), f"{self}: {name} has strides {t.stride()}"
        ratios = self.errors(results)
        found = torch.stack(list(ratios.values())).tolist()  # the only synchronisation
        bad = {name: f"{r:.3g}" for name, r in zip(ratios, found, strict=True) if not r <= 1}
        assert not bad, f"{self}: error as a multiple of the tolerance: {bad}"

    def errors(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """The worst error of each result as a multiple of its tolerance, chunk of rows by chunk."""
        rows, cols = self.rows, self.cols
        compute = TOLERANCE[self.inputs["input"].dtype].compute
        inputs = {n: t if t is None else t.detach() for n, t in self.inputs.items()}
        flat = {n: inputs[n].reshape(rows, cols) for n in self.op.inputs[: 1 + self.op.adds]}
        flat |= {n: t.reshape(rows, cols) for n, t in results.items() if is_rows(n)}
        flat |= {("dy", "dsum")[i]: g.reshape(rows, cols) for i, g in enumerate(self.grads)}
        params = {
            n: None if inputs[n] is None else inputs[n].to(F64).flatten()
            for n in self.op.parameters
        }

        ratios: dict[str, Tensor] = {}
        sums: dict[str, Tensor | float] = {n: 0.0 for n in results if not is_rows(n)}
        scales = dict(sums)
        for start in range(0, max(rows, 1), size := max(1, CHUNK // max(cols, 1))):
            part = {name: t[start : start + size] for name, t in flat.items()}
            truth, scale = self._truth(part, params)
            for name in results:
                if name in sums:
                    sums[name] = sums[name] + truth[name]
                    scales[name] = scales[name] + scale[name]
                    continue
                t = TOLERANCE[part[name].dtype]
                bound = 0.0  # the sum is one rounded addition: exact
                if name != "sum":
                    bound = t.rounding * truth[name].abs() + t.smallest
                    bound = bound + compute * steps(cols) * scale[name]
                found = worst(part[name], truth[name], bound)
                ratios[name] = torch.maximum(found, ratios.get(name, found))
        for name in sums:
            t = TOLERANCE[results[name].dtype]
            bound = t.rounding * sums[name].abs() + t.smallest
            bound = bound + compute * (steps(cols) + steps(rows)) * scales[name]
            ratios[name] = worst(results[name].flatten(), sums[name], bound)
        return ratios

    def _truth(self, part: dict, params: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Truth and condition for some rows. The op normalises the sum as it is stored: so
        does the truth, by an fp64 input that adds up to the stored sum."""
        op, dtype = self.op, part["input"].dtype
        leaves = {n: part[n].to(F64) for n in op.inputs[: 1 + op.adds]} | params
        truth = {}
        if op.adds:
            truth["sum"] = (part["input"] + part["residual"]).to(dtype).to(F64)
            leaves["input"] = truth["sum"] - leaves["residual"]
        present = {n: t.requires_grad_() for n, t in leaves.items() if t is not None}
        grads = [part[name].to(F64) for name in ("dy", "dsum") if name in part]
        outputs = op.reference(*leaves.values(), eps=self.eps)
        outputs = outputs if op.adds else (outputs,)
        truth["output"] = outputs[0].detach()
        for name, grad in zip(present, gradients(outputs, [*present.values()], grads), strict=True):
            truth[f"grad_{name}"] = grad
        with torch.no_grad():
            x = truth["sum"] if op.adds else leaves["input"]
            weight, bias = params["weight"], params.get("bias")
            least = torch.finfo(F64 if dtype is F64 else F32).smallest_normal
            scale = condition(op, self.eps, x, weight, bias, grads[0], least)
            scale["grad_input"] = scale["grad_x"] + (grads[1].abs() if op.adds else 0)
            scale["grad_residual"] = scale["grad_input"]
        return truth, scale


def is_rows(name: str) -> bool:
    return name not in ("grad_weight", "grad_bias")


def gradients(outputs: tuple, wanted: list[Tensor], grads: tuple) -> tuple[Tensor, ...]:
    """Gradients from those outputs that have any: a sum does not depend on the parameters."""
    used = [(out, g) for out, g in zip(outputs, grads, strict=True) if out.requires_grad]
    if not wanted:
        return ()
    return torch.autograd.grad([out for out, _ in used], wanted, [g for _, g in used])


def make_case(
    op: Op,
    shape: tuple[int, ...],
    pair: Pair,
    device: str,
    absent: tuple[str, ...] = (),
    normalized_shape: tuple[int, ...] | None = None,
    **options: float | str,
) -> Case:
    """Random rows whose scale and offset differ from row to row, around one another."""
    g = generator(device, op.name, shape, pair, absent)
    dtype = F64 if pair.rows is F64 else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=dtype, device=device)

    def some_rows() -> Tensor:
        scale, offset = normal(*shape[:-1], 1).exp2(), normal(*shape[:-1], 1)
        return (normal(*shape) * scale + offset).to(pair.rows)

    inputs: dict[str, Tensor | None] = {}
    for name in op.inputs:
        if name in op.parameters:
            params = normal(*(normalized_shape or shape[-1:])).to(pair.params)
            inputs[name] = None if name in absent else params
        else:
            inputs[name] = some_rows()
    grads = tuple(normal(*shape).to(pair.rows) for _ in range(1 + op.adds))
    return Case(op, inputs, grads, normalized_shape=normalized_shape, **options)
