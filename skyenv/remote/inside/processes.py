"""What runs below this process, as /proc tells it, how to end it, and how a fork becomes another program."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD)  # that a shell finds as a login would


class Process(NamedTuple):
    """A living process: its parent and its state letter."""

    ppid: int
    state: str


def scan() -> dict[int, Process]:
    """Every living process that /proc shows; zombies are left out."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found[int(name)] = Process(int(fields[1]), fields[0].decode())
    return found


def descendants(root: int, table: dict[int, Process]) -> set[int]:
    """Every process below `root`; all others when `root` is process 1 of its namespace."""
    if root == 1:
        return table.keys() - {1}
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.ppid, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def started_since(known: Collection[int], spared: Collection[int], table: dict[int, Process]) -> set[int]:
    """Processes below this one that are neither in `spared` or `known`, nor children of one in `known`.

    `spared` are this process's own helpers (the session shell): they live, but what they started does not.
    """
    me = os.getpid()
    found = set()
    for pid in descendants(me, table) - set(spared) - set(known):
        ancestor, steps = table[pid].ppid, 0
        while ancestor in table and ancestor != me and ancestor not in spared and steps < 4096:
            if ancestor in known:
                break
            ancestor, steps = table[ancestor].ppid, steps + 1
        else:
            found.add(pid)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(spared: Collection[int] = (), known: Collection[int] = ()) -> None:
    """Stop, then kill everything that `started_since` names, until nothing new appears (a fork bomb loses)."""
    stopped: set[int] = set()
    for _attempt in range(50):
        fresh = started_since(known, spared, scan()) - stopped
        if not fresh:
            break
        send(fresh, signal.SIGSTOP)
        stopped |= fresh
    send(stopped, signal.SIGKILL)


def stop_all(spared: Collection[int], within: float) -> tuple[set[int], bool]:
    """Stop everything below this process but `spared`; what was told to, and whether all did within so many seconds.

    A process that was told and waits in the kernel counts: it returns from there into its stop (after vfork it waits
    for a child that may have been stopped too).
    """
    told: set[int] = set()
    deadline = time.monotonic() + within
    while True:
        table = scan()
        below = descendants(os.getpid(), table) - set(spared)
        moving = {pid for pid in below if table[pid].state not in ("TtD" if pid in told else "Tt")}
        if not moving or time.monotonic() > deadline:
            return told, not moving
        send(moving, signal.SIGSTOP)
        told |= moving
        time.sleep(0.001)


def become(
    arguments: Sequence[str], environment: Mapping[str, str], folders: Sequence[str], usual: Iterable[signal.Signals]
) -> NoReturn:
    """Be another program, in the first of `folders` that exists, with `usual` signals. OSError if it cannot be run."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.chdir(folder)
            break
    os.umask(0o022)
    for number in usual:
        signal.signal(number, signal.SIG_DFL)
    os.execve(arguments[0], [os.path.basename(arguments[0]), *arguments[1:]], dict(environment))
