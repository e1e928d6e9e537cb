"""The tools on a real sandbox: the shell's conformance rows, and what only a real file system shows of the editor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from skyenv.core import Sandbox, SandboxProvider, Tool
from skyenv.testing.editor_desk import EditorDesk, prepare
from skyenv.testing.editor_rows import ROWS, check_row
from skyenv.tools import ExecuteBash, StrReplaceEditor, check_arguments

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Desk:
    """The tools of one episode in one sandbox, called as an environment calls them."""

    def __init__(self, sandbox: Sandbox, soft_timeout: float) -> None:
        self.sandbox = sandbox
        self.bash = ExecuteBash(soft_timeout=soft_timeout)
        self.editor = StrReplaceEditor()

    async def __call__(self, command: str, **rest: Any) -> str:
        return await self._run(self.bash, {"command": command, **rest})

    async def edit(self, command: str, path: str, **rest: Any) -> str:
        return await self._run(self.editor, {"command": command, "path": path, **rest})

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> str:
        checked = check_arguments(tool.spec, arguments)
        assert not isinstance(checked, str), checked
        with anyio.fail_after(100):
            return await tool.run(checked, self.sandbox)


Open = Callable[..., AbstractAsyncContextManager[Desk]]


@pytest.fixture(scope="module")
def desk(client: SandboxProvider) -> Open:
    """Opens desks, each on a sandbox of its own."""

    @asynccontextmanager
    async def open_desk(soft_timeout: float = 60.0) -> AsyncIterator[Desk]:
        async with client.sandbox() as sandbox:
            yield Desk(sandbox, soft_timeout)

    return open_desk


def code(answer: str) -> int:
    return int(answer.rsplit("exit code ", 1)[1].rstrip("]"))


def cwd(answer: str) -> str:
    return answer.rsplit("[Current working directory: ", 1)[1].split("]")[0]


def output(answer: str) -> str:
    return answer.split("\n[")[0] if not answer.startswith("[") else ""


async def until(run: Desk, answer: str, text: str) -> str:
    """All that is said from this answer on until the command has printed `text`, in however many pieces."""
    said, printed = answer, answer.rpartition("\n[")[0]
    with anyio.fail_after(100):
        while "".join(text.split()) not in "".join(printed.split()):
            assert "still running" in answer, said
            answer = await run("")
            said, printed = said + answer, printed + answer.rpartition("\n[")[0]
    return said


async def ended(run: Desk, answer: str, *codes: int) -> str:
    """All that is said from this answer on until the command has ended, with one of these exit codes."""
    said = answer
    with anyio.fail_after(100):
        while "still running" in answer:
            answer = await run("")
            said += answer
    assert code(answer) in codes, said
    return said


async def test_b1_state_persists(desk: Open) -> None:
    async with desk() as run:
        assert output(await run("echo hi")) == "hi"
        await run("cd /tmp; export A=1; f(){ echo f; }")
        assert output(await run("pwd; echo $A; f")) == "/tmp\n1\nf"
        assert cwd(await run("(cd /)")) == "/tmp"


async def test_b2_b15_exit_codes(desk: Open) -> None:
    async with desk() as run:
        await run("cd /tmp; export A=kept")
        for command, expected in (("false", 1), ("(exit 3)", 3), ("nosuch", 127)):
            assert code(await run(command)) == expected
        for command, expected in (("kill -9 $$", 137), ("exit 3", 3)):
            answer = await run(command)
            assert code(answer) == expected
            assert "a new one was started" in answer
            assert output(await run("pwd; echo $A")) == "/tmp\nkept"


async def test_b4_b25_soft_timeout_and_interrupt(desk: Open) -> None:
    async with desk(0.5) as run:
        assert "still running" in await run("echo begun; sleep 100")
        assert "still running" in await run("")
        assert "still running, and your text" in await run("ls")
        await ended(run, await run("C-c"), 130)
        assert "free" in await ended(run, await run("echo free"), 0)
        assert "still running" in await run("trap '' INT; sleep 300")
        answer = await run("C-c")
        if "still running" in answer:
            answer = await run("C-c")
        await ended(run, answer, 130, 137)
        assert "free" in await ended(run, await run("echo free"), 0)


async def test_b6_output_keeps_a_command_going(desk: Open) -> None:
    async with desk(3.0) as run:
        answer = await run("for i in $(seq 14); do echo $i; sleep 0.3; done")
        assert code(answer) == 0
        assert output(answer) == "\n".join(map(str, range(1, 15)))


async def test_b22_hard_timeout_kills(desk: Open) -> None:
    async with desk() as run:
        answer = await run("echo begun; sleep 100", timeout=1)
        assert "killed: it ran longer than 1 seconds" in answer
        assert code(answer) == 124
        assert output(await run("echo free")) == "free"


async def test_b8_readers_get_end_of_file(desk: Open) -> None:
    async with desk(60.0) as run:
        assert code(await run("cat")) == 0
        assert code(await run("read x")) == 1
        assert code(await run("python3")) == 0


async def test_b9_background_jobs_do_not_hold_the_call(desk: Open) -> None:
    async with desk(60.0) as run:
        assert "Running" in await run("sleep 100 &\njobs")
        assert code(await run("sleep 1 & false")) == 1
        assert code(await run("(while sleep 0.05; do echo noise; done) & true")) == 0
        assert code(await run("(exit 7)")) == 7


async def test_b10_a_server_serves_the_next_turn(desk: Open) -> None:
    async with desk() as run:
        await run("mkdir -p /tmp/www; cd /tmp/www; echo hello > page; python3 -m http.server 8765 > /tmp/log 2>&1 &")
        get = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8765/page').read().decode())"
        wait = "for i in $(seq 300); do"
        answer = await run(f'{wait} python3 -c "{get}" 2>/dev/null && break; sleep 0.1; done')
        assert output(answer).strip() == "hello"


async def test_b11_b13_scripts_and_syntax_errors(desk: Open) -> None:
    async with desk(60.0) as run:
        assert output(await run("echo a\necho b")) == "a\nb"
        assert code(await run("# only a comment")) == 0
        for broken in ('echo "unterminated', "if true; then", "echo `"):
            assert code(await run(broken)) == 2
        assert output(await run("cat <<'E'\n\ttab\n  $x \\\\ `\nE\necho done")) == "\ttab\n  $x \\\\ `\ndone"
        assert output(await run("echo 'a\nb' \\| x")) == "a\nb | x"


async def test_b14_strict_mode_ends_the_shell_and_says_so(desk: Open) -> None:
    async with desk() as run:
        answer = await run("set -euo pipefail\nfalse\necho not reached")
        assert code(answer) == 1
        assert "a new one was started" in answer
        assert output(await run("echo ok")) == "ok"


async def test_b17_long_output(desk: Open) -> None:
    async with desk() as run:
        answer = await run("seq 1 200000")
        assert answer.startswith("1\n2\n")
        assert "\n200000\n" in answer
        assert len(answer) < 17_000
        saved = answer.split("is in ")[1].split(" ")[0]
        assert output(await run(f"tail -n 1 {saved}")) == "200000"
        answer = await run("printf '%100000s' '' | tr ' ' x")
        assert "left out" in answer


async def test_b18_b19_terminal_output(desk: Open) -> None:
    async with desk(60.0) as run:
        assert output(await run(r"printf '\xff\x00ok'")) == "\ufffd\ufffdok"
        assert output(await run(r"printf '\033[31mred\033[0m'")) == "red"
        assert output(await run(r"printf '1\r2\r3'")) == "3"
        assert output(await run(r"printf '\033[6n'; echo x")) == "x"
        assert output(await run("printf '   lead  \\n'")) == "   lead  "
        assert code(await run("clear")) in (0, 1)
        setup = "cd /tmp && git init -q g && cd g && git config user.email a@b && git config user.name n"
        commits = "for i in $(seq 60); do git commit -q --allow-empty -m m$i; done; git --paginate log --oneline"
        answer = await run(f"{setup} && {commits}")
        assert code(answer) == 0
        assert "m60" in answer
        assert code(await run("touch a; git add a; git commit")) != 0
        assert "still running" not in await run("man ls")


async def test_b21_deleted_directory(desk: Open) -> None:
    async with desk() as run:
        await run("mkdir /tmp/gone; cd /tmp/gone")
        await run("rm -r /tmp/gone")
        answer = await run("echo still here")
        assert output(answer).endswith("still here")
        assert cwd(answer) == "/tmp/gone; it was removed"
        assert code(await run("cd /tmp")) == 0


async def test_editor_on_real_files(desk: Open) -> None:
    """R16, E44, E48, E57, E58: modes, links, hostile names, special files, refused writes."""
    async with desk() as run:
        await run(
            "mkdir -p /tmp/w && cd /tmp/w && printf 'a\\nb\\n' > s.sh && chmod 755 s.sh && ln -s s.sh link && mkfifo p"
        )
        assert "edited" in await run.edit("str_replace", "/tmp/w/link", old_str="a", new_str="A")
        assert "edited" in await run.edit("insert", "/tmp/w/s.sh", insert_line=2, new_str="c")
        shown = output(await run("cat s.sh; stat -c '%a %F' s.sh; stat -c %F link"))
        assert shown == "A\nb\nc\n755 regular file\nsymbolic link"
        assert "gone" not in await run.edit("undo_edit", "/tmp/w/s.sh")
        for name in ("sp ace", "it's", "a$(touch inj)", "-n", "new\nline"):
            assert "File created" in await run.edit("create", f"/tmp/w/d/{name}/f", file_text="x\n")
            assert "     1\tx" in await run.edit("view", f"/tmp/w/d/{name}/f")
            assert f"/tmp/w/d/{name}/\n" in await run.edit("view", "/tmp/w/d")
        assert "inj" not in await run("find /tmp /root -name 'inj*' 2>/dev/null | wc -l; ls /tmp/w")
        for special in ("/tmp/w/p", "/dev/zero"):
            assert "not a regular file" in await run.edit("view", special)
        assert (await run.edit("create", "/proc/version/x", file_text="x")).startswith("ERROR")
        assert (await run.edit("view", "/tmp/" + "n" * 5000)).startswith("ERROR")
        assert "escape" not in await run.edit("view", "/tmp/w/../../../../etc/passwd-no-such")


@pytest.mark.parametrize("command", ["", "C-c"])
async def test_b3_nothing_runs_at_idle(command: str, desk: Open) -> None:
    async with desk() as run:
        assert (await run(command)).startswith("ERROR: no command is running")


async def test_editor_rows(client: SandboxProvider) -> None:
    """Every row of the table on real files; a sandbox with a small limit on files stands for a full disk."""
    failed: list[str] = []
    async with client.sandbox() as box, client.sandbox(file_bytes=1 << 20) as small:
        for number, row in enumerate(ROWS):
            sandbox, root = small if row.limit else box, f"/tmp/row{number}"
            try:
                with anyio.fail_after(100):
                    await prepare(row, sandbox, root)
                    await check_row(row, EditorDesk(StrReplaceEditor(workdir=root), sandbox, root))
            except (AssertionError, TimeoutError) as error:
                failed.append(f"{row.name}: {error!r}")
    assert not failed, "\n".join(failed)


async def test_editor_needs_no_program_inside(client: SandboxProvider) -> None:
    """Every program directory is gone, so neither Python nor a shell nor anything else can be started."""
    async with client.sandbox() as box:
        gone = "for d in /bin /sbin /usr /lib /lib64 /opt; do mv $d /gone$d.away 2>/dev/null || true; done"
        await box.write_file("/tmp/w/a.py", b"one\r\ntwo\r\n")
        result = await box.exec(f"mkdir -p /gone; cp -a /usr/bin/env /tmp/env 2>/dev/null; {gone}; env")
        assert result.exit_code == 127, result
        editor = StrReplaceEditor()
        for call in (
            {"command": "view", "path": "/tmp/w"},
            {"command": "str_replace", "path": "/tmp/w/a.py", "old_str": "two", "new_str": "2"},
            {"command": "create", "path": "/tmp/w/deep/b.py", "file_text": "x\n"},
            {"command": "undo_edit", "path": "/tmp/w/deep/b.py"},
        ):
            answer = await editor.run(call, box)
            assert not answer.startswith("ERROR"), answer
        assert await box.read_file("/tmp/w/a.py") == b"one\r\n2\r\n"


@pytest.mark.parametrize("timeout", ["abc", -1, 0])
async def test_b22_bad_timeouts(timeout: Any, desk: Open) -> None:
    async with desk() as run:
        checked = check_arguments(run.bash.spec, {"command": "touch /tmp/ran", "timeout": timeout})
        answer = checked if isinstance(checked, str) else await run.bash.run(checked, run.sandbox)
        assert "timeout" in answer
        assert code(await run("test -e /tmp/ran")) == 1


async def test_b22_huge_timeout_is_clamped(desk: Open) -> None:
    async with desk() as run:
        assert output(await run("echo ran", timeout=1e9)) == "ran"


@pytest.mark.parametrize("flag", [True, "True", "true"])
async def test_b24_is_input_in_any_spelling(flag: Any, desk: Open) -> None:
    async with desk(0.3) as run:
        assert "could take input" in await run("yes", is_input=flag)
        assert "still running" in await run("sleep 100")
        assert "neither run nor delivered" in await run("yes", is_input=flag)
        await ended(run, await run("C-c", is_input=flag), 130)


async def test_b8_programs_on_a_terminal(client: SandboxProvider) -> None:
    """B8, B3 and B25 on a terminal: text, a bare Enter, C-d and C-c reach the program that reads from it."""
    async with client.sandbox() as box:
        run = Desk(box, 0.5)
        run.bash = ExecuteBash(soft_timeout=0.5, terminal=True)
        assert "/tmp" in await ended(run, await run("cd /tmp; pwd"), 0)
        asked = await run('read -p "name? " x; echo "[$x]"; cat; echo end', terminal="true")
        asked = await until(run, asked, "name? ")
        assert "text with is_input" in asked
        assert "was not run" in await run("ls")
        await until(run, await run("", is_input=True), "[]")
        assert "still running" in await run("")
        await until(run, await run("line", is_input=True), "line\nline")
        assert "end" in await ended(run, await run("C-d", is_input=True), 0)
        await until(run, await run("python3 -q", terminal=True), ">>>")
        await until(run, await run("print(6 * 7)", is_input="True"), "42")
        await until(run, await run("C-c"), "KeyboardInterrupt")
        await ended(run, await run("C-d"), 0)
        await until(run, await run("trap '' INT; echo set; sleep 100", terminal=True), "set")
        assert "still running" in await run("C-c")
        await ended(run, await run("C-c"), 130, 137)
        assert "still running" in await run("sleep 100", terminal=True)
        assert "did not reach" in await run("x\n" * 200_000, is_input=True)
        await run("C-c")
        await ended(run, await run("C-c"), 130, 137)
        assert "/tmp\n" in await ended(run, await run("pwd; cat"), 0)
