"""One case measured: the limit, then every implementation, as one JSON-ready dictionary.

Knows nothing of CUDA: the timer decides where and how calls are timed, so that a CPU (or a timer
of a test's own) runs the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .check import InputSet, check_values, leaves
from .grids import ITEM_BYTES, Case
from .peers import Peer, Run
from .timing import Timer, Timing, tensors_in

_COPY_UNIT_BYTES = 32 << 20
_COPY_PIECE_BYTES = 256 * 2**20


def measure_case(
    case: Case,
    timer: Timer,
    peers: Sequence[Peer],
    device: torch.device,
    limits: dict[tuple[str, int, str], dict[str, Any]],
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Times a case and returns its row for the JSON file.

    Args:
        case: the problem.
        timer: times a list of calls, one per input set.
        peers: implementations in the order to measure them; one that fails gets a reason.
        device: where the tensors are made.
        limits: limits measured so far in this run, by kind, bytes and dtype; added to.
        note: told what is being measured.
    """
    row: dict[str, Any] = asdict(case) | {"modes": list(case.modes), "limits": {}, "peers": {}}
    with timer.context():
        for mode in case.modes:
            kind = "add" if mode == "backward" else "copy"
            key = (kind, case.limit_bytes(mode), case.dtype)
            if key not in limits:
                note(f"{case.key}: {kind}")
                limits[key] = measure_limit(*key, timer, device)
            row["limits"][mode] = limits[key]
        sets = _make_sets(case, timer, device)
        for peer in peers:
            note(f"{case.key}: {peer.name}")
            row["peers"][peer.name] = _measure_peer(case, timer, peer, sets, row["limits"])
    return row


def measure_limit(
    kind: str, total_bytes: int, dtype: str, timer: Timer, device: torch.device
) -> dict[str, Any]:
    """The fastest device copy (2 tensors) or add (3 tensors) found that moves `total_bytes`.

    A copy of an awkward size, or of half a gigabyte and more, can be far slower than another, which
    is no limit of the memory: an aligned size and a smaller piece are measured too, and scaled.
    """
    tensors = 2 if kind == "copy" else 3
    unit = _COPY_UNIT_BYTES // ITEM_BYTES[dtype]
    exact = total_bytes // (tensors * ITEM_BYTES[dtype])
    piece = min(exact, _COPY_PIECE_BYTES // ITEM_BYTES[dtype])
    sizes = {"exact size": exact, "aligned size": exact // unit * unit, "in pieces": piece}
    candidates = {}
    for name, elements in sizes.items():
        if elements == 0 or (name != "exact size" and elements == exact):
            continue
        moved = elements * tensors * ITEM_BYTES[dtype]
        made = [
            [
                torch.ones(elements, dtype=getattr(torch, dtype), device=device)
                for _ in range(tensors)
            ]
            for _ in range(timer.sets_for(moved))
        ]
        calls = [
            partial(y.copy_, *rest) if kind == "copy" else partial(torch.add, *rest, out=y)
            for y, *rest in made
        ]
        with torch.no_grad():
            candidates[name] = timer(calls, moved).us * total_bytes / moved
    best = min(candidates.values())
    return {
        "kind": kind,
        "bytes": total_bytes,
        "us": best,
        "tb_per_s": total_bytes / best / 1e6,
        "candidates_us": candidates,
    }


def _make_sets(case: Case, timer: Timer, device: torch.device) -> list[InputSet]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def draw() -> Tensor:
        shape = (case.rows, case.cols)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    outputs = 1 + case.has_residual if "backward" in case.modes else 0
    count = max(timer.sets_for(case.limit_bytes(mode)) for mode in case.modes)
    return [
        InputSet(
            draw(),
            draw() if case.has_residual else None,
            tuple(draw() for _ in range(outputs)),
        )
        for _ in range(count)
    ]


def _measure_peer(
    case: Case,
    timer: Timer,
    peer: Peer,
    sets: Sequence[InputSet],
    limits: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    parameter_dtype = "float32" if case.op in peer.float32_parameters else case.dtype
    weight, bias = _parameters(case, parameter_dtype, sets[0].input.device)
    result["parameter_dtype"] = parameter_dtype
    try:
        run = peer.load(case.op)
        result["relative_error"] = check_values(case, run, sets[0], weight, bias)
    except Exception as error:  # whatever a peer raises, the others are still measured
        return result | {"failed": failure(error, case, peer, weight.device)}
    for mode in case.modes:
        bytes_per_call = case.limit_bytes(mode)
        mode_sets = sets[: timer.sets_for(bytes_per_call)]
        try:
            calls = _CALLS[mode](run, mode_sets, weight, bias)
            with torch.set_grad_enabled(mode != "forward"):
                timing = timer(calls, bytes_per_call)
            result[mode] = _figures(timing, bytes_per_call, limits[mode]["us"])
        except Exception as error:
            result[mode] = {"failed": failure(error, case, peer, weight.device)}
        calls = []  # frees the autograd graphs before the next mode allocates
    times = [result.get(mode, {}).get("us") for mode in ("training_forward", "backward")]
    if all(times):
        limit = limits["training_forward"]["us"] + limits["backward"]["us"]
        result["fb"] = limit / sum(times)
    return result


def _parameters(case: Case, dtype: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator(device).manual_seed(1)
    options: dict[str, Any] = {
        "generator": generator,
        "dtype": getattr(torch, dtype),
        "device": device,
    }
    weight = torch.rand(case.cols, **options) + 0.5
    return weight, torch.randn(case.cols, **options) if case.has_bias else None


def _forward_calls(
    run: Run, sets: Sequence[InputSet], weight: Tensor, bias: Tensor | None
) -> list[Callable[[], Any]]:
    return [partial(run, item.input, item.residual, weight, bias) for item in sets]


def _training_forward_calls(
    run: Run, sets: Sequence[InputSet], weight: Tensor, bias: Tensor | None
) -> list[Callable[[], Any]]:
    parameters = leaves(weight, bias)
    return [partial(run, *leaves(item.input, item.residual), *parameters) for item in sets]


def _backward_calls(
    run: Run, sets: Sequence[InputSet], weight: Tensor, bias: Tensor | None
) -> list[Callable[[], Any]]:
    """Forwards now, on the timer's stream; what is timed is all gradients from what they saved."""
    parameters = leaves(weight, bias)
    calls = []
    for item in sets:
        given = [*leaves(item.input, item.residual), *parameters]
        with torch.enable_grad():
            outputs = tuple(tensors_in(run(*given)))
        wanted = [leaf for leaf in given if leaf is not None]
        calls.append(
            partial(torch.autograd.grad, outputs, wanted, item.grad_outputs, retain_graph=True)
        )
    return calls


_CALLS = {
    "forward": _forward_calls,
    "training_forward": _training_forward_calls,
    "backward": _backward_calls,
}


def _figures(timing: Timing, bytes_per_call: int, limit_us: float) -> dict[str, Any]:
    return asdict(timing) | {
        "spread": timing.spread,
        "tb_per_s": bytes_per_call / timing.us / 1e6,
        "fraction": limit_us / timing.us,
    }


def failure(error: Exception, case: Case, peer: Peer, device: torch.device) -> str:
    """Why a peer failed.

    Raises:
        RuntimeError: the GPU failed with it, for which the next peer would be blamed.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        raise RuntimeError(f"the GPU failed in {case.key} of {peer.name}") from error
    return reason(error)


def reason(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= 200 else text[:197] + "..."
