"""How one test runner is started and observed: which files it needs, its command, and the events it reports.

A runner reports through a file outside the checkout, one line an event, each with the nonce of this run; nothing is
read from what tests print. Beside the graded tests it runs a canary: one passing, one failing and one skipping test
with random names. If those do not come out as they must, or the exit status differs from the reported one, whoever
wrote the code under test has bent the runner. Code under test shares the process with the runner, so forging aimed at
known test names cannot be excluded by looking at outcomes; held-out tests are the answer to that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from skyenv.envs.swe.tasks import RunnerName

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]
OUTCOMES = frozenset({"passed", "failed", "error", "skipped", "xfailed", "xpassed"})
_SEVERITY = ("passed", "xpassed", "skipped", "xfailed", "failed", "error")


@dataclass(frozen=True, slots=True)
class Canary:
    """Three tests whose outcome is known, under names that nobody can know."""

    passing: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")
    failing: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")
    skipping: str = field(default_factory=lambda: f"test_{secrets.token_hex(6)}")

    def sings(self, outcomes: Mapping[str, str]) -> bool:
        """Whether exactly the three outcomes that must be there are there."""
        expected = {self.passing: "passed", self.failing: "failed", self.skipping: "skipped"}
        found = {test_id.rpartition("::")[2]: outcome for test_id, outcome in outcomes.items()}
        return all(found.get(name) == outcome for name, outcome in expected.items())

    def owns(self, test_id: str) -> bool:
        """Whether an id is one of the canary's."""
        return test_id.rpartition("::")[2] in (self.passing, self.failing, self.skipping)


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the checkout, the private directory beside it, what to run, and the secrets of this run.

    `import_roots` are the absolute directories of the checkout on the module search path; `isolated` when nothing but
    the standard library and the checkout is needed.
    """

    repo_path: str
    private: str
    test_files: Sequence[str]
    import_roots: Sequence[str]
    isolated: bool = False
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    canary: Canary = field(default_factory=Canary)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run reported: outcome by test id, the exit status it announced (None: it did not come to its end).

    `started` is False when the runner never got to the point of running project code; `forged` when lines without
    the run's nonce stood among the events.
    """

    outcomes: Mapping[str, str]
    started: bool
    exit_status: int | None
    forged: bool


class Runner(Protocol):
    """A test runner; stateless."""

    modules: frozenset[str]
    """Top-level modules whose place a checkout must not take."""

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Files to put below `job.private`, by relative path."""
        ...

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Files to put into the checkout beside the graded tests, by relative path."""
        ...

    def command(self, job: Job) -> str:
        """Shell command that runs the tests from within the checkout and leaves `events` in `job.private`."""
        ...


def get_runner(name: RunnerName) -> Runner:
    """Return the runner of that name."""
    from skyenv.envs.swe.runners.pytest import PytestRunner
    from skyenv.envs.swe.runners.unittest import UnittestRunner

    runners: dict[str, type[PytestRunner] | type[UnittestRunner]] = {"pytest": PytestRunner, "unittest": UnittestRunner}
    return cast(Runner, runners[name]())


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
                outcomes[key] = max(outcomes.get(key, outcome), outcome, key=_SEVERITY.index)
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
