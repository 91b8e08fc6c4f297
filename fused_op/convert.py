"""Swap the norms of a model for fused ones, in place, each after a check on random rows.

Only a module's ``__class__`` changes: parameters, hooks, names and the optimizer's state stay the
very same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._fused_class import EPS_NAMES, fused_class, is_fused
from ._proof import Formula, Refusal, prove
from .modules import FusedLayerNorm, FusedRMSNorm
from .reference import Norm

Select = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# In a converted module's __dict__: its class before. Absent where a user built a FusedLayerNorm.
_MARK = "_class_before_convert"
_NOTE = {2: "up to 2 ulp apart: the original rounds before the weight too"}


class Converted(NamedTuple):
    """A module whose class changed."""

    name: str
    before: str
    after: str
    # How many spacings of the dtype the results of both may be apart, by their roundings to it: 1,
    # or 2 where the original rounds the normalised values too; 0 in a report of revert.
    ulps: int


class Skipped(NamedTuple):
    """A norm that stayed as it was."""

    name: str
    type_name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What became of each norm in a model; ``str()`` of it is a table."""

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]

    def __str__(self) -> str:
        """One line for each norm."""
        rows = [(c.name, f"{c.before} -> {c.after}", _NOTE.get(c.ulps, "")) for c in self.converted]
        rows += [(s.name, s.type_name, s.reason) for s in self.skipped]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"norms changed: {len(self.converted)}, left as they are: {len(self.skipped)}"]
        for name, what, note in rows:
            lines.append(f"  {name:{widths[0]}}  {what:{widths[1]}}  {note}".rstrip())
        return "\n".join(lines)


def convert(model: nn.Module, *, include: Select = None, exclude: Select = None) -> Report:
    """Give every norm of the model that can be proved equal a fused forward, in place.

    ``torch.nn.LayerNorm`` and ``RMSNorm`` become :class:`FusedLayerNorm` and :class:`FusedRMSNorm`.
    Other leaf modules with an ``eps`` or ``variance_epsilon``, at most a ``weight`` and a ``bias``,
    and no buffers become a subclass of their class; Gemma's, which multiply by ``1 + weight``, too.
    Each is first run beside the fused op, forward and backward, on random rows in the dtype and on
    the device of its parameters; the random state of torch does not change. What differs by more
    than the roundings of the dtype is left as it is.

    Forward hooks stay and run as before. A proof holds for the dtype that the module has, so
    convert after ``model.to(dtype)``. In a class that is not PyTorch's, rows of another dtype than
    the parameters, and calls with more than the input, still take the original forward. A wrapper
    that replaced the class, ``forward`` or parameters of a norm keeps it from conversion, so
    convert before ``fully_shard`` and the like.

    Copies and pickles of a converted model are converted. To unpickle one takes this package:
    :func:`revert` first, or save the ``state_dict``, which is the same before and after.

    Args:
        model: changed in place; may itself be a norm.
        include: only these: a pattern or several as of :mod:`fnmatch` on names as in
            ``model.named_modules()``, or a predicate ``(name, module) -> bool``. Default: all.
        exclude: not these, though included.

    Returns:
        The norms that changed, and those that did not with the reason of each. A norm that the
        model has under several names is listed under the first.

    Raises:
        TypeError: ``model`` is no module, or a selection is of the wrong kind.
        ValueError: a pattern matches no norm.
    """
    norms = _norms("convert", model)
    included = _selection("include", include, norms)
    excluded = _selection("exclude", exclude, norms)
    like = next(model.parameters(), torch.empty(0))
    changes: list[tuple[nn.Module, type[nn.Module]]] = []
    converted, skipped = [], []
    for names, module in norms:
        before = type(module)
        try:
            if include is not None and id(module) not in included:
                raise Refusal("is not included")
            if id(module) in excluded:
                raise Refusal("is excluded")
            after, ulps = _judge(module, like)
        except Refusal as refusal:
            skipped.append(Skipped(names[0], before.__name__, str(refusal)))
            continue
        changes.append((module, after))
        converted.append(Converted(names[0], before.__name__, after.__name__, ulps))
    # Only now: an error on the way here, such as one in a predicate, has left the model alone.
    for module, after in changes:
        module.__dict__[_MARK] = module.__class__
        module.__class__ = after
    return Report(tuple(converted), tuple(skipped))


