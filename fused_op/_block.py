"""For a block of any library, a subclass of it whose norms do what its forward did around them.

They add the residual, modulate, or apply SiLU. ``_rewrite.py`` makes that forward, and proves it;
``add_norm``, ``norm_add_norm``, ``modulated_norm`` and ``activated_norm`` are what it calls.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as global_hooks

from ._activation import SILU
from ._contexts import is_autocast
from ._fused_class import Formula, is_fused
from ._group_norm import FusedGroupNorm, fused_group_norm
from ._grouped_class import GroupedFormula
from ._modulated_norm import fused_modulated_layer_norm, fused_modulated_rms_norm
from ._post_add_pre_rms_norm import fused_post_add_pre_rms_norm
from ._probe import Refusal
from ._recipe import RECIPE, made_once, make_subclass, recipe_of
from ._rewrite import ACTIVATE, BOTH, HELPER, MODULATE, Found, Wanted, rewritten
from .functional import fused_add_layer_norm, fused_add_rms_norm
from .modules import CONVERTED, FusedLayerNorm, FusedRMSNorm, takes_original

# Elements from which one call of two norms pays outside of compiled code: it takes the host some 40
# us longer than two calls, and a GPU then has work for longer.
MANY = 1 << 22


class Block(NamedTuple):
    """A module with norms of its own, and what its norms do now."""

    name: str
    type_name: str
    additions: int
    """How many residuals they add."""
    modulations: int
    """How often they modulate."""
    activations: int
    """How often they apply SiLU."""
    reason: str
    """Why none of these; empty otherwise."""


def fuse_blocks(
    model: nn.Module, residual: bool, modulation: bool, activation: bool
) -> tuple[Block, ...]:
    """Give each block of a converted model, whose forward allows it, one that asks its norms."""
    blocks = []
    for name, module in model.named_modules():
        before, options = type(module), (residual, modulation, activation)
        earlier = recipe_of(before)
        if isinstance(earlier, Wanted):  # of an earlier call
            done = earlier.additions, earlier.modulations, bool(earlier.groups)
            options = tuple(map(operator.or_, options, done))
            # Not by CONVERTED, which an instance that such a class has made does not have.
            before, *_ = getattr(before, RECIPE)
        wanted = _wanted(module, *options)
        if not (wanted.norms or wanted.groups) or wanted == earlier:
            continue
        try:
            if "forward" in module.__dict__:
                raise Refusal("its forward is replaced on the instance")
            if isinstance(earlier, Wanted) and not is_fused(type(module)):
                raise Refusal("its class was changed after convert: undo that first")
            after = block_class(before, wanted)
        except Refusal as refusal:
            blocks.append(Block(name, before.__name__, 0, 0, 0, str(refusal)))
            continue
        module.__dict__[CONVERTED] = before
        module.__class__ = after
        found: Found = getattr(after, _FOUND)
        blocks.append(Block(name, before.__name__, *found, ""))
    return tuple(blocks)


def _wanted(module: nn.Module, residual: bool, modulation: bool, activation: bool) -> Wanted:
    """What the forward of a module is searched for, by the names of its norms and activations."""
    children = {k: c for k, c in module._modules.items() if c is not None}  # with all their names
    converted = {k: type(c) for k, c in children.items() if CONVERTED in c.__dict__}
    rows = frozenset(k for k, cls in converted.items() if _is_of_rows(cls))
    groups = frozenset(k for k, cls in converted.items() if _is_of_groups(cls))
    silus = frozenset(k for k, c in children.items() if type(c) is nn.SiLU)
    if groups and type(module).forward in (_SEQUENCE, _forward_of_sequence):
        groups &= {k for k, following in pairwise(children) if following in silus}
    if not rows:
        residual = modulation = False
    return Wanted(
        rows if residual or modulation else frozenset(),
        residual,
        modulation,
        *((groups, silus) if activation and groups else ()),
    )


def add_norm(norm: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """``norm(left + right)`` and the sum, in one kernel where the norm can be asked for that.

    Otherwise by the norm's own call: where it is no longer as ``convert`` left it, or the operands
    would be broadcast or converted.
    """
    if _is_free(norm) and _takes_sum(norm, left, right):
        weight, shape, eps, zero_centered, rounding = _arguments_of(norm)
        options: dict[str, Any] = {
            "normalized_shape": shape,
            "zero_centered": zero_centered,
            "rounding": rounding,
        }
        if _formula_of(type(norm)).norm == "layer_norm":
            bias = norm.__dict__["_parameters"].get("bias")
            return fused_add_layer_norm(left, right, weight, bias, eps, **options)
        return fused_add_rms_norm(left, right, weight, eps, **options)
    sum = left + right
    return norm(sum), sum


def norm_add_norm(post: Any, pre: Any, branch: Any, residual: Any) -> tuple[Any, Any]:
    """``pre(residual + post(branch))`` and the sum, likewise, where both norms in one call pay."""
    if (is_dynamo_compiling() or (type(branch) is Tensor and branch.numel() >= MANY)) and all(
        _is_free(norm)
        and _takes_sum(norm, branch, residual)
        and _formula_of(type(norm)).norm == "rms_norm"
        for norm in (post, pre)
    ):
        (post_weight, *options), (pre_weight, *others) = map(_arguments_of, (post, pre))
        shape, eps, zero_centered, rounding = options
        weights = [w for w in (post_weight, pre_weight) if w is not None]
        if options == others and all(
            each in (None, branch.shape[-1:]) for each in (shape, *(w.shape for w in weights))
        ):
            return fused_post_add_pre_rms_norm(
                *(branch, residual, post_weight, pre_weight, eps),
                zero_centered=zero_centered,
                rounding=rounding,
            )
    return add_norm(pre, residual, post(branch))


_ABSENT: Any = object()


def modulated_norm(norm: Any, input: Any, scale: Any, shift: Any = _ABSENT) -> Any:
    """``norm(input) * (1 + scale) + shift``, in one kernel where the norm can be asked for that.

    Otherwise in these operations: also under autocast, which has dtypes of its own for them, and on
    the CPU if each row has an entry of its own, where they are faster.
    """
    if shift is not _ABSENT and not _is_like(shift, scale):
        return modulated_norm(norm, input, scale) + shift
    if _is_free(norm) and _modulates(norm, input, scale, shift):
        weight, _, eps, _, _ = _arguments_of(norm)
        shift = None if shift is _ABSENT else shift
        if _formula_of(type(norm)).norm == "layer_norm":
            bias = norm.__dict__["_parameters"].get("bias")
            return fused_modulated_layer_norm(input, scale, shift, weight, bias, eps)
        return fused_modulated_rms_norm(input, scale, shift, weight, eps)
    product = norm(input) * (1 + scale)
    return product if shift is _ABSENT else product + shift


def activated_norm(norm: Any, activation: Any, input: Any) -> Any:
    """``activation(norm(input))``, in one kernel where both can be asked for that."""
    if _is_free_silu(activation) and _is_free_group_norm(norm, input):
        formula = _formula_of(type(norm))
        weight, bias = (norm.__dict__["_parameters"].get(name) for name in ("weight", "bias"))
        groups, eps = formula.groups_of(norm), formula.eps_of(norm)
        return fused_group_norm(input, groups, weight, bias, eps, activation="silu")
    return activation(norm(input))


_SILU_FORWARD = nn.SiLU.forward
_SEQUENCE, _ITERATION = nn.Sequential.forward, nn.Sequential.__iter__  # PyTorch's own


def _forward_of_sequence(self: Any, input: Any) -> Any:
    """The forward of ``nn.Sequential``, with each group norm and SiLU in one kernel."""
    done: Any = _ABSENT
    for module, following in pairwise([*self._modules.values(), None]):
        if module is done:
            done = _ABSENT
        elif type(following) is nn.SiLU and _is_of_groups(type(module)):
            input, done = activated_norm(module, following, input), following
        else:
            input = module(input)
    return input


def _is_free_silu(activation: Any) -> bool:
    return activation is SILU or (
        type(activation) is nn.SiLU
        and nn.SiLU.forward is _SILU_FORWARD
        and F.silu is SILU  # which that calls
        and not _is_hooked(activation.__dict__)
    )


def _is_free_group_norm(norm: Any, input: Any) -> bool:
    """Whether the norm is as ``convert`` left it, and its forward would call the fused op."""
    if not isinstance(norm, nn.Module) or not _is_of_groups(type(norm)):
        return False
    state, formula = norm.__dict__, _formula_of(type(norm))
    if CONVERTED not in state or not is_fused(type(norm)) or _is_hooked(state):
        return False
    affine = [p for p in state["_parameters"].values() if p is not None]
    return (
        type(input) is Tensor
        and getattr(norm, "activation", None) is None
        # Wrappers hold a parameter elsewhere, such as FSDP with flat parameters.
        and all(p in state["_parameters"] or not hasattr(norm, p) for p in ("weight", "bias"))
        and (type(norm) is FusedGroupNorm or formula.takes(input, affine[0] if affine else None))
        # Compiled code cannot ask for all of the reasons for which the op might fail.
        and not takes_original(
            norm, input, *affine, has_failed=not is_dynamo_compiling(), is_image=True
        )
    )


def _is_like(tensor: Any, other: Any) -> bool:
    return (
        type(tensor) is type(other) is Tensor
        and tensor.shape == other.shape
        and tensor.dtype is other.dtype
        and tensor.device == other.device
    )


def _modulates(norm: Any, input: Any, scale: Any, shift: Any) -> bool:
    """Whether the kernel computes what the norm and its modulation would."""
    if not type(input) is type(scale) is Tensor or input.dtype is not scale.dtype:
        return False
    parameters = [p for p in norm.__dict__["_parameters"].values() if p is not None]
    if takes_original(norm, input, *parameters) or not all(
        p.dtype is input.dtype and p.shape == input.shape[-1:] for p in parameters
    ):
        return False
    weight, shape, _, zero_centered, rounding = _arguments_of(norm)
    if zero_centered or (rounding != "once" and weight is not None):
        return False
    tensors = [t for t in (input, scale, shift, *parameters) if t is not _ABSENT]
    return (
        shape in (None, input.shape[-1:])
        and all(t.device == input.device for t in tensors)
        and _has_entries_for(input, scale)
        and not _are_unsaved(tensors)
        and not is_autocast(input)
    )


def _are_unsaved(tensors: list[Tensor]) -> bool:
    """Whether autograd would refuse to save one of them, as the kernel asks it to."""
    if is_dynamo_compiling() or not torch.is_grad_enabled():
        return False
    return any(tensor.is_inference() for tensor in tensors)


def _has_entries_for(input: Tensor, scale: Tensor) -> bool:
    """Whether scale broadcasts to input, and its rows are shared by neighbouring ones of input."""
    if scale.dim() not in (1, input.dim()) or scale.shape[-1:] != input.shape[-1:]:
        return False
    shared = False
    for entries, rows in zip(scale.shape[:-1], input.shape[:-1], strict=False):
        shared = shared or entries != rows
        if shared and entries != 1:
            return False
    return shared or scale.dim() == 1 or input.device.type != "cpu"


def _takes_sum(norm: Any, left: Any, right: Any) -> bool:
    return (
        type(left) is Tensor
        and type(right) is Tensor
        and not takes_original(norm, left, right)
        and left.dtype is right.dtype
        and left.shape == right.shape
        and all(
            parameter is None or parameter.dtype is left.dtype
            for parameter in norm.__dict__["_parameters"].values()
        )
    )


def _is_free(norm: Any) -> bool:
    """Whether its fused op may be called in its place: it is as ``convert`` left it."""
    if not isinstance(norm, nn.Module) or not is_fused(type(norm)):
        return False
    state = norm.__dict__
    return (
        _is_of_rows(type(norm))
        and not _is_hooked(state)
        and not any(state.get(option) for option in _OPTIONS)
        # Wrappers hold a parameter elsewhere, such as FSDP with flat parameters.
        and all(p in state["_parameters"] or not hasattr(norm, p) for p in ("weight", "bias"))
    )


# Of FusedLayerNorm and FusedRMSNorm: what convert does not set.
_OPTIONS = ("dropout_p", "zero_centered", "out_dtype", "memory_efficient")


def _is_of_groups(cls: Any) -> bool:
    return isinstance(_formula_of(cls), GroupedFormula)


def _is_of_rows(cls: Any) -> bool:
    """Whether it is the fused class of a norm over the last dimensions of one input."""
    formula = _formula_of(cls)
    return isinstance(formula, Formula) and not formula.images


_OF_MODULES: dict[Any, Formula | GroupedFormula] = {
    FusedLayerNorm: Formula("layer_norm", "weight", "eps"),
    FusedRMSNorm: Formula("rms_norm", "weight", "eps"),
    FusedGroupNorm: GroupedFormula("num_groups", "eps"),
}


def _formula_of(cls: Any) -> Any:
    """What ``convert`` made the class by: of a norm over rows or images, a Formula."""
    formula = _OF_MODULES.get(cls)
    return recipe_of(cls) if formula is None else formula


def _arguments_of(norm: Any) -> tuple[Any, ...]:
    """Of a fused module: weight, normalized_shape, eps, zero_centered and rounding."""
    formula = _formula_of(type(norm))
    state = norm.__dict__
    weight = state["_parameters"].get("weight")
    if formula.factor == "1":
        weight = None
    elif formula.factor == "rounded 1 + weight" and weight is not None:
        weight = weight + 1
    rounding = state.get("rounding", formula.rounding)
    zero_centered = formula.factor == "1 + weight"
    return weight, state.get("normalized_shape"), formula.eps_of(norm), zero_centered, rounding


def _is_hooked(state: dict[str, Any]) -> bool:
    """Whether a call of the norm is more than its forward."""
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or state.get("_compiled_call_impl")
        or global_hooks._global_forward_hooks
        or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks
        or global_hooks._global_backward_pre_hooks
    )


_FOUND = "_fused_op_found"


@made_once
def block_class(original: Any, wanted: Wanted) -> type[nn.Module]:
    """The class for a block with norms of these names, which holds what they do as ``_FOUND``.

    Raises:
        Refusal: there is none.
    """
    if original.forward is _SEQUENCE and wanted.groups:
        if original.__iter__ is not _ITERATION:
            raise Refusal("it iterates over its modules in a way of its own")
        forward, found = _forward_of_sequence, Found(0, 0, len(wanted.groups))
    else:
        forward, found = rewritten(original.forward, wanted)
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": forward,
        _FOUND: found,
        HELPER: staticmethod(add_norm),
        BOTH: staticmethod(norm_add_norm),
        MODULATE: staticmethod(modulated_norm),
        ACTIVATE: staticmethod(activated_norm),
    }
    # Under the name of the original: libraries look for the blocks of a model by it.
    return make_subclass(original, wanted, block_class, original.__name__, members)
