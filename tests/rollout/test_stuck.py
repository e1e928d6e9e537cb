"""The rows S1 to S14 of the loop rule, and what a digest forgives."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from skyenv.errors import ConfigError
from skyenv.stuck import SKYRL, STRICT, StuckDetector, StuckRule, call_key, observation_digest, stuck_rule
from skyenv.types import ToolCall

Pair = tuple[ToolCall, str]


def bash(command: str) -> ToolCall:
    return ToolCall("execute_bash", {"command": command})


def edit(old: str, new: str) -> ToolCall:
    return ToolCall("str_replace_editor", {"command": "str_replace", "path": "/a", "old_str": old, "new_str": new})


def view(first: int, last: int) -> ToolCall:
    return ToolCall("str_replace_editor", {"command": "view", "path": "/a", "view_range": [first, last]})


def hits(pairs: Iterable[Pair], rule: StuckRule = STRICT, *, failed: bool = False) -> int | None:
    """The number (from 1) of the call at which the rule is met first."""
    detector = StuckDetector(rule)
    for number, (call, observation) in enumerate(pairs, start=1):
        if detector.add(call, observation, failed=failed):
            return number
    return None


A, B, C = (bash("a"), "1"), (bash("b"), "2"), (bash("c"), "3")


def test_s1_same_call_and_output_four_times() -> None:
    assert hits([A] * 6) == 4


def test_s2_three_times_is_enough_for_the_skyrl_preset_only() -> None:
    assert hits([A] * 3) is None
    assert hits([A] * 3, SKYRL) == 3
    assert hits([(bash("a"), str(i)) for i in range(3)], SKYRL) == 3


def test_s3_polling_a_command_that_prints_is_not_stuck() -> None:
    assert hits((bash(""), "line\n" * n) for n in range(60)) is None


def test_s4_silent_polling_is_stuck_at_the_tenth() -> None:
    assert hits([(bash(""), "[still running]")] * 12) == 10
    assert hits([(bash("  "), f"[no output for {n}.0 s]") for n in range(12)]) == 10


def test_s5_arguments_in_another_order_are_the_same_call() -> None:
    left = ToolCall("t", {"a": 1, "b": [1, {"x": "y"}]})
    right = ToolCall("t", {"b": [1, {"x": "y"}], "a": 1})
    assert call_key(left) == call_key(right)
    assert hits([(left, "o"), (right, "o")] * 2) == 4


def test_s6_and_s7_cycles_of_two_and_three() -> None:
    assert hits([A, B] * 4) == 6
    assert hits([A, B, C] * 4) == 9
    assert hits([A, B, C, A, C, B] * 2) is None


def test_s8_the_same_test_between_different_edits_is_work() -> None:
    pairs = [pair for n in range(8) for pair in ((edit(str(n), "x"), f"edited {n}"), (bash("pytest"), "1 failed"))]
    assert hits(pairs) is None


def test_s9_the_same_failing_edit_three_times() -> None:
    assert hits([(edit("nope", "x"), "not found")] * 3, failed=True) == 3
    assert hits([(edit("nope", "x"), "not found")] * 3, failed=False) is None


def test_s10_paging_through_a_file_is_work() -> None:
    assert hits((view(n * 100, n * 100 + 99), f"page {n}") for n in range(20)) is None


def test_s12_the_same_output_in_another_directory_differs() -> None:
    assert hits((bash("ls"), f"setup.py\n[cwd: /repo/project_{name}]") for name in "abcdefgh") is None


def test_s13_outputs_that_differ_in_a_duration_are_equal() -> None:
    assert hits((bash("pytest"), f"1 failed in 0.{n}2s") for n in range(6)) == 4


def test_a_warning_starts_the_count_anew() -> None:
    detector = StuckDetector(STRICT)
    assert [detector.add(*A) for _ in range(4)][-1] is not None
    detector.clear()
    assert [detector.add(*A) is not None for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("<object at 0x7f3a12bc>", "<object at 0x55d0c0de>"),
        ("[1] 4711", "[1] 815"),
        ("pid 12 ended", "pid 99 ended"),
        ("/tmp/tmpab12_xyz/a", "/tmp/tmpzz99qwer/a"),
        ("/tmp/tmp.Ab3dEf9hIj", "/tmp/tmp.0123456789"),
        ("real\t0m0.012s", "real\t0m1.100s"),
        ("at 12:00:01", "at 12:00:59"),
        ("2026-01-02T03:04:05.123Z", "2027-01-02T03:04:06Z"),
        ("took 3 seconds", "took 14 seconds"),
        ("/tmp/pytest-of-root/pytest-1/x", "/tmp/pytest-of-root/pytest-22/x"),
    ],
)
def test_the_digest_forgives(left: str, right: str) -> None:
    assert observation_digest(left) == observation_digest(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("1 failed", "2 failed"), ("line 10", "line 11"), ("a", "a\n"), ("3 passed in 1s", "4 passed in 1s"), ("", " ")],
)
def test_the_digest_does_not_forgive(left: str, right: str) -> None:
    assert observation_digest(left) != observation_digest(right)


def test_the_digest_takes_hostile_text_in_linear_time() -> None:
    for text in ("/tmp/" * 20_000, "9" * 200_000, "0x" * 100_000, "[1] " * 50_000, "\udc80" * 1000, "1:" * 100_000):
        observation_digest(text)


def test_presets_by_name() -> None:
    assert stuck_rule("strict") is STRICT
    assert stuck_rule("off") is None
    with pytest.raises(ConfigError, match="strict, skyrl, off"):
        stuck_rule("stritc")


def test_a_rule_that_is_all_off_never_hits() -> None:
    assert hits([A] * 50, StuckRule(0, 0, 0, 0, 0, 0), failed=True) is None
