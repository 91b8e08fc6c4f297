"""Processes in one process group, which run one function after another, so that they start once."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.case import SEED

TIMEOUT = timedelta(seconds=60)  # of a collective, and of a function after the last sign of life
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# What the process imports that all ranks are forked from: seconds for each of them otherwise. None
# of it starts threads or CUDA.
PRELOADED = ["torch.distributed.device_mesh", "fused_op"]


class Ranks:
    """``run`` calls a function of a test module on every rank, as ``function(device, *args)``."""

    def __init__(self, device: str, size: int) -> None:
        self.device, self.size = device, size
        self.processes: list[Any] = []

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Raises AssertionError with what the first rank to fail said."""
        if not self.processes:
            self._start()
        try:
            for pipe in self.pipes:
                pipe.send((function, args))
            busy = dict(zip(self.pipes, range(self.size), strict=True))
            while busy:
                done = wait(list(busy), 2 * TIMEOUT.total_seconds())
                assert done, f"rank {[*busy.values()]} hangs"
                for pipe in done:
                    rank = busy.pop(pipe)
                    failure = self._answer(rank)
                    assert not failure, f"rank {rank} failed:\n{failure}"
        except BaseException:  # the others may wait for a message that never comes
            self.stop(kill=True)
            raise

    def _answer(self, rank: int) -> str | None:
        """What a rank says of the function: None if it returned."""
        try:
            failure: str | None = self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(TIMEOUT.total_seconds())
            return f"its process ended with exit code {self.processes[rank].exitcode}"
        return failure

    def stop(self, kill: bool = False) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True) if self.processes else ():
            if kill:
                process.kill()
            else:
                pipe.send(None)
            process.join()
        self.processes = []

    def _start(self) -> None:
        os.environ["FUSED_OP_SEED"] = str(SEED)  # one for all
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # A file to meet at, where a port might be taken.
        self.folder = tempfile.TemporaryDirectory()
        meeting = os.path.join(self.folder.name, "store")
        pairs = [context.Pipe() for _ in range(self.size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(
                target=_serve, args=(theirs, self.device, rank, self.size, meeting), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()


def ranks_fixture(size: int) -> Any:
    """A fixture ``ranks_<size>``: processes on the CPU, and on as many GPUs where there are."""

    @pytest.fixture(scope="module", params=["cpu", "cuda"], name=f"ranks_{size}")
    def fixture(request):
        if request.param == "cuda" and torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} GPUs")
        ranks = Ranks(request.param, size)
        yield ranks
        ranks.stop()

    return fixture


@functools.cache
def mesh_of(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Once in each rank: each further mesh would start threads that end with the process."""
    return init_device_mesh(device, shape)


def _serve(pipe: Any, device: str, rank: int, size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        BACKENDS[device],
        store=torch.distributed.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            function(device, *args)
        except BaseException:  # which the failure of pytest.raises is
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
    os._exit(0)  # gloo's threads may still free tensors, and hang or abort a process that ends
