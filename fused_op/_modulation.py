"""The form of a modulation in the source of a forward: ``_rewrite.py`` looks for it."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class Modulation(NamedTuple):
    """The parts of ``normalized * (1 + scale) + shift``; without a shift, it is ``None``."""

    normalized: ast.expr
    scale: ast.expr
    shift: ast.expr

    def names(self) -> set[str]:
        """The variables that scale and shift read."""
        nodes = (*ast.walk(self.scale), *ast.walk(self.shift))
        return {node.id for node in nodes if isinstance(node, ast.Name)}


def modulation_of(expression: ast.expr | None) -> Modulation | None:
    """The parts of an expression that modulates, in any order of its operands.

    Scale and shift only read: they may then be evaluated before the norm.
    """
    nothing: tuple[Any, ast.expr] = expression, ast.Constant(None)
    for product, shift in (*_operands(expression, ast.Add), nothing):
        for normalized, factor in _operands(product, ast.Mult):
            scale = _less_one(factor)
            if scale is not None and _only_reads(scale) and _only_reads(shift):
                return Modulation(normalized, scale, shift)
    return None


def _operands(expression: ast.expr | None, op: type) -> list[tuple[ast.expr, ast.expr]]:
    """Left and right of a commutative operation, both ways round."""
    if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, op):
        return []
    left, right = expression.left, expression.right
    return [(left, right), (right, left)]


def _less_one(factor: ast.expr) -> ast.expr | None:
    """``s`` of ``1 + s``, ``s[…]`` of ``(1 + s)[…]``, and likewise with ``unsqueeze``."""
    for one, rest in _operands(factor, ast.Add):
        if isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value == 1:
            return rest
    match factor:
        case ast.Subscript(value=inner, slice=index, ctx=ctx):
            scale = _less_one(inner)
            return None if scale is None else ast.Subscript(scale, index, ctx)
        case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze", ctx=ctx), args=args):
            scale = _less_one(inner)
            if scale is not None:
                return ast.Call(ast.Attribute(scale, "unsqueeze", ctx), args, factor.keywords)
    return None


_READING = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple),
    *(ast.UnaryOp, ast.USub, ast.Load, ast.keyword),
)


def _only_reads(expression: ast.expr) -> bool:
    """Whether it is made of variables, attributes, indices and ``unsqueeze`` alone."""
    nodes = list(ast.walk(expression))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    allowed = all(isinstance(node, (*_READING, ast.Call)) for node in nodes)
    return allowed and all(
        isinstance(call.func, ast.Attribute) and call.func.attr == "unsqueeze" for call in calls
    )
