"""The state of a session, as its live shell tells it through its private descriptor, and how a new shell takes it over.

Carried for bash: directory, variables with their attributes, functions, aliases, options, umask, traps, positional
parameters, the directory stack, disabled builtins, resource limits, `$?`, and what lies in the memory file systems
/run and /dev/shm. A POSIX sh cannot list functions and has fewer of the rest. Nothing is taken on trust: a second shell
takes the state over on trial, and what it does not tell back in the same words counts as not carried.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import resource
import select
import signal
import time
from typing import Any, NamedTuple

from . import archive, processes
from .scripts import BASH_LINE, BASH_SAVE, SETTLE, SH_LINE, SH_SAVE, bash_takeover, sh_takeover
from .shell import READ, STATUS_FD, Shell

DEADLINE = 5.0
END = b"\0end\0"
MEMORY_FOLDERS = ("/run", "/dev/shm")
MEMORY_BYTES = 64 << 20
OWN_FOLDER = "skyenv"
DESCRIPTOR_TRIES = 10
KNOWN_DEVICES = frozenset(
    {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "ptmx", "fd", "stdin", "stdout", "stderr"}
    | {"console", "mqueue", "core", "termination-log"}
)
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))

_PLAIN_OPTIONS = frozenset(
    b"allexport braceexpand errexit errtrace functrace hashall interactive-comments noclobber noglob nounset "
    b"pipefail verbose xtrace".split()
)
_PLAIN_PARTS = (b"traps", b"exports", b"umask", b"parameters", b"shopt")
_PLAIN_VARIABLE = re.compile(rb"declare -[-xiraA]+ [^ =]+(=|$)")


class Saved(NamedTuple):
    """A state, empty when none was asked for, and what stands in the way of carrying it.

    `moving` are things that live (processes, open descriptors, a running command), `lost` what else is left behind.
    """

    state: bytes
    moving: list[str]
    lost: list[str]


def moving(shell: Shell) -> list[str]:
    """What lives in the sandbox besides an idle shell, in words."""
    found = []
    if shell.running is not None:
        found.append("a running command")
    if shell.helpers:
        found.append("a file operation under way")
    spared = {os.getpid(), shell.pid, *shell.helpers, *shell.guests}
    if shell.running is not None:
        spared.add(shell.running.pid)
    below = processes.descendants(os.getpid(), processes.scan()) - spared
    found += [f"process {pid}: {_command_line(pid)}" for pid in sorted(below)]
    return found + _open_descriptors(shell.pid)


def _open_descriptors(pid: int) -> list[str]:
    """What a session's shell has open. A shell that has just answered may not have closed a copy of its own yet."""
    found: list[str] = []
    for _attempt in range(DESCRIPTOR_TRIES):
        with contextlib.suppress(OSError):
            names = set(map(int, os.listdir(f"/proc/{pid}/fd"))) if pid else set()
            numbers = sorted(names - {0, 1, 2, STATUS_FD})
            found = [f"descriptor {number}: {_link(f'/proc/{pid}/fd/{number}')}" for number in numbers]
        if not found:
            break
        time.sleep(0.002)
    return found


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read(200).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        return words or "(no name)"
    return "(ended)"


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.fsencode(os.readlink(path)).decode(errors="replace")
    return "(closed)"


def save(shell: Shell, private_root: bool) -> Saved:
    """Ask the shell for its state. `private_root`: memory file systems and devices are the sandbox's own."""
    alive = moving(shell)
    state: dict[str, Any] = {"cwd": os.fsencode(shell.cwd).decode("latin-1"), "code": shell.last_code}
    state["environment"] = shell.environment
    lost = [] if os.path.isdir(shell.cwd) else [f"the working directory {shell.cwd}, which was removed"]
    bash = os.path.basename(shell.program) == "bash"
    parts = None if shell.running is not None else _ask(shell, bash)
    if parts is None:
        lost.append("the state of the shell, which does not tell it")
    else:
        head, rest = bash_takeover(parts, traps=True) if bash else sh_takeover(parts)
        lost += _losses(shell, parts, bash)
        texts = {"head": head, "rest": rest, "exports": parts[b"exports"]}
        state |= {key: text.decode("latin-1") for key, text in texts.items()}
        state["limits"] = _own_limits(shell.pid)
    if private_root:
        state["memory"], more = _pack_memory()
        lost += more
    return Saved(json.dumps(state).encode(), alive, lost)


def _ask(shell: Shell, bash: bool) -> dict[bytes, bytes] | None:
    """Have an idle shell tell its state: names and values. None when it does not."""
    script, line = (BASH_SAVE, BASH_LINE) if bash else (SH_SAVE, SH_LINE)
    try:
        if not shell.pid:
            shell.spawn()
        shell.write_file("save", script.replace("{dir}", shell.dir).encode())
        told = _converse(shell, line.replace("{dir}", shell.dir).encode())
    except OSError:
        return None
    fields = told.split(b"\0")[:-2]
    if len(fields) % 2:
        return None
    parts = dict(zip(fields[::2], fields[1::2], strict=True))
    wanted = {b"traps", b"umask", b"exports", b"aliases", b"shopt" if bash else b"variables"}
    return parts if wanted <= parts.keys() else None


def _converse(shell: Shell, line: bytes) -> bytes:
    """Have the shell run `line` and read what it tells on its private descriptor. OSError when it does not end."""
    os.write(shell.stdin, line)
    told, deadline = bytearray(), time.monotonic() + DEADLINE
    poller = select.poll()
    poller.register(shell.status, select.POLLIN)
    while not told.endswith(END):
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            shell.overdue = END
            raise OSError("the shell does not answer")
        chunk = os.read(shell.status, READ)
        if not chunk:
            raise OSError("the shell ended")
        told += chunk
    return bytes(told)


