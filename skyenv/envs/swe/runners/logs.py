"""Log parsers: outcomes by test id, read from what a test command printed.

The parsers are pure functions of text. What a log says is only as true as the code under test lets it be, so a failure
anywhere wins over a success, and the exit status, which comes from elsewhere, has to agree (see `grading`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

Found = Iterator[tuple[str, str]]
"""Test id and outcome, in the order of the log."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_WORDS = {
    "PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfailed",
    "XPASS": "xpassed",
}  # fmt: skip
_ANY_WORD = "|".join(_WORDS)
_PYTEST_FIRST = re.compile(rf"({_ANY_WORD})\s+(\S.*)")
_PYTEST_LAST = re.compile(rf"(\S+::\S.*?)\s+({_ANY_WORD})(?:\s+\(.*\))?(?:\s+\[.*)?\s*")
_LOGGED = re.compile(r"\s{2,}\S+:\S+:\d+")


def pytest_text(log: str) -> Found:
    """The summary lines of `-rA` and the lines of verbose mode; ids keep their blanks.

    A captured log record (`ERROR    module:file.py:12 text`) and the count of a skip are no tests.
    """
    for line in log.split("\n"):
        if (first := _PYTEST_FIRST.fullmatch(line)) is not None:
            word, rest = first.groups()
            is_log = _LOGGED.match(line, len(word)) is not None
            if not is_log and not re.match(r"\[\d+\]", rest):
                yield rest.split(" - ")[0].rstrip(), _WORDS[word]
        elif (last := _PYTEST_LAST.fullmatch(line)) is not None:
            yield last[1], _WORDS[last[2]]


def unittest_text(log: str) -> Found:
    """Unittest at verbosity 2, which Django prints too: `test_x (module.Class) ... ok`.

    What a test prints may stand between its name and the `ok`, also over several lines. A docstring takes the place of
    the name, as data sets have it.
    """
    waiting: str | None = None
    for raw in log.split("\n"):
        line = raw.strip()
        name, dots, result = line.rpartition(" ... ")
        if dots:
            waiting = line.split(" ... ")[0]
            outcome = _unittest_word(result)
            if outcome is not None:
                yield name, outcome
                waiting = None
        elif waiting is not None and (outcome := _unittest_word(line)) is not None:
            yield waiting, outcome
            waiting = None
        elif line.startswith(("FAIL: ", "ERROR: ")):
            kind, _, rest = line.partition(": ")
            yield rest, "failed" if kind == "FAIL" else "error"
            yield rest.split()[0], "failed" if kind == "FAIL" else "error"


def _unittest_word(text: str) -> str | None:
    text = text.strip()
    if text.lower() == "ok":
        return "passed"
    for word, outcome in (
        ("FAIL", "failed"), ("ERROR", "error"), ("skipped", "skipped"), ("expected failure", "xfailed"),
        ("unexpected success", "xpassed"),
    ):  # fmt: skip
        if text.startswith(word):
            return outcome
    return None


_SYMPY_HEAD = re.compile(r"_+ (\S+\.py):(\S+) _+")
_SYMPY_FILE_ENDS = re.compile(r"\s+\[(?:OK|FAIL)\]$")
_SYMPY_WORDS = {"ok": "passed", "F": "failed", "E": "error", "s": "skipped", "f": "xfailed", "X": "xpassed"}


def sympy_text(log: str) -> Found:
    """`bin/test -C --verbose`: a line with the name and a letter for each test, and a heading for each failure.

    The last test of a file shares its line with the file's result.
    """
    for raw in log.split("\n"):
        line = _SYMPY_FILE_ENDS.sub("", raw.strip())
        if (head := _SYMPY_HEAD.fullmatch(line)) is not None:
            yield f"{head[1]}:{head[2]}", "failed"
            yield head[2], "failed"
        elif line.startswith("test_") and len(words := line.split()) > 1 and words[-1] in _SYMPY_WORDS:
            yield words[0], _SYMPY_WORDS[words[-1]]


