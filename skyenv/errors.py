"""The error tree, and the one place that turns foreign exceptions into it.

A bad rollout is data: a failing command, a timeout, a malformed tool call are results that the model sees. Only
infrastructure raises, and what it raises is one of these types, so that a failure can be recorded by kind::

    SkyEnvError
     +- SandboxError          infrastructure: recorded, masked, may be retried with a fresh sandbox
     |   +- SandboxUnavailable    no sandbox to be had now; `retry_after` seconds
     |   +- SandboxLost           it existed and is gone
     |   +- SandboxProtocolError  client and node do not understand each other
     |   +- DeadlineExceeded      a stage, the wait for its slot, or a whole trajectory took too long
     |   +- ShardLost             the process that ran a share of a pipeline died or fell silent
     +- SourceUnavailable     the files of a task cannot be fetched now
     +- EngineError           the inference server failed (a full context is a StopReason, not an error)
     |   +- EngineUnavailable     it cannot be reached, turned the request away or broke off: another one may answer
     +- EnvError              a bug of an environment's or a tool's author
     |   +- NotCarried            a snapshot or rollback would leave something of a session behind
     +- RewardError           the grader failed (not: the tests failed)
     +- ConfigError           the user's configuration, file or task row is wrong; also a ValueError
     +- ResetNeeded           contract misuse: step before reset
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SkyEnvError(Exception):
    """Root of every error that skyenv raises on purpose."""


class SandboxError(SkyEnvError):
    """Sandbox infrastructure failed; the trajectory is masked and may be retried with a fresh sandbox.

    `reason` is one of `skyenv.remote.protocol.Reason` where the server gave one.
    """

    def __init__(self, message: str = "", *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class SandboxUnavailable(SandboxError):
    """No sandbox can be had now. `retry_after` says in how many seconds to try again (None: it would not help)."""

    def __init__(self, message: str, retry_after: float | None = None, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class SandboxLost(SandboxError):
    """The sandbox existed and is gone: killed, out of memory, or its lease ran out."""


class SandboxProtocolError(SandboxError):
    """Client and node server do not understand each other."""


class DeadlineExceeded(SandboxError):
    """An infrastructure deadline passed: of a stage, of the wait for its slot, or of the whole trajectory."""


class ShardLost(SandboxError):
    """The process or machine that ran a share of a pipeline died, fell silent or could not be started."""


class SandboxPathError(SkyEnvError, OSError):
    """A path inside the sandbox cannot be read or written; an ordinary result for a tool, `errno` is set."""


class SandboxConflict(SandboxPathError):
    """A compare-and-swap write found other content than expected."""


class SourceUnavailable(SkyEnvError):
    """The files of a task cannot be fetched now: not cached, and the index or repository is out of reach."""


class EngineError(SkyEnvError):
    """The inference server failed or answered nonsense."""


class EngineUnavailable(EngineError):
    """The server cannot be reached, turns requests away or broke off; nothing of the request is kept there."""


class EnvError(SkyEnvError):
    """An environment or a tool raised: its author's bug."""


class NotCarried(EnvError):
    """A snapshot, fork or rollback would leave something of the session behind; `items` says what, in words."""

    def __init__(self, items: Iterable[str]) -> None:
        self.items = tuple(items)
        super().__init__(f"cannot be carried: {'; '.join(self.items)} (end it, or pass drop=True to go on without)")


class RewardError(SkyEnvError):
    """The grader itself failed, as opposed to the graded work."""


class ConfigError(SkyEnvError, ValueError):
    """The user's configuration, file or task row is wrong; the message names the field and the fix."""


class ResetNeeded(SkyEnvError):
    """`step` was called before `reset`, or after the episode ended."""


@contextmanager
def boundary(kind: type[SkyEnvError], what: str) -> Iterator[None]:
    """Turn any foreign exception raised inside the block into `kind`; our own errors pass unchanged.

    Of an exception group that holds one of ours, the first of ours is raised. Cancellation passes too, unless nobody
    asked for it: a future of asyncio that a library cancels by itself would otherwise end whoever waits for it, unseen.
    """
    try:
        yield
    except SkyEnvError:
        raise
    except ExceptionGroup as group:
        ours = first_of_ours(group)
        if ours is not None:
            raise ours from group
        raise kind(f"{what}: {group}: {_first_leaf(group)!r}") from group
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
    except _cancelled_error() as error:
        if _asked_for():
            raise
        raise kind(f"{what}: cancelled from within") from error


def _cancelled_error() -> type[BaseException]:
    """Asyncio's, which is imported only where one is under way: it takes a fifth of what `import skyenv` does."""
    import asyncio

    return asyncio.CancelledError


def _asked_for() -> bool:
    """Whether a scope around the present task of asyncio, or somebody who holds the task, cancels it."""
    import asyncio

    import anyio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return False
    return task is not None and (task.cancelling() > 0 or anyio.current_effective_deadline() == -math.inf)


def _first_leaf(error: BaseException) -> BaseException:
    return _first_leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def first_of_ours(group: ExceptionGroup[Exception]) -> SkyEnvError | None:
    """The first of our errors among the leaves of a group."""
    for error in group.exceptions:
        found = first_of_ours(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(found, SkyEnvError):
            return found
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
