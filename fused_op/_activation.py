"""The form of an activation in the source of a forward: ``_rewrite.py`` looks for it."""

from __future__ import annotations

import ast
import types
from typing import NamedTuple

import torch.nn.functional as F

SILU = F.silu  # PyTorch's own: a program may put another function under that name


class Activation(NamedTuple):
    """The parts of ``function(normalized)``."""

    function: ast.expr
    normalized: ast.expr


def activation_of(
    expression: ast.expr | None, modules: frozenset[str], forward: types.FunctionType
) -> Activation | None:
    """The parts of an expression of a forward that applies SiLU.

    Args:
        expression: any, or none.
        modules: the names of the SiLU modules that ``self`` has.
        forward: the function whose globals tell what ``F.silu`` is.
    """
    match expression:
        case ast.Call(func=function, args=[x], keywords=[]) if not isinstance(x, ast.Starred):
            if _is_module(function, modules) or _is_silu(function, forward):
                return Activation(function, x)
    return None


def _is_module(function: ast.expr, modules: frozenset[str]) -> bool:
    match function:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name in modules
    return False


def _is_silu(function: ast.expr, forward: types.FunctionType) -> bool:
    names = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    code = forward.__code__
    if not isinstance(function, ast.Name) or function.id in (*code.co_varnames, *code.co_cellvars):
        return False
    found = forward.__globals__.get(function.id)
    for name in reversed(names):
        found = found.__dict__.get(name) if isinstance(found, types.ModuleType) else None
    return found is SILU
