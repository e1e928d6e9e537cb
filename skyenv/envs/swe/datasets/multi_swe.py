"""Multi-SWE-bench and Multi-SWE-RL: pull requests in many languages, with the outcome of each test in three runs.

The images hold the fix and the test patch; both are hidden from the agent. `/home/run.sh` runs the tests. A row names
no parser: `log_parser` may be added to it, else whatever any of the parsers finds counts, and admission tells whether
that fits.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyenv.envs.swe.datasets.swebench import TIMEOUT
from skyenv.envs.swe.fields import Row, number
from skyenv.envs.swe.runners.ids import parser_name
from skyenv.envs.swe.sources import ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SweTask
from skyenv.errors import ConfigError

HIDDEN = ("/home/fix.patch", "/home/test.patch", "/home/fix-run.sh", "/home/test-run.sh")
_FAILING = ("f2p_tests", "n2p_tests", "s2p_tests")


def matches(row: Row) -> bool:
    """Whether a row is a pull request with its fix."""
    return row.has("org", "repo", "number", "fix_patch")


def parse(row: Row) -> SweTask:
    """Read a row."""
    org, repo = row.text("org"), row.text("repo")
    pull = int(number(row.value("number"), row.at("number"), 1, 1 << 31))
    failing = tuple(dict.fromkeys(test for name in _FAILING for test in _tests(row, name)))
    if not failing:
        failing = tuple(_tests(row, "fixed_tests"))
    if not failing:
        raise ConfigError(f"{row.at('fixed_tests')}: names no failing test, so nothing could show that work is done")
    path = f"/home/{repo}"
    return SweTask(
        task_id=row.text("instance_id", default=f"{org}__{repo}-{pull}"),
        problem=_problem(row),
        source=ImageSource(path),
        tests=PatchText(row.patch("test_patch")),
        fail_to_pass=failing,
        pass_to_pass=tuple(test for test in _tests(row, "p2p_tests") if test not in set(failing)),
        runner="command",
        environment=Environment(image=f"mswebench/{org}_m_{repo}:pr-{pull}".lower()),
        reference=PatchText(row.patch("fix_patch")),
        timeout=TIMEOUT,
        repo_path=path,
        base=row.base,
        command="bash /home/run.sh",
        parser=parser_name(row.text("log_parser", default="any"), row.at("log_parser")),
        hidden=HIDDEN,
    )


def _tests(row: Row, name: str) -> list[str]:
    found = row.value(name)
    if found is None:
        return []
    if not isinstance(found, Mapping) or not all(isinstance(test, str) for test in found):
        raise ConfigError(f"{row.at(name)}: must map test names to their outcomes")
    return [test for test, outcomes in found.items() if outcomes is not None]


def _problem(row: Row) -> str:
    """The issues that the pull request resolves, else its own text."""
    issues = row.value("resolved_issues") or []
    if not isinstance(issues, list) or not all(isinstance(issue, Mapping) for issue in issues):
        raise ConfigError(f"{row.at('resolved_issues')}: must be a list of issues")
    parts = [f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip() for issue in issues]
    text = "\n\n".join(part for part in parts if part)
    return text or f"{row.text('title')}\n\n{row.text('body', default='')}".strip()
