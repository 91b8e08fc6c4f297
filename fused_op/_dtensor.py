"""What the dispatcher ops do with a ``torch.distributed.tensor.DTensor``: run on its local shard.

A row needs no other row, so shards along leading dimensions (batch, sequence) stay as they are; the
normalised dimensions and the parameters are gathered. Only DTensor's own operations communicate.

This takes the place of a sharding strategy for each op, because of ``stats``: it has a column for
each row, and the rows of a shard along an inner dimension are no slice of those columns. So it
remains a plain tensor, the statistics of this rank's rows, and backward shards x as forward did.

``_ops.register_rules`` imports this file once there can be DTensors: importing them takes long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ._options import default_ndim
from ._variant import variant_named

Placements = tuple[Placement, ...]

# Arguments and results by their names in csrc/dispatcher.cpp. Others have nothing to be sharded by.
ROWS = {"input", "gate", "residual", "grad_output", "grad_sum", "x"}
ROWS |= {"output", "sum", "grad_input", "grad_gate", "grad_residual"}
PARAMETERS = {"weight", "bias", "post_weight", "pre_weight"}
PARAMETERS |= {f"grad_{name}" for name in PARAMETERS}
TABLES = {"cos", "sin"}  # plain ones are those of this rank's rows
GRADIENTS = {"grad_output", "grad_sum"}
ENTRIES = {"scale", "shift", "grad_scale", "grad_shift"}  # rows that rows of the input share
WAYS = ("forward", "backward")


def run_on_shards(cls: Any, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
    """Run ``op`` on the shards of this rank, as ``DTensor.__torch_dispatch__`` would."""
    names = [argument.name for argument in op._schema.arguments]
    named: dict[str, Any] = dict(zip(names, args, strict=False))  # less those left at their default
    if named.get("dropout_p"):
        raise NotImplementedError(
            f"{op}: dropout_p must be 0 for a DTensor, whose shards would all get one mask; "
            "call torch.nn.functional.dropout before"
        )
    # The gate of a residual has entries, that of a norm has rows.
    entries = ENTRIES | {"gate", "grad_gate"} if "scale" in named else ENTRIES
    are_rows = ROWS - entries
    if "scale" in named and "save_stats" in named:  # the op sees shards: wrong ones may fit
        variant_named(op._schema.name).check(*args[:-1])
    mesh: DeviceMesh = next(value.device_mesh for value in args if isinstance(value, DTensor))
    replicated: Placements = (Replicate(),) * mesh.ndim
    for name in named:
        value = named[name]
        if name in GRADIENTS and _is_whole(value, named):
            named[name] = DTensor.from_local(value, mesh, replicated, run_check=False)
        elif (name in are_rows | entries | PARAMETERS and value is not None) or (
            name in TABLES and isinstance(value, DTensor)
        ):
            named[name] = _as_dtensor(op, name, value, mesh)

    # Backward follows x, or the sum, alone, as its stats do: what forward made of its inputs. (That
    # of rms_norm_add has neither, and no residual.)
    leading = ("input",) if "rms_norm_add" in str(op) else ("x", "sum", "input", "residual")
    leaders = [named[name] for name in leading if named.get(name) is not None]
    shape = leaders[0].shape
    # Of variants: heads that have weights of their own stay together.
    ndim = 1 if named.get("weight") is None else named["weight"].dim()
    if "normalized_ndim" in named:
        ndim = named["normalized_ndim"] or default_ndim(named["weight"], named["bias"])
    rows_ndim = len(shape) - ndim
    rows = _placements_of_rows(leaders, rows_ndim)
    # Each rank sums the rows that it has. Where ranks have the same rows, their sums are the same.
    sums: Placements = tuple(Partial() if p.is_shard() else Replicate() for p in rows)

    # In the order of the schema: all ranks have to communicate in the same one.
    whole = dict(named)
    for name, value in named.items():
        if isinstance(value, DTensor):
            layout = (rows, rows_ndim) if name in are_rows else (replicated, 0)
            if name in entries:
                layout = _placements_of_entries(value, rows, Replicate()), value.dim() - 1
            named[name] = _shard(value, mesh, *layout)
    local = named["x" if "x" in named else "input"].shape
    results = []
    found = op(*named.values())
    found = found if isinstance(found, tuple) else (found,)
    for returned, result in zip(op._schema.returns, found, strict=True):
        if returned.name in are_rows and result.shape == local:
            result = _from_shard(result, mesh, rows, shape)
        elif returned.name in entries:
            of = returned.name.removeprefix("grad_")
            if named[of] is not None and result.shape == named[of].shape:
                placements = _placements_of_entries(whole[of], rows, Partial())
                result = _from_shard(result, mesh, placements, whole[of].shape)
        elif returned.name in PARAMETERS and result.shape == local[rows_ndim:]:
            result = _from_shard(result, mesh, sums, shape[rows_ndim:])
        results.append(result)  # stats, and what was not asked for, as they are
    return tuple(results) if len(results) > 1 else results[0]


def _is_whole(gradient: Tensor | None, named: dict[str, Any]) -> bool:
    """Whether a gradient is a plain tensor of all rows, the same on all ranks.

    In compiled code, autograd makes such zeros for an output that was not used.
    """
    if gradient is None or isinstance(gradient, DTensor):
        return False
    x: Tensor = named["x" if "x" in named else "input"]
    return gradient.shape == x.shape


def _as_dtensor(op: Any, name: str, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Let DTensor decide whether a plain tensor may stand among DTensors."""
    if not isinstance(value, DTensor):
        one = DTensor.from_local(value.new_ones(()), mesh, (Replicate(),) * mesh.ndim)
        try:
            return value.detach() * one
        except RuntimeError as error:
            raise RuntimeError(
                f"{op} got mixed torch.Tensor and DTensor: {name} is a torch.Tensor. Distribute "
                "it, or call under torch.distributed.tensor.experimental.implicit_replication()"
            ) from error
    if value.device_mesh != mesh:
        raise RuntimeError(
            f"{op}: {name} must be on the device mesh of the other tensors, {mesh}, "
            f"got {value.device_mesh}"
        )
    return value


