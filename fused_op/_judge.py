"""Which fused class a norm may get, and what proves it.

``judge_once`` gives each module to the proof of its kind: ``_proof.py`` for norms of rows and of
pixels, ``_gated_class.py`` for those with a gate, ``_grouped_proof.py`` for group norms.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ._arguments import KERNEL_DTYPES
from ._channels_first_modules import ChannelsFirstNorm
from ._fused_class import Factor, Formula, fused_class
from ._gated_class import gate_parameter, prove_gated
from ._gated_rms_norm import FusedGatedRMSNorm
from ._group_norm import FusedGroupNorm
from ._grouped_class import grouped_class
from ._grouped_proof import groups_name, prove_grouped
from ._options import Norm, Rounding
from ._probe import Refusal, dtypes_of, explain, image_ranks, state_key
from ._proof import Match, prove
from ._recipe import recipe_of
from .modules import CONVERTED, FusedLayerNorm, FusedRMSNorm

_FUSED = FusedLayerNorm, FusedRMSNorm, FusedGatedRMSNorm, ChannelsFirstNorm, FusedGroupNorm

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# A class without any of these may have the number in its forward.
_EPS_NUMBERS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-7, 1e-10, 1e-3, torch.finfo(torch.float32).eps)


def name_of_eps(module: nn.Module) -> str | None:
    """The attribute that holds what the norm adds before the root, if it has one."""
    return next((name for name in _EPS_NAMES if _has(module, name)), None)


def _has(module: nn.Module, name: str) -> bool:
    """``hasattr``, but False for a property that raises any error."""
    try:
        return hasattr(module, name)
    except Exception:
        return False


Proof = tuple[type[nn.Module], Match]
Verdict = Proof | Refusal


def judge_once(
    module: nn.Module, like: Tensor, shared: dict[int, Any], verdicts: dict[Any, Verdict]
) -> Proof:
    """The class that the module may get, and its proof: one for all layers that are alike.

    Args:
        module: any module.
        like: a tensor whose dtype and device stand in for those that the module does not have.
        shared: what is not copied with the module for a probe, by its id.
        verdicts: those so far; added to.

    Raises:
        Refusal: there is none.
    """
    key = like.dtype, like.device, state_key(module)
    if key not in verdicts:
        try:
            verdicts[key] = _judge(module, like, shared)
        except Refusal as refusal:
            verdicts[key] = refusal
    verdict = verdicts[key]
    if isinstance(verdict, Refusal):
        raise verdict
    return verdict


def _judge(module: nn.Module, like: Tensor, shared: dict[int, Any]) -> Proof:
    """The class that the module may get, and its proof. Raises a Refusal if there is none."""
    if CONVERTED in module.__dict__ or isinstance(module, _FUSED):
        raise Refusal("is fused already")
    given = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if any(map(is_lazy, given)):
        raise Refusal("is lazy: run the model once, which gives its parameters their shapes")
    like = given[0] if given else like
    shape: Any = given[0].shape if given else (16,)
    try:
        shape = _shape_of(module) or shape
        _check_structure(module)
        _check_kind(like, given)
        if like.is_meta:  # the proof uses a copy with random parameters on the CPU
            like = torch.empty(0, dtype=like.dtype, device="cpu")
        if gate_parameter(type(module)) is not None:
            return _prove_with_gate(module, like, shape, shared)
        proof = _prove_without_gate(module, like, shape, shared)
        return proof if given else _of_more_dtypes(proof, module, like, shape, shared)
    except Refusal as refusal:
        raise explain(refusal, module, like, shape[-1] if shape else 16, shared) from None


def _of_more_dtypes(
    proof: Proof, module: nn.Module, like: Tensor, shape: tuple[int, ...], shared: dict[int, Any]
) -> Proof:
    """The class for rows of all dtypes with the same proof, where no parameter has a dtype."""
    formula = recipe_of(proof[0])
    if formula is None:  # of PyTorch's own, which takes any
        return proof
    dtypes = {like.dtype}
    for dtype in KERNEL_DTYPES:
        with contextlib.suppress(Refusal):
            other = torch.empty(0, dtype=dtype, device=like.device)
            after, match = _prove_without_gate(module, other, shape, shared)
            is_same = recipe_of(after)._replace(dtypes=formula.dtypes) == formula
            if is_same and (match.same_roundings or dtype.itemsize != 2):
                dtypes.add(dtype)
    formula = formula._replace(dtypes=tuple(sorted(dtypes, key=str)))
    make: Any = fused_class if isinstance(formula, Formula) else grouped_class
    return make(type(module), formula), proof[1]


def _prove_without_gate(
    module: nn.Module, like: Tensor, shape: tuple[int, ...], shared: dict[int, Any]
) -> Proof:
    """The proof of a norm over rows, channels or groups; that over groups first for PyTorch's."""
    refusal: Refusal | None = None
    if isinstance(module, nn.GroupNorm):
        try:
            return prove_grouped(module, _eps_of(module), like, shared)
        except Refusal as of_groups:
            if type(module) is nn.GroupNorm:
                raise
            refusal = of_groups
    try:
        return _prove_of_rows_or_images(module, like, shape, shared)
    except Refusal as of_others:
        if refusal is not None:
            raise refusal from None
        if groups_name(module) is not None and (of_others.is_of_run or of_others.is_of_values):
            with contextlib.suppress(Refusal):
                return prove_grouped(module, _eps_of(module), like, shared)
        raise


