"""Commands on a terminal: text reaches programs that read from one, and nothing of it disturbs the session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from skyenv.errors import ConfigError, EnvError
from skyenv.remote.client import RemoteSandbox, connect
from skyenv.types import ExecResult


@pytest.fixture(params=["local", "rootless", pytest.param("docker", marks=pytest.mark.docker)])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RemoteSandbox]:
    async with connect(url, "secret") as client, client.sandbox() as box:
        yield box


async def until(box: RemoteSandbox, result: ExecResult, text: str) -> str:
    """All output from `result` on until `text` was printed."""
    seen = result.output
    with anyio.fail_after(100):
        while text not in seen:
            assert result.running, seen
            result = await box.poll(soft_timeout=0.2)
            seen += result.output
    return seen


async def test_a_reader_waits_and_gets_what_is_typed(url: str) -> None:
    async with opened(url) as box:
        asked = await box.exec(
            'read -p "name? " x; echo "got [$x]"; test -t 0 && test -t 1', soft_timeout=0.5, terminal=True
        )
        assert await until(box, asked, "name? ") == "name? "
        answered = await box.send_input("Ada\n")
        assert not answered.running
        assert answered.exit_code == 0
        assert answered.output == "Ada\ngot [Ada]\n"


async def test_bare_enter_and_end_of_file(url: str) -> None:
    async with opened(url) as box:
        await box.exec('read x; echo "[$x]"; cat; echo end', soft_timeout=0.3, terminal=True)
        assert "[]" in await until(box, await box.send_input("\n", soft_timeout=0.3), "[]")
        assert "line\nline\n" in await until(box, await box.send_input("line\n", soft_timeout=0.3), "line\nline\n")
        done = await box.send_input("\x04")
        assert (done.exit_code, done.output) == (0, "end\n")


async def test_interrupt_reaches_the_program_and_may_be_survived(url: str) -> None:
    async with opened(url) as box:
        started = await box.exec("python3 -q", soft_timeout=0.5, terminal=True)
        await until(box, started, ">>>")
        await box.send_input("import time; time.sleep(100)\n", soft_timeout=0.3)
        assert "KeyboardInterrupt" in await until(
            box, await box.send_input("\x03", soft_timeout=0.3), "KeyboardInterrupt"
        )
        assert "42" in await until(box, await box.send_input("print(6 * 7)\n", soft_timeout=0.3), "\n42")
        assert (await box.send_input("exit(3)\n")).exit_code == 3
        await box.exec("sleep 100", soft_timeout=0.2, terminal=True)
        assert (await box.send_input("\x03")).exit_code == 130
        await box.exec("trap '' INT; sleep 100", soft_timeout=0.2, terminal=True)
        assert (await box.interrupt()).exit_code >= 128


async def test_the_session_stays_as_it_was(url: str) -> None:
    async with opened(url) as box:
        await box.exec("cd /tmp; export A=1; b=2; (exit 7)")
        result = await box.exec("pwd; echo $A; cd /; export A=9; exit 5", terminal=True)
        assert (result.output, result.exit_code, result.cwd) == ("/tmp\n1\n", 5, "/tmp")
        assert not result.session_restarted
        assert (await box.exec("echo $?; pwd; echo $A $b")).output == "5\n/tmp\n1 2\n"


async def test_timeouts_end_everything_on_the_terminal(url: str) -> None:
    async with opened(url) as box:
        result = await box.exec("sleep 1234 & echo begun; sleep 1234", timeout=2.0, terminal=True)
        assert (result.exit_code, result.timed_out, result.output) == (124, True, "begun\n")
        left = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q 'sleep 123[4]'"
        assert not (await box.exec(f"while {left}; do :; done", timeout=60)).timed_out


async def test_much_output_and_many_terminals(url: str) -> None:
    async with opened(url) as box:
        result = await box.exec("seq 1 200000", terminal=True)
        assert result.output.startswith("1\n2\n")
        assert result.output.endswith("\n200000\n")
        for number in range(30):
            assert (await box.exec(f"echo {number}", terminal=True)).output == f"{number}\n"
        assert int((await box.exec("ls /dev/pts | wc -l")).output) < 5


async def test_what_cannot_be_typed_is_refused(url: str) -> None:
    async with opened(url) as box:
        with pytest.raises(EnvError, match="no command is running"):
            await box.send_input("x\n")
        await box.exec("sleep 100", soft_timeout=0.2)
        with pytest.raises(EnvError, match="has no terminal"):
            await box.send_input("x\n")
        await box.interrupt()
        await box.exec("sleep 100", soft_timeout=0.2, terminal=True)
        with pytest.raises(EnvError, match="does not read"):
            await box.send_input("x\n" * 200_000)
        with pytest.raises(EnvError, match="still running"):
            await box.exec("echo no")
        assert (await box.interrupt()).exit_code >= 128
        with pytest.raises(ConfigError):
            await box.exec("true", timeout=-1, terminal=True)


async def test_a_dying_session_shell_leaves_the_terminal_alone(url: str) -> None:
    async with opened(url) as box:
        shell = (await box.exec("echo $$")).output.strip()
        result = await box.exec(f"kill -9 {shell}; sleep 0.3; echo still here", terminal=True)
        assert (result.output, result.exit_code) == ("still here\n", 0)
        assert (await box.exec("echo alive")).output == "alive\n"
