"""Injected bugs, as pure text: what each operator offers, and what holds for all of them."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

import skyenv
from skyenv.envs.swe.making.mutations import OPERATOR_NAMES, Mutation, choose, find_mutations
from skyenv.envs.swe.sources import Edit

OWN_CODE = {str(path): path.read_bytes() for path in sorted((Path(skyenv.__file__).parent / "formats").glob("*.py"))}


def applied(data: bytes, edits: tuple[Edit, ...]) -> bytes:
    for edit in sorted(edits, key=lambda edit: -edit.at):
        assert data[edit.at : edit.at + len(edit.old)] == edit.old
        data = data[: edit.at] + edit.new + data[edit.at + len(edit.old) :]
    return data


def results(operator: str, body: str) -> list[str]:
    data = body.encode()
    return [applied(data, m.edits).decode() for m in find_mutations("m.py", data) if m.operator == operator]


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("wrong_operator", "def f(a, b):\n    return (a) + b\n", "def f(a, b):\n    return (a) - b\n"),
        ("wrong_operator", "def f(a):\n    return a not in ()\n", None),
        ("wrong_operator", "def f(a):\n    return a in ()\n", "def f(a):\n    return a not in ()\n"),
        ("wrong_operator", "def f(a):\n    return a is None\n", "def f(a):\n    return a is not None\n"),
        ("wrong_operator", "def f(a, b):\n    return a and b\n", "def f(a, b):\n    return a or b\n"),
        ("wrong_operator", "def f(é):\n    return 'ü', é<2\n", "def f(é):\n    return 'ü', é<=2\n"),
        ("wrong_operator", "def f(a):\n    return 'x' + a\n", None),
        ("wrong_operator", "A = 1 + 2\n", None),
        ("off_by_one", "def f(a):\n    return a[1:]\n", "def f(a):\n    return a[2:]\n"),
        ("off_by_one", "def f(a):\n    return range(a)\n", "def f(a):\n    return range(a - 1)\n"),
        ("off_by_one", "def f(a):\n    x = len(a)\n", "def f(a):\n    x = len(a) - 1\n"),
        (
            "removed_guard",
            "def f(a):\n    if not a:\n        return 0\n    return a\n",
            "def f(a):\n    return a\n",
        ),
        ("removed_guard", "def f(a):\n    if not a: return 0\n    else: pass\n    return a\n", None),
        ("swapped_arguments", "def f(a, b):\n    return g(a,  b)\n", "def f(a, b):\n    return g(b,  a)\n"),
        ("swapped_arguments", "def f(a):\n    return g(a, a)\n", None),
        ("wrong_default", "def f(a=True): pass\n", "def f(a=False): pass\n"),
        ("wrong_default", "def f(*, a=1): pass\n", "def f(*, a=2): pass\n"),
        ("lost_call", "def f(a):\n    a.clear()\n    return a\n", "def f(a):\n    return a\n"),
        ("lost_call", "def f(a):\n    return sorted(a)\n", "def f(a):\n    return a\n"),
        ("lost_call", "def f(a):\n    return a.strip()\n", "def f(a):\n    return a\n"),
        ("lost_call", "def f(a):\n    a.clear()\n", None),
    ],
)
def test_operators(operator: str, before: str, after: str | None) -> None:
    assert results(operator, before) == ([] if after is None else [after])


def test_docstrings_annotations_decorators_and_messages_are_left_alone() -> None:
    body = '@d(1 + 2)\ndef f(a: x[1 + 2]) -> y[0]:\n    """1 + 1"""\n    raise ValueError(a.strip() + b)\n'
    assert list(find_mutations("m.py", body.encode())) == []


def test_what_does_not_parse_offers_nothing() -> None:
    assert list(find_mutations("m.py", b"def f(:\n")) == []
    assert list(find_mutations("m.py", b"\xff\xfe")) == []


def test_mutations_of_real_code_parse_differ_and_can_be_undone() -> None:
    seen = set()
    for mutation in itertools.islice(choose(OWN_CODE, seed=1), 120):
        before = OWN_CODE[mutation.path]
        after = applied(before, mutation.edits)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
        assert mutation.digest not in seen
        seen.add(mutation.digest)
        functions = [
            n.name for n in ast.walk(ast.parse(before)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert all(name.split(".")[-1] in functions for name in mutation.function.split(", "))


def test_a_seed_gives_one_order_and_operators_take_turns() -> None:
    def first(seed: int) -> list[Mutation]:
        return list(itertools.islice(choose(OWN_CODE, seed), 14))

    assert first(3) == first(3) != first(4)
    assert {m.operator for m in first(3)} == set(OPERATOR_NAMES)
    chosen = list(itertools.islice(choose(OWN_CODE, 3, ("several",)), 5))
    assert {m.operator for m in chosen} == {"several"}
    assert all(len(m.edits) > 1 for m in chosen)
