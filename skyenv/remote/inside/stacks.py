"""The launcher's snapshots: which layers each sandbox and each snapshot stands on, and what becomes of layers.

A snapshot of a sandbox in which only an idle shell lives costs the same however much was written: its upper directory
becomes a layer by a rename, and the sandbox goes on with a fresh one on top. Otherwise, or without overlays of root's,
the upper directory is copied. A layer lives as long as anybody stands on it; a stack that gets deep is flattened in the
background, for whoever starts from it later.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import flatten, mounts
from .children import copy_tree

FLATTEN_AT = 8
DEPTH = 16
MOST_LAYERS = 200  # when flattening fails; the kernel takes 500
FOLDER = "layers"

Stack = tuple[str, ...]
Done = Callable[[str], None]


class Snapshot(NamedTuple):
    """What to take: of which sandbox, whether only its idle shell lives, and a state to keep with it."""

    name: str
    sandbox: str
    pid: int
    idle: bool
    state: bytes


class Stacks:
    """Owns `layers` in the state directory. `work(job, done)` runs a job in a child; `bury(path)` removes later."""

    def __init__(
        self,
        config: dict[str, Any],
        work: Callable[[Callable[[], None], Done], None],
        bury: Callable[[str], None],
    ) -> None:
        self.folder = f"{config['state']}/{FOLDER}"
        self.top: str = config["state"]
        self.stacked = config["base_uid"] is not None
        self.states: dict[str, bytes] = {}
        self._work = work
        self._bury = bury
        self._stacks: dict[str, Stack] = {}
        self._holders: dict[str, set[str]] = {}
        self._flat: OrderedDict[Stack, str] = OrderedDict()
        self._flattening: dict[Stack, list[Callable[[], None]]] = {}
        self._unflattened: set[str] = set()  # top layers of stacks on which flattening failed
        self._count = 0

    def path(self, layer: str) -> str:
        """Where a layer lies."""
        return f"{self.folder}/{layer}"

    def start(self, sandbox: str, snapshot: str | None, lower: list[str]) -> list[str]:
        """Let a new sandbox stand on a snapshot; returns its lower directories. OSError when there is none such."""
        if snapshot is None:
            return lower
        if snapshot not in self._stacks:
            raise OSError(f"snapshot {snapshot} does not exist")
        if not self.stacked:
            return lower
        self._hold(sandbox, self._stacks[snapshot])
        return [*map(self.path, self._stacks[snapshot]), *lower]

    def release(self, holder: str) -> None:
        """A sandbox ended or a snapshot is forgotten; layers that nobody needs go. Idempotent."""
        self.states.pop(holder, None)
        self._leave(holder, self._stacks.pop(holder, ()))

    def _leave(self, holder: str, layers: Iterable[str]) -> None:
        for layer in layers:
            holders = self._holders[layer]
            holders.discard(holder)
            if not holders:
                del self._holders[layer]
                self._bury(self.path(layer))
                for stack in [stack for stack in self._flat if layer in stack]:
                    self.release(f"flat {self._flat.pop(stack)}")

    def take(self, wanted: Snapshot, base_lower: list[str], done: Done) -> None:
        """Take a snapshot; `done` hears "ok" or what went wrong, once it can be used."""
        stack = self._shortened(self._stacks.get(wanted.sandbox, ()))
        if len(stack) >= DEPTH and (pending := self._pending(stack)) is not None:
            self._flattening[pending].append(lambda: self.take(wanted, base_lower, done))
            return
        if len(stack) >= MOST_LAYERS:
            done(f"the snapshot would stand on {len(stack)} layers")
            return
        os.makedirs(self.folder, mode=0o711, exist_ok=True)
        upper = f"{self.top}/{wanted.sandbox}/upper"
        moved = wanted.idle and self.stacked and not os.path.ismount(os.path.dirname(upper))
        self._count += 1
        fresh, lowers = f"{os.path.dirname(upper)}/work{self._count}", [*map(self.path, stack), *base_lower]

        def finish(answer: str) -> None:
            if answer == "ok":
                self._taken(wanted, stack, moved)
            else:
                self._bury(self.path(wanted.name))
            done(answer)

        if not moved:
            self._work(lambda: copy_tree(upper, self.path(wanted.name)), finish)
            return
        try:
            move(wanted.pid, upper, self.path(wanted.name), lowers, fresh)
        except OSError as error:
            finish(str(error))
        else:
            finish("ok")

    def _taken(self, wanted: Snapshot, stack: Stack, moved: bool) -> None:
        above = (wanted.name, *stack) if self.stacked else (wanted.name,)
        self.states[wanted.name] = wanted.state
        self._hold(wanted.name, above)
        if moved and os.path.isdir(f"{self.top}/{wanted.sandbox}"):
            self._hold(wanted.sandbox, above)
        if self.stacked and len(above) >= FLATTEN_AT and above[-1] not in self._unflattened:
            self._flatten(above)

    def _hold(self, holder: str, stack: Stack) -> None:
        """Let `holder` stand on `stack`, and no longer on what it stood on before."""
        for layer in stack:
            self._holders.setdefault(layer, set()).add(holder)
        former, self._stacks[holder] = self._stacks.get(holder, ()), stack
        self._leave(holder, [layer for layer in former if layer not in stack])

    def _shortened(self, stack: Stack) -> Stack:
        """The same view on fewer layers, as far as flattening got."""
        for start in range(len(stack)):
            if stack[start:] in self._flat:
                return (*stack[:start], self._flat[stack[start:]])
        return stack

    def _pending(self, stack: Stack) -> Stack | None:
        """The part of a stack that is being flattened."""
        return next((known for known in self._flattening if stack[-len(known) :] == known), None)

    def _flatten(self, stack: Stack) -> None:
        if self._pending(stack) is not None:
            return
        self._count += 1
        layer = f"flat{self._count}"
        self._flattening[stack] = []
        self._hold(f"flattening {layer}", stack)
        paths, target = [self.path(each) for each in stack], self.path(layer)

        def finish(answer: str) -> None:
            if answer == "ok":
                self._hold(f"flat {layer}", (layer,))
                self._flat[stack] = layer
                for holder in [each for each in self.states if self._stacks[each][-len(stack) :] == stack]:
                    self._hold(holder, self._shortened(self._stacks[holder]))
            else:
                self._unflattened.add(stack[-1])
                self._bury(target)
            self.release(f"flattening {layer}")
            for waiting in self._flattening.pop(stack):
                waiting()

        self._work(lambda: flatten.flatten(paths, target), finish)


def move(pid: int, upper: str, layer: str, lowers: list[str], work: str) -> None:
    """Turn a living sandbox's upper directory into a layer and give it a fresh one. All or nothing."""
    os.rename(upper, layer)
    try:
        os.mkdir(upper)
        like(layer, upper)
        os.mkdir(work)
        mounts.restack(pid, [layer, *lowers], upper, work)
    except OSError:
        shutil.rmtree(upper, ignore_errors=True)
        os.rename(layer, upper)
        raise


def like(source: str, target: str) -> None:
    """Give a directory the owner and mode of another."""
    found = os.stat(source)
    os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, found.st_mode & 0o7777)
