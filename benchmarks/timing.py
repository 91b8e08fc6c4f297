"""How long a call takes: on the GPU alone, or with the host included.

A timer is given one callable per input set and answers with the time of one call. `GraphTimer`
records the calls in a CUDA graph and replays it, so that no host time is in the figure, and the
input sets together are larger than the L2 cache, so that the data comes from memory. `HostTimer`
does the same job on a CPU. `eager_us` times ordinary calls one after the other, host included.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call; the spread is that of the rounds, each a mean of many calls."""

    us: float  # median of the rounds
    min_us: float
    max_us: float
    rounds_us: tuple[float, ...]
    sets: int
    leaves_cache: bool  # False: the sets are capped in number and stay in L2

    @classmethod
    def of(cls, rounds_us: Sequence[float], sets: int, leaves_cache: bool) -> Timing:
        return cls(
            statistics.median(rounds_us),
            min(rounds_us),
            max(rounds_us),
            tuple(rounds_us),
            sets,
            leaves_cache,
        )

    @property
    def spread(self) -> float:
        """Half the distance from the fastest to the slowest round, relative to the median."""
        return (self.max_us - self.min_us) / 2 / self.us


class Timer(Protocol):
    """What `measure.py` needs of a timer."""

    def sets_for(self, bytes_per_call: int) -> int:
        """How many input sets to prepare for calls that move so many bytes each."""
        ...

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where tensors are made and autograd graphs are built for this timer."""
        ...

    def __call__(self, calls: Sequence[Call], bytes_per_call: int) -> Timing: ...


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors of a result: a tensor, or a tuple of tensors and None."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_in(item)


class GraphTimer:
    """GPU time of a call, from replays of a CUDA graph over input sets that leave the L2 cache.

    All work is done on one stream of the timer's own, tensors included: autograd runs a backward
    on the stream of its forward, and a capture may not depend on any other stream.
    """

    max_calls = 1024  # calls in one graph; bounds capture time at tiny shapes
    graph_us = 2000.0  # a graph at least so long hides the gap between two replays
    round_ms = 4.0
    warm_ms = 30.0  # the clocks fall while the host compiles

    def __init__(self, device: torch.device | str = "cuda", rounds: int = 7) -> None:
        self.device = torch.device(device)
        self.rounds = rounds
        self.stream = torch.cuda.Stream(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 << 20

    def sets_for(self, bytes_per_call: int) -> int:
        wanted = math.ceil(3 * self.l2_bytes / max(bytes_per_call, 1))
        return min(max(wanted, 2), self.max_calls)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def __call__(self, calls: Sequence[Call], bytes_per_call: int) -> Timing:
        # 4 bytes/ns is about the fastest memory of today; elsewhere the graph is just longer.
        expected_us = max(bytes_per_call / 4e6, 1.0)
        count = min(max(len(calls), math.ceil(self.graph_us / expected_us)), self.max_calls)
        with self.context():
            # Kernels are loaded and compiled here: neither is allowed during a capture.
            for call in (*calls[:2], *calls[:2]):
                call()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                rounds_us = self._time(graph, *self._capture(graph, calls, count))
            finally:
                graph.reset()
        return Timing.of(rounds_us, len(calls), len(calls) * bytes_per_call >= 3 * self.l2_bytes)

    def _capture(
        self, graph: torch.cuda.CUDAGraph, calls: Sequence[Call], count: int
    ) -> tuple[deque[Any], int]:
        # As many results are kept as there are sets: were they freed at once, every call would
        # write the same memory, which then never leaves L2.
        kept: deque[Any] = deque(maxlen=len(calls))
        collecting = gc.isenabled()
        gc.disable()  # a collected CUDA object may call what is forbidden during a capture
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                for index in range(count):
                    kept.append(calls[index % len(calls)]())
        finally:
            if collecting:
                gc.enable()
        return kept, count

    def _time(self, graph: torch.cuda.CUDAGraph, kept: deque[Any], count: int) -> list[float]:
        # A capture that missed the work (another stream, a cached result) would look very fast.
        for output in tensors_in(kept[-1]):
            output.detach().fill_(math.nan)
        graph.replay()
        for output in tensors_in(kept[-1]):
            flat = output.detach().reshape(-1)
            if bool(flat[:: max(1, flat.numel() // 4096)].isnan().any()):
                raise RuntimeError("the CUDA graph does not write all of its outputs")

        replay_ms = max(self._elapsed_ms(graph, 1), 1e-3)
        self._elapsed_ms(graph, math.ceil(self.warm_ms / replay_ms))
        replays = max(1, math.ceil(self.round_ms / replay_ms))
        return [
            self._elapsed_ms(graph, replays) * 1e3 / (replays * count) for _ in range(self.rounds)
        ]

    def _elapsed_ms(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        for _ in range(replays):
            graph.replay()
        end.record(self.stream)
        end.synchronize()
        return float(start.elapsed_time(end))


class HostTimer:
    """Wall time of a call on the CPU, where a kernel has returned when the call has."""

    def __init__(self, rounds: int = 5, round_s: float = 0.02) -> None:
        self.rounds = rounds
        self.round_s = round_s

    def sets_for(self, bytes_per_call: int) -> int:
        return 2

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def __call__(self, calls: Sequence[Call], bytes_per_call: int) -> Timing:
        for call in calls:
            call()
        return Timing.of([self._round_us(calls) for _ in range(self.rounds)], len(calls), False)

    def _round_us(self, calls: Sequence[Call]) -> float:
        count = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < self.round_s or count < len(calls):
            calls[count % len(calls)]()
            count += 1
        return elapsed * 1e6 / count


def eager_us(call: Call, device: torch.device, warmups: int = 10, iterations: int = 100) -> float:
    """Time of one ordinary call, the host's part included.

    On a GPU the mean between two CUDA events; on a CPU the median, since other processes take the
    cores for milliseconds at a time.
    """
    for _ in range(warmups):
        call()
    if device.type != "cuda":
        taken = []
        for _ in range(iterations):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(iterations):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / iterations