def _prove_of_rows_or_images(
    module: nn.Module, like: Tensor, shape: tuple[int, ...], shared: dict[int, Any]
) -> Proof:
    """The proof of a norm over the last dimensions, or else of one over the channels of images."""
    try:
        return _prove_one(module, like, shape, shared)
    except Refusal as refusal:
        if len(shape) != 1 or not (refusal.is_of_run or refusal.is_of_values):
            raise
        ranks = image_ranks(module, like, shape[0], shared)
        try:
            if ranks:
                return _prove_of_images(module, like, shape, shared, ranks)
        except Refusal as of_images:
            if refusal.is_of_run:  # images are all that it takes
                raise of_images from None
        raise


def _prove_of_images(
    module: nn.Module, like: Tensor, channels: Any, shared: dict[int, Any], ranks: dict[int, bool]
) -> Proof:
    """The proof for as many of these numbers of dimensions as have one, with one formula."""
    formula: Formula | None = None
    refusal: Refusal | None = None  # of the most common number
    matches: dict[int, Match] = {}
    for rank, innermost in ranks.items():
        try:
            if formula is None:
                candidates = _image_candidates(module, like, rank, innermost)
                after, matches[rank] = _prove_one(module, like, channels, shared, candidates)
                formula = recipe_of(after)
            elif innermost == formula.innermost:
                each = formula._replace(images=(rank,))
                fused = fused_class(type(module), each)
                matches[rank] = prove(module, fused, each, like, channels, shared)
        except Refusal as reason:
            refusal = refusal or reason
    if formula is None:
        assert refusal is not None
        raise refusal
    after = fused_class(type(module), formula._replace(images=tuple(sorted(matches))))
    found = matches.values()
    worst = max(match.ulps for match in found), max(match.differing for match in found)
    return after, Match(worst[0], formula.rounding, worst[1])


def _prove_one(
    module: nn.Module,
    like: Tensor,
    shape: tuple[int, ...],
    shared: dict[int, Any],
    candidates: list[Formula] | None = None,
) -> Proof:
    """The proof of the formula with the module's own roundings, or else of the closest one.

    Without candidates, they are those of a norm over the last dimensions.
    """
    proofs: dict[Formula, Proof] = {}
    refusal: Refusal | None = None  # of the likeliest formula
    for formula in candidates or _candidates(module, like):
        if any((f.norm, f.eps) != (formula.norm, formula.eps) for f in proofs):
            continue  # it is another formula, whatever its roundings
        try:
            after = fused_class(type(module), formula)
            match = prove(module, after, formula, like, shape, shared)
        except Refusal as reason:
            refusal = refusal or reason
            continue
        proofs[formula] = after, match
        if match.same_roundings or like.dtype.itemsize != 2:
            return after, match
    if not proofs:
        assert refusal is not None
        raise refusal
    return min(proofs.values(), key=lambda proof: proof[1].differing)


def _prove_with_gate(
    module: nn.Module, like: Tensor, shape: tuple[int, ...], shared: dict[int, Any]
) -> Proof:
    """The proof of the calls with a gate, and of those without one, if it may be left out."""
    alone: Proof | None = None
    parameter, eps_name = gate_parameter(type(module)), name_of_eps(module)
    if parameter is not None and parameter.default is not parameter.empty:
        with contextlib.suppress(Refusal):
            alone = _prove_one(module, like, shape, shared)
    without = None if alone is None else recipe_of(alone[0])
    try:
        if eps_name is None:
            raise Refusal("has no eps")
        gated = prove_gated(module, eps_name, without, like, shared)
    except Refusal:
        if alone is None:
            raise
        return alone
    # A call with other roundings than before should have been asked for, as none without a gate is.
    is_other = like.dtype.itemsize == 2 and not gated[1].same_roundings
    return alone if alone is not None and is_other else gated


