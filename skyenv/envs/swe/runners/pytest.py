"""pytest, observed by a plugin that is loaded from outside the checkout.

The console script starts it, so the checkout is not on the module search path when pytest itself is imported. The
canary is a file next to the first graded test and runs last. What pytest prints about passed tests has to agree with
what the plugin reports.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from skyenv.core import Sandbox
from skyenv.envs.swe.runners import Job, Report, escape, read_events
from skyenv.envs.swe.runners.command import with_files
from skyenv.envs.swe.runners.logs import parse_log
from skyenv.types import ExecResult

_PLUGIN = (Path(__file__).parent / "inside" / "pytest_report.py").read_bytes()
_CANARY = """import pytest
def {passing}(): pass
def {failing}(): assert False, "as it must"
def {skipping}(): pytest.skip("as it must")
"""


class PytestRunner:
    """Runs whole test files with pytest; `test_command` is how it is called, by default `pytest {files}`."""

    modules = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "exceptiongroup", "tomli", "pygments"})
    max_output_bytes = 4 << 20

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the plugin and its instructions, which it deletes before any code of the checkout is imported."""
        name = _plugin(job)
        lines = [("nonce", job.nonce), ("events", f"{job.private}/events")]
        lines += [("path", root) for root in job.import_roots]
        text = "".join(f"{key}\t{escape(value)}\n" for key, value in lines)
        return {f"plugin/{name}.py": _PLUGIN, f"plugin/{name}.job": text.encode("ascii")}

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the canary."""
        canary = job.canary
        text = _CANARY.format(passing=canary.passing, failing=canary.failing, skipping=canary.skipping)
        return {_canary_file(job): text.encode()}

    def command(self, job: Job) -> str:
        """Run the graded files and the canary, in this order and one process."""
        files = [*job.test_files, _canary_file(job)]
        command = with_files(job.test_command or "pytest {files}", files)
        if "{files}" not in job.test_command and job.test_command:
            command = f"{command} {_canary_file(job)}"
        return (
            f"export PYTHONPATH={job.private}/plugin PYTHONDONTWRITEBYTECODE=1 PYTEST_ADDOPTS=; {command} "
            f"-p {_plugin(job)} -p no:cacheprovider --continue-on-collection-errors --maxfail=0 --color=no --tb=short "
            f"-rfEsxXp"
        )

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the plugin reported, if what was printed says the same about the tests that passed.

        Output that was cut, or a summary that is switched off (then the canary is not in it either), says nothing.
        """
        report = await read_events(job, box)
        if result.truncated or not report.canary:
            return report
        printed = [(_start(test_id), outcome) for test_id, outcome in parse_log("pytest", result.output)]
        if not any(job.canary.owns(test_id) for test_id, _ in printed):
            return report
        passed = {_start(test_id) for test_id, outcome in report.outcomes.items() if outcome == "passed"}
        said = {test_id for test_id, outcome in printed if outcome == "passed"}
        return replace(report, canary=passed <= said)


def _start(test_id: str) -> str:
    """As much of an id as survives in any summary line."""
    return test_id.split()[0] if test_id.split() else test_id


def _plugin(job: Job) -> str:
    return f"skyenv_report_{job.nonce[:8]}"


def _canary_file(job: Job) -> str:
    return posixpath.join(posixpath.dirname(job.test_files[0]), f"test_{job.nonce[-8:]}.py")
