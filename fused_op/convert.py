"""Replace the norms of a model by fused ones, in place, each after a check on random rows.

Only the ``__class__`` of a module changes. Parameters, hooks and the state of the optimizer stay
the same objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ._arguments import KERNEL_DTYPES
from ._channels_first_modules import ChannelsFirstNorm
from ._fused_class import Factor, Formula, fused_class, is_fused
from ._gated_class import gate_parameter, prove_gated
from ._gated_rms_norm import FusedGatedRMSNorm
from ._group_norm import FusedGroupNorm
from ._grouped_proof import groups_name, prove_grouped
from ._options import Norm, Rounding
from ._probe import Refusal, explain, image_ranks, state_key
from ._proof import Match, prove
from ._recipe import recipe_of
from ._residual import Residual, fuse_residuals
from .modules import CONVERTED, FusedLayerNorm, FusedRMSNorm

_FUSED = FusedLayerNorm, FusedRMSNorm, FusedGatedRMSNorm, ChannelsFirstNorm, FusedGroupNorm

Select = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# A class without any of these may have the number in its forward.
EPS_NUMBERS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-7, 1e-10, 1e-3, torch.finfo(torch.float32).eps)
_TWICE = "up to 2 ulp apart: the original rounds in between too"
_STATISTICS = "the original rounds eps or its statistics too, and is farther from the exact values"


class Converted(NamedTuple):
    """A module whose class changed."""

    name: str
    before: str
    after: str
    # How many spacings of the dtype the results may differ, because of their roundings to it: 1, or
    # 2 if the original also rounds the normalised values. 0 in a report of revert.
    ulps: int
    rounding: Rounding = "once"  # of the fused op
    # In 16 bits, all but about 5e-5 of the outputs keep their bits.
    same_roundings: bool = False
    # The original, a group norm, rounds eps or its statistics too: `ulps` does not bound that.
    rounds_statistics: bool = False

    def note(self) -> str:
        """The words for it in a report."""
        if self.same_roundings:
            return "same roundings"
        return _STATISTICS if self.rounds_statistics else _TWICE if self.ulps == 2 else ""


class Skipped(NamedTuple):
    """A norm that did not change."""

    name: str
    type_name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What happened to each norm of a model; ``str()`` gives a table."""

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    residuals: tuple[Residual, ...] = ()

    def __str__(self) -> str:
        """One line for each norm, and with ``residual=True`` for each block."""
        rows = [(c.name, f"{c.before} -> {c.after}", c.note()) for c in self.converted]
        rows += [(s.name, s.type_name, s.reason) for s in self.skipped]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"norms changed: {len(self.converted)}, left as they are: {len(self.skipped)}"]
        for name, what, note in rows:
            lines.append(f"  {name:{widths[0]}}  {what:{widths[1]}}  {note}".rstrip())
        for r in self.residuals:
            what = r.reason or f"additions done by its norms: {r.additions}"
            lines.append(f"  {r.name or '(the model)'}  {r.type_name}  {what}")
        return "\n".join(lines)


