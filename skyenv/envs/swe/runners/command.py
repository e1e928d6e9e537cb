"""Test commands of other people, read from what they print: any with a log parser, Django's and sympy's with a canary.

There is no channel of our own, so a log that was forged completely cannot be told from a real one. What is asked for:
a failure anywhere counts, every expected test has to be there, and the exit status has to agree with the log.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.runners import Job, Report, merge
from skyenv.envs.swe.runners.logs import parse_log
from skyenv.types import ExecResult


class CommandRunner:
    """Runs the task's test command; `{files}` in it stands for the graded test files."""

    modules: frozenset[str] = frozenset({"pytest", "_pytest"})
    max_output_bytes = 16 << 20

    def private_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing."""
        return {}

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Nothing."""
        return {}

    def command(self, job: Job) -> str:
        """Return the command as it is, in a shell of its own."""
        return f"({with_files(job.test_command, job.test_files)}\n)"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the log says, if it says anything."""
        outcomes = await to_thread.run_sync(_read, job.parser or "pytest", result.output)
        return Report(outcomes, bool(outcomes), result.exit_code)


def _read(parser: str, log: str) -> dict[str, str]:
    return merge(parse_log(parser, log))


def with_files(command: str, files: Sequence[str]) -> str:
    """The command with the files in place of `{files}`."""
    return command.replace("{files}", " ".join(map(shlex.quote, files)))


_DJANGO_CANARY = """import unittest
class Canary(unittest.TestCase):
    def {passing}(self): pass
    def {failing}(self): self.fail("as it must")
    def {skipping}(self): self.skipTest("as it must")
"""
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {files}"


class DjangoRunner(CommandRunner):
    """Django's own test suite: labels instead of files, and a canary that is a test package of its own."""

    modules = frozenset({"unittest"})

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the canary."""
        canary = job.canary
        text = _DJANGO_CANARY.format(passing=canary.passing, failing=canary.failing, skipping=canary.skipping)
        package = f"tests/{_package(job)}"
        return {f"{package}/__init__.py": b"", f"{package}/tests.py": text.encode()}

    def command(self, job: Job) -> str:
        """Run the graded labels and the canary's."""
        labels = [*dict.fromkeys(_label(path) for path in job.test_files), _package(job)]
        command = job.test_command or _DJANGO
        extra = "" if "{files}" in command else f" {_package(job)}"
        return f"({with_files(command, labels)}{extra}\n)"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the log says, and whether the canary sang."""
        outcomes = await to_thread.run_sync(_read, "django", result.output)
        return Report(outcomes, bool(outcomes), result.exit_code, canary=job.canary.sings(outcomes))


def _label(path: str) -> str:
    return posixpath.splitext(path.removeprefix("tests/"))[0].replace("/", ".")


def _package(job: Job) -> str:
    return f"skyenv_{job.nonce[-8:]}"


_SYMPY_CANARY = """def {passing}(): pass
def {failing}(): assert False
"""
_SYMPY = "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose {files}"


class SympyRunner(CommandRunner):
    """sympy's own test suite, with a canary file next to the first graded test."""

    modules = frozenset({"sympy"})

    def checkout_files(self, job: Job) -> Mapping[str, bytes]:
        """Return the canary."""
        text = _SYMPY_CANARY.format(passing=job.canary.passing, failing=job.canary.failing)
        return {_sympy_file(job): text.encode()}

    def command(self, job: Job) -> str:
        """Run the graded files and the canary."""
        command, files = job.test_command or _SYMPY, [*job.test_files, _sympy_file(job)]
        extra = "" if "{files}" in command else f" {_sympy_file(job)}"
        return f"({with_files(command, files)}{extra}\n)"

    async def report(self, job: Job, box: Sandbox, result: ExecResult) -> Report:
        """What the log says, and whether the canary sang."""
        outcomes = await to_thread.run_sync(_read, "sympy", result.output)
        return Report(outcomes, bool(outcomes), result.exit_code, canary=job.canary.sings(outcomes, skips=False))


def _sympy_file(job: Job) -> str:
    folder = posixpath.dirname(job.test_files[0]) if job.test_files else ""
    return posixpath.join(folder, f"test_{job.nonce[-8:]}.py")