def _losses(shell: Shell, parts: dict[bytes, bytes], bash: bool) -> list[str]:
    """What a second shell that takes the state over does not tell back."""
    odd = {key: value for key, value in parts.items() if not (bash and _is_plain(key, value))}
    if odd.items() <= shell.proven.items():
        return []
    told: dict[bytes, bytes] | None = None
    with contextlib.suppress(OSError):
        script = b"".join(bash_takeover(parts, traps=False) if bash else sh_takeover(parts))
        trial = twin(shell, script)
        try:
            told = _ask(trial, bash)
        finally:
            os.kill(trial.pid, signal.SIGKILL)
            os.waitpid(trial.pid, 0)
            os.close(trial.stdin)
            os.close(trial.status)
    if told is None:
        return ["the state of the shell, which another one does not take over"]
    compared = parts.keys() | told.keys() if bash else {b"exports", b"options", b"umask", b"aliases"}
    different = {_in_words(key) for key in compared - {b"traps", b"exports"} if parts.get(key) != told.get(key)}
    if not different:
        shell.proven = odd
    return sorted(different)


def _is_plain(key: bytes, value: bytes) -> bool:
    """Whether this is something that bash is known to tell as it reads it: a simple variable, a usual option."""
    if key == b"set":
        return _PLAIN_OPTIONS.issuperset(value.split(b":"))
    if key.startswith(b"v:"):
        return _PLAIN_VARIABLE.match(value) is not None
    return key in _PLAIN_PARTS or not value


def twin(shell: Shell, script: bytes) -> Shell:
    """A second shell that took a state over, unknown to the loop; who asks for it kills, reaps and closes it."""
    config = {"run_dir": f"{shell.dir}/twin", "home": shell.home, "shells": [shell.program]}
    second = Shell(config, select.poll(), None)
    second.cwd, second.exports, second.takeover = shell.cwd, b"", script
    second.spawn()
    return second


def _in_words(key: bytes) -> str:
    kind, colon, name = key.decode(errors="replace").partition(":")
    if colon:
        return f"{'variable' if kind == 'v' else 'function'} {name}"
    return "shell options" if kind in ("set", "shopt") else kind


def _own_limits(pid: int) -> list[tuple[int, int, int]]:
    """The resource limits in which the shell differs from this process."""
    found = []
    with contextlib.suppress(OSError):
        for kind in _LIMITS:
            theirs = resource.prlimit(pid, kind)
            if theirs != resource.getrlimit(kind):
                found.append((kind, *theirs))
    return found


def _pack_memory() -> tuple[dict[str, str], list[str]]:
    """The memory file systems that are not empty, as archives; what cannot be packed, in words."""
    packed, lost = {}, []
    for folder in MEMORY_FOLDERS:
        if not _memory_names(folder) or os.stat(folder).st_dev == os.stat("/").st_dev:
            continue
        usage = os.statvfs(folder)
        if (usage.f_blocks - usage.f_bfree) * usage.f_frsize > MEMORY_BYTES:
            lost.append(f"the files in {folder}, more than {MEMORY_BYTES >> 20} MiB")
            continue
        out = io.BytesIO()
        archive.pack(folder, [OWN_FOLDER] if folder == "/run" else [], out)
        packed[folder] = base64.b64encode(out.getvalue()).decode()
    lost += [f"/dev/{name}" for name in _names("/dev") if name not in KNOWN_DEVICES]
    return packed, lost


def _memory_names(folder: str) -> list[str]:
    return [name for name in _names(folder) if (folder, name) != ("/run", OWN_FOLDER)]


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def restore(shell: Shell, state: bytes, overrides: dict[str, str]) -> None:
    """Let a shell that was not started yet begin in this state; `overrides` are exported on top of its variables."""
    told = json.loads(state)
    for folder, packed in told.get("memory", {}).items():
        with contextlib.suppress(OSError):
            archive.unpack(folder, io.BytesIO(base64.b64decode(packed)))
    shell.cwd = os.fsdecode(told["cwd"].encode("latin-1"))
    shell.last_code = told["code"]
    if "head" not in told:
        shell.environment = told["environment"] | overrides
        return
    extra = b"".join(b"export %s=%s\n" % (name.encode(), _quoted(value)) for name, value in overrides.items())
    shell.exports = told["exports"].encode("latin-1") + extra
    shell.takeover = told["head"].encode("latin-1") + extra + told["rest"].encode("latin-1")
    shell.limits = [(kind, soft, hard) for kind, soft, hard in told["limits"]]


def _quoted(value: str) -> bytes:
    return b"'" + os.fsencode(value).replace(b"'", b"'\\''") + b"'"


def settle(shell: Shell) -> None:
    """Let an idle shell go on where it is by name after the root was exchanged below it.

    One that cannot be made to go there is replaced by another one that takes its state over.
    """
    if not shell.pid or not os.path.isdir(shell.cwd):  # nothing can be written in a directory that was removed
        return
    folder = _quoted(shell.cwd).decode(errors="surrogateescape")
    for word in ("command", "builtin"):
        line = SETTLE.format(word=word, folder=folder).encode(errors="surrogateescape")
        with contextlib.suppress(OSError):
            _converse(shell, line)
            if _place(f"/proc/{shell.pid}/cwd") == _place(shell.cwd):
                return
    restore(shell, save(shell, False).state, {})
    shell.replace()


def _place(path: str) -> tuple[int, int, bytes]:
    """Which directory a path leads to, and in which mount."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            mount = next(line for line in file if line.startswith(b"mnt_id:"))
        found = os.fstat(fd)
        return found.st_dev, found.st_ino, mount
    finally:
        os.close(fd)
