"""A function becomes a tool: its schema, and what hostile arguments come to."""

from __future__ import annotations

import threading
from typing import Any, Literal, Optional

import pytest

from skyenv.core import Sandbox, Tool
from skyenv.envs.tool_env import NoSandbox
from skyenv.errors import ConfigError, EnvError, SandboxPathError
from skyenv.tools import check_arguments, tool

NOWHERE: Any = NoSandbox()


@tool
async def count(
    words: list[str],
    unit: Literal["words", "letters"],
    most: int = 5,
    share: float = 1.0,
    loud: bool = False,
    note: str | None = None,
) -> str:
    """Count words or letters.

    Nothing is changed.

    Args:
        words: What to count,
            in any order.
        most: Upper bound.
    """
    return f"{sum(1 if unit == 'words' else len(word) for word in words)} {most} {share} {loud} {note}"


async def call(made: Tool, **arguments: Any) -> str:
    checked = check_arguments(made.spec, arguments)
    return f"ERROR: {checked}" if isinstance(checked, str) else await made.run(checked, NOWHERE)


def test_schema_comes_from_the_signature() -> None:
    assert isinstance(count, Tool)
    assert count.spec.name == "count"
    assert count.spec.description == "Count words or letters.\n\nNothing is changed."
    properties = count.spec.parameters["properties"]
    assert properties["words"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": "What to count, in any order.",
    }
    assert properties["unit"] == {"type": "string", "enum": ["words", "letters"]}
    assert properties["most"] == {"type": "integer", "description": "Upper bound."}
    assert [properties[name]["type"] for name in ("share", "loud", "note")] == ["number", "boolean", "string"]
    assert count.spec.parameters["required"] == ["words", "unit"]


async def test_arguments_reach_the_function_with_their_types() -> None:
    assert await call(count, words='["a", "bc"]', unit="letters", most="7", loud="True") == "3 7 1.0 True None"
    assert await count(["a"], "words") == "1 5 1.0 False None"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"words": "a", "unit": "words"},
        {"words": [1], "unit": "words"},
        {"words": [["a"]], "unit": "words"},
        {"words": [], "unit": "pages"},
        {"words": [], "unit": "words", "sandbox": "x"},
        {"words": [], "unit": "words", "self": 1},
        {"words": [], "unit": "words", "__class__": "x"},
        {"words": [], "unit": "words", "most": "five"},
        {"words": [], "unit": "words", "most": 10**400},
        {"words": [], "unit": "words", "share": float("nan")},
        {"words": ["\ud800"], "unit": "words"},
        {"words": "[" * 10_000, "unit": "words"},
    ],
    ids=lambda arguments: str(arguments)[:40],
)
async def test_hostile_arguments_are_answered(arguments: dict[str, Any]) -> None:
    answer = await call(count, **{str(name): value for name, value in arguments.items()})
    if arguments.get("most") == 10**400:
        assert answer.startswith("0 1")
    else:
        assert answer.startswith("ERROR")


async def test_the_sandbox_is_given_and_is_no_parameter() -> None:
    @tool(name="size")
    async def measure(path: str, sandbox: Sandbox) -> str:
        """Size of a file."""
        return f"{len(await sandbox.read_file(path))} bytes"

    class Files:
        async def read_file(self, path: str) -> bytes:
            if path != "/x":
                raise SandboxPathError(2, "No such file or directory")
            return b"12345"

    assert measure.spec.name == "size"
    assert list(measure.spec.parameters["properties"]) == ["path"]
    assert await measure.run({"path": "/x"}, Files()) == "5 bytes"  # type: ignore[arg-type]
    refused = await measure.run({"path": "/y"}, Files())  # type: ignore[arg-type]
    assert refused == "ERROR: [Errno 2] No such file or directory"


async def test_plain_functions_run_beside_the_loop() -> None:
    @tool
    def where(depth: Optional[int]) -> str:  # noqa: UP045
        """Say which thread runs this."""
        return f"{threading.current_thread() is threading.main_thread()} {depth}"

    assert where.spec.parameters["required"] == []
    assert await call(where) == "False None"


def untyped(value) -> str:  # type: ignore[no-untyped-def]
    """Has no type."""
    return ""


def nameless(value: int, /) -> str:
    """Cannot be called by name."""
    return ""


def strange(value: dict[str, int]) -> str:
    """Takes what the schema cannot say."""
    return ""


def mixed(value: Literal["a", 1]) -> str:
    """Takes text or a number."""
    return ""


def silent(value: int) -> str:
    return ""


def blocking(sandbox: Sandbox) -> str:
    """Cannot await the sandbox."""
    return ""


def unresolved(value: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Has a type that is nowhere."""
    return ""


@pytest.mark.parametrize("function", [untyped, nameless, strange, mixed, silent, blocking, unresolved])
def test_what_cannot_be_a_tool_is_refused_by_name(function: Any) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        tool(function)


async def test_what_is_not_text_is_the_authors_bug() -> None:
    @tool
    def number() -> Any:
        """Give a number."""
        return 3

    with pytest.raises(EnvError, match="returned a int"):
        await number.run({}, NOWHERE)
