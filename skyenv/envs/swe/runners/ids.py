"""Test ids as data sets write them: what each log parser makes of the id that a runner reports.

Several tests may come to one id (parsers cut at the first blank); then all of them have to pass for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from skyenv.envs.swe.runners.logs import PARSERS
from skyenv.errors import ConfigError, did_you_mean

_OPTION = re.compile(r"(.*?)\[(.*)\]")
_BUTTONS = (("MouseButton.LEFT", "1"), ("MouseButton.RIGHT", "3"))


def _cut(test_id: str) -> str:
    return test_id.split()[0] if test_id.split() else test_id


def _options(test_id: str) -> str:
    test_id = _cut(test_id)
    found = _OPTION.search(test_id)
    if found is None:
        return test_id
    name, option = found.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return f"{name}[{option}]"


def _matplotlib(test_id: str) -> str:
    for name, value in _BUTTONS:
        test_id = test_id.replace(name, value)
    return _cut(test_id)


def _without_file(test_id: str) -> str:
    return ".".join(test_id.split("::")[1:]) or test_id


NORMALISERS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "pytest": _cut,
        "pytest_options": _options,
        "pytest_v2": _cut,
        "seaborn": _cut,
        "matplotlib": _matplotlib,
        "pydantic": _cut,
        "r2e": _without_file,
    }
)
"""By parser, for the runner pytest."""

_ALIASES = {"gotest": "go", "maven": "maven", "mvn": "maven", "java_mvn": "maven", "vitest": "jest", "js": "mocha"}
_FORMER = re.compile(r"(?:parse_)?(?:log_)?(?P<name>.+?)(?:_v\d+|_\d+)?")


def parser_name(name: str, where: str) -> str:
    """A parser's name, also as data sets write it (`parse_log_pytest_v2`). ConfigError for an unknown one."""
    plain = name.removeprefix("parse_").removeprefix("log_")
    former = _FORMER.fullmatch(plain)
    short = former["name"] if former else plain
    for candidate in (plain, _ALIASES.get(plain, ""), short, _ALIASES.get(short, "")):
        if candidate in NORMALISERS or candidate in PARSERS or not name:
            return candidate
    known = sorted({*NORMALISERS, *PARSERS})
    raise ConfigError(f"{where}: no parser {name!r}; the known ones are {', '.join(known)}{did_you_mean(plain, known)}")


def by_expected(
    outcomes: Mapping[str, str], expected: Iterable[str], parser: str, worst: Callable[[str, str], str]
) -> dict[str, str]:
    """The outcome of each expected id: the worst among the tests that come to it, or "missing".

    An expected id with more opening than closing brackets was cut short; it stands for all ids that begin with it.
    """
    normalise = NORMALISERS.get(parser, str)
    found: dict[str, str] = {}
    for test_id, outcome in outcomes.items():
        key = normalise(test_id)
        found[key] = worst(found[key], outcome) if key in found else outcome
    result = {}
    for test_id in expected:
        outcome = found.get(test_id, "missing")
        if outcome == "missing" and parser and test_id.count("[") > test_id.count("]"):
            for key, other in found.items():
                if key.startswith(test_id):
                    outcome = other if outcome == "missing" else worst(outcome, other)
        result[test_id] = outcome
    return result