def revert(model: nn.Module) -> Report:
    """Undo :func:`convert`: give each norm that it changed its class back, in place.

    Args:
        model: a converted model, or a copy of one, or one unpickled.

    Returns:
        The norms that changed back. Skipped are those whose class something else has changed since.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert: model must be a torch.nn.Module, not {type(model).__name__}")
    converted, skipped = [], []
    for name, module in model.named_modules():
        if _MARK not in module.__dict__:
            continue
        after = type(module)
        if not is_fused(after):
            reason = "its class was changed after convert: undo that first"
            skipped.append(Skipped(name, after.__name__, reason))
            continue
        before = module.__dict__.pop(_MARK)
        module.__class__ = before
        converted.append(Converted(name, after.__name__, before.__name__, 0))
    return Report(tuple(converted), tuple(skipped))


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
    return next((name for name in EPS_NAMES if hasattr(module, name)), None)


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


def _judge(module: nn.Module, like: Tensor) -> tuple[type[nn.Module], int]:
    """The class that the module may get and the ulps of :func:`prove`, or a Refusal."""
    if _MARK in module.__dict__ or isinstance(module, (FusedLayerNorm, FusedRMSNorm)):
        raise Refusal("is fused already")
    eps_name = _structure(module)
    params = [p for p in module._parameters.values() if p is not None]
    like = params[0] if params else like
    if like.device.type == "meta":
        raise Refusal("is on the meta device, where nothing can be proved: give it memory first")
    if like.device.type not in ("cpu", "cuda"):
        raise Refusal(f"is on {like.device.type}, for which there is no kernel")
    if like.dtype not in _DTYPES:
        raise Refusal(f"is of {like.dtype}, for which there is no kernel")
    if any((p.dtype, p.device) != (like.dtype, like.device) for p in params):
        raise Refusal("its weight and bias differ in dtype or device")
    shape = getattr(module, "normalized_shape", None) or (params[0].shape if params else (16,))
    refusal = Refusal()
    for formula in _candidates(module):
        try:
            after = fused_class(type(module), *formula, eps_name)
            return after, prove(module, after, formula, like, shape)
        except Refusal as error:
            refusal = error if not refusal.args else refusal  # the first is the likeliest
    raise refusal


def _structure(module: nn.Module) -> str:
    """The name of its eps, after a check that its state is no more than weight, bias and eps."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Refusal("is compiled by TorchScript")
    if parametrize.is_parametrized(module):
        raise Refusal("is parametrized (torch.nn.utils.parametrize), by a class of its own")
    if "forward" in module.__dict__:
        raise Refusal("its forward is replaced on the instance")
    if module._modules:
        raise Refusal("contains other modules")
    if module._buffers:
        raise Refusal(f"has buffers ({', '.join(module._buffers)})")
    if extra := [name for name in module._parameters if name not in ("weight", "bias")]:
        raise Refusal(f"has parameters other than weight and bias ({', '.join(extra)})")
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if value is None:
            continue
        if module._parameters.get(name) is not value:
            raise Refusal(f"its {name} is not a parameter")
        if type(value) is not nn.Parameter or value.is_quantized:
            raise Refusal(f"its {name} is a {type(value).__name__}, not a plain parameter")
    eps_name = _eps_name(module)
    if eps_name is None:
        raise Refusal("has no eps")
    if not isinstance(eps := getattr(module, eps_name), (float, int)) and eps is not None:
        raise Refusal(f"its {eps_name} is a {type(eps).__name__}, not a number")
    return eps_name


def _candidates(module: nn.Module) -> list[Formula]:
    norms: list[Norm] = ["rms_norm", "layer_norm"]
    if isinstance(module, nn.LayerNorm) or getattr(module, "bias", None) is not None:
        norms = ["layer_norm"]
    elif isinstance(module, nn.RMSNorm):
        norms = ["rms_norm"]
    formulas = [Formula(norm, zero_centered=False) for norm in norms]
    if type(module) in (nn.LayerNorm, nn.RMSNorm) or getattr(module, "weight", None) is None:
        return formulas
    return formulas + [Formula(norm, zero_centered=True) for norm in norms]