def _shape_of(module: nn.Module) -> tuple[int, ...]:
    """Its ``normalized_shape``; empty where it has none."""
    shape = _attribute(module, "normalized_shape")
    if shape is None:
        return ()
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, (tuple, list)) else (shape,)))
    except (TypeError, RuntimeError):  # the second of a tensor
        found = type(shape).__name__
        raise Refusal(f"its normalized_shape is a {found}, not one or several sizes") from None
    if any(size < 1 for size in sizes):
        raise Refusal("normalises no elements")
    return sizes


def _attribute(module: nn.Module, name: str) -> Any:
    """It, or None where it is not there; a Refusal where a property raises."""
    try:
        return getattr(module, name, None)
    except Exception as error:
        raise Refusal(f"its {name} raises {type(error).__name__}: {error}") from error


def _check_kind(like: Tensor, given: list[Tensor]) -> None:
    if like.device.type not in ("cpu", "cuda", "meta"):
        raise Refusal(f"is on {like.device.type}, for which there is no kernel")
    if like.dtype not in KERNEL_DTYPES:
        raise Refusal(f"is of {like.dtype}, for which there is no kernel")
    if any((p.dtype, p.device) != (like.dtype, like.device) for p in given):
        raise Refusal("its weight and bias differ in dtype or device")


def _check_structure(module: nn.Module) -> None:
    """Check that its state is only weight, bias and eps."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Refusal("is compiled by TorchScript")
    if parametrize.is_parametrized(module):
        raise Refusal("is parametrized (torch.nn.utils.parametrize), by a class of its own")
    if "forward" in module.__dict__:
        raise Refusal("its forward is replaced on the instance")
    try:
        inspect.signature(type(module).forward)
    except (TypeError, ValueError):  # of a builtin function
        raise Refusal("its forward does not tell its arguments") from None
    if module._modules:
        raise Refusal("contains other modules")
    known = ("weight", "bias")
    if extra := [name for name in module._buffers if name not in known]:
        raise Refusal(f"has buffers ({', '.join(extra)})", is_of_values=True)
    if extra := [name for name in module._parameters if name not in known]:
        raise Refusal(
            f"has parameters other than weight and bias ({', '.join(extra)})", is_of_values=True
        )
    for name in known:
        value = _attribute(module, name)
        if value is None:
            continue
        if value is not module._parameters.get(name) and value is not module._buffers.get(name):
            raise Refusal(f"its {name} is not a parameter")
        if type(value) not in (nn.Parameter, Tensor) or getattr(value, "is_quantized", False):
            raise Refusal(f"its {name} is a {type(value).__name__}, not a plain parameter")
    eps_name = name_of_eps(module)
    eps = None if eps_name is None else getattr(module, eps_name)
    if not isinstance(eps, (float, int)) and eps is not None:
        raise Refusal(f"its {eps_name} is a {type(eps).__name__}, not a number")


def _candidates(module: nn.Module, like: Tensor) -> list[Formula]:
    norms: list[Norm] = ["rms_norm", "layer_norm"]
    if isinstance(module, nn.LayerNorm) or getattr(module, "bias", None) is not None:
        norms = ["layer_norm"]
    elif isinstance(module, nn.RMSNorm):
        norms = ["rms_norm"]
    factors: list[Factor] = ["weight"]
    if (
        type(module) not in (nn.LayerNorm, nn.RMSNorm)
        and getattr(module, "weight", None) is not None
    ):
        factors.append("1 + weight")
        if like.dtype.itemsize == 2:
            factors.append("rounded 1 + weight")
    if "weight" in module._buffers:  # a constant for other code
        factors.append("1")
    roundings: list[Rounding] = ["once"]
    if len(factors) > 1 and like.dtype.itemsize == 2:
        roundings.append("before_weight")
    return [
        Formula(norm, factor, eps, rounding, dtypes=dtypes_of(module, like))
        for eps in _eps_of(module)
        for factor in factors
        for norm in norms
        for rounding in roundings
    ]


def _image_candidates(module: nn.Module, like: Tensor, rank: int, innermost: bool) -> list[Formula]:
    norms: list[Norm] = ["layer_norm", "rms_norm"]
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        norms = ["layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm"]
    elif getattr(module, "bias", None) is None:
        norms.reverse()
    return [
        Formula(norm, "weight", eps, "once", (rank,), innermost, dtypes_of(module, like))
        for eps in _eps_of(module)
        for norm in norms
    ]


def _eps_of(module: nn.Module) -> tuple[str | float, ...]:
    """The attribute that holds eps, or the numbers that the code may have."""
    name = name_of_eps(module)
    return _EPS_NUMBERS if name is None else (name,)