def _lines(pattern: str, words: Mapping[str, str], flags: re.RegexFlag = re.NOFLAG) -> Callable[[str], Found]:
    """A parser of lines that hold a name and a word; the groups are `name` and `word`."""
    compiled = re.compile(pattern, flags)

    def parse(log: str) -> Found:
        for line in log.split("\n"):
            found = compiled.fullmatch(line.rstrip("\r"))
            if found is not None:
                yield found["name"].strip(), words[found["word"]]

    return parse


def _maven(log: str) -> Found:
    """Surefire: a class passes when none of its tests failed; failing tests are named themselves."""
    pattern = re.compile(
        r"(?:\[\w+\]\s+)?Tests run: (\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+).*?(?: -- in |- in | in )(\S+)"
    )
    for line in log.split("\n"):
        if (found := pattern.match(line)) is not None:
            run, failures, errors, skipped = map(int, found.groups()[:4])
            bad = "failed" if failures else "error" if errors else "skipped" if skipped == run else "passed"
            yield found[5], bad


_go = _lines(
    r"\s*--- (?P<word>PASS|FAIL|SKIP): (?P<name>\S+)(?: \([\d.]+ ?s\))?.*",
    {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"},
)
_cargo = _lines(
    r"test (?P<name>.+?) \.\.\. (?P<word>ok|FAILED|ignored)(?:[ ,<].*)?",
    {"ok": "passed", "FAILED": "failed", "ignored": "skipped"},
)
_gradle = _lines(
    r"(?P<name>\S.* > .+?) (?P<word>PASSED|FAILED|SKIPPED)(?: \(.*\))?",
    {"PASSED": "passed", "FAILED": "failed", "SKIPPED": "skipped"},
)
_mocha = _lines(
    r"\s*(?P<word>✓|✔|√|✗|✕|×|✘|○|↓) (?P<name>.+?)(?: \(?\d+(?:\.\d+)? ?m?s\)?)?",
    {
        "✓": "passed", "✔": "passed", "√": "passed", "✗": "failed", "✕": "failed", "×": "failed", "✘": "failed",
        "○": "skipped", "↓": "skipped",
    },
)  # fmt: skip
_jest = _lines(r"\s*(?P<word>PASS|FAIL) (?P<name>\S+)(?: \([\d.]+ ?m?s\))?", {"PASS": "passed", "FAIL": "failed"})
_tap = _lines(r"\s*(?P<word>ok|not ok) \d+ (?:- )?(?P<name>[^#]+?)(?:\s+#.*)?", {"ok": "passed", "not ok": "failed"})
_ctest = _lines(
    r"\s*\d+/\d+ Test\s+#\d+: (?P<name>.+?) \.*\s*"
    r"(?P<word>Passed|\*\*\*(?:Failed|Exception|Not Run|Skipped|Timeout))\b.*",
    {
        "Passed": "passed", "***Failed": "failed", "***Exception": "error", "***Not Run": "error",
        "***Skipped": "skipped", "***Timeout": "failed",
    },
)  # fmt: skip
_googletest = _lines(
    r"\[\s+(?P<word>OK|FAILED|SKIPPED) +\] (?P<name>[^\s,(]+).*",
    {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"},
)


def _jest_and_tests(log: str) -> Found:
    yield from _jest(log)
    yield from _mocha(log)


def _any(log: str) -> Found:
    """Whatever any of the parsers for other languages finds."""
    for name in ("go", "cargo", "maven", "gradle", "jest", "ctest", "googletest", "tap"):
        yield from PARSERS[name](log)


PARSERS: Mapping[str, Callable[[str], Found]] = MappingProxyType(
    {
        **dict.fromkeys(("pytest", "pytest_options", "pytest_v2", "seaborn", "matplotlib", "pydantic"), pytest_text),
        "django": unittest_text,
        "unittest": unittest_text,
        "sympy": sympy_text,
        "go": _go,
        "cargo": _cargo,
        "maven": _maven,
        "gradle": _gradle,
        "mocha": _mocha,
        "jest": _jest_and_tests,
        "tap": _tap,
        "ctest": _ctest,
        "googletest": _googletest,
        "any": _any,
    }
)


def parse_log(parser: str, log: str) -> Found:
    """What a parser finds in a log, without colours and control characters."""
    return PARSERS[parser](_ANSI.sub("", log))
