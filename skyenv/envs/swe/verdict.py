"""What a graded work comes to: the statuses, and the rules that lead from a run's report to one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyenv.envs.swe.runners import Job, Report, worst
from skyenv.envs.swe.runners.ids import by_expected
from skyenv.envs.swe.tasks import SweTask
from skyenv.types import ExecResult

Status = Literal[
    "resolved", "unresolved", "empty_patch", "patch_apply_failed", "patch_rejected", "patch_too_large", "tampered",
    "timeout", "oom", "instance_error", "infra_error",
]  # fmt: skip
INVALID = frozenset({"instance_error", "infra_error"})
_SHOWN_PATHS = 200
_SHOWN_OUTPUT = 4_000


@dataclass(slots=True)
class Grade:
    """A verdict in the making.

    `tests` are the outcomes of all tests that ran, `expected` those of the task's ids; `output` is what the tests
    printed, head and tail; `timings` are seconds by stage.
    """

    task: SweTask
    status: Status = "unresolved"
    patch: bytes = b""
    tests: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    flags: list[str] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""
    exit_status: int | None = None
    reward: float | None = None
    timings: dict[str, float] = field(default_factory=dict)

    def holds(self, test: str) -> bool:
        """Whether an expected test came out as it has to."""
        outcome = self.expected.get(test, "missing")
        return outcome in ("passed", self.task.accept.get(test))

    def resolution(self) -> Literal["FULL", "PARTIAL", "NO"]:
        """FULL: everything holds; PARTIAL: some of what had to be fixed, and nothing broke."""
        if self.status == "resolved":
            return "FULL"
        kept = all(self.holds(test) for test in self.task.pass_to_pass)
        return "PARTIAL" if kept and any(self.holds(test) for test in self.task.fail_to_pass) else "NO"

    def verdict(self) -> dict[str, Any]:
        """The grade as plain data."""
        resolved = self.status == "resolved"
        record = self.task.record
        return {
            "status": self.status,
            "resolved": resolved,
            "reward": float(resolved) if self.reward is None else self.reward,
            "valid_for_training": self.status not in INVALID,
            "resolution": self.resolution(),
            "tests": dict(self.expected),
            "patch": self.patch.decode("utf-8", "surrogateescape"),
            "dropped_paths": list(self.dropped[:_SHOWN_PATHS]),
            "flags": list(self.flags),
            "seconds": round(self.seconds, 4),
            "timings": {stage: round(seconds, 4) for stage, seconds in self.timings.items()},
            "digests": {
                "patch": hashlib.sha256(self.patch).hexdigest(),
                "task": self.task.digest if record is None else record.digest,
                "environment": self.task.environment.key,
            },
            "output": _ends(self.output),
            "accepted": {test: outcome for test, outcome in self.task.accept.items() if test in self.expected},
            "fail_to_pass": list(self.task.fail_to_pass),
            "pass_to_pass": list(self.task.pass_to_pass),
        }


def _ends(output: str) -> str:
    if len(output) <= _SHOWN_OUTPUT:
        return output
    return f"{output[: _SHOWN_OUTPUT // 2]}\n[...]\n{output[-_SHOWN_OUTPUT // 2 :]}"


def judge(grade: Grade, job: Job, result: ExecResult, report: Report) -> None:
    """The rules, in order: limits first, then whether the runner can be believed, then the tests."""
    task = grade.task
    grade.output, grade.exit_status = result.output, report.exit_status
    own = {test: outcome for test, outcome in report.outcomes.items() if not job.canary.owns(test)}
    grade.tests = own
    if own:
        grade.expected = own if task.whole_machine else by_expected(own, task.expected, task.parser, worst)
    if result.timed_out:
        grade.status = "timeout"
    elif result.oom:
        grade.status = "oom"
    elif report.forged:
        grade.status = "tampered"
        grade.flags.append("forged_events")
    elif not report.started:
        grade.status = "instance_error"
        grade.flags.append("runner_did_not_start" if report.has_events else "no_test_ran")
    elif report.reward is not None:
        grade.reward = report.reward
        grade.status = "resolved" if report.reward >= 1.0 else "unresolved"
    elif report.canary is None:
        _judge_log(grade, own)
    else:
        _judge_with_canary(grade, result, report)


def _judge_with_canary(grade: Grade, result: ExecResult, report: Report) -> None:
    """The canary fails one test, so a run that came to its end has the status 1."""
    if report.exit_status is None or report.exit_status > 1:
        grade.flags.append("tests_did_not_finish")
    elif not report.canary or report.exit_status != 1:
        grade.status = "tampered"
        grade.flags.append("canary")
    elif result.exit_code != report.exit_status:
        grade.status = "tampered" if result.exit_code == 0 else "unresolved"
        grade.flags.append("exit_status")
    elif all(grade.holds(test) for test in grade.task.expected):
        grade.status = "resolved"


def _judge_log(grade: Grade, outcomes: Mapping[str, str]) -> None:
    """Without a canary the exit status has to agree: not 0 only with a failure in the log, or as for the reference."""
    record = grade.task.record
    bad = any(outcome in ("failed", "error") for outcome in outcomes.values())
    as_admitted = record is not None and record.exit_status == grade.exit_status
    if grade.exit_status != 0 and not bad and not as_admitted:
        grade.flags.append("exit_status")
    elif all(grade.holds(test) for test in grade.task.expected):
        grade.status = "resolved"
