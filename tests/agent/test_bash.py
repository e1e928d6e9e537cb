"""What the shell tool owes the model, against a shell that answers from a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import SandboxLost
from skyenv.tools import ExecuteBash, check_arguments
from skyenv.tools.output import clean, cut_middle
from skyenv.types import ExecResult

DONE = ExecResult(0, "", cwd="/repo")
RUNNING = ExecResult(-1, "", running=True, cwd="/repo")


class ScriptedShell:
    """Answers calls in order and keeps what was asked; files it is given are kept too."""

    def __init__(self, answers: Sequence[ExecResult]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []
        self.files: dict[str, bytes] = {}

    async def exec(
        self, command: str, *, timeout: float = 60.0, soft_timeout: float | None = None, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        self.asked.append(("exec", command, timeout, soft_timeout))
        return self.answers.pop(0)

    async def poll(self, *, soft_timeout: float | None = None) -> ExecResult:
        self.asked.append(("poll", soft_timeout))
        return self.answers.pop(0)

    async def interrupt(self) -> ExecResult:
        self.asked.append(("interrupt",))
        return self.answers.pop(0)

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        self.files[path] = data


class Terminal:
    def __init__(self, *answers: ExecResult, **options: Any) -> None:
        self.shell = ScriptedShell(answers)
        self.tool = ExecuteBash(**options)

    async def __call__(self, command: str, **rest: Any) -> str:
        checked = check_arguments(self.tool.spec, {"command": command, **rest})
        return f"ERROR: {checked}" if isinstance(checked, str) else await self.tool.run(checked, self.shell)  # type: ignore[arg-type]


async def test_result_shows_output_directory_and_code() -> None:
    run = Terminal(ExecResult(3, "  hi\nthere\n", cwd="/repo"))
    assert await run("x") == ("  hi\nthere\n[Current working directory: /repo]\n[Command finished with exit code 3]")
    assert run.shell.asked == [("exec", "x", 600.0, 30.0)]


@pytest.mark.parametrize("command", ["", "  \n", "C-c", "^C", "C-d", "ctrl+z"])
async def test_b3_nothing_to_follow_at_idle(command: str) -> None:
    run = Terminal()
    assert (await run(command)).startswith("ERROR: no command is running")
    assert run.shell.asked == []


@pytest.mark.parametrize("flag", [True, "True", "true", "TRUE"])
async def test_b3_b24_input_at_idle(flag: Any) -> None:
    run = Terminal()
    assert (await run("yes", is_input=flag)).startswith("ERROR: no command is running that could take input")
    assert run.shell.asked == []


@pytest.mark.parametrize("flag", [False, "False", "false"])
async def test_b24_false_is_false(flag: Any) -> None:
    assert "exit code 0" in await Terminal(DONE)("ls", is_input=flag)


async def test_b4_soft_timeout_poll_interrupt() -> None:
    still = ExecResult(-1, "one\n", running=True, cwd="/repo")
    run = Terminal(still, RUNNING, ExecResult(130, "two\n", cwd="/repo"), DONE, soft_timeout=2.0)
    first = await run("sleep 100")
    assert "one" in first
    assert "No new output for 2 seconds" in first
    assert "exit code" not in first
    second = await run("")
    assert second.startswith("[Output of the earlier command `sleep 100`]")
    assert "still running" in second
    third = await run("C-c", is_input="true")
    assert third.startswith("[Output of the earlier command `sleep 100`]\ntwo")
    assert "exit code 130" in third
    assert "exit code 0" in await run("ls")
    assert run.shell.asked == [
        ("exec", "sleep 100", 600.0, 2.0),
        ("poll", 2.0),
        ("interrupt",),
        ("exec", "ls", 600.0, 2.0),
    ]


async def test_poll_to_the_end_frees_the_shell() -> None:
    run = Terminal(RUNNING, DONE, DONE)
    await run("make")
    assert "exit code 0" in await run("", timeout=90)
    await run("ls")
    assert run.shell.asked[1:] == [("poll", 90.0), ("exec", "ls", 600.0, 30.0)]


@pytest.mark.parametrize("extra", [{}, {"is_input": True}])
async def test_while_running_text_is_refused_and_said_so(extra: dict[str, Any]) -> None:
    run = Terminal(RUNNING)
    await run("make\nmake install")
    answer = await run("ls", **extra)
    assert answer.startswith("ERROR: `make...` is still running")
    assert "neither run nor delivered" in answer
    assert (await run("C-d")).startswith("ERROR:")
    assert len(run.shell.asked) == 1


@pytest.mark.parametrize(
    ("timeout", "said"), [("abc", "must be a number"), (-1, "greater than 0"), (0, "greater than 0")]
)
async def test_b22_bad_timeouts(timeout: Any, said: str) -> None:
    run = Terminal()
    answer = await run("ls", timeout=timeout)
    assert answer.startswith("ERROR:")
    assert said in answer
    assert run.shell.asked == []


async def test_b22_hard_timeout_is_clamped_and_disables_the_soft_one() -> None:
    run = Terminal(DONE, DONE, ExecResult(124, "", timed_out=True))
    await run("ls", timeout=1e9)
    await run("ls", timeout="5")
    assert "killed: it ran longer than 7 seconds" in await run("ls", timeout=7)
    assert [asked[2:] for asked in run.shell.asked] == [(600.0, None), (5.0, None), (7.0, None)]


async def test_notices() -> None:
    answer = await Terminal(ExecResult(137, "", oom=True, session_restarted=True, cwd="/w"))("x")
    assert "out of memory" in answer
    assert "a new one was started" in answer


async def test_b17_long_output_keeps_both_ends_and_the_full_text() -> None:
    text = "".join(f"{i}\n" for i in range(1, 200_001))
    run = Terminal(ExecResult(0, text), ExecResult(0, text, truncated=True, output_bytes=9_999_999), max_chars=4000)
    answer = await run("seq 1 200000")
    lines = answer.split("\n")
    assert lines[0] == "1"
    assert "200000" in lines
    assert len(answer) < 4300
    marker = next(line for line in lines if line.startswith("[..."))
    at = lines.index(marker)
    elided = int(lines[at + 1]) - int(lines[at - 1]) - 1
    assert f"{elided} lines" in marker
    assert "the full text is in /tmp/command_output_1.txt" in marker
    assert run.shell.files["/tmp/command_output_1.txt"].decode() == text.rstrip("\n")
    answer = await run("again")
    assert "9999999 bytes were printed in all; what was kept of it is in /tmp/command_output_2.txt" in answer


async def test_infrastructure_raises() -> None:
    class Gone(ScriptedShell):
        async def exec(self, *args: Any, **options: Any) -> ExecResult:
            raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        await ExecuteBash().run({"command": "ls"}, Gone([]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\ufffd\x00ok", "\ufffd\ufffdok"),
        ("\x1b[31mred\x1b[0m \x1b[1;32mgreen\x1b[m", "red green"),
        ("1\r2\r3", "3"),
        ("50%\r100%\r\ndone\r\n", "100%\ndone\n"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        ("\x1b[6n\x1b[?2004htext\x1b[?2004l", "text"),
        ("n\x08na\x08am\x08me \x07", "name "),
        ("  two  spaces\t", "  two  spaces\t"),
        ("\x1b[2J\x1b[H\x1b(B\x1b=clear", "clear"),
        ("unfinished \x1b[31", "unfinished 31"),
    ],
)
def test_b18_clean(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text(st.sampled_from("ab\n\r\x1b[]m;0\x07\x08\x00\x9b é"), max_size=60))
def test_clean_leaves_no_controls_and_is_idempotent(raw: str) -> None:
    text = clean(raw)
    assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
    assert clean(text) == text


@given(st.text(st.sampled_from("ab\n"), max_size=400), st.integers(1, 100))
def test_cut_middle_keeps_a_prefix_a_suffix_and_counts(text: str, limit: int) -> None:
    shown = cut_middle(text, limit)
    if len(text) <= limit:
        assert shown == text
        return
    before, _, rest = shown.partition("[... ")
    marker, _, after = rest.partition(" ...]\n")
    elided = int(marker.split("(")[1].split(" ")[0])
    head = before if text.startswith(before) else before.removesuffix("\n")
    assert text.startswith(head)
    assert text.endswith(after)
    assert len(head) + elided + len(after) in (len(text), len(text) + 1)
    assert len(head) + len(after) <= limit + 1
