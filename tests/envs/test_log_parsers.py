"""Log parsers and the ids that data sets make of them: pure text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.envs.swe.runners import OUTCOMES, merge, worst
from skyenv.envs.swe.runners.ids import NORMALISERS, by_expected, parser_name
from skyenv.envs.swe.runners.logs import PARSERS, parse_log
from skyenv.errors import ConfigError

LOGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "pytest summary": (
        "pytest",
        "PASSED t/a.py::test_one\nFAILED t/a.py::test_two - assert 1 == 2 - really\nERROR t/b.py\n"
        "SKIPPED [1] t/a.py:3: no\nXFAIL t/a.py::test_x - known\nXPASS t/a.py::test_y\n",
        {"t/a.py::test_one": "passed", "t/a.py::test_two": "failed", "t/b.py": "error", "t/a.py::test_x": "xfailed",
         "t/a.py::test_y": "xpassed"},
    ),
    "pytest verbose": (
        "pytest",
        "t/a.py::test_one PASSED          [ 50%]\nt/a.py::test_two[a b] FAILED [100%]\n"
        "t/a.py::T::test SKIPPED (why) [1%]\n",
        {"t/a.py::test_one": "passed", "t/a.py::test_two[a b]": "failed", "t/a.py::T::test": "skipped"},
    ),
    "captured log records are no tests": ("pytest", "ERROR    root:calc.py:12 oh no\nPASSED t/a.py::t\n",
                                          {"t/a.py::t": "passed"}),
    "colours": ("pytest", "\x1b[32mPASSED\x1b[0m t/a.py::\x1b[1mtest_one\x1b[0m\n", {"t/a.py::test_one": "passed"}),
    "any failure wins": ("pytest", "PASSED t/a.py::t\nERROR t/a.py::t - teardown\n", {"t/a.py::t": "error"}),
    "django": (
        "django",
        "test_a (m.T) ... ok\ntest_b (m.T)\nDoes b. ... FAIL\ntest_c (m.T) ... skipped 'why'\n"
        "test_d (m.T) ... printed\nmore\nok\ntest_e (m.T) ... expected failure\ntest_f (m.T) ... ERROR\n"
        "======\nERROR: test_f (m.T)\n------\nRan 6 tests\n",
        {"test_a (m.T)": "passed", "Does b.": "failed", "test_c (m.T)": "skipped", "test_d (m.T)": "passed",
         "test_e (m.T)": "xfailed", "test_f (m.T)": "error", "test_f": "error"},
    ),
    "django system checks between": (
        "django", "test_a (m.T) ... System check identified no issues (0 silenced).\nok\n", {"test_a (m.T)": "passed"},
    ),
    "sympy": (
        "sympy",
        "s/core/tests/test_a.py[3]\ntest_one ok\ntest_two F\ntest_three s\ntest_four E        [FAIL]\n"
        "____ s/core/tests/test_a.py:test_two ____\n",
        {"test_one": "passed", "test_two": "failed", "test_three": "skipped", "test_four": "error",
         "s/core/tests/test_a.py:test_two": "failed"},
    ),
    "go": (
        "go", "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestA/sub (0.01s)\n--- SKIP: TestB (0.00s)\n",
        {"TestA": "passed", "TestA/sub": "failed", "TestB": "skipped"},
    ),
    "cargo": (
        "cargo", "test a::one ... ok\ntest a::two ... FAILED\ntest a::three ... ignored, slow\n",
        {"a::one": "passed", "a::two": "failed", "a::three": "skipped"},
    ),
    "maven": (
        "maven",
        "[INFO] Tests run: 3, Failures: 0, Errors: 0, Skipped: 1, Time elapsed: 0.1 s -- in a.OneTest\n"
        "[ERROR] Tests run: 3, Failures: 1, Errors: 0, Skipped: 0, Time elapsed: 0.1 s <<< FAILURE! - in a.TwoTest\n",
        {"a.OneTest": "passed", "a.TwoTest": "failed"},
    ),
    "gradle": ("gradle", "a.OneTest > adds PASSED\na.OneTest > subtracts() FAILED\n",
               {"a.OneTest > adds": "passed", "a.OneTest > subtracts()": "failed"}),
    "jest": ("jest", "PASS src/a.test.js\n  calc\n    ✓ adds (3 ms)\n    ✕ subtracts\n    ○ skipped later\n",
             {"src/a.test.js": "passed", "adds": "passed", "subtracts": "failed", "skipped later": "skipped"}),
    "mocha": ("mocha", "  ✔ adds\n  ✖ ignored sign\n  ✗ subtracts (12ms)\n", {"adds": "passed", "subtracts": "failed"}),
    "tap": ("tap", "TAP version 13\nok 1 - adds\nnot ok 2 - subtracts\nok 3 - later # SKIP\n",
            {"adds": "passed", "subtracts": "failed", "later": "passed"}),
    "ctest": ("ctest", " 1/2 Test  #1: adds ......   Passed    0.01 sec\n 2/2 Test  #2: subs ...***Failed 0.0 sec\n",
              {"adds": "passed", "subs": "failed"}),
    "googletest": ("googletest", "[       OK ] Calc.Adds (0 ms)\n[  FAILED  ] Calc.Subs, where x = 1 (0 ms)\n",
                   {"Calc.Adds": "passed", "Calc.Subs": "failed"}),
    "any": ("any", "--- PASS: TestA (0.00s)\ntest one ... ok\n", {"TestA": "passed", "one": "passed"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs(name: str) -> None:
    parser, log, expected = LOGS[name]
    assert merge(parse_log(parser, log)) == expected


@given(st.text(), st.sampled_from(sorted(PARSERS)))
def test_any_text_is_parsed(log: str, parser: str) -> None:
    assert {outcome for _, outcome in parse_log(parser, log)} <= OUTCOMES


IDS = {
    "pytest": ("t/a.py::test[a b-c]", "t/a.py::test[a"),
    "pytest_options": ("t/a.py::test[/tmp/x/y.dcm]", "t/a.py::test[/y.dcm]"),
    "pytest_v2": ("t/a.py::T::test", "t/a.py::T::test"),
    "matplotlib": ("t/a.py::test[MouseButton.LEFT-x]", "t/a.py::test[1-x]"),
    "r2e": ("r2e_tests/test_1.py::T::test[a b]", "T.test[a b]"),
}


@pytest.mark.parametrize("parser", IDS)
def test_ids(parser: str) -> None:
    given_id, expected = IDS[parser]
    assert NORMALISERS[parser](given_id) == expected


def test_an_id_holds_only_if_all_tests_that_come_to_it_do() -> None:
    outcomes = {"a.py::t[x 1]": "passed", "a.py::t[x 2]": "failed", "a.py::u[y 1]": "passed", "a.py::u[y 2]": "passed"}
    found = by_expected(outcomes, ["a.py::t[x", "a.py::u[y", "a.py::v"], "pytest", worst)
    assert found == {"a.py::t[x": "failed", "a.py::u[y": "passed", "a.py::v": "missing"}


def test_ids_that_were_cut_short_stand_for_all_that_begin_so() -> None:
    outcomes = {"x.py::T::t[a b]": "passed", "x.py::T::t[a c]": "skipped", "x.py::T::u": "passed"}
    assert by_expected(outcomes, ["T.t[a"], "r2e", worst) == {"T.t[a": "skipped"}
    assert by_expected({"x.py::T.t": "passed"}, ["T.t[a"], "r2e", worst) == {"T.t[a": "missing"}


def test_exact_ids_are_not_touched() -> None:
    assert by_expected({"a.py::t[x 1]": "passed"}, ["a.py::t[x 1]", "a.py::t[x"], "", worst) == {
        "a.py::t[x 1]": "passed",
        "a.py::t[x": "missing",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ""), ("pytest", "pytest"), ("parse_log_pytest", "pytest"), ("parse_log_pytest_v2", "pytest_v2"),
        ("parse_log_gotest", "go"), ("parse_java_mvn_v2", "maven"), ("parse_log_js_4", "mocha"), ("vitest", "jest"),
        ("parse_log_cargo", "cargo"), ("parse_log_django", "django"), ("parse_log_junit", None), ("abacus", None),
    ],
)  # fmt: skip
def test_parser_names(name: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match=r"row: no parser .* the known ones are"):
            parser_name(name, "row")
    else:
        assert parser_name(name, "row") == expected
