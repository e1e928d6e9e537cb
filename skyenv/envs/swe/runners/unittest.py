"""The standard library's unittest, by a driver of our own that starts fast.

Test ids are `path::Class::method`. Without packages the interpreter runs isolated and without `site`, so that neither
environment variables nor start-up files reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skyenv.core import Sandbox
from skyenv.envs.swe.runners import Job, Report, escape, read_events
from skyenv.types import ExecResult

_DRIVER = (Path(__file__).parent / "inside" / "unittest_driver.py").read_bytes()


class UnittestRunner:
    """Runs whole test files with unittest."""

    modules = frozenset({"unittest"})
    max_output_bytes = 64 << 10

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the driver and its instructions, which it deletes before any code of the checkout is imported."""
        lines = [("nonce", job.nonce), ("repo", job.repo_path)]
        lines += [("passing", job.canary.passing), ("failing", job.canary.failing), ("skipping", job.canary.skipping)]
        lines += [("path", root) for root in job.import_roots] + [("file", path) for path in job.test_files]
        text = "".join(f"{key}\t{escape(value)}\n" for key, value in lines)
        return {"driver.py": _DRIVER, "job": text.encode("ascii")}

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing: the canary is made in memory."""
        return {}

    def command(self, job: Job) -> str:
        """Run the driver from outside the checkout."""
        return f"python3 {'-ISB' if job.isolated else '-IB'} {job.private}/driver.py"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the driver reported."""
        return await read_events(job, box)
