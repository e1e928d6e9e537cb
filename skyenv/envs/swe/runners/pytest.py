"""pytest, observed by a plugin that is loaded from outside the checkout.

The console script starts it, so the checkout is not on the module search path when pytest itself is imported. The
canary is a file next to the first graded test and runs last.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from pathlib import Path

from skyenv.envs.swe.runners import Job, escape

_PLUGIN = (Path(__file__).parent / "inside" / "pytest_report.py").read_bytes()
_CANARY = """import pytest
def {passing}(): pass
def {failing}(): assert False, "as it must"
def {skipping}(): pytest.skip("as it must")
"""


class PytestRunner:
    """Runs whole test files with pytest."""

    modules = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "exceptiongroup", "tomli", "pygments"})

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
        files = " ".join(shlex.quote(path) for path in [*job.test_files, _canary_file(job)])
        return (
            f"PYTHONPATH={job.private}/plugin PYTHONDONTWRITEBYTECODE=1 PYTEST_ADDOPTS= pytest -p {_plugin(job)} "
            f"-p no:cacheprovider --continue-on-collection-errors --maxfail=0 --color=no --tb=short -q {files}"
        )


def _plugin(job: Job) -> str:
    return f"skyenv_report_{job.nonce[:8]}"


def _canary_file(job: Job) -> str:
    return posixpath.join(posixpath.dirname(job.test_files[0]), f"test_{job.nonce[-8:]}.py")
