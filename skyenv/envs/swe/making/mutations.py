"""Injected bugs: which edits a file offers, and a seeded choice among them. Pure; running them is `candidates`' work.

Invariants of every mutation: the file still parses, its syntax tree differs, and all edits lie in functions.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyenv.envs.swe.making.operators import OPERATORS, Span, Text
from skyenv.envs.swe.sources import Edit

SEVERAL = "several"
OPERATOR_NAMES = (*OPERATORS, SEVERAL)
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: which operator made it, the function it is in (`Class.method`), that function's docstring, its edits."""

    operator: str
    path: str
    function: str
    docstring: str
    edits: tuple[Edit, ...]

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name the edits."""
        parts = [f"{edit.path}\0{edit.at}\0{len(edit.old)}\0".encode() + edit.new for edit in self.edits]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def apply_spans(data: bytes, spans: list[Span]) -> bytes:
    """The bytes after edits that do not overlap."""
    for span in sorted(spans, reverse=True):
        data = data[: span.start] + span.new + data[span.end :]
    return data


def find_mutations(path: str, data: bytes) -> Iterator[Mutation]:
    """Every single-edit mutation of a file; nothing when it does not parse."""
    yield from (mutation for mutation in _candidates(path, data) if _is_sound(mutation, data))


def _candidates(path: str, data: bytes) -> Iterator[Mutation]:
    """Mutations before the costly look at what becomes of the whole file."""
    try:
        text = Text(data)
    except (SyntaxError, ValueError):
        return
    seen: set[Span] = set()
    for name, function in _functions(text.tree):
        for operator, span in _spans(text, function):
            if span not in seen:
                seen.add(span)
                edit = Edit(path, span.start, data[span.start : span.end], span.new)
                yield Mutation(operator, path, name, _first_paragraph(function), (edit,))


def _is_sound(mutation: Mutation, data: bytes) -> bool:
    spans = [Span(edit.at, edit.at + len(edit.old), edit.new) for edit in mutation.edits]
    try:
        return ast.dump(ast.parse(apply_spans(data, spans))) != ast.dump(ast.parse(data))
    except (SyntaxError, ValueError):
        return False


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Outermost functions and methods with their qualified names; the shallow ones only, inner code is theirs."""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                todo.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, _FUNCTIONS):
                yield prefix + child.name, child
            elif not isinstance(child, ast.expr):
                todo.append((prefix, child))


def _spans(text: Text, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, Span]]:
    todo: list[tuple[ast.AST, ast.AST]] = [(function, function)]
    while todo:
        node, parent = todo.pop()
        for name, operator in OPERATORS.items():
            for span in operator(text, node, parent):
                yield name, span
        todo += [(child, node) for child in _code_children(node)]


def _code_children(node: ast.AST) -> Iterator[ast.AST]:
    """Children that are code: neither annotations, nor decorators, nor a docstring, nor what a message is made of."""
    if isinstance(node, _FUNCTIONS | ast.ClassDef):
        yield from node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield node.value
    elif isinstance(node, ast.Raise):
        return
    else:
        yield from ast.iter_child_nodes(node)


def _first_paragraph(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())


def choose(files: Mapping[str, bytes], seed: int, operators: tuple[str, ...] = OPERATOR_NAMES) -> Iterator[Mutation]:
    """Mutations of `files` in a seeded order that takes turns between operators and never repeats one.

    Among `several`, two or three single mutations of different functions of one file come together.
    """
    rng = random.Random(seed)
    found: dict[str, list[Mutation]] = defaultdict(list)
    for path in sorted(files):
        for mutation in _candidates(path, files[path]):
            found[mutation.operator].append(mutation)
    queues = {name: found[name] for name in operators if name in OPERATORS and found[name]}
    for queue in queues.values():
        rng.shuffle(queue)
    if SEVERAL in operators:
        queues[SEVERAL] = list(_combinations([m for queue in found.values() for m in queue], rng))
    while any(queues.values()):
        for name in list(queues):
            while queues[name]:
                mutation = queues[name].pop()
                if _is_sound(mutation, files[mutation.path]):
                    yield mutation
                    break


def _combinations(singles: list[Mutation], rng: random.Random) -> Iterator[Mutation]:
    by_file: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in rng.sample(singles, len(singles)):
        by_file[mutation.path].append(mutation)
    for path, mutations in sorted(by_file.items()):
        while mutations:
            chosen = {m.function: m for m in reversed(mutations[-rng.choice((2, 3)) :])}
            del mutations[-len(chosen) :]
            if len(chosen) > 1:
                parts = sorted(chosen.values(), key=lambda m: m.edits[0].at)
                edits = tuple(edit for part in parts for edit in part.edits)
                if all(a.at + len(a.old) <= b.at for a, b in itertools.pairwise(edits)):
                    functions = ", ".join(part.function for part in parts)
                    yield Mutation(SEVERAL, path, functions, parts[0].docstring, edits)