def convert(
    model: nn.Module, *, include: Select = None, exclude: Select = None, residual: bool = False
) -> Report:
    """Give the norms of a model a fused forward, in place, after a comparison of each.

    ``torch.nn.LayerNorm``, ``RMSNorm`` and ``GroupNorm`` become :class:`FusedLayerNorm`,
    :class:`FusedRMSNorm` and :class:`FusedGroupNorm`. Other leaf modules that look like a norm, by
    name or by an ``eps``, and have at most a ``weight`` and a ``bias``, become a subclass of their
    class. This includes Gemma's, which multiply by ``1 + weight``, norms over the channels of
    images, dimension 1, which keep that dimension where it is in memory, and group norms.

    Before that, a copy of each runs beside the fused op, forward and backward, in the dtype and on
    the device of its parameters: on random rows of many magnitudes and shapes, on zeros, and on NaN
    and infinities. The random state of torch does not change. A module stays as it is if it differs
    by more than the roundings of its dtype, or does more than compute its result. The comparison
    cannot see everything: not what a forward does only from some number of rows on, nor an
    attribute that changes its meaning later.

    In 16 bits the fused forward rounds where the original does: once, or before the weight too
    (``rounding`` of :func:`fused_rms_norm`). If the comparison shows that, the report says
    ``same roundings``.

    Parameters on the meta device stay there. The copy then has random parameters on the CPU, and
    what the forward would do on another device is not seen.

    Forward hooks stay and run as before. The comparison holds for the module's present dtype, so
    convert after ``model.to(dtype)``. A wrapper that has replaced the class, ``forward`` or
    parameters of a norm prevents its conversion, so convert before ``fully_shard`` and the like.
    Inputs that no kernel takes (nested, sparse, complex) go to the original forward. In a class
    that is not PyTorch's, so do rows of another dtype than the parameters, images of a number of
    dimensions that was not compared, and calls with more than the input.

    Copies and pickles of a converted model are converted. Unpickling one needs this package: call
    :func:`revert` first, or save the ``state_dict``, which is the same before and after.

    Args:
        model: changed in place; may itself be a norm.
        include: only these norms: one or several patterns of :mod:`fnmatch` on names as in
            ``model.named_modules()``, or a predicate ``(name, module) -> bool``. Default: all.
        exclude: not these, even if included.
        residual: also let the norms add the residual, in blocks whose forward adds it right before
            one of them: ``h = r + f(x); r = h; h = self.norm(h)``, or ``h = self.norm(r + f(x))``.
            Such a block gets a subclass of its class, under the same name, with that forward. A
            sum that only the next block normalises stays an addition.

    Returns:
        The norms that changed, and those that did not, each with its reason. A norm with several
        names in the model is listed under the first.

    Raises:
        TypeError: ``model`` is not a module, or a selection has the wrong type.
        ValueError: a pattern matches no norm.
    """
    norms = _norms("convert", model)
    included = _selection("include", include, norms)
    excluded = _selection("exclude", exclude, norms)
    like = next(model.parameters(), torch.empty(0))
    verdicts: dict[Any, _Verdict] = {}
    shared: dict[int, Any] = {id(o): o for o in (*model.modules(), *model.parameters())}
    changes: list[tuple[nn.Module, type[nn.Module]]] = []
    converted, skipped = [], []
    for names, module in norms:
        before = type(module)
        try:
            if include is not None and id(module) not in included:
                raise Refusal("is not included")
            if id(module) in excluded:
                raise Refusal("is excluded")
            after, match = _judge_once(module, like, shared, verdicts)
        except Refusal as refusal:
            skipped.append(Skipped(names[0], before.__name__, str(refusal)))
            continue
        changes.append((module, after))
        facts = match.ulps, match.rounding, match.same_roundings, match.rounds_statistics
        converted.append(Converted(names[0], before.__name__, after.__name__, *facts))
    # Only now, so that an error above, such as one in a predicate, leaves the model unchanged.
    for module, after in changes:
        module.__dict__[CONVERTED] = module.__class__
        module.__class__ = after
    residuals = fuse_residuals(model) if residual else ()
    return Report(tuple(converted), tuple(skipped), residuals)


