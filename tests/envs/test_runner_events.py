"""What runners report is hostile input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skyenv.envs.swe.runners import OUTCOMES, Canary, escape, parse_events

NONCE = "ab12"


def line(*fields: str) -> bytes:
    return ("\t".join((NONCE, *fields)) + "\n").encode()


def test_a_run() -> None:
    data = line("start") + line("test", "passed", "a::b") + line("test", "failed", "a::c") + line("end", "1")
    report = parse_events(data, NONCE)
    assert (report.started, report.exit_status, report.forged) == (True, 1, False)
    assert report.outcomes == {"a::b": "passed", "a::c": "failed"}


def test_the_worst_outcome_of_a_test_counts() -> None:
    for order in (("passed", "error"), ("error", "passed")):
        report = parse_events(b"".join(line("test", outcome, "a") for outcome in order), NONCE)
        assert report.outcomes == {"a": "error"}


@given(st.text())
def test_ids_travel_whole(test_id: str) -> None:
    report = parse_events(line("test", "passed", escape(test_id)), NONCE)
    assert report.outcomes == {test_id: "passed"}


@given(st.binary())
def test_whatever_else_stands_there_is_a_forgery(data: bytes) -> None:
    report = parse_events(data + b"\n", NONCE)
    assert report.forged
    assert (report.started, report.exit_status, report.outcomes) == (False, None, {})


@given(st.lists(st.sampled_from([b"start", b"end", b"test", b"1", b"passed", b"\xff", b"", b"a"])))
def test_lines_with_the_nonce_never_break_it(fields: list[bytes]) -> None:
    report = parse_events(b"\t".join([NONCE.encode(), *fields]) + b"\n", NONCE)
    assert set(report.outcomes.values()) <= OUTCOMES


def test_a_second_end_is_a_forgery_and_an_unfinished_line_is_not_read() -> None:
    assert parse_events(line("end", "1") + line("end", "1"), NONCE).forged
    report = parse_events(line("start") + b"ab12\ttest\tpas", NONCE)
    assert (report.forged, report.outcomes) == (False, {})


def test_the_canary_must_sing_exactly() -> None:
    canary = Canary()
    right = {f"x::{canary.passing}": "passed", f"x::{canary.failing}": "failed", f"x::{canary.skipping}": "skipped"}
    assert canary.sings(right)
    assert not canary.sings({**right, f"x::{canary.failing}": "passed"})
    assert not canary.sings({test: outcome for test, outcome in right.items() if outcome != "skipped"})
    assert all(canary.owns(test) for test in right)
    assert len({Canary().passing for _ in range(50)}) == 50
