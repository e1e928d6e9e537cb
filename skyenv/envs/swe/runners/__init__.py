"""How one test runner is started and observed: which files it needs, its command, and the events it reports.

Runners of ours report through a file outside the checkout, one line an event, each with the nonce of this run; what
tests print can only contradict that. Runners of other people are read from their output. Beside the graded tests most
run a canary: one passing, one failing and one skipping test with random names. If those do not come out as they must,
or the exit status differs from the reported one, whoever wrote the code under test has bent the runner. Code under
test shares the process with the runner, so forging aimed at known test names cannot be excluded by looking at
outcomes; held-out tests are the answer to that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.tasks import RunnerName
from skyenv.envs.swe.trees import TreeFile
from skyenv.errors import SandboxPathError
from skyenv.types import ExecResult

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]
OUTCOMES = frozenset({"passed", "failed", "error", "skipped", "xfailed", "xpassed"})
MAX_EVENT_BYTES = 16 << 20
_SEVERITY = ("passed", "xpassed", "skipped", "xfailed", "failed", "error")


@dataclass(frozen=True, slots=True)
class Canary:
    """Three tests whose outcome is known, under names that nobody can know."""

    passing: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")
    failing: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")
    skipping: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")

    def sings(self, outcomes: Mapping[str, str], *, skips: bool = True) -> bool:
        """Whether the outcomes that must be there are there; without `skips` the runner knows no skipping."""
        expected = {self.passing: "passed", self.failing: "failed", self.skipping: "skipped"}
        if not skips:
            del expected[self.skipping]
        found = {_function(test_id): outcome for test_id, outcome in outcomes.items()}
        return all(found.get(name) == outcome for name, outcome in expected.items())

    def owns(self, test_id: str) -> bool:
        """Whether an id is one of the canary's."""
        return _function(test_id) in (self.passing, self.failing, self.skipping)


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the checkout, the private directory beside it, what to run, and the secrets of this run.

    `import_roots` are the absolute directories of the checkout on the module search path; `isolated` when nothing but
    the standard library and the checkout is needed; `test_command`, `parser` and `script` are the task's, `tests` the
    graded test files.
    """

    repo_path: str
    private: str
    test_files: Sequence[str]
    import_roots: Sequence[str]
    isolated: bool = False
    test_command: str = ""
    parser: str = ""
    script: Mapping[str, bytes] = field(default_factory=dict)
    tests: Mapping[str, TreeFile] = field(default_factory=dict)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    canary: Canary = field(default_factory=Canary)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run reported: outcome by test id, the exit status it announced (None: it did not come to its end).

    `started` is False when the runner never got to the point of running project code; `forged` when lines without
    the run's nonce stood among the events. `canary` says whether the canary sang and what was printed agrees with what
    was reported, None for a runner that has no canary. `reward` is that of a verifier that gives one. `has_events` is
    False for what was read from output.
    """

    outcomes: Mapping[str, str]
    started: bool
    exit_status: int | None
    forged: bool = False
    canary: bool | None = None
    reward: float | None = None
    has_events: bool = False


class Runner(Protocol):
    """A test runner; stateless."""

    modules: frozenset[str]
    """Top-level modules whose place a checkout must not take."""
    max_output_bytes: int
    """How much of the output is kept, head and tail."""

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Files to put below `job.private`, by relative path."""
        ...

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Files to put into the checkout beside the graded tests, by relative path."""
        ...

    def command(self, job: Job) -> str:
        """Shell command that runs the tests from within the checkout."""
        ...

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the run came to; it has ended, but what it started may still be running in `box`."""
        ...


def get_runner(name: RunnerName) -> Runner:
    """Return the runner of that name."""
    from skyenv.envs.swe.runners.command import CommandRunner, DjangoRunner, SympyRunner
    from skyenv.envs.swe.runners.harbor import HarborRunner
    from skyenv.envs.swe.runners.pytest import PytestRunner
    from skyenv.envs.swe.runners.script import ScriptRunner
    from skyenv.envs.swe.runners.unittest import UnittestRunner

    runners: Mapping[RunnerName, Callable[[], Runner]] = {
        "pytest": PytestRunner,
        "unittest": UnittestRunner,
        "django": DjangoRunner,
        "sympy": SympyRunner,
        "command": CommandRunner,
        "script": ScriptRunner,
        "harbor": HarborRunner,
    }
    return runners[name]()


def worst(one: str, other: str) -> str:
    """The outcome that counts when a test has two."""
    return max(one, other, key=_SEVERITY.index)


def merge(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Outcomes by test id; the worst of each counts."""
    outcomes: dict[str, str] = {}
    for test_id, outcome in found:
        outcomes[test_id] = worst(outcomes[test_id], outcome) if test_id in outcomes else outcome
    return outcomes


async def read_events(job: Job, box: Sandbox) -> Report:
    """The events that the run left in `job.private`; none when the file is gone."""
    try:
        events = await box.read_file(f"{job.private}/events", max_bytes=MAX_EVENT_BYTES)
    except SandboxPathError:
        events = b""
    report = await to_thread.run_sync(parse_events, events, job.nonce)
    return replace(report, canary=job.canary.sings(report.outcomes), has_events=True)


def _function(test_id: str) -> str:
    """The name of the test function in an id of any runner."""
    return test_id.rpartition("::")[2].split(" ")[0]


def escape(text: str) -> str:
    """Make any text one field of a line."""
    return text.encode("unicode_escape").decode("ascii")


def parse_events(data: bytes, nonce: str) -> Report:
    """Read an events file. For a test with several events the worst outcome counts; hostile bytes are no error."""
    outcomes: dict[str, str] = {}
    started, forged = False, False
    exit_status: int | None = None
    for line in data.split(b"\n")[:-1]:
        fields = line.split(b"\t")
        if fields[0] != nonce.encode() or len(fields) < 2:
            forged = True
            continue
        match [field.decode("ascii", "replace") for field in fields[1:]]:
            case ["start"]:
                started = True
            case ["test", outcome, test_id] if outcome in OUTCOMES:
                key = _unescape(test_id)
                outcomes[key] = worst(outcomes.get(key, outcome), outcome)
            case ["end", status] if exit_status is None and status.isdecimal() and len(status) < 4:
                exit_status = int(status)
            case _:
                forged = True
    return Report(outcomes, started, exit_status, forged)


def _unescape(text: str) -> str:
    try:
        return text.encode("ascii", "replace").decode("unicode_escape")
    except UnicodeDecodeError:
        return text