def revert(model: nn.Module) -> Report:
    """Undo :func:`convert`: give each norm that it changed its class back, in place.

    Args:
        model: a converted model, a copy of one, or an unpickled one.

    Returns:
        The norms that changed back. Those whose class or forward has been changed by something
        else since are skipped.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert: model must be a torch.nn.Module, not {type(model).__name__}")
    converted, skipped = [], []
    for name, module in model.named_modules():
        if CONVERTED not in module.__dict__:
            continue
        after = type(module)
        changed = None if is_fused(after) else "class"
        if "forward" in module.__dict__ and not _is_own_forward(module):
            changed = "forward"
        if changed is not None:
            reason = f"its {changed} was changed after convert: undo that first"
            skipped.append(Skipped(name, after.__name__, reason))
            continue
        module.__dict__.pop("forward", None)
        before = module.__dict__.pop(CONVERTED)
        module.__class__ = before
        converted.append(Converted(name, after.__name__, before.__name__, 0))
    return Report(tuple(converted), tuple(skipped))


def _is_own_forward(module: nn.Module) -> bool:
    """Whether forward on the instance is that of its class, as unhooking leaves it behind."""
    forward: Any = module.__dict__["forward"]
    return getattr(forward, "__func__", None) is type(module).forward and (
        forward.__self__ is module
    )


def _norms(function: str, model: Any) -> list[tuple[list[str], nn.Module]]:
    """The modules that look like norms, each once, with all its names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, not {type(model).__name__}")
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if ".parametrizations." not in f".{name}." and _looks_like_norm(module):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def _looks_like_norm(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    named = "norm" in type(module).__name__.lower() or _eps_name(module) is not None
    return named and (not module._modules or parametrize.is_parametrized(module))


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in EPS_NAMES if _has(module, name)), None)


def _has(module: nn.Module, name: str) -> bool:
    """``hasattr``, but False for a property that raises any error."""
    try:
        return hasattr(module, name)
    except Exception:
        return False


def _selection(argument: str, select: Select, norms: list[tuple[list[str], nn.Module]]) -> set[int]:
    """The ids of the norms that are selected by one of their names."""
    if select is None:
        return set()
    if callable(select):
        return {id(m) for names, m in norms if any(select(name, m) for name in names)}
    patterns = [select] if isinstance(select, str) else select
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"convert: {argument} must be a pattern, patterns or a predicate (name, module) -> "
            f"bool, not {select!r}"
        )
    chosen: set[int] = set()
    for pattern in patterns:
        matched = {id(m) for names, m in norms if any(fnmatchcase(n, pattern) for n in names)}
        if not matched:
            raise ValueError(f"convert: {argument} pattern {pattern!r} matches no norm")
        chosen |= matched
    return chosen


_Proof = tuple[type[nn.Module], Match]
_Verdict = _Proof | Refusal


def _judge_once(
    module: nn.Module, like: Tensor, shared: dict[int, Any], verdicts: dict[Any, _Verdict]
) -> _Proof:
    """As :func:`_judge`, with one proof for the norms of all layers, which are alike."""
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


def _judge(module: nn.Module, like: Tensor, shared: dict[int, Any]) -> _Proof:
    """The class that the module may get, and its proof. Raises a Refusal if there is none."""
    if CONVERTED in module.__dict__ or isinstance(module, _FUSED):
        raise Refusal("is fused already")
    given = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if any(map(is_lazy, given)):
        raise Refusal("is lazy: run the model once, which gives its parameters their shapes")
    like = given[0] if given else like
    shape = getattr(module, "normalized_shape", None) or (given[0].shape if given else (16,))
    try:
        _check_structure(module)
        _check_kind(like, given)
        if like.is_meta:  # the proof uses a copy with random parameters on the CPU
            like = torch.empty(0, dtype=like.dtype, device="cpu")
        if gate_parameter(type(module)) is not None:
            return _prove_with_gate(module, like, shape, shared)
        return _prove_without_gate(module, like, shape, shared)
    except Refusal as refusal:
        cols = 16 if not shape else shape if isinstance(shape, int) else shape[-1]
        raise explain(refusal, module, like, cols, shared) from None


