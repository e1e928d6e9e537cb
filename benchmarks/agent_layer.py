"""What the agent layer costs: edits without I/O, parsing a megabyte in every format, rendering a turn late in a run.

Beside each stands a baseline on the same input: `bytes.replace`, `json.loads` or `str.find`, and encoding the whole
conversation again. Milliseconds; `--json` ends with one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import anyio
from _measure import parse, report, spread

from skyenv import formats
from skyenv.errors import SandboxPathError
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.tools import default_tools
from skyenv.tools.editor import StrReplaceEditor
from skyenv.types import FileInfo, Message, ToolCall

TOOLS = tuple(tool.spec for tool in default_tools())
MEGABYTE = 1_000_000
SOUP = {
    "open": "<function=execute_bash>\n<parameter=command>",
    "close": "</parameter>\n</function>\n",
    "mixed": "<function=f>\n<parameter=a><parameter=b></parameter>\n</function>",
    "angle": "< ",
    "braces": '{"name": "x"}\n',
    "prose": "hello there, a word.\n",
    "wrappers": "<tool_call>",
    "channels": "<|channel|>analysis<|message|>x<|end|><|start|>assistant",
}


class OneFile:
    """File primitives over one file in memory, so that an edit costs no I/O."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def stat(self, path: str) -> FileInfo:
        return FileInfo(path, "file", len(self.data), 0o644)

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        return self.data[offset:] if max_bytes is None else self.data[offset : offset + max_bytes]

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        self.data = data

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        raise SandboxPathError(20, "not a directory", path)

    async def remove(self, path: str) -> None:
        self.data = b""


def best(work: Callable[[], Any], repeats: int = 5) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


async def editor(edits: int) -> dict[str, Any]:
    """One-line replacements in a file of 1 000 lines."""
    source = "".join(f"line {n} of the file = {n}\n" for n in range(1000)).encode()
    files, tool, times, plain = OneFile(source), StrReplaceEditor(), [], []
    for number in range(edits):
        old, new = ("line 500 of the file", "row 500 of the file")[:: 1 if number % 2 == 0 else -1]
        arguments = {"command": "str_replace", "path": "/f.py", "old_str": old, "new_str": new}
        begin = time.perf_counter()
        await tool.run(arguments, files)  # type: ignore[arg-type]
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        source.replace(old.encode(), new.encode())
        plain.append(time.perf_counter() - begin)
    return {"editor ms": spread(times), "editor baseline bytes.replace ms": spread(plain)}


def parsing() -> dict[str, Any]:
    """A megabyte of each kind of text in each format."""
    results: dict[str, Any] = {}
    value = "x = 1  # a line\n" * (MEGABYTE // 16)
    quoted = json.dumps({"command": value})
    results["parse baseline json.loads ms"] = best(lambda: json.loads(quoted))
    results["parse baseline str.find ms"] = best(lambda: value.find("</parameter>"))
    for name in formats.names():
        form = formats.get(name)
        one = form.render_call(ToolCall("execute_bash", {"command": value}))
        many = "\n".join([form.render_call(ToolCall("execute_bash", {"command": "ls"}))] * (MEGABYTE // 60))
        times = {"value": best(lambda: form.parse(one, TOOLS)), "calls": best(lambda: form.parse(many, TOOLS))}  # noqa: B023
        for kind, unit in SOUP.items():
            text = unit * (MEGABYTE // len(unit))
            times[kind] = best(lambda: form.parse(text, TOOLS))  # noqa: B023
        results[f"parse {name} ms"] = {**times, "worst": max(times.values())}
    return results


def rendering(turns: int) -> dict[str, Any]:
    """The delta of a 2 000 byte result, early and late in a conversation, and encoding all of it again."""
    renderer = Renderer(ByteTokenizer(), formats.get("codeact"))
    call, result = ToolCall("execute_bash", {"command": "ls"}), "some output of a command\n" * 80
    messages = [Message("system", "Work."), Message("user", "Fix it.")]
    ids, cost, whole = renderer.prompt(messages, TOOLS), [], []
    answer = [*renderer.encode("I look.\n" + renderer.format.render_call(call)), renderer.end_of_turn]
    for _ in range(turns):
        begin = time.perf_counter()
        delta = renderer.observation(result, call, completion_ids=answer)
        cost.append(time.perf_counter() - begin)
        ids += answer + delta
        messages += [Message("assistant", renderer.decode(answer)), renderer.format.observation(result, call)]
        begin = time.perf_counter()
        renderer.prompt(messages, TOOLS)
        whole.append(time.perf_counter() - begin)
    tenth = max(1, turns // 5)
    return {
        "render first turns ms": spread(cost[:tenth]),
        "render last turns ms": spread(cost[-tenth:]),
        "render baseline whole, first ms": spread(whole[:tenth]),
        "render baseline whole, last ms": spread(whole[-tenth:]),
        "render last / first": min(cost[-tenth:]) / min(cost[:tenth]),
    }


def main() -> None:
    """Run all three."""
    options = parse(__doc__ or "", edits=500, turns=50)
    results = {**anyio.run(editor, options.edits), **parsing(), **rendering(options.turns)}
    report(results, options.json)


if __name__ == "__main__":
    main()