def _placements_of_rows(leaders: list[DTensor], rows_ndim: int) -> Placements:
    """For each mesh dimension the first placement that shards rows, or else replication."""
    return tuple(
        next((p for p in placements if p.is_shard() and p.dim < rows_ndim), Replicate())
        for placements in zip(*(t.placements for t in leaders), strict=True)
    )


def _placements_of_entries(entries: Tensor, rows: tuple[Any, ...], shared: Placement) -> Placements:
    """Those of the rows, or ``shared`` where ranks have different rows of one entry.

    Rows share entries along all dimensions behind the last one that is not 1. This does not depend
    on whether ones are left out: scale and shift then agree on a rank without rows, too.
    """
    sizes = entries.shape[:-1]
    own = max((dim + 1 for dim, size in enumerate(sizes) if size != 1), default=0)
    return tuple(shared if p.is_shard() and p.dim >= own else p for p in rows)


def _shard(value: Any, mesh: DeviceMesh, placements: Placements, rows_ndim: int) -> Tensor:
    """The part of this rank; a rank outside of the mesh has no rows, but takes part in the call."""
    if mesh.get_coordinate() is None:
        size = (0,) * rows_ndim + tuple(value.shape[rows_ndim:])
        return torch.empty(size, dtype=value.dtype, device=mesh.device_type)
    if value.placements != placements:
        value = value.detach().redistribute(mesh, placements)
    shard: Tensor = value.to_local()
    return shard


def _from_shard(
    result: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size
) -> DTensor:
    """The contiguous DTensor that this rank has computed its part of."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    # With the shape, because ranks may have different numbers of rows.
    return DTensor.from_local(
        result.contiguous(), mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )


VARIANTS = (
    *("l2_norm", "gated_rms_norm", "post_add_pre_rms_norm", "rms_norm_add", "rms_norm_rope"),
    *("modulated_norm", "gated_add_norm"),
)
OPS = [f"{norm}_{way}" for norm in ("norm", *VARIANTS) for way in WAYS]
for _op in OPS:
    torch.library.register_torch_dispatch(f"fused_op::{_op}", DTensor, run_on_shards)
