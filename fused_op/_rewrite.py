"""A forward with other statements: what ``_residual.py`` gives to a block.

The proof is one of the source: a forward is compiled once more, with statements of three forms
replaced by others that mean the same. That the source is what runs is proved by its bytecode.

=============================================  ====================================================
``h = r + f(…)``; ``r = h``; ``h = self.n(h)``  ``h, r = add_norm(self.n, r, f(…))``
the same with ``h = self.p(f(…))`` before it    ``h, r = norm_add_norm(self.p, self.n, f(…), r)``
``h = self.n(r + f(…))``                        ``h, _ = add_norm(self.n, r, f(…))``
=============================================  ====================================================
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any, cast

from ._probe import Refusal

HELPER = "_fused_op_add_norm"  # the name of add_norm in a block
BOTH = "_fused_op_norm_add_norm"  # and of norm_add_norm


def rewritten(forward: Any, norms: frozenset[str]) -> tuple[types.FunctionType, int]:
    """A forward with the additions before its norms fused, and how many there are.

    Args:
        forward: of a class.
        norms: the names of the norms that may add.

    Raises:
        Refusal: there is none, or it is not certain what the forward does.
    """
    if not isinstance(forward, types.FunctionType):
        raise Refusal("its forward is no function")
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is not None:
        inner, additions = rewritten(wrapped, norms)
        return _with_inner(forward, wrapped, inner), additions
    if forward.__code__.co_freevars:
        raise Refusal("its forward is a closure")
    # The whole file: what a file imports changes the bytecode of its functions.
    lines = linecache.getlines(forward.__code__.co_filename, forward.__globals__)
    try:
        tree = ast.parse("".join(lines))
        if not _is_same(_compiled(tree, forward), forward.__code__):
            raise ValueError
        node = next(n for n in ast.walk(tree) if _is_definition(n, forward))
    except (SyntaxError, ValueError, StopIteration):
        raise Refusal("its forward is not what its source says, or that is not there") from None
    rewriter = _Rewriter(norms)
    rewriter.visit(node)
    if not rewriter.additions:
        raise Refusal("no addition comes right before a norm in its forward")
    code = _compiled(ast.fix_missing_locations(tree), forward)
    return _like(forward, code, None), rewriter.additions


def _like(function: types.FunctionType, code: types.CodeType, closure: Any) -> types.FunctionType:
    """The function with other code, or with another closure."""
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function, updated=("__dict__",))
    del made.__wrapped__  # type: ignore[attr-defined]  # it wraps nothing itself
    return made


def _with_inner(
    wrapper: types.FunctionType, wrapped: Any, inner: types.FunctionType
) -> types.FunctionType:
    """A wrapper, such as a decorator makes, around another function than it was made for."""
    cells = wrapper.__closure__ or ()
    holds = [cell != types.CellType() and cell.cell_contents is wrapped for cell in cells]
    if sum(holds) != 1:
        raise Refusal("its forward is wrapped, and the wrapper does not show what it calls")
    closure = tuple(types.CellType(inner) if h else c for h, c in zip(holds, cells, strict=True))
    made = _like(wrapper, wrapper.__code__, closure)
    made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made


def _is_definition(node: ast.AST, function: types.FunctionType) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        return False
    places: list[Any] = [node, *node.decorator_list]
    first = min(place.lineno for place in places)
    return bool(first == function.__code__.co_firstlineno)


def _compiled(tree: ast.Module, forward: types.FunctionType) -> types.CodeType:
    """The code of a function, of a file that is compiled anew."""
    code = forward.__code__
    flags = code.co_flags & _FUTURE_FLAGS
    found: list[Any] = [compile(tree, code.co_filename, "exec", flags, dont_inherit=True)]
    for each in found:  # which grows
        if (each.co_name, each.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return cast(types.CodeType, each)
        found += [c for c in each.co_consts if isinstance(c, types.CodeType)]
    raise ValueError("no such function")


def _future_flags() -> int:
    import __future__

    features = (getattr(__future__, name) for name in __future__.all_feature_names)
    return functools.reduce(lambda flags, f: flags | f.compiler_flag, features, 0)


_FUTURE_FLAGS = _future_flags()


def _is_same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two functions run the same instructions on the same names and constants."""
    if a.co_code != b.co_code or len(a.co_consts) != len(b.co_consts):
        return False
    if (a.co_names, a.co_varnames, a.co_freevars) != (b.co_names, b.co_varnames, b.co_freevars):
        return False
    return all(
        _is_same(x, y)
        if isinstance(x, types.CodeType) and isinstance(y, types.CodeType)
        else type(x) is type(y) and repr(x) == repr(y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


class _Rewriter(ast.NodeTransformer):
    """Replaces the statements of the three forms in the table above."""

    def __init__(self, norms: frozenset[str]) -> None:
        self._norms = norms
        self.additions = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                value[:] = self._statements(value)
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result, i = [], 0
        while i < len(body):
            count = 1
            for form, length in (
                (self._norm_add_keep_norm, 4),
                (self._add_keep_norm, 3),
                (self._norm_of_sum, 1),
            ):
                fused = form(body[i : i + length])
                if fused is not None:
                    self.additions += 1
                    count = length
                    break
            result.append(fused or body[i])
            i += count
        return result

    def _norm_add_keep_norm(self, four: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.p(f)``, ``h = r + h``, ``r = h``, ``h = self.n(h)``."""
        if len(four) != 4 or self._add_keep_norm(four[1:]) is None:
            return None
        (h, call), (output, sum), (r, _), (_, last) = map(_assignment, four)
        post, argument = self._norm_call(call)
        pre, _ = self._norm_call(last)
        if post is None or argument is None or h != output or _assigns(argument):
            return None
        if not isinstance(sum, ast.BinOp) or {_name(sum.left), _name(sum.right)} != {h, r}:
            return None
        code = f"{h}, {r} = self.{BOTH}(self.{post}, self.{pre}, None, {r})"
        return _statement(four[0], code, argument)

    def _add_keep_norm(self, three: list[ast.stmt]) -> ast.stmt | None:
        """``h = r + f``, ``r = h``, ``h = self.n(h)``."""
        if len(three) != 3:
            return None
        (h, sum), (r, kept), (output, call) = map(_assignment, three)
        norm, argument = self._norm_call(call)
        if (
            h is None
            or r is None
            or h == r
            or not h == output == _name(kept) == _name(argument)
            or norm is None
            or not isinstance(sum, ast.BinOp)
            or not _is_sum(sum)
            or r not in (_name(sum.left), _name(sum.right))
        ):
            return None
        code = f"{h}, {r} = self.{HELPER}(self.{norm}, None, None)"
        return _statement(three[0], code, sum.left, sum.right)

    def _norm_of_sum(self, one: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.n(r + f)``."""
        h, call = _assignment(one[0])
        norm, argument = self._norm_call(call)
        if h is None or norm is None or not isinstance(argument, ast.BinOp):
            return None
        if not _is_sum(argument):
            return None
        code = f"{h} = self.{HELPER}(self.{norm}, None, None)[0]"
        return _statement(one[0], code, argument.left, argument.right)

    def _norm_call(self, call: ast.expr | None) -> tuple[str | None, ast.expr | None]:
        """The name of the norm, and the argument, of ``self.n(x)``."""
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[x], keywords=[]
            ) if norm in self._norms and not isinstance(x, ast.Starred):
                return norm, x
        return None, None


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
    return None, None


def _name(expression: ast.expr | None) -> str | None:
    return expression.id if isinstance(expression, ast.Name) else None


def _is_sum(expression: ast.BinOp) -> bool:
    """Whether it adds, and assigns no variable on the way."""
    return isinstance(expression.op, ast.Add) and not _assigns(expression)


def _assigns(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(expression))


def _statement(place: ast.stmt, code: str, *operands: ast.expr) -> ast.stmt:
    """The statement, with its arguments ``None`` replaced by the operands in turn."""
    statement = ast.parse(code).body[0]
    for call in ast.walk(statement):
        if isinstance(call, ast.Call):
            rest = iter(operands)
            call.args = [next(rest) if isinstance(a, ast.Constant) else a for a in call.args]
            break  # the operands may be calls, too
    return ast.copy_location(statement, place)
