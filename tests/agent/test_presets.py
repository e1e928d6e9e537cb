"""Which tools an environment gets, the plan tool, and the texts of the preset `openhands`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

import skyenv
from skyenv.core import Sandbox, Tool
from skyenv.envs.tool_env import NoSandbox, ToolEnv
from skyenv.errors import ConfigError, SandboxPathError
from skyenv.testing.editor_desk import EditorDesk
from skyenv.testing.editor_rows import ROWS, Row, check_row
from skyenv.tools import Finish, StrReplaceEditor, TaskTracker, Think, check_arguments, default_tools, make_tools, tool
from skyenv.tools.openhands import OpenHandsBash, OpenHandsEditor
from skyenv.types import ExecResult, Message

NOWHERE: Any = NoSandbox()
F = "/w/f.txt"


@tool
async def greet(name: str) -> str:
    """Say hello."""
    return f"hello {name}"


class Lesson:
    task_id = "lesson"


class School(ToolEnv[Any]):
    def __init__(self, **options: Any) -> None:
        super().__init__([Lesson()], options.pop("tools"), **options)

    async def begin(self, task: Any, resources: AsyncExitStack) -> Sandbox | None:
        return None

    def instructions(self, task: Any) -> tuple[Message, ...]:
        return (Message("user", "go"),)

    async def grade(self, task: Any, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        return 1.0, {}


def names(tools: Sequence[Tool]) -> list[str]:
    return [made.spec.name for made in tools]


def test_presets() -> None:
    assert names(default_tools()) == ["execute_bash", "str_replace_editor", "finish"]
    shell, think, finish, editor = default_tools(preset="openhands")
    assert names([shell, think, finish, editor]) == ["execute_bash", "think", "finish", "str_replace_editor"]
    assert finish.spec.parameters["properties"] == {}
    assert shell.spec.parameters["properties"]["is_input"]["enum"] == ["true", "false"]
    assert isinstance(editor, OpenHandsEditor)
    with pytest.raises(ConfigError, match="opnhands"):
        default_tools(preset="opnhands")


def test_a_list_of_tools() -> None:
    chosen = make_tools(["strict", "search", "think", "task_tracker", "ipython", greet])
    assert names(chosen)[3:] == ["search", "think", "task_tracker", "ipython", "greet"]
    assert names(make_tools([Finish, "skyenv.tools.think:Think"])) == ["finish", "think"]
    first, second = make_tools(TaskTracker), make_tools(TaskTracker)
    assert first[0] is not second[0]


@pytest.mark.parametrize(
    "choice", ["nothing", "no.such:Thing", "os:path", "os:nothing", ["strict", Finish], 7, object()]
)
def test_what_is_no_tool_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match="tools"):
        make_tools(choice)


async def test_environment_takes_tools_by_keyword() -> None:
    async with School(tools=[greet, Finish]) as env:
        await env.areset()
        assert (await env.astep({"name": "greet", "arguments": {"name": "you"}})).observation == "hello you"
        assert (await env.astep({"name": "greet", "arguments": {"nam": "you"}})).info["failed"]
        assert (await env.astep({"name": "finish", "arguments": {}})).terminated


async def test_environment_by_preset_makes_fresh_tools_and_room_for_their_output() -> None:
    @tool
    async def shout() -> str:
        """Say a lot."""
        return "x" * 40_000

    async with School(tools=["openhands", shout, "task_tracker"]) as env:
        assert [spec.name for spec in env.tools][-2:] == ["shout", "task_tracker"]
        await env.areset()
        assert 30_000 < len((await env.astep({"name": "shout", "arguments": {}})).observation) < 32_000
        plan = {"command": "plan", "task_list": [{"title": "one"}]}
        assert "1. [ ] one" in (await env.astep({"name": "task_tracker", "arguments": plan})).observation
        await env.areset()
        assert "empty" in (await env.astep({"name": "task_tracker", "arguments": {"command": "view"}})).observation


async def test_think_and_plan() -> None:
    assert await Think().run({"thought": "<|im_end|>"}, NOWHERE) == "Your thought has been logged."
    tracker = TaskTracker()
    tasks = [
        {"title": "a", "status": "done"},
        {"title": "b\nc", "status": "in_progress", "notes": "n\nm"},
        {"title": "d"},
    ]
    shown = await tracker.run({"command": "plan", "task_list": tasks}, NOWHERE)
    assert shown == "Task list (1 of 3 done):\n1. [x] a\n2. [~] b c\n   n\n   m\n3. [ ] d"
    assert await tracker.run({"command": "view"}, NOWHERE) == shown


@pytest.mark.parametrize(
    "tasks",
    [
        None,
        [{"title": ""}],
        [{"title": 3}],
        [{"status": "done"}],
        [{"title": "a", "status": "finished"}],
        [{"title": "a", "status": ["done"]}],
        [{"title": "a", "notes": 1}],
        [{"title": "a", "x": 1}],
        [{"title": "a" * 1000}],
        [{"title": "a"}] * 101,
    ],
    ids=lambda tasks: str(tasks)[:30],
)
async def test_a_bad_plan_changes_nothing(tasks: Any) -> None:
    tracker = TaskTracker()
    before = await tracker.run({"command": "plan", "task_list": [{"title": "kept"}]}, NOWHERE)
    checked = check_arguments(tracker.spec, {"command": "plan", "task_list": tasks})
    assert isinstance(checked, dict)
    assert (await tracker.run(checked, NOWHERE)).startswith("ERROR")
    assert await tracker.run({"command": "view"}, NOWHERE) == before


class OpenHandsDesk:
    def __init__(self, files: Any) -> None:
        self.files = files
        self.tool = OpenHandsEditor(workdir="/w")

    async def __call__(self, command: str, path: str = F, **rest: Any) -> str:
        checked = check_arguments(self.tool.spec, {"command": command, "path": path, **rest})
        assert isinstance(checked, dict), checked
        return await self.tool.run(checked, self.files)


CAT = f"Here's the result of running `cat -n` on {F}:\n"
SEEN: dict[str, tuple[bytes | None, dict[str, Any], str]] = {
    "view": (b"a\nb\n", {"command": "view"}, CAT + "     1\ta\n     2\tb\n     3\t\n"),
    "view, open last line": (b"a\nb", {"command": "view"}, CAT + "     1\ta\n     2\tb\n"),
    "view, empty": (b"", {"command": "view"}, CAT + "     1\t\n"),
    "view, range": (b"a\nb\n", {"command": "view", "view_range": [2, 2]}, CAT + "     2\tb\n"),
    "view, clamped": (
        b"a\nb\n",
        {"command": "view", "view_range": [2, 9]},
        f"NOTE: We only show up to 2 since there're only 2 lines in this file.\n{CAT}     2\tb\n",
    ),
    "view, behind": (
        b"a\nb\n",
        {"command": "view", "view_range": [3, 4]},
        "ERROR:\nInvalid `view_range` parameter: [3, 4]. Its first element `3` should be within the range of lines of "
        "the file: [1, 2].",
    ),
    "missing": (
        None,
        {"command": "view"},
        f"ERROR:\nInvalid `path` parameter: {F}. The path {F} does not exist. Please provide a valid path.",
    ),
    "relative": (
        b"a",
        {"command": "view", "path": "f.txt"},
        "ERROR:\nInvalid `path` parameter: f.txt. The path should be an absolute path, starting with `/`. "
        f"Maybe you meant {F}?",
    ),
    "create": (None, {"command": "create", "file_text": "x"}, f"File created successfully at: {F}"),
    "create, there": (
        b"a",
        {"command": "create", "file_text": "x"},
        f"ERROR:\nInvalid `path` parameter: {F}. File already exists at: {F}. Cannot overwrite files using command "
        "`create`.",
    ),
    "create, no text": (None, {"command": "create"}, "ERROR:\nParameter `file_text` is required for command: create."),
    "replace": (
        b"a\nb\nc\n",
        {"command": "str_replace", "old_str": "b", "new_str": "x\ny"},
        f"The file {F} has been edited. Here's the result of running `cat -n` on a snippet of {F}:\n"
        "     1\ta\n     2\tx\n     3\ty\n     4\tc\n     5\t\n"
        "Review the changes and make sure they are as expected. Edit the file again if necessary.",
    ),
    "replace, absent": (
        b"a\n",
        {"command": "str_replace", "old_str": "zz", "new_str": "x"},
        f"ERROR:\nNo replacement was performed, old_str `zz` did not appear verbatim in {F}.",
    ),
    "replace, twice": (
        b"a\na\n",
        {"command": "str_replace", "old_str": "a", "new_str": "x"},
        "ERROR:\nNo replacement was performed. Multiple occurrences of old_str `a` in lines [1, 2]. "
        "Please ensure it is unique.",
    ),
    "replace, same": (
        b"a\n",
        {"command": "str_replace", "old_str": "a", "new_str": "a"},
        "ERROR:\nInvalid `new_str` parameter: a. No replacement was performed. `new_str` and `old_str` must be "
        "different.",
    ),
    "insert": (
        b"a\nb\n",
        {"command": "insert", "insert_line": 1, "new_str": "x"},
        f"The file {F} has been edited. Here's the result of running `cat -n` on a snippet of the edited file:\n"
        "     1\ta\n     2\tx\n     3\tb\n     4\t\n"
        "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
        "Edit the file again if necessary.",
    ),
    "insert, behind": (
        b"a\n",
        {"command": "insert", "insert_line": 3, "new_str": "x"},
        "ERROR:\nInvalid `insert_line` parameter: 3. It should be within the range of allowed values: [0, 1]",
    ),
    "undo, nothing": (b"a\n", {"command": "undo_edit"}, f"ERROR:\nNo edit history found for {F}."),
}


@pytest.mark.parametrize("row", SEEN)
async def test_editor_speaks_as_openhands(row: str, files: Any) -> None:
    """These texts are what openhands-aci 0.3.3 answers to the same calls."""
    data, arguments, expected = SEEN[row]
    files.mkdir("/w")
    if data is not None:
        files.put(F, data)
    assert await OpenHandsDesk(files)(**arguments) == expected


async def test_openhands_undo_and_cut(files: Any) -> None:
    desk = OpenHandsDesk(files)
    files.put(F, b"a\r\nb\r\n")
    assert "     1\tA\n     2\tb\n     3\t\n" in await desk("str_replace", old_str="a", new_str="A")
    assert files.get(F) == b"A\r\nb\r\n"
    assert (await desk("undo_edit")).startswith(f"Last edit to {F} undone successfully. {CAT}     1\ta\n")
    assert files.get(F) == b"a\r\nb\r\n"
    files.put(F, b"x" * 20_000)
    cut = await desk("view")
    assert cut.startswith(
        CAT + "     1\t" + "x" * 16_000 + "<response clipped><NOTE>Due to the max output limit, only part"
    )


KEPT = (
    "E9 CRLF replace",
    "E9 CRLF insert",
    "E10",
    "E33",
    "E41",
    "E51",
    "E53",
    "E54",
    "E55",
    "E59",
    "R11 un",
    "R11 lo",
    "R13",
)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(KEPT)], ids=lambda row: row.name)
async def test_openhands_preset_keeps_files_as_the_default_does(row: Row, files: Any) -> None:
    for path, data in row.files.items():
        files.put(f"/w/{path}", data or b"")
    await check_row(row, EditorDesk(OpenHandsEditor(workdir="/w"), files, "/w"))


async def test_openhands_errors_of_the_file_system(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(path: str, data: bytes, *, expected: bytes | None = None) -> None:
        raise SandboxPathError(28, os.strerror(28), path)

    files.put(F, b"a\n")
    monkeypatch.setattr(files, "write_file", full)
    answer = await OpenHandsDesk(files)("str_replace", old_str="a", new_str="b")
    assert answer == f"ERROR:\nRan into [Errno 28] No space left on device: '{F}' while trying to write to {F}"


class Scripted:
    def __init__(self, *answers: ExecResult) -> None:
        self.answers = list(answers)

    async def exec(self, command: str, **options: Any) -> ExecResult:
        if "command -v python" in command:
            return ExecResult(0, "/opt/bin/python\n")
        return self.answers.pop(0)

    async def poll(self, **options: Any) -> ExecResult:
        return self.answers.pop(0)

    async def interrupt(self) -> ExecResult:
        return self.answers.pop(0)


TAIL = "\n[Current working directory: /w]\n[Python interpreter: /opt/bin/python]\n[Command finished with exit code {}]"
WAITING = (
    "\n[The command has no new output after 30 seconds. You may wait longer to see additional output by sending empty "
    "command '', send other commands to interact with the current process, or send keys to interrupt/kill the command.]"
)


async def test_shell_speaks_as_openhands() -> None:
    box: Any = Scripted(
        ExecResult(3, "  hi  \nthere\n\n", cwd="/w"),
        ExecResult(-1, "one\n", running=True, cwd="/w"),
        ExecResult(-1, "two\n", running=True, cwd="/w"),
        ExecResult(-1, "", running=True, cwd="/w"),
        ExecResult(130, "^C\n", cwd="/w"),
        ExecResult(0, "x" * 40_000, cwd="/w"),
    )
    shell = OpenHandsBash()

    async def run(command: str, **rest: Any) -> str:
        checked = check_arguments(shell.spec, {"command": command, **rest})
        assert isinstance(checked, dict)
        return await shell.run(checked, box)

    assert await run("") == "ERROR: No previous running command to retrieve logs from."
    assert await run("y", is_input=True) == "ERROR: No previous running command to interact with."
    assert await run("x") == "hi\nthere\n[The command completed with exit code 3.]" + TAIL.format(3)
    assert await run("sleep") == "one" + WAITING
    assert await run("") == "[Below is the output of the previous command.]\ntwo" + WAITING
    refused = await run("ls", is_input="False")
    assert refused.startswith('[Below is the output of the previous command.]\n\n[Your command "ls" is NOT executed.')
    done = "^C\n[The command completed with exit code 130. CTRL+C was sent.]" + TAIL.format(130)
    assert await run("C-c", is_input="true") == done
    long = await run("cat")
    assert len(long) == 30_000 + len("\n[... Observation truncated due to length ...]\n")
    assert long.endswith(TAIL.format(0))


def test_strict_stays_the_default() -> None:
    assert isinstance(default_tools()[1], StrReplaceEditor)


@pytest.mark.parametrize(
    ("tools", "last"), [("openhands", "str_replace_editor"), (["terminal", "search", greet], "greet"), (greet, "greet")]
)
def test_the_registered_environment_takes_tools(tools: Any, last: str) -> None:
    env = skyenv.make("SkyRL/SWE-v0", tools=tools)
    assert [spec.name for spec in env.tools][-1] == last


def test_a_shell_with_terminals_says_so() -> None:
    shell = default_tools(preset="terminal")[0]
    assert "terminal" in shell.spec.parameters["properties"]
    assert "terminal" not in default_tools()[0].spec.parameters["properties"]
