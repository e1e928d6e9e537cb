"""What every sandbox provider must do, as small named checks through the public interface.

`check_sandbox` runs them all; each opens a sandbox of its own, so they are independent. Paths are below the directory
that a session starts in, so that providers without a private root can be checked too.
"""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio

from skyenv.core import Sandbox, SandboxProvider
from skyenv.errors import ConfigError, EnvError, SandboxConflict, SandboxLost, SandboxPathError, SkyEnvError
from skyenv.testing.forks import FORKS
from skyenv.types import ExecResult

Check = Callable[[Sandbox, str], Awaitable[None]]
CHECK_TIMEOUT = 200.0
CHECKS_AT_A_TIME = 4


async def check_sandbox(provider: SandboxProvider, *, isolated: bool = True, snapshots: bool = True) -> None:
    """Run every check. ExceptionGroup of AssertionErrors naming what failed.

    `isolated=False` leaves out what only a private machine can promise: snapshots, no network, a root of its own;
    `snapshots=False` leaves out snapshots, forks and rollbacks.
    """
    failures: list[AssertionError] = []
    limiter = anyio.CapacityLimiter(CHECKS_AT_A_TIME)

    async def attempt(name: str, check: Callable[[], Awaitable[None]]) -> None:
        try:
            async with limiter:
                with anyio.fail_after(CHECK_TIMEOUT):
                    await check()
        except (AssertionError, SkyEnvError, TimeoutError) as error:
            failure = AssertionError(f"{name}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            failures.append(failure)

    async with anyio.create_task_group() as group:
        for check in (*COMMON, *(ISOLATED if isolated else ()), *(FORKS if isolated and snapshots else ())):
            group.start_soon(attempt, _name(check), partial(_in_a_sandbox, provider, check))
        for plain in (_a_closed_sandbox_is_lost, _unknown_keys_are_refused):
            group.start_soon(attempt, _name(plain), partial(plain, provider))
    if failures:
        raise ExceptionGroup("the provider does not keep the contract of sandboxes", failures)


def _name(check: Callable[..., object]) -> str:
    return check.__name__.strip("_").replace("_", " ")


async def _in_a_sandbox(provider: SandboxProvider, check: Check) -> None:
    async with provider.sandbox() as box:
        await check(box, (await box.exec("pwd")).cwd)


def _expect(condition: bool, message: object) -> None:
    if not condition:
        raise AssertionError(str(message))


async def _refused(work: Awaitable[object], kind: type[SkyEnvError], what: str) -> SkyEnvError:
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{what}: expected {kind.__name__}, nothing was raised")


async def _commands_answer(box: Sandbox, home: str) -> None:
    result = await box.exec("echo out; echo err >&2; exit_code=5; (exit $exit_code)")
    _expect((result.exit_code, result.output) == (5, "out\nerr\n"), result)
    _expect(not (result.timed_out or result.truncated or result.running or result.session_restarted), result)
    _expect(result.cwd == home and result.output_bytes == 8 and result.seconds > 0, result)


async def _state_carries_over(box: Sandbox, home: str) -> None:
    await box.exec("mkdir -p sub && cd sub && export A='1 2'; f() { echo f; }; B=3")
    result = await box.exec("pwd; echo $A $B; f")
    _expect(result.output == f"{home}/sub\n1 2 3\nf\n", result)


async def _a_lost_shell_is_replaced(box: Sandbox, home: str) -> None:
    await box.exec("mkdir -p sub && cd sub && export A=1")
    gone = await box.exec("exit 7")
    _expect(gone.exit_code == 7 and gone.session_restarted, gone)
    result = await box.exec("pwd; echo $A")
    _expect(result.output == f"{home}/sub\n1\n" and not result.session_restarted, result)


async def _syntax_errors_answer_at_once(box: Sandbox, _home: str) -> None:
    for command in ("echo 'abc", "if true; then", "echo $(ls"):
        result = await box.exec(command, timeout=60.0)
        _expect(result.exit_code == 2 and not result.timed_out, result)


async def _standard_input_is_empty(box: Sandbox, _home: str) -> None:
    result = await box.exec("cat; read x; echo end", timeout=60.0)
    _expect(result.output == "end\n", result)


async def _a_terminal_takes_text_and_changes_nothing(box: Sandbox, home: str) -> None:
    asked = await box.exec('cd /; read -p "name? " x; echo "[$x]"', soft_timeout=0.5, terminal=True)
    _expect(await _until(box, asked, "name? ") == "name? ", asked)
    answered = await box.send_input("Ada\n")
    _expect((answered.exit_code, answered.output, answered.cwd) == (0, "Ada\n[Ada]\n", home), answered)
    await box.exec("sleep 60", soft_timeout=0.2, terminal=True)
    _expect((await box.send_input("\x03")).exit_code == 130, "C-c did not end the command")
    await _refused(box.send_input("x"), EnvError, "typing when nothing runs")


async def _a_timeout_keeps_output_and_kills(box: Sandbox, _home: str) -> None:
    nap = _unique_nap()
    result = await box.exec(f"echo part; sleep {nap} | sleep {nap}; sleep {nap}", timeout=2.0)
    _expect(result.timed_out and result.exit_code == 124 and result.output == "part\n", result)
    await _gone(box, nap)


async def _until(box: Sandbox, result: ExecResult, text: str) -> str:
    """All that a running command printed until it had printed `text` and was silent."""
    seen = result.output
    while text not in seen:
        _expect(result.running, f"over without {text!r}: {seen!r}")
        result = await box.poll(soft_timeout=0.2)
        seen += result.output
    return seen


def _unique_nap() -> str:
    """Seconds to sleep that no other process on a shared machine sleeps."""
    return f"97.{secrets.randbelow(10**9):09}"


async def _gone(box: Sandbox, nap: str) -> None:
    """No process sleeps for `nap` seconds, though what was killed may take a moment to be gone.

    The pattern does not match the program that looks for it.
    """
    found = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q 'sleep [9]{nap[1:]}'"
    result = await box.exec(f"while {found}; do :; done", timeout=60.0)
    _expect(not result.timed_out, "processes survived the timeout")


async def _stubborn_programs_die(box: Sandbox, _home: str) -> None:
    result = await box.exec("sh -c 'trap \"\" INT TERM; while :; do sleep 1; done'", timeout=0.3)
    _expect(result.timed_out, result)
    result = await box.exec("echo alive", timeout=60.0)
    _expect(result.output == "alive\n", result)


async def _background_work_does_not_hold(box: Sandbox, _home: str) -> None:
    result = await box.exec("(sleep 0.3; echo late) & echo now", timeout=60.0)
    _expect(result.output == "now\n", result)
    result = await box.exec("sleep 0.6; echo next", timeout=60.0)
    _expect(result.output == "next\n", f"background output mixed in: {result}")


async def _a_silent_command_can_be_followed(box: Sandbox, home: str) -> None:
    first = await box.exec("echo a; until [ -e go ]; do sleep 0.1; done; echo b", timeout=60.0, soft_timeout=0.2)
    _expect(first.running and first.exit_code == -1, first)
    _expect(await _until(box, first, "a\n") == "a\n", first)
    error = await _refused(box.exec("true"), EnvError, "a second command while one runs")
    _expect("running" in str(error), error)
    await box.write_file(f"{home}/go", b"")
    last = await box.poll()
    _expect(not last.running and last.exit_code == 0 and last.output == "b\n", last)
    await _refused(box.poll(), EnvError, "poll when idle")
    await _refused(box.interrupt(), EnvError, "interrupt when idle")


async def _a_running_command_can_be_interrupted(box: Sandbox, _home: str) -> None:
    first = await box.exec("echo a; sleep 600", timeout=600.0, soft_timeout=0.2)
    _expect(first.running, first)
    last = await box.interrupt()
    _expect(last.exit_code == 130 and not last.timed_out, last)
    result = await box.exec("echo alive")
    _expect(result.output == "alive\n", result)


async def _output_is_bounded(box: Sandbox, _home: str) -> None:
    command = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"
    result = await box.exec(command, max_output_bytes=1000)
    _expect(result.truncated and result.output_bytes == 3_000_012, result.output_bytes)
    _expect(result.output.startswith("first\n") and result.output.endswith("\nlast\n"), result.output[:20])
    _expect(len(result.output) < 1200, len(result.output))
    whole = await box.exec("seq 1 10000", max_output_bytes=1 << 20)
    _expect(whole.output == "".join(f"{n}\n" for n in range(1, 10001)) and not whole.truncated, len(whole.output))


async def _any_bytes_are_output(box: Sandbox, _home: str) -> None:
    result = await box.exec("printf 'a\\377\\000b\\r\\n'")
    _expect(result.output == "a\ufffd\0b\r\n" and result.output_bytes == 6, repr(result.output))


async def _files_are_bytes(box: Sandbox, home: str) -> None:
    data = b"\xff\x00\r\nno newline at the end"
    await box.write_file(f"{home}/new/deep/file", data)
    _expect(await box.read_file(f"{home}/new/deep/file") == data, "other bytes came back")
    _expect(await box.read_file(f"{home}/new/deep/file", offset=2, max_bytes=2) == b"\r\n", "a part of a file")
    info = await box.stat(f"{home}/new/deep/file")
    _expect((info.kind, info.size, info.mode) == ("file", len(data), 0o644), info)
    big = bytes(range(256)) * 20_000
    await box.write_file(f"{home}/big", big)
    _expect(await box.read_file(f"{home}/big") == big, "5 MB came back differently")


async def _writing_keeps_the_mode_and_follows_links(box: Sandbox, home: str) -> None:
    await box.exec("echo old > tool; chmod 755 tool; ln -s tool link")
    await box.write_file(f"{home}/link", b"new")
    _expect((await box.stat(f"{home}/tool")).mode == 0o755, "the mode changed")
    _expect((await box.exec("readlink link; cat tool")).output == "tool\nnew", "the link was replaced")


async def _writing_compares_first(box: Sandbox, home: str) -> None:
    path = f"{home}/file"
    await _refused(box.write_file(path, b"1", expected=b""), SandboxConflict, "a missing file is not empty")
    await box.write_file(path, b"1")
    await box.write_file(path, b"2", expected=b"1")
    await _refused(box.write_file(path, b"3", expected=b"1"), SandboxConflict, "the file holds 2")
    _expect(await box.read_file(path) == b"2", "a refused write changed the file")


async def _special_files_are_refused(box: Sandbox, home: str) -> None:
    await box.exec("mkfifo fifo; ln -s fifo link; ln -s nowhere dangling; mkdir dir")
    with anyio.fail_after(CHECK_TIMEOUT / 2):
        for name in ("fifo", "link", "dangling", "dir", "missing", "dir/missing/x"):
            await _refused(box.read_file(f"{home}/{name}"), SandboxPathError, f"reading {name}")
        await _refused(box.read_file("/dev/zero"), SandboxPathError, "reading a device")
        await _refused(box.write_file(f"{home}/fifo", b""), SandboxPathError, "writing a FIFO")
        await _refused(box.read_file("relative"), SandboxPathError, "a relative path")
        await _refused(box.stat(f"{home}/a\0b"), SandboxPathError, "a NUL in a path")
        await _refused(box.remove(f"{home}/dir"), SandboxPathError, "removing a directory")
    error = await _refused(box.stat(f"{home}/missing"), SandboxPathError, "a missing path")
    _expect(isinstance(error, OSError) and error.errno == 2, f"errno of a missing path: {error!r}")


async def _directories_are_listed(box: Sandbox, home: str) -> None:
    await box.exec("mkdir -p d/b d/a; touch d/a/x d/Z; ln -s / d/root; printf '' > $'d/new\\nline'")
    names = [(entry.path.removeprefix(home + "/"), entry.kind) for entry in await box.list_dir(f"{home}/d", depth=2)]
    wanted = [
        ("d/Z", "file"), ("d/a", "dir"), ("d/a/x", "file"), ("d/b", "dir"), ("d/new\nline", "file"), ("d/root", "link"),
    ]  # fmt: skip
    _expect(names == wanted, names)
    _expect(len(await box.list_dir(f"{home}/d")) == 5, "depth 1 went deeper")
    await box.remove(f"{home}/d/root")
    await box.remove(f"{home}/d/Z")
    _expect(len(await box.list_dir(f"{home}/d")) == 3, "remove left something")


async def _trees_travel(box: Sandbox, home: str) -> None:
    await box.exec(
        "mkdir -p t/src t/.git; printf 'x\\r' > t/src/a; chmod 755 t/src/a; ln -s src/a t/link; touch t/.git/x"
    )
    archive = await box.download(f"{home}/t", exclude=[".git"])
    await box.upload(f"{home}/copy", archive)
    result = await box.exec("cd copy && find . | sort && readlink link && cat src/a && stat -c %a src/a")
    _expect(result.output == ".\n./link\n./src\n./src/a\nsrc/a\nx\r755\n", result)
    await _refused(box.download(f"{home}/missing"), SandboxPathError, "downloading a missing path")


async def _hostile_archives_stay_inside(box: Sandbox, home: str) -> None:
    link = tarfile.TarInfo("out")
    link.type, link.linkname = tarfile.SYMTYPE, home
    device = tarfile.TarInfo("device")
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    hard = tarfile.TarInfo("hard")
    hard.type, hard.linkname = tarfile.LNKTYPE, "../secret"
    await box.write_file(f"{home}/secret", b"untouched")
    hostile: list[list[tarfile.TarInfo | str]] = [
        ["../secret"], ["/secret"], ["a/../../secret"], [link, "out/secret"], [device], [hard],
    ]  # fmt: skip
    for members in hostile:
        archive = _archive(members)
        await _refused(box.upload(f"{home}/in/here", archive), SandboxPathError, f"unpacking {members}")
    for garbage in (b"", b"not a tar at all" * 100, _archive(["ok"])[:700]):
        await _refused(box.upload(f"{home}/in/here", garbage), SandboxPathError, "unpacking garbage")
    _expect(await box.read_file(f"{home}/secret") == b"untouched", "an archive wrote outside")


def _archive(members: Sequence[tarfile.TarInfo | str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = 4 if isinstance(member, str) else 0
            tar.addfile(info, io.BytesIO(b"evil") if isinstance(member, str) else None)
    return out.getvalue()


async def _processes_can_be_killed(box: Sandbox, home: str) -> None:
    started = await box.exec(
        "sleep 96 & one=$!; setsid sleep 96 & kill -0 $one $! && echo $one $!; touch kept; export A=1"
    )
    _expect(len(started.output.split()) == 2, started)
    await box.kill_processes()
    result = await box.exec(
        f"ls; echo $A; for pid in {started.output.strip()}; do while kill -0 $pid 2>/dev/null; do :; done; done",
        timeout=60.0,
    )
    _expect(result.output == "kept\n1\n" and result.session_restarted, result)


async def _sandboxes_have_a_root_of_their_own(box: Sandbox, _home: str) -> None:
    result = await box.exec(
        "id -u; hostname; cat /home/*/* /root/.ssh/* /var/run/docker.sock 2>/dev/null; echo x > /marker"
    )
    _expect(result.output == "0\nsandbox\n" and result.exit_code == 0, result)
    result = await box.exec("ps -e | wc -l")
    _expect(int(result.output) < 10, f"foreign processes are visible: {result.output}")


_CONNECT = (
    "if command -v python3 >/dev/null; then python3 -c \"import socket; socket.create_connection(('{0}', {1}), 3)\"; "
    "elif command -v bash >/dev/null; then bash -c '</dev/tcp/{0}/{1}'; else nc -w 3 {0} {1} </dev/null; fi"
)


async def _only_loopback_exists(box: Sandbox, _home: str) -> None:
    result = await box.exec(_CONNECT.format("192.0.2.1", 80), timeout=60)
    _expect(result.exit_code == 1 and not result.timed_out, f"the network answers: {result}")
    _expect("unreachable" in result.output, f"the network is there, and silent: {result}")
    result = await box.exec(_CONNECT.format("127.0.0.1", 9), timeout=60)
    _expect(result.exit_code == 1 and "refused" in result.output, f"loopback does not work: {result}")


async def _privileges_are_few(box: Sandbox, _home: str) -> None:
    for command in ("mount -t tmpfs x /mnt", "unshare -r true", "mknod /tmp/d b 8 0", "chroot / mount -t proc p /mnt"):
        result = await box.exec(command)
        _expect(result.exit_code != 0, f"{command} worked")
    result = await box.exec("grep NoNewPrivs /proc/self/status; cat /proc/1/environ /proc/1/maps", timeout=60)
    _expect(result.output.startswith("NoNewPrivs:\t1\n") and "-" not in result.output[14:40], result)


async def _a_closed_sandbox_is_lost(provider: SandboxProvider) -> None:
    async with provider.sandbox() as box:
        pass
    await _refused(box.exec("true"), SandboxLost, "a command in a closed sandbox")
    await provider.delete_snapshot("0" * 32)


async def _unknown_keys_are_refused(provider: SandboxProvider) -> None:
    async def open_one() -> None:
        async with provider.sandbox(memory_byte=1 << 30):
            pass

    error = await _refused(open_one(), ConfigError, "an unknown spec key")
    _expect("memory_bytes" in str(error), f"the nearest key is not named: {error}")


COMMON: tuple[Check, ...] = (
    _commands_answer,
    _state_carries_over,
    _a_lost_shell_is_replaced,
    _syntax_errors_answer_at_once,
    _standard_input_is_empty,
    _a_terminal_takes_text_and_changes_nothing,
    _a_timeout_keeps_output_and_kills,
    _stubborn_programs_die,
    _background_work_does_not_hold,
    _a_silent_command_can_be_followed,
    _a_running_command_can_be_interrupted,
    _output_is_bounded,
    _any_bytes_are_output,
    _files_are_bytes,
    _writing_keeps_the_mode_and_follows_links,
    _writing_compares_first,
    _special_files_are_refused,
    _directories_are_listed,
    _trees_travel,
    _hostile_archives_stay_inside,
    _processes_can_be_killed,
)
ISOLATED: tuple[Check, ...] = (
    _sandboxes_have_a_root_of_their_own,
    _only_loopback_exists,
    _privileges_are_few,
)