def _prove_without_gate(
    module: nn.Module, like: Tensor, shape: Any, shared: dict[int, Any]
) -> _Proof:
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
    module: nn.Module, like: Tensor, shape: Any, shared: dict[int, Any]
) -> _Proof:
    """The proof of a norm over the last dimensions, or else of one over the channels of images."""
    try:
        return _prove_one(module, like, shape, shared)
    except Refusal as refusal:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(sizes) != 1 or not (refusal.is_of_run or refusal.is_of_values):
            raise
        ranks = image_ranks(module, like, sizes[0], shared)
        try:
            if ranks:
                return _prove_of_images(module, like, sizes, shared, ranks)
        except Refusal as of_images:
            if refusal.is_of_run:  # images are all that it takes
                raise of_images from None
        raise


def _prove_of_images(
    module: nn.Module, like: Tensor, channels: Any, shared: dict[int, Any], ranks: tuple[int, ...]
) -> _Proof:
    """The proof for as many of these numbers of dimensions as have one, with one formula."""
    formula: Formula | None = None
    refusal: Refusal | None = None  # of the most common number
    matches: dict[int, Match] = {}
    for rank in ranks:
        try:
            if formula is None:
                after, matches[rank] = _prove_one(module, like, channels, shared, (rank,))
                formula = recipe_of(after)
            else:
                each = formula._replace(images=(rank,))
                fused = _subclassed(type(module), each)
                matches[rank] = prove(module, fused, each, like, channels, shared)
        except Refusal as reason:
            refusal = refusal or reason
    if formula is None:
        assert refusal is not None
        raise refusal
    after = _subclassed(type(module), formula._replace(images=tuple(sorted(matches))))
    found = matches.values()
    worst = max(match.ulps for match in found), max(match.differing for match in found)
    return after, Match(worst[0], formula.rounding, worst[1])


def _prove_one(
    module: nn.Module,
    like: Tensor,
    shape: Any,
    shared: dict[int, Any],
    images: tuple[int, ...] = (),
) -> _Proof:
    """The proof of the formula with the module's own roundings, or else of the closest one."""
    proofs: dict[Formula, _Proof] = {}
    refusal: Refusal | None = None  # of the likeliest formula
    for formula in _image_candidates(module, images) if images else _candidates(module, like):
        if any((f.norm, f.eps) != (formula.norm, formula.eps) for f in proofs):
            continue  # it is another formula, whatever its roundings
        try:
            after = _subclassed(type(module), formula)
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


def _prove_with_gate(module: nn.Module, like: Tensor, shape: Any, shared: dict[int, Any]) -> _Proof:
    """The proof of the calls with a gate, and of those without one, if it may be left out."""
    alone: _Proof | None = None
    parameter, eps_name = gate_parameter(type(module)), _eps_name(module)
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


def _subclassed(original: type[nn.Module], formula: Formula) -> type[nn.Module]:
    try:
        return fused_class(original, formula)
    except Exception as error:  # of its metaclass or __init_subclass__
        raise Refusal(f"its class refuses a subclass: {type(error).__name__}: {error}") from error


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
        value = getattr(module, name, None)
        if value is None:
            continue
        if value is not module._parameters.get(name) and value is not module._buffers.get(name):
            raise Refusal(f"its {name} is not a parameter")
        if type(value) not in (nn.Parameter, Tensor) or getattr(value, "is_quantized", False):
            raise Refusal(f"its {name} is a {type(value).__name__}, not a plain parameter")
    eps_name = _eps_name(module)
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
        Formula(norm, factor, eps, rounding)
        for eps in _eps_of(module)
        for factor in factors
        for norm in norms
        for rounding in roundings
    ]


def _image_candidates(module: nn.Module, images: tuple[int, ...]) -> list[Formula]:
    norms: list[Norm] = ["layer_norm", "rms_norm"]
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        norms = ["layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm"]
    elif getattr(module, "bias", None) is None:
        norms.reverse()
    return [
        Formula(norm, "weight", eps, images=images) for eps in _eps_of(module) for norm in norms
    ]


def _eps_of(module: nn.Module) -> tuple[str | float, ...]:
    """The attribute that holds eps, or the numbers that the code may have."""
    name = _eps_name(module)
    return EPS_NUMBERS if name is None else (name,)
