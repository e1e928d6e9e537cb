"""The session shell: one bash (or sh) fed through a pipe, one command at a time.

Each command is a file that the shell sources with stdin from /dev/null and output to a FIFO of its own. Exit status
and exported variables come back on a private descriptor, so nothing in the output can be mistaken for them. This side
always drains the FIFO into a bounded buffer: no writer ever blocks or sees a full disk, and a background child neither
holds the call nor mixes into the next result. A shell that goes away is replaced with the same directory and exports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from . import processes, terminal
from .cgroups import oom_kills
from .command import KILL_GRACE, Reply, Running
from .files import write_all

STATUS_FD = 9
READ = 1 << 17

# Each part of the report is redirected by itself, so that a DEBUG trap cannot print into it.
_LINE = (
    "{status}. {dir}/{name} </dev/null >{dir}/out.{number} 2>&1 {fd}>&-; __status=$?; "
    "\\unset -f unset printf export; "
    "\\printf '%s ' \"$__status\" >&{fd} && \\export -p >&{fd} && \\printf '\\0' >&{fd} || exit\n"
)
_ON_TERMINAL = "echo 500 >/proc/self/oom_score_adj\n. {dir}/terminal_exports\n. {dir}/{name}\n"
# A shell seeds itself from the time and its process id, in which siblings may agree.
_PROLOGUE = "echo 500 >/proc/self/oom_score_adj; {bash_seed}. {dir}/exports{arrive}{sh_seed}\n"
_SH_SEED = '; [ -z "${RANDOM-}" ] || RANDOM='


class Shell:
    """Owns the shell process, its pipes and the FIFO of the running command. Driven by the loop in `init`."""

    def __init__(self, config: dict[str, Any], poller: select.poll, oom_counter: int | None) -> None:
        self.dir: str = config["run_dir"]
        self.home: str = config["home"]
        self.environment: dict[str, str] = {}
        self.program: str = next((p for p in config["shells"] if os.access(p, os.X_OK)), "/bin/sh")
        self.poller = poller
        self.oom_counter = oom_counter
        self.oom_seen = oom_kills(oom_counter)
        self.pid = 0
        self.cwd = self.home
        self.exports: bytes | None = None
        self.takeover: bytes | None = None  # a script that a fresh shell begins with, once
        self.limits: list[tuple[int, int, int]] = []  # of the shell that takes over: resource, soft, hard
        self.proven: dict[bytes, bytes] = {}  # parts of the state that another shell was seen to take over
        self.overdue = b""  # the end of an answer that is still to come and that nobody wants any more
        self.last_code = 0
        self.restarted = False
        self.running: Running | None = None
        self.held = False  # everything inside is stopped, and so is the running command's time
        self.finished: tuple[dict[str, Any], bytes] | None = None
        self.readers: dict[int, Callable[[], None]] = {}
        self.helpers: Collection[int] = ()
        self.guests: Collection[int] = ()
        self.stdin = self.status = -1
        self._record = bytearray()
        self._count = 0
        self._draining: set[int] = set()

    @property
    def exists(self) -> bool:
        """Whether there is a program to start; an image may have none."""
        return os.access(self.program, os.X_OK)

    def spawn(self) -> None:
        """Start the shell where the last one was. OSError when no process can be had."""
        with contextlib.suppress(OSError):
            os.makedirs(self.dir, exist_ok=True)
        self.write_file("exports", self.exports or b"" if self.takeover is None else self.takeover)
        stdin, self.stdin = os.pipe()
        self.status, status = os.pipe()
        os.set_blocking(self.status, False)
        try:
            pid = os.fork()
            if not pid:
                self._exec_shell(stdin, status)
        except OSError:
            os.close(self.stdin)
            os.close(self.status)
            raise
        finally:
            os.close(stdin)
            os.close(status)
        self.pid = pid
        self._record.clear()
        self._watch(self.status, self._read_status)
        os.write(self.stdin, self._prologue().encode())
        self.takeover, self.limits = None, []

    def _prologue(self) -> str:
        seed, bash = int.from_bytes(os.urandom(4)), os.path.basename(self.program) == "bash"
        return _PROLOGUE.format(
            dir=self.dir,
            arrive="; \\cd ." if self.takeover is None else "",
            bash_seed=f"RANDOM={seed}; " if bash else "",
            sh_seed="" if bash else f"{_SH_SEED}{seed}",
        )

    def _arguments(self) -> list[str]:
        return [self.program, *(("--noprofile", "--norc") if os.path.basename(self.program) == "bash" else ())]

    def _folders(self) -> tuple[str, ...]:
        """Where a shell starts: the first of these that exists."""
        return self.cwd, self.home, "/"

    def _exec_shell(self, stdin: int, status: int) -> None:
        try:
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            status = os.dup(status)
            for source, target in ((stdin, 0), (null, 1), (null, 2)):
                os.dup2(source, target)
            os.dup2(status, STATUS_FD)
            os.closerange(3, STATUS_FD)
            os.closerange(STATUS_FD + 1, 1 << 16)
            for kind, soft, hard in self.limits:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(kind, (soft, hard))
            environment = self.environment if self.exports is None else {}
            processes.become(self._arguments(), environment, self._folders(), processes.SIGNALS)
        finally:
            os._exit(127)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file in the session's own directory."""
        path = f"{self.dir}/{name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, data)
        finally:
            os.close(file)

    def start(self, request: dict[str, Any], command: bytes, reply: Reply) -> None:
        """Give the shell a command. OSError when the sandbox is too broken to take one."""
        if not self.pid and not self.exists:
            raise FileNotFoundError(errno.ENOENT, "there is no shell", self.program)
        running = Running(request, reply)
        try:
            line = self._prepare(running, command, request["terminal"])
        except OSError:
            self._make_room()
            line = self._prepare(running, command, request["terminal"])
        running.known = set(map(int, filter(str.isdigit, os.listdir("/proc")))) - {self.pid, running.pid}
        self.finished, self.running = None, running
        self.oom_seen = oom_kills(self.oom_counter)
        self._watch(running.reader, lambda: self._read_output(running))
        with contextlib.suppress(BrokenPipeError):
            os.write(self.stdin, line.encode())

    def _prepare(self, running: Running, command: bytes, on_terminal: bool) -> str:
        """Write the command to a file and make ready what it prints to; returns what the session shell is told."""
        self._reap()
        if not self.pid:
            self.spawn()
        self._count += 1
        name = os.path.basename(self.program)
        self.write_file(name, command.replace(b"\0", b""))
        return self._prepare_terminal(running, name) if on_terminal else self._prepare_fifo(running, name)

    def _prepare_fifo(self, running: Running, name: str) -> str:
        """Open the FIFO; returns the line that makes the shell run the file."""
        status = ""
        if self.last_code:
            # The command finds the last one's `$?`; the right side of `||` still obeys `set -e`.
            self.write_file("status", f"return {self.last_code}\n".encode())
            status = f". {self.dir}/status || "
        fifo = f"{self.dir}/out.{self._count}"
        os.mkfifo(fifo)
        os.chmod(fifo, 0o622)
        running.reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        running.writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return _LINE.format(dir=self.dir, name=name, number=self._count, fd=STATUS_FD, status=status)

    def _prepare_terminal(self, running: Running, name: str) -> str:
        """Run the file in a shell of its own on a terminal; the session shell has nothing to do."""
        self.write_file("terminal_exports", self.exports or b"")
        self.write_file("terminal", _ON_TERMINAL.format(dir=self.dir, name=name).encode())
        running.reader, running.writer = terminal.open_pair()
        arguments = [*self._arguments(), f"{self.dir}/terminal"]
        environment = {"TERM": "dumb", **(self.environment if self.exports is None else {})}
        try:
            running.pid = terminal.start(running.writer, arguments, environment, self._folders())
        except OSError:
            os.close(running.reader)
            os.close(running.writer)
            raise
        return ""

    def type(self, data: bytes, reply: Reply, soft_timeout: float | None = None, flush: float | None = None) -> str:
        """Type into the running command's terminal, then follow it as `poll` does. What is wrong, if it cannot be."""
        running = self.running
        if running is None:
            return "no command is running"
        if not running.pid:
            return "the running command has no terminal"
        done = terminal.write(running.reader, data)
        if done < len(data):
            return f"the program does not read its terminal: {done} of {len(data)} bytes were typed"
        self.poll(reply, soft_timeout, flush)
        return ""

    def _make_room(self) -> None:
        """The session's own directory is full of things that are not ours, or no process can be started."""
        if not self.pid:
            processes.kill_all(self.guests)
        for name in os.listdir(self.dir):
            path = f"{self.dir}/{name}"
            with contextlib.suppress(OSError):
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rename(path, f"{self.dir}/.{os.urandom(8).hex()}")
                else:
                    os.unlink(path)

    def poll(self, reply: Reply, soft_timeout: float | None = None, flush: float | None = None) -> bool:
        """Answer `reply` with what the running command comes to; False when there is none."""
        if self.finished is not None:
            finished, self.finished = self.finished, None
            reply(*finished)
        elif self.running is not None:
            self.running.waiters.append(reply)
            self.running.soft, self.running.printed, self.running.flush = soft_timeout, time.monotonic(), flush
        else:
            return False
        return True

    def interrupt(self, reply: Reply) -> bool:
        """End the running command and answer with how it went; False when there is none."""
        if self.running is not None and self.running.phase == "run":
            self.running.end(self.pid, self._spared())
        return self.poll(reply)

    def kill(self) -> None:
        """Kill everything inside; the next command finds a fresh shell."""
        processes.kill_all(self.guests)
        deadline = time.monotonic() + KILL_GRACE
        while not self._reap() and time.monotonic() < deadline:
            time.sleep(0.001)

    def replace(self) -> None:
        """Put a fresh shell in the place of an idle one."""
        processes.send((self.pid,), signal.SIGKILL)
        _pid, status = os.waitpid(self.pid, 0)
        self.died(status)

    def _reap(self) -> bool:
        """Notice now if the shell is gone, before the loop does; True when it was."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG) if self.pid else (0, 0)
            if pid:
                self.died(status)
                return True
        return not self.pid

    def died(self, status: int) -> None:
        """The loop reaped the shell."""
        with contextlib.suppress(OSError):
            self._read_status()
        self._unwatch(self.status)
        os.close(self.status)
        os.close(self.stdin)
        self.pid, self.restarted = 0, True
        code = os.waitstatus_to_exitcode(status)
        if self.running is not None and not self.running.pid:
            self._ended(self.running, code)
        with contextlib.suppress(OSError):
            self.spawn()

    def reaped(self, pid: int, status: int) -> None:
        """The loop reaped some process: perhaps the running command's own shell."""
        if self.running is not None and pid == self.running.pid:
            self._ended(self.running, os.waitstatus_to_exitcode(status))

    def _ended(self, running: Running, code: int) -> None:
        if running.phase == "kill":
            processes.kill_all(self._spared(), running.known)
        self._finish(running, 128 - code if code < 0 else code)

    def next_event(self) -> float | None:
        """Seconds until `tick` wants to be called."""
        running = self.running
        if running is None or self.held:
            return None
        moments = [running.deadline if running.phase == "run" else running.next_sweep]
        if running.waiters and running.phase == "run":
            moments += running.moments()
        return max(0.0, min(moments) - time.monotonic())

    def tick(self) -> None:
        """Let time pass for the running command: soft timeout, deadline, interrupt, kill."""
        running, now = self.running, time.monotonic()
        if running is None or self.held:
            return
        if running.phase == "run":
            if now >= running.deadline:
                running.timed_out = True
                running.end(self.pid, self._spared())
            elif running.waiters and any(now >= moment for moment in running.moments()):
                self._answer(running, {"running": True, "exit_code": -1})
        elif now >= running.next_sweep:
            running.sweep(self.pid, self._spared())

    def shift(self, seconds: float) -> None:
        """Time stood still for so long: it does not count against the running command."""
        if self.running is not None:
            self.running.shift(seconds)

    def _spared(self) -> tuple[int, ...]:
        """Our own helpers, which no command started."""
        return (self.pid, *self.helpers, *self.guests)

    def _read_output(self, running: Running) -> None:
        try:
            chunk = os.read(running.reader, READ)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""  # a terminal that nobody has open any more
        if running is self.running:
            running.printed = time.monotonic()
            if not running.capture.total:
                running.unsent = running.printed
            running.capture.add(chunk)
        elif not chunk:
            self._unwatch(running.reader)
            os.close(running.reader)

    def _read_status(self) -> None:
        try:
            chunk = os.read(self.status, READ)
        except BlockingIOError:
            return
        if not chunk:
            # Nobody holds the descriptor any more, so no report will come: let the shell end after this command.
            self._unwatch(self.status)
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.stdin)
            os.close(null)
            return
        self._record += chunk
        if self.overdue:
            if self.overdue not in self._record:
                return
            self._record, self.overdue = self._record.partition(self.overdue)[2], b""
        if self._record.endswith(b"\0") and self.running is not None:
            code, _space, self.exports = bytes(self._record[:-1]).rpartition(b"\0")[2].partition(b" ")
            self._record.clear()
            self._remember_cwd()
            self._finish(self.running, int(code) if code.isdigit() else 1)

    def _remember_cwd(self) -> None:
        with contextlib.suppress(OSError):
            self.cwd = os.readlink(f"/proc/{self.pid}/cwd").removesuffix(" (deleted)")

    def _finish(self, running: Running, code: int) -> None:
        self.running, self.last_code = None, code
        with contextlib.suppress(OSError):
            while chunk := os.read(running.reader, READ):
                running.capture.add(chunk)
        os.close(running.writer)
        with contextlib.suppress(OSError):
            os.unlink(f"{self.dir}/out.{self._count}")
        result = {"exit_code": 124 if running.timed_out else code, "timed_out": running.timed_out}
        result["oom"] = oom_kills(self.oom_counter) > self.oom_seen
        result["session_restarted"], self.restarted = self.restarted, False
        self._answer(running, result)

    def _answer(self, running: Running, result: dict[str, Any]) -> None:
        total = running.capture.total
        head, data = running.capture.take()
        seconds = time.monotonic() - running.started
        result["cwd_missing"] = not os.path.isdir(self.cwd)
        result |= {"cwd": self.cwd, "seconds": seconds, "head": head, "output_bytes": total}
        if not running.waiters:
            self.finished = (result, data)
        for waiter in running.waiters:
            waiter(result, data)
        running.waiters.clear()

    def _watch(self, fd: int, reader: Callable[[], None]) -> None:
        self.readers[fd] = reader
        self.poller.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self.readers.pop(fd, None):
            self.poller.unregister(fd)
