"""Spaces for language."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from gymnasium.vector.utils import batch_space

from skyenv.spaces import ToolCallSpace, Unicode
from skyenv.tools import check_arguments, default_tools
from skyenv.types import ToolCall, ToolSpec

SPECS = tuple(tool.spec for tool in default_tools())


def test_samples_are_valid_calls_of_every_tool() -> None:
    space = ToolCallSpace(SPECS, seed=1)
    samples = [space.sample() for _ in range(300)]
    assert {sample["name"] for sample in samples} == {spec.name for spec in SPECS}
    by_name = {spec.name: spec for spec in SPECS}
    for sample in samples:
        assert space.contains(sample)
        assert isinstance(check_arguments(by_name[sample["name"]], sample["arguments"]), dict)


def test_equal_seeds_give_equal_samples() -> None:
    first, second = ToolCallSpace(SPECS, seed=5), ToolCallSpace(SPECS)
    second.seed(5)
    assert [first.sample() for _ in range(20)] == [second.sample() for _ in range(20)]
    text = Unicode(seed=5)
    again = copy.deepcopy(text)
    assert [text.sample() for _ in range(20)] == [again.sample() for _ in range(20)]


@pytest.mark.parametrize(
    "call",
    [
        None,
        "ls",
        {},
        {"name": "execute_bash"},
        {"name": "execute_bash", "arguments": {}},
        {"name": "execute_bash", "arguments": {"command": 5}},
        {"name": "execute_bash", "arguments": {"command": "ls", "extra": 1}},
        {"name": "execute_bash", "arguments": {"command": "ls"}, "id": 1},
        {"name": "nothing", "arguments": {}},
        {"name": "str_replace_editor", "arguments": {"command": "fly", "path": "/a"}},
        {"name": "str_replace_editor", "arguments": {"command": "view", "path": "/a", "view_range": ["1"]}},
        ToolCall("nothing", {}),
    ],
)
def test_what_is_no_call(call: Any) -> None:
    assert not ToolCallSpace(SPECS).contains(call)


def test_what_is_one() -> None:
    space = ToolCallSpace(SPECS)
    assert space.contains(ToolCall("execute_bash", {"command": "ls"}))
    assert space.contains({"name": "finish", "arguments": {}})


def test_unicode_is_any_text_of_the_length() -> None:
    space = Unicode(5)
    assert all(space.contains(text) for text in ("", "a b", "\n\0", "日本語", "\udc80"))
    assert not any(space.contains(value) for value in ("too long", b"a", None, 5))


def test_equality_pickling_and_batching() -> None:
    space = ToolCallSpace(SPECS)
    assert space == pickle.loads(pickle.dumps(space)) == ToolCallSpace(SPECS)
    assert space != ToolCallSpace(SPECS[:1])
    assert Unicode(5) == Unicode(5) != Unicode(6)
    assert batch_space(space, 3).contains(tuple(space.sample() for _ in range(3)))


def test_every_schema_type_is_sampled() -> None:
    kinds = {name: {"type": name} for name in ("string", "integer", "number", "boolean", "array", "object")}
    spec = ToolSpec("all", "x", {"type": "object", "properties": kinds, "required": list(kinds)})
    space = ToolCallSpace([spec])
    assert space.contains(space.sample())
