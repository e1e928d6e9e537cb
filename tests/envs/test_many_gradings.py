"""Many gradings at once on a node with few places: each gets its verdict, and no more sandboxes live than places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import skyenv
from skyenv.envs.swe.grading import grade_patch
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.validation import reference_patch

SLOTS = 4
GRADINGS = 64
PROGRAM = Path(sys.executable).parent / "skyenv"


@pytest.mark.slow
async def test_sixty_four_gradings_keep_within_four_places() -> None:
    command = [PROGRAM, "serve", "--port", "0", "--slots", str(SLOTS), "--queue", str(GRADINGS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            resolved, most = await grade_all(url)
        finally:
            server.terminate()
    assert resolved == [True] * (GRADINGS // 2) + [False] * (GRADINGS // 2)
    assert 1 < most <= SLOTS


async def grade_all(url: str) -> tuple[list[bool], int]:
    """Half with the reference and half with nothing; the verdicts in order, and the most sandboxes that were seen."""
    (task,) = [task for task in load_tasks("builtin") if task.task_id == "fahrenheit-offset"]
    assert task.fix is not None
    verdicts: dict[int, bool] = {}
    most = 0
    async with skyenv.connect(url, patience=600.0) as client:
        reference = await reference_patch(task, client)
        wrong = reference.replace(task.fix.new.encode(), task.decoys[0].encode())

        async def one(number: int) -> None:
            patch = reference if number < GRADINGS // 2 else wrong
            verdict = await grade_patch(task, patch, client)
            assert verdict["valid_for_training"], verdict
            verdicts[number] = verdict["resolved"]

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, (await client.health())["sandboxes"])
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as watching:
            watching.start_soon(watch)
            async with anyio.create_task_group() as group:
                for number in range(GRADINGS):
                    group.start_soon(one, number)
            watching.cancel_scope.cancel()
    return [verdicts[number] for number in range(GRADINGS)], most
