"""The rollout tax: what a trajectory's sandbox costs beside the model, projected to a million trajectories.

T is (a) creation to the end of the first command, plus (b) the actions, plus (c) deletion until nothing is left. Every
substrate runs the same command texts with 1 CPU and 1 GiB (a bare bash and SWE-ReX: with all there is). The *null*
actions are shell builtins (`true`, a 4 KiB read that is printed, an edit of one line), so T is overhead only; the
*bug-fix* actions search, read, edit and run tests with the system's own Python (in container images: a copy of ours).
Worker-hours are a million times T over 3600, inference left out. Other machines' numbers cannot be set beside these;
the ratio to `docker exec` in the same run can.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
from _latency import FAILURES
from _measure import spread
from _substrates import Execute, Substrate

MILLION = 1_000_000
SEED_NULL = "mkdir tax && printf '%4096s' x > tax/data && printf 'a = 1\\nvalue = 0\\nb = 2\\n' > tax/file"
READ = 'IFS= read -r -N 4096 x < tax/data && printf %s "$x"'
EDIT = 'mapfile -t l < tax/file && l[1]="value = {n}" && printf "%s\\n" "${{l[@]}}" > tax/file'
SEED_BUG = (
    'mkdir bug && for n in $(seq 30); do echo "def f$n(x): return x + $n" > bug/m$n.py; done && '
    "echo 'def total(values): return sum(values) - 1' > bug/fixme.py && "
    "printf 'import unittest, fixme\\nclass T(unittest.TestCase):\\n    def test(self):\\n"
    "        self.assertEqual(fixme.total([1, 2]), 3)\\n' > bug/test_fixme.py"
)
BUG_FIX = (
    "grep -rn 'def total' bug > /dev/null",
    "sed -n 1,40p bug/fixme.py > /dev/null",
    "sed -i 's/sum(values).*/sum(values)/' bug/fixme.py",
    "(cd bug && python3 -m unittest -q test_fixme 2> /dev/null)",
)


def null_actions(count: int) -> list[str]:
    """The fixed sequence: a third each of nothing, a read and an edit."""
    return [("true", READ, EDIT.format(n=n))[n % 3] for n in range(count)]


def bug_fix_actions(count: int) -> list[str]:
    """The same four steps, again and again; the tests pass after the first edit."""
    return [BUG_FIX[n % 4] for n in range(count)]


async def trajectory(substrate: Substrate, seed: str, actions: Sequence[str]) -> tuple[float, float, float]:
    """Seconds of one: start, actions, teardown."""
    async with AsyncExitStack() as stack:
        begin = time.perf_counter()
        execute: Execute = await stack.enter_async_context(substrate.episode())
        await execute(seed)
        started = time.perf_counter()
        for action in actions:
            await execute(action)
        acted = time.perf_counter()
    return started - begin, acted - started, time.perf_counter() - acted


class Plan(NamedTuple):
    """What to run: "null" or "bug-fix" actions, so many, in so many episodes; `budget` seconds for each substrate."""

    kind: str
    actions: int
    episodes: int
    budget: float

    def texts(self) -> tuple[str, list[str]]:
        """The first command, and the actions."""
        if self.kind == "null":
            return SEED_NULL, null_actions(self.actions)
        return SEED_BUG, bug_fix_actions(self.actions)


async def measure(
    substrates: Sequence[Substrate], plan: Plan, shuffle: random.Random, reasons: dict[str, str]
) -> dict[str, Any]:
    """Episodes in shuffled order, after a warm-up of each; what used up its budget gets no more, what fails neither."""
    seed, sequence = plan.texts()
    found: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in substrates}
    spent = dict.fromkeys(found, 0.0)
    left = list(substrates)
    for number in range(plan.episodes + 1):
        for each in shuffle.sample(left, len(left)):
            if spent[each.name] > plan.budget and len(found[each.name]) >= 2:
                continue
            try:
                seconds = await trajectory(each, seed, sequence[: None if number else 8])
            except FAILURES as error:
                left.remove(each)
                reasons[f"tax {plan.kind} {each.name}"] = repr(error)
                continue
            if number:
                found[each.name].append(seconds)
                spent[each.name] += sum(seconds)
    return {name: _row(values) for name, values in found.items() if values}


def _row(values: list[tuple[float, float, float]]) -> dict[str, Any]:
    totals = sorted(sum(value) for value in values)
    middle = totals[len(totals) // 2]
    names = ("start", "actions", "teardown")
    parts = {f"{name} ms": spread([value[at] for value in values])["p50"] for at, name in enumerate(names)}
    return {**parts, "T ms": spread(totals), "hours_per_million": middle * MILLION / 3600}


async def concurrent(substrate: Substrate, actions: int, width: int) -> float:
    """Worker-hours of a million null trajectories when so many run at a time, `width` of them being one worker."""
    sequence = null_actions(actions)
    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(width):
            group.start_soon(trajectory, substrate, SEED_NULL, sequence)
    return (time.perf_counter() - start) / width * MILLION / 3600
