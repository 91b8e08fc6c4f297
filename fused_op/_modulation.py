"""The form of a modulation in the source of a forward: ``_rewrite.py`` looks for it."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class Modulation(NamedTuple):
    """The parts of ``normalized * (1 + scale) + shift``."""

    normalized: ast.expr
    scale: ast.expr
    shift: ast.expr | None
    """``None``: nothing is added."""

    def names(self) -> set[str]:
        """The variables that scale and shift read."""
        parts = (self.scale,) if self.shift is None else (self.scale, self.shift)
        nodes = (node for part in parts for node in ast.walk(part))
        return {node.id for node in nodes if isinstance(node, ast.Name)}


def modulation_of(expression: ast.expr | None) -> Modulation | None:
    """The parts of an expression that modulates, in any order of its operands.

    Scale and shift only read variables: they may then be evaluated before the norm.
    """
    alone: tuple[Any, None] = expression, None
    for product, shift in (*_operands(expression, ast.Add), alone):
        for normalized, factor in _operands(product, ast.Mult):
            scale = _less_one(factor)
            if scale is not None and _only_reads(scale) and (shift is None or _only_reads(shift)):
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
        # Not 1.0, which makes a float of an integer.
        if isinstance(one, ast.Constant) and type(one.value) is int and one.value == 1:
            return rest
    match factor:
        case ast.Subscript(value=inner, slice=index, ctx=ctx):
            scale = _less_one(inner)
            made: ast.expr | None = scale and ast.Subscript(scale, index, ctx)
        case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze", ctx=ctx), args=args):
            scale = _less_one(inner)
            method = scale and ast.copy_location(ast.Attribute(scale, "unsqueeze", ctx), factor)
            made = method and ast.Call(method, args, factor.keywords)
        case _:
            return None
    return made and ast.copy_location(made, factor)


_READING = (
    *(ast.Name, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub),
    *(ast.Load, ast.keyword),
)


def _only_reads(node: ast.AST) -> bool:
    """Whether it is made of variables, indices and ``unsqueeze`` alone: attributes may do more."""
    if isinstance(node, ast.Call):
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr != "unsqueeze":
            return False
        return all(map(_only_reads, (method.value, *node.args, *node.keywords)))
    return isinstance(node, _READING) and all(map(_only_reads, ast.iter_child_nodes(node)))
