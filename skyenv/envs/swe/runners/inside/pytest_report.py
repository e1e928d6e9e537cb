# ruff: noqa: PTH100, PTH108, PTH122, PTH123
"""A pytest plugin that reports outcomes to a file; loaded with `-p` inside the grading sandbox, imports no skyenv.

Beside it lies its job: lines of key, tab, escaped value. It is read and deleted when the plugin is imported, which is
before pytest loads any conftest or test of the checkout; only then does the checkout join the module search path.
Runs on Python 3.5 and pytest 3 too, as images of older projects have them. In a worker of pytest-xdist it does
nothing, for there the main process reports.
"""

import os
import sys

import pytest

_JOB = os.path.splitext(os.path.abspath(__file__))[0] + ".job"


def _read_job() -> "dict[str, list[str]]":
    job = {}  # type: dict[str, list[str]]
    with open(_JOB, encoding="ascii") as lines:
        for line in lines:
            key, _, value = line.rstrip("\n").partition("\t")
            job.setdefault(key, []).append(value.encode("ascii").decode("unicode_escape"))
    os.unlink(_JOB)
    return job


class _Events:
    def __init__(self, job: "dict[str, list[str]]") -> None:
        self.nonce = job["nonce"][0]
        self.descriptor = os.open(job["events"][0], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, *fields: str) -> None:
        os.write(self.descriptor, ("\t".join((self.nonce,) + fields) + "\n").encode("ascii"))  # noqa: RUF005

    def test(self, outcome: str, node: str) -> None:
        self.write("test", outcome, node.encode("unicode_escape").decode("ascii"))


def _start() -> "_Events | None":
    if "PYTEST_XDIST_WORKER" in os.environ:
        return None
    job = _read_job()
    events = _Events(job)
    events.write("start")
    sys.path[:0] = job["path"]
    os.environ["PYTHONPATH"] = os.pathsep.join(job["path"])
    return events


_events = _start()


def _outcome(report: "pytest.TestReport") -> str:
    """An attempt that a plugin will repeat is a failure: a test that passes in the end only is not reliable."""
    if hasattr(report, "wasxfail"):
        return {"skipped": "xfailed", "passed": "xpassed"}.get(report.outcome, "failed")
    if report.failed and report.when != "call":
        return "error"
    return report.outcome if report.outcome in ("passed", "failed", "skipped") else "failed"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    """Report the call, and what goes wrong or skips around it."""
    if _events is not None and (report.when == "call" or report.outcome != "passed"):
        _events.test(_outcome(report), report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report: "pytest.CollectReport") -> None:
    """Report a file that cannot be collected."""
    if _events is not None and report.failed:
        _events.test("error", report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: "pytest.Session", exitstatus: int) -> None:
    """Announce the status that the process will exit with."""
    if _events is not None:
        _events.write("end", str(int(exitstatus)))
