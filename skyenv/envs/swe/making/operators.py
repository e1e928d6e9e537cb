"""Bugs as text edits of Python source: each operator looks at one node and offers the edits that would break it.

An edit replaces a span of the file and leaves all other bytes alone, so a task's reference is a patch of a line or two.
Operators never touch annotations, docstrings, decorators, imports or names with two leading underscores at module
level. Offsets are bytes of the UTF-8 text.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

BINARY = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not"),
}  # fmt: skip
LEAVING = (ast.Raise, ast.Return, ast.Continue, ast.Break)


class Span(NamedTuple):
    """Bytes `start` to `end` of a file become `new`."""

    start: int
    end: int
    new: bytes


class Text:
    """A parsed file, and where its nodes stand in its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.tree = ast.parse(data)
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Offset of a position as `ast` gives it: lines from 1, columns in bytes."""
        return self._lines[line - 1] + column

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Where a node begins."""
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Where it ends."""
        return self.at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def of(self, node: ast.expr | ast.stmt) -> bytes:
        """The node as written."""
        return self.data[self.start(node) : self.end(node)]

    def whole_lines(self, node: ast.stmt) -> tuple[int, int]:
        """The lines that a statement fills, with the last line's end."""
        return self._lines[node.lineno - 1], self._lines[node.end_lineno or node.lineno]

    def symbol(self, left: ast.expr, right: ast.expr, symbol: str) -> tuple[int, int] | None:
        """Where the operator `symbol` (one or two words) stands between two operands."""
        start, stop = self.end(left), self.start(right)
        between = self.data[start:stop].decode()
        tokens: list[tokenize.TokenInfo] = []
        with contextlib.suppress(tokenize.TokenError, SyntaxError):  # the operands' brackets are not balanced here
            tokens.extend(tokenize.generate_tokens(io.StringIO(f"({between}").readline))
        words = [token for token in tokens if token.string in symbol.split() and token.start[0] == 1]
        if not words or " ".join(t.string for t in words) != symbol:
            return None
        first, last = words[0].start[1] - 1, words[-1].end[1] - 1
        head = len(between[:first].encode())
        return start + head, start + head + len(between[first:last].encode())


Operator = Callable[[Text, ast.AST, ast.AST], Iterator[Span]]


def wrong_operator(text: Text, node: ast.AST, _parent: ast.AST) -> Iterator[Span]:
    """Another arithmetic, comparison or boolean operator."""
    found: list[tuple[ast.expr, ast.expr, tuple[str, str] | None]] = []
    if isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
        found.append((node.left, node.right, BINARY.get(type(node.op))))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        found.append((node.left, node.comparators[0], COMPARE.get(type(node.ops[0]))))
    elif isinstance(node, ast.BoolOp):
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        found += [(left, right, pair) for left, right in itertools.pairwise(node.values)]
    for left, right, pair_ in found:
        place = text.symbol(left, right, pair_[0]) if pair_ else None
        if pair_ and place:
            yield Span(*place, pair_[1].encode())


def off_by_one(text: Text, node: ast.AST, parent: ast.AST) -> Iterator[Span]:
    """A bound that is one too large or too small."""
    is_number = isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 1000
    if is_number and isinstance(parent, ast.Slice | ast.Subscript | ast.Compare | ast.BinOp):
        value = int(text.of(node)) if text.of(node).isdigit() else None  # type: ignore[arg-type]
        if value is not None:
            yield Span(text.start(node), text.end(node), str(value + 1).encode())  # type: ignore[arg-type]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and node.args:
        if node.func.id == "len" and not isinstance(parent, ast.Compare):
            yield Span(text.end(node), text.end(node), b" - 1")
        elif node.func.id == "range" and not isinstance(node.args[-1], ast.Starred):
            last = node.args[min(1, len(node.args) - 1)]
            if not isinstance(last, ast.IfExp | ast.Lambda | ast.GeneratorExp):
                yield Span(text.end(last), text.end(last), b" - 1")


def removed_guard(text: Text, node: ast.AST, parent: ast.AST) -> Iterator[Span]:
    """An early return, raise, continue or break that is no longer there."""
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], LEAVING) and len(node.body) <= 2:
        yield from _drop(text, node, parent)


def swapped_arguments(text: Text, node: ast.AST, _parent: ast.AST) -> Iterator[Span]:
    """Two positional arguments in each other's place."""
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        for left, right in itertools.pairwise(node.args):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred) or ast.dump(left) == ast.dump(right):
                continue
            middle = text.data[text.end(left) : text.start(right)]
            if b"(" not in middle and b")" not in middle:
                yield Span(text.start(left), text.end(right), text.of(right) + middle + text.of(left))


def wrong_default(text: Text, node: ast.AST, _parent: ast.AST) -> Iterator[Span]:
    """A parameter whose default is another one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        for default in defaults:
            if isinstance(default, ast.Constant):
                new = _other_constant(default.value)
                if new is not None:
                    yield Span(text.start(default), text.end(default), new.encode())


def lost_call(text: Text, node: ast.AST, parent: ast.AST) -> Iterator[Span]:
    """A call whose effect or conversion is missing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield from _drop(text, node, parent)
    elif isinstance(node, ast.Call) and not node.keywords and not isinstance(parent, ast.Expr | ast.Await):
        if isinstance(node.func, ast.Attribute) and not node.args:
            yield Span(text.start(node), text.end(node), text.of(node.func.value))
        elif _is_conversion(node):
            yield Span(text.start(node), text.end(node), text.of(node.args[0]))


OPERATORS: dict[str, Operator] = {
    "wrong_operator": wrong_operator,
    "off_by_one": off_by_one,
    "removed_guard": removed_guard,
    "swapped_arguments": swapped_arguments,
    "wrong_default": wrong_default,
    "lost_call": lost_call,
}
_CONVERSIONS = frozenset({"sorted", "list", "set", "tuple", "dict", "str", "int", "abs", "reversed", "float", "iter"})


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_conversion(node: ast.Call) -> bool:
    alone = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.List | ast.Constant
    named = isinstance(node.func, ast.Name) and node.func.id in _CONVERSIONS
    return named and len(node.args) == 1 and isinstance(node.args[0], alone)


def _other_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, str) and len(value) == 1 and value.isprintable():
        return repr("-" if value != "-" else "_")
    return None


def _drop(text: Text, node: ast.stmt, parent: ast.AST) -> Iterator[Span]:
    """Take a statement out with its lines, when its block has others and nothing else stands on these lines."""
    blocks = [
        block for name in ("body", "orelse", "finalbody") if isinstance(block := getattr(parent, name, None), list)
    ]
    block = next((block for block in blocks if node in block), [])
    start, end = text.whole_lines(node)
    alone = not text.data[start : text.start(node)].strip() and not text.data[text.end(node) : end].strip()
    if len(block) > 1 and alone:
        yield Span(start, end, b"")
