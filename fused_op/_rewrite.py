"""A forward with other statements: what ``_block.py`` gives to a block.

The proof is one of the source: a forward is compiled once more, with what has one of these forms
replaced by a call that means the same. That the source is what runs is proved by its bytecode.

=============================================  ====================================================
``h = r + f(…)``; ``r = h``; ``h = self.n(h)``  ``h, r = add_norm(self.n, r, f(…))``
the same with ``h = self.p(f(…))`` before it    ``h, r = norm_add_norm(self.p, self.n, f(…), r)``
``h = self.n(r + f(…))``                        ``h, _ = add_norm(self.n, r, f(…))``
``self.n(x) * (1 + s) + t``                    ``modulated_norm(self.n, x, s, t)``
``h = self.n(x)``; ``h = h * (1 + s) + t``     ``h = modulated_norm(self.n, x, s, t)``
the same two without ``+ t``                   ``modulated_norm(self.n, x, s)``
``self.a(self.n(x))``, where ``a`` is SiLU     ``activated_norm(self.n, self.a, x)``
``h = self.n(x)``; ``h = self.a(h)``           ``h = activated_norm(self.n, self.a, x)``
=============================================  ====================================================

``h = self.n(x)`` may also end a branch of an ``if`` before ``h = self.a(h)``, which then ends each
branch instead. ``F.silu`` may stand for ``self.a``.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from ._activation import Activation, activation_of
from ._modulation import Modulation, modulation_of
from ._probe import Refusal

Node = TypeVar("Node", bound=ast.AST)

HELPER = "_fused_op_add_norm"  # the name of add_norm in a block
BOTH = "_fused_op_norm_add_norm"  # of norm_add_norm
MODULATE = "_fused_op_modulated_norm"  # of modulated_norm
ACTIVATE = "_fused_op_activated_norm"  # and of activated_norm


class Wanted(NamedTuple):
    """What a forward is searched for."""

    norms: frozenset[str]  # their names
    additions: bool
    modulations: bool
    groups: frozenset[str] = frozenset()  # the names of group norms, if activations are wanted
    silus: frozenset[str] = frozenset()  # and those of SiLU modules

    def missing(self) -> str:
        """The words for a forward with nothing of it."""
        forms = {
            "no addition comes right before a norm": self.norms and self.additions,
            "no modulation comes right after a norm": self.norms and self.modulations,
            "no SiLU comes right after a group norm": self.groups,
        }
        return (
            f"{' and '.join(form for form, is_wanted in forms.items() if is_wanted)} in its forward"
        )


class Found(NamedTuple):
    """What a new forward does by its norms."""

    additions: int
    modulations: int
    activations: int


def rewritten(forward: Any, wanted: Wanted) -> tuple[types.FunctionType, Found]:
    """A forward whose norms do what is wanted, and how often.

    Args:
        forward: of a class.
        wanted: additions before norms, modulations and activations after them.

    Raises:
        Refusal: there is none, or it is not certain what the forward does.
    """
    if not isinstance(forward, types.FunctionType):
        raise Refusal("its forward is no function")
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is not None:
        inner, found = rewritten(wrapped, wanted)
        return _with_inner(forward, wrapped, inner), found
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
    if not _keeps_self(node):
        raise Refusal("its forward has another self")
    rewriter = _Rewriter(wanted, forward)
    rewriter.generic_visit(node)
    found = Found(rewriter.additions, rewriter.modulations, rewriter.activations)
    if not any(found):
        raise Refusal(wanted.missing())
    code = _compiled(ast.fix_missing_locations(tree), forward)
    return _like(forward, code, None), found


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


def _keeps_self(node: ast.AST) -> bool:
    """Whether ``self`` is the first argument of a function, and stays it."""
    if not isinstance(node, ast.FunctionDef):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args]
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == "self")
    # By functions, imports, patterns and the errors that a `try` catches.
    bound = {getattr(n, at, None) for n in ast.walk(node) for at in ("name", "asname", "rest")}
    return (
        bool(arguments)
        and arguments[0].arg == "self"
        and "self" not in bound
        and all(isinstance(name.ctx, ast.Load) for name in names)
    )


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


_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_TRIES = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))


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
    """Replaces the forms in the table above, but not in functions and classes inside a forward."""

    def __init__(self, wanted: Wanted, forward: types.FunctionType) -> None:
        self._wanted = wanted
        self._forward = forward
        # The forms that are statements, each with how many it takes.
        self._forms: list[tuple[Callable[[list[ast.stmt]], ast.stmt | None], int]] = []
        if wanted.modulations:
            self._forms += [(self._norm_then_modulation, 2)]
        if wanted.additions:
            self._forms += [(self._norm_add_keep_norm, 4), (self._add_keep_norm, 3)]
            self._forms += [(self._norm_of_sum, 1)]
        if wanted.groups:
            self._forms += [(self._norm_then_activation, 2), (self._branches_then_activation, 2)]
        # That a statement is inside of. After an error in one of several statements, a `try` finds
        # what those before it have assigned.
        self._tries = 0
        self.additions = 0
        self.modulations = 0
        self.activations = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _SCOPES):
            return node
        tries = isinstance(node, _TRIES)
        self._tries += tries
        result: ast.AST = super().visit(node)
        self._tries -= tries
        return result

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                value[:] = self._statements(value)
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result, i = [], 0
        while i < len(body):
            count, fused = 1, None
            for form, length in self._forms:
                fused = form(body[i : i + length]) if length == 1 or not self._tries else None
                if fused is not None:
                    count = length
                    break
            result.append(fused or body[i])
            i += count
        return result

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """``self.n(x) * (1 + s) + t``; the whole of it before its product."""
        parts = modulation_of(node) if self._wanted.modulations else None
        norm, argument = self._norm_call(None if parts is None else parts.normalized)
        if parts is None or norm is None or argument is None:
            return self.generic_visit(node)
        # Where `1 + s` comes first, the argument might change s in place.
        names = {each.id for each in ast.walk(argument) if isinstance(each, ast.Name)}
        if _start(parts.scale) < _start(parts.normalized) and names & parts.names():
            return self.generic_visit(node)
        return self._modulated(node, norm, cast(ast.expr, self.visit(argument)), parts)

    def _norm_then_modulation(self, two: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.n(x)``, ``h = h * (1 + s) + t``."""
        if len(two) != 2:
            return None
        (h, call), (output, sum) = map(_assignment, two)
        norm, argument = self._norm_call(call)
        parts = modulation_of(sum)
        if norm is None or argument is None or parts is None:
            return None
        if h is None or not h == output == _name(parts.normalized) or h in parts.names():
            return None
        value = self._modulated(two[0], norm, argument, parts)
        return ast.copy_location(ast.Assign([ast.Name(h, ast.Store())], value), two[0])

    def _modulated(
        self, place: ast.AST, norm: str, argument: ast.expr, parts: Modulation
    ) -> ast.expr:
        """The call, with its arguments in the order in which they were evaluated before."""
        self.modulations += 1
        call: Any = _placed(ast.parse(f"self.{MODULATE}(self.{norm})", mode="eval").body, place)
        operands = [("input", parts.normalized, argument), ("scale", parts.scale, parts.scale)]
        if parts.shift is not None:
            operands += [("shift", parts.shift, parts.shift)]
        operands.sort(key=lambda operand: _start(operand[1]))
        call.keywords = [ast.keyword(name, value) for name, _, value in operands]
        return cast(ast.expr, call)

    def _norm_add_keep_norm(self, four: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.p(f)``, ``h = r + h``, ``r = h``, ``h = self.n(h)``."""
        if len(four) != 4 or not self._adds_and_keeps(four[1:]):
            return None
        (h, call), (output, sum), (r, _), (_, last) = map(_assignment, four)
        post, argument = self._norm_call(call)
        pre, _ = self._norm_call(last)
        if post is None or argument is None or h != output:
            return None
        if not isinstance(sum, ast.BinOp) or {_name(sum.left), _name(sum.right)} != {h, r}:
            return None
        self.additions += 1
        code = f"{h}, {r} = self.{BOTH}(self.{post}, self.{pre}, None, {r})"
        return _statement(four[0], code, argument)

    def _add_keep_norm(self, three: list[ast.stmt]) -> ast.stmt | None:
        """``h = r + f``, ``r = h``, ``h = self.n(h)``."""
        if not self._adds_and_keeps(three):
            return None
        (h, sum), (r, _), (_, call) = map(_assignment, three)
        norm, _ = self._norm_call(call)
        assert isinstance(sum, ast.BinOp)
        self.additions += 1
        code = f"{h}, {r} = self.{HELPER}(self.{norm}, None, None)"
        return _statement(three[0], code, sum.left, sum.right)

    def _adds_and_keeps(self, three: list[ast.stmt]) -> bool:
        if len(three) != 3:
            return False
        (h, sum), (r, kept), (output, call) = map(_assignment, three)
        norm, argument = self._norm_call(call)
        return (
            None not in (h, r, norm)
            and h != r
            and h == output == _name(kept) == _name(argument)
            and isinstance(sum, ast.BinOp)
            and _is_sum(sum)
            and r in (_name(sum.left), _name(sum.right))
        )

    def _norm_of_sum(self, one: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.n(r + f)``."""
        h, call = _assignment(one[0])
        norm, argument = self._norm_call(call)
        if h is None or norm is None or not isinstance(argument, ast.BinOp):
            return None
        if not _is_sum(argument):
            return None
        self.additions += 1
        code = f"{h} = self.{HELPER}(self.{norm}, None, None)[0]"
        return _statement(one[0], code, argument.left, argument.right)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``self.a(self.n(x))``."""
        parts = self._activation(node)
        norm, argument = self._norm_call(parts and parts.normalized, self._wanted.groups)
        if parts is None or norm is None or argument is None:
            return self.generic_visit(node)
        return self._activated(node, norm, cast(ast.expr, self.visit(argument)), parts)

    def _norm_then_activation(self, two: list[ast.stmt]) -> ast.stmt | None:
        """``h = self.n(x)``, ``h = self.a(h)``."""
        if len(two) != 2:
            return None
        (h, call), (output, last) = map(_assignment, two)
        norm, argument = self._norm_call(call, self._wanted.groups)
        parts = self._activation(last)
        if norm is None or argument is None or parts is None:
            return None
        if h is None or not h == output == _name(parts.normalized):
            return None
        value = self._activated(two[0], norm, argument, parts)
        return ast.copy_location(ast.Assign([ast.Name(h, ast.Store())], value), two[0])

    def _branches_then_activation(self, two: list[ast.stmt]) -> ast.stmt | None:
        """``if c: ...; h = self.n(x)`` with any other branches, ``h = self.a(h)``."""
        if len(two) != 2 or not isinstance(two[0], ast.If):
            return None
        h, last = _assignment(two[1])
        parts = self._activation(last)
        if h is None or parts is None or h != _name(parts.normalized):
            return None
        before = self.activations
        branches = [
            self._statements([*branch, copy.deepcopy(two[1])])
            for branch in (two[0].body, two[0].orelse)
        ]
        if self.activations == before:
            return None
        self.activations = before + 1  # of which each call takes one
        return ast.copy_location(ast.If(two[0].test, *branches), two[0])

    def _activated(
        self, place: ast.AST, norm: str, argument: ast.expr, parts: Activation
    ) -> ast.expr:
        self.activations += 1
        code = f"self.{ACTIVATE}(norm=self.{norm})"
        call: Any = _placed(ast.parse(code, mode="eval").body, place)
        call.keywords.append(ast.keyword("input", argument))
        # In the order in which they were evaluated before: of two statements, the norm's is first.
        at = 0 if isinstance(place, ast.Call) else 2
        call.keywords.insert(at, ast.keyword("activation", parts.function))
        return cast(ast.expr, call)

    def _activation(self, expression: ast.expr | None) -> Activation | None:
        return activation_of(expression, self._wanted.silus, self._forward)

    def _norm_call(
        self, call: ast.expr | None, names: frozenset[str] | None = None
    ) -> tuple[str | None, ast.expr | None]:
        """The name of the norm, and the argument, of ``self.n(x)``."""
        names = self._wanted.norms if names is None else names
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=norm), args=[x], keywords=[]
            ) if norm in names and not isinstance(x, ast.Starred):
                return (None, None) if _assigns(x) else (norm, x)
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
    statement = _placed(ast.parse(code).body[0], place)
    for call in ast.walk(statement):
        if isinstance(call, ast.Call):
            rest = iter(operands)
            call.args = [next(rest) if isinstance(a, ast.Constant) else a for a in call.args]
            break  # the operands may be calls, too
    return statement


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _placed(made: Node, place: ast.AST) -> Node:
    """The nodes at the lines of another, which tracebacks then show."""
    for node in ast.walk(made):
        ast.copy_location(node, place)
    return made
