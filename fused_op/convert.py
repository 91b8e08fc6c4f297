"""Replace the norms of a model by fused ones, in place, each after a check on random rows.

Only the ``__class__`` of a module changes. Parameters, hooks and the state of the optimizer stay
the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from ._arguments import check_bools
from ._block import Block, fuse_blocks
from ._fused_class import is_fused
from ._judge import Verdict, judge_once, name_of_eps
from ._options import Rounding
from ._probe import Refusal
from ._recipe import RECIPE
from .modules import CONVERTED

Select = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

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
    blocks: tuple[Block, ...] = ()

    def __str__(self) -> str:
        """One line for each norm, and for each block that was searched."""
        rows = [(c.name, f"{c.before} -> {c.after}", c.note()) for c in self.converted]
        rows += [(s.name, s.type_name, s.reason) for s in self.skipped]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"norms changed: {len(self.converted)}, left as they are: {len(self.skipped)}"]
        for name, what, note in rows:
            lines.append(f"  {name:{widths[0]}}  {what:{widths[1]}}  {note}".rstrip())
        for block in self.blocks:
            forms = ("additions", "modulations", "activations")
            counts = ", ".join(f"{form} {n}" for form in forms if (n := getattr(block, form)))
            what = block.reason or f"done by its norms: {counts}"
            lines.append(f"  {block.name or '(the model)'}  {block.type_name}  {what}")
        return "\n".join(lines)


def convert(
    model: nn.Module,
    *,
    include: Select = None,
    exclude: Select = None,
    residual: bool = False,
    modulation: bool = False,
    activation: bool = False,
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
        modulation: let the norms also apply the scale and shift of diffusion transformers (AdaLN),
            in modules whose forward has ``self.norm(x) * (1 + scale) + shift``, in one statement or
            in two. Such a module gets a subclass, too. In 16 bits the result is rounded once, where
            the original rounds after each operation.
        activation: let group norms also apply the SiLU behind them, as in the blocks of UNets and
            autoencoders: ``self.silu(self.norm(x))`` in one statement or in two, also with
            ``F.silu`` or in an ``nn.Sequential``. Such a module gets a subclass, too. In 16 bits
            the result is rounded once, not twice.

    Returns:
        The norms that changed, and those that did not, each with its reason. A norm with several
        names in the model is listed under the first.

    Raises:
        TypeError: ``model`` is not a module, or another argument has the wrong type.
        ValueError: a pattern matches no norm.
    """
    check_bools("convert", residual=residual, modulation=modulation, activation=activation)
    norms = _norms("convert", model)
    included = _selection("include", include, norms)
    excluded = _selection("exclude", exclude, norms)
    like = next(model.parameters(), torch.empty(0))
    verdicts: dict[Any, Verdict] = {}
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
            after, match = judge_once(module, like, shared, verdicts)
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
    wanted = residual, modulation, activation
    blocks = fuse_blocks(model, *wanted) if any(wanted) else ()
    return Report(tuple(converted), tuple(skipped), blocks)


def revert(model: nn.Module) -> Report:
    """Undo :func:`convert`: give each norm and block that it changed its class back, in place.

    Args:
        model: a converted model, a copy of one, or an unpickled one.

    Returns:
        The modules that changed back. Those whose class or forward has been changed by something
        else since are skipped.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert: model must be a torch.nn.Module, not {type(model).__name__}")
    converted, skipped = [], []
    for name, module in model.named_modules():
        after = type(module)
        # A converted instance may have made this one, as a slice of nn.Sequential.
        original, *_ = vars(after).get(RECIPE, (None,))
        before = module.__dict__.get(CONVERTED, original)
        if before is None:
            continue
        changed = None if is_fused(after) else "class"
        if "forward" in module.__dict__ and not _is_own_forward(module):
            changed = "forward"
        if changed is not None:
            reason = f"its {changed} was changed after convert: undo that first"
            skipped.append(Skipped(name, after.__name__, reason))
            continue
        module.__dict__.pop("forward", None)
        module.__dict__.pop(CONVERTED, None)
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
    if module._modules and not parametrize.is_parametrized(module):
        return False  # before its attributes are looked at: some models warn of that
    return "norm" in type(module).__name__.lower() or name_of_eps(module) is not None


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
