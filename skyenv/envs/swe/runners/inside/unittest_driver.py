# ruff: noqa: D102, PTH100, PTH108, PTH118, PTH120, PTH122, PTH123  (pathlib would double the start-up time)
"""Runs test files with unittest inside the grading sandbox and reports to a file; a script that imports no skyenv.

Usage: the directory of this file holds `job`, lines of key, tab, escaped value. Everything that this needs is imported
before any code of the checkout, and the process leaves by `os._exit`, so that nothing registered there runs after it.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_job(path: str) -> dict[str, list[str]]:
    """Read and delete the instructions: value lists by key."""
    job: dict[str, list[str]] = {}
    with open(path, encoding="ascii") as lines:
        for line in lines:
            key, _, value = line.rstrip("\n").partition("\t")
            job.setdefault(key, []).append(value.encode("ascii").decode("unicode_escape"))
    os.unlink(path)
    return job


class Reporter(unittest.TestResult):
    """Writes one event for each outcome; `files` maps a module's name to the path in its ids."""

    def __init__(self, descriptor: int, nonce: str, files: dict[str, str]) -> None:
        super().__init__()
        self.descriptor, self.nonce, self.files = descriptor, nonce, files

    def write(self, *fields: str) -> None:
        os.write(self.descriptor, ("\t".join((self.nonce, *fields)) + "\n").encode("ascii"))

    def report(self, outcome: str, test: unittest.TestCase) -> None:
        kind, method = type(test), test.id().rpartition(".")[2]
        path = self.files.get(kind.__module__, kind.__module__)
        name = "::".join((path, *kind.__qualname__.split("."), method))
        self.write("test", outcome, name.encode("unicode_escape").decode("ascii"))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.report("passed", test)

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        self.report("error", test)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        super().addFailure(test, error)
        self.report("failed", test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.report("skipped", test)

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.report("xfailed", test)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self.report("xpassed", test)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            self.failures.append((test, ""))
            self.report("failed" if issubclass(error[0], test.failureException) else "error", test)


def canary(job: dict[str, list[str]]) -> unittest.TestSuite:
    """Make the three tests whose outcome is known."""

    def failing(self: unittest.TestCase) -> None:
        self.fail("as it must")

    def skipping(self: unittest.TestCase) -> None:
        self.skipTest("as it must")

    tests = {job["passing"][0]: lambda self: None, job["failing"][0]: failing, job["skipping"][0]: skipping}
    return unittest.TestLoader().loadTestsFromTestCase(type("Canary", (unittest.TestCase,), tests))


def load(repo: str, path: str) -> tuple[str, unittest.TestSuite | None]:
    """Import a test file by its dotted name; returns the name and its tests, None when it cannot be imported.

    The import runs as a test of its own, because unittest stops whatever a test may raise, `SystemExit` included.
    """
    name = os.path.splitext(path)[0].replace("/", ".")
    suites: list[unittest.TestSuite] = []

    def collect() -> None:
        module = importlib.import_module(name)
        if os.path.realpath(module.__file__ or "") != os.path.realpath(os.path.join(repo, path)):
            raise ImportError(f"{name} is {module.__file__}, not {path} of the checkout")
        suites.append(unittest.TestLoader().loadTestsFromModule(module))

    result = unittest.TestResult()
    unittest.FunctionTestCase(collect).run(result)
    for _, reason in result.errors + result.failures + result.skipped:
        sys.stderr.write(f"{path}: {reason}\n")
    return name, suites[0] if suites else None


def main() -> None:
    """Run the job; exit status 1 when a test failed, which the canary sees to."""
    here = os.path.dirname(os.path.abspath(__file__))
    job = read_job(os.path.join(here, "job"))
    descriptor = os.open(os.path.join(here, "events"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    repo = job["repo"][0]
    files: dict[str, str] = {}
    reporter = Reporter(descriptor, job["nonce"][0], files)
    reporter.write("start")
    sys.path[:0] = job["path"]
    sys.argv = ["unittest"]
    failed = False
    for path in job.get("file", []):
        name, suite = load(repo, path)
        files[name] = path
        if suite is None:
            failed = True
        else:
            suite.run(reporter)
    canary(job).run(reporter)
    status = 0 if reporter.wasSuccessful() and not failed else 1
    reporter.write("end", str(status))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)


if __name__ == "__main__":
    main()
