"""A repair task as a value, whatever data set it comes from. Nothing of it is ever shown to an agent but `problem`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyenv.envs.swe.sources import ImageSource, Source

RunnerName = Literal["unittest", "pytest", "django", "sympy", "command", "script", "harbor"]


@dataclass(frozen=True, slots=True)
class Environment:
    """What a task needs beside its files: the same for all tasks of one project, and prepared once.

    `packages` are requirements put into a virtual environment, `setup` shell commands that run as root before any
    source is there, `env` variables of every session, `image` a container image (None: the host's system
    directories), `python` the interpreter to make the virtual environment with, `activate` a shell command with which
    every session starts, `limits` what a sandbox may use, by the names that `SandboxProvider.sandbox` takes.
    `agent_packages` go into a virtual environment of their own, whose programs come last on the `PATH`. `network`:
    sandboxes get the network of their node's machine, where the node allows it. `context`, a folder below the task's
    `base`, holds the Dockerfile that `image` is made from; empty when the image lies somewhere ready.
    """

    packages: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    python: str | None = None
    activate: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    agent_packages: tuple[str, ...] = ()
    network: bool = False
    context: str = ""

    @property
    def spec(self) -> dict[str, Any]:
        """What `SandboxProvider.sandbox` takes beside image, snapshot and variables."""
        return {**self.limits, **({"network": "host"} if self.network else {})}

    @property
    def key(self) -> str:
        """Digest of what makes a prepared sandbox different from another; variables matter to set-up commands only."""
        variables = sorted(self.env.items()) if self.setup else []
        parts = [sorted(self.packages), self.setup, variables, self.image, self.python, sorted(self.agent_packages)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of a source, placed at their own paths; `paths` (files or directories) cuts it down, empty means all."""

    source: Source
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchText:
    """A patch given in full; `reverse` when it is to be taken back."""

    patch: bytes
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class PatchFile:
    """A patch in a file; a relative path is below the task's `base`."""

    path: str


@dataclass(frozen=True, slots=True)
class SolutionScript:
    """A shell script that solves the task when it runs in `repo_path`, with `env`.

    The directory's files lie at `place`, where scripts may look for each other.
    """

    directory: str
    script: str = "solve.sh"
    place: str = "/solution"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fix:
    """The known fix of a small task as one replacement: `old` occurs once in `path` and becomes `new`."""

    path: str
    old: str
    new: str


Tests = SourceFiles | PatchText | PatchFile
"""The graded tests: files laid over the source, or a patch to it."""

Reference = PatchText | PatchFile | SourceFiles | SolutionScript
"""The known fix: a patch, files of a later release that replace those of the source, or a script."""


@dataclass(frozen=True, slots=True)
class Record:
    """What admission measured; grading uses it and training asks for it.

    `digest` is the task's when it was admitted, `seconds` the longest run of the tests, `exit_status` the runner's with
    the reference, `accept` outcomes that stand for "passed" (a test that the reference skips), `flaky` tests that are
    left out, `allow` protected paths that the reference has to change, `network` whether something asked for one.
    """

    task_id: str
    digest: str
    runs: int
    seconds: float
    exit_status: int | None = None
    accept: Mapping[str, str] = field(default_factory=dict)
    flaky: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    network: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SweTask:
    """One repository to repair. Compared by identity; `base` is where relative paths of its row start.

    Test ids are those of the data set: `path::Class::method` for `unittest` and `pytest`, else what `parser` makes of
    the runner's output. `accept` maps ids to an outcome that counts for them instead of "passed". `command` is the
    test command, in which `{files}` stands for the graded test files (`test_files`, or those of `tests`); the runners
    `unittest` and `script` have none. `timeout` bounds it, in seconds. `hidden` are absolute paths of the image that
    no agent may see; `source_patch` is applied to an image's repository before anyone sees it. `script` are files of
    the runner `script`. `fix` and `decoys` (wrong replacements for `fix.old`) are there for scripted solvers.

    A task of the runner `harbor` is graded on the machine as the agent leaves it; with a `verifier`, an environment of
    its own, in a fresh sandbox of that, into which the `artifacts` (absolute paths) are carried. `files`, a folder
    below `base`, lies in `repo_path` at the beginning. `agent_timeout` is the agent's time in seconds.
    """

    task_id: str
    problem: str
    source: Source
    tests: Tests
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    runner: RunnerName = "unittest"
    environment: Environment = field(default_factory=Environment)
    reference: Reference | None = None
    level: int = 1
    timeout: float = 60.0
    repo_path: str = "/testbed"
    base: Path = field(default_factory=Path)
    fix: Fix | None = None
    decoys: tuple[str, ...] = ()
    command: str = ""
    parser: str = ""
    test_files: tuple[str, ...] = ()
    accept: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    source_patch: PatchText | None = None
    script: Mapping[str, bytes] = field(default_factory=dict)
    record: Record | None = None
    agent_timeout: float | None = None
    verifier: Environment | None = None
    artifacts: tuple[str, ...] = ()
    files: str = ""

    @property
    def expected(self) -> tuple[str, ...]:
        """Ids of all tests that must pass for the task to be resolved."""
        return self.fail_to_pass + self.pass_to_pass

    @property
    def whole_machine(self) -> bool:
        """Whether what an agent leaves on the machine is graded, and not its changes to a repository."""
        return self.runner == "harbor"

    @property
    def in_image(self) -> bool:
        """Whether the repository lies in the container image already."""
        return isinstance(self.source, ImageSource)

    @property
    def digest(self) -> str:
        """Digest of everything in the row that grading depends on; fields that hold nothing make no difference."""
        fields = dataclasses.asdict(self)
        for name in ("problem", "level", "base", "fix", "decoys", "record", "agent_timeout"):
            del fields[name]
        kinds = [type(part).__name__ for part in (self.source, self.tests, self.reference)]
        text = json.dumps([kinds, _filled(fields)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def admitted(self, record: Record) -> SweTask:
        """Return this task as admission found it: without flaky tests, with its time limit and allowances."""
        flaky = frozenset(record.flaky)
        return dataclasses.replace(
            self,
            pass_to_pass=tuple(test for test in self.pass_to_pass if test not in flaky),
            accept={**self.accept, **record.accept},
            timeout=min(self.timeout, max(60.0, 10 * record.seconds)),
            record=record,
        )


def _filled(value: object) -> object:
    """A nested value as JSON has it, without what is empty."""
    if isinstance(value, Mapping):
        parts = {str(name): _filled(item) for name, item in value.items()}
        return {name: item for name, item in parts.items() if item not in (None, "", [], {}, False)}
    if isinstance(value, list | tuple):
        return [_filled(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value
