"""The policy's rows with an environment of ours behind OpenEnv's server, played through OpenEnv's client as ours."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

import skyenv
from skyenv.adapters.openenv import OpenEnvTask, application, list_tasks
from skyenv.samples import RowRules, rows_from
from tests.adapters import policies
from tests.adapters.playing.serving import running

GROUP_SIZE = 2
FIELDS = ("task_id", "prompt_ids", "completion_ids", "loss_mask", "logprobs", "reward")


async def play(url: str, tasks: list[OpenEnvTask]) -> list[dict[str, Any]]:
    tokenizer = policies.tokenizer()
    renderer = policies.renderer(tokenizer)
    pipeline = policies.ROLLOUTS.pipeline(policies.HalfRight(renderer), renderer, None, [])  # type: ignore[arg-type]
    pipeline = replace(pipeline, make_env=lambda: skyenv.make("SkyRL/OpenEnv-v0", url=url, tasks=tasks, token="secret"))
    groups = await pipeline.collect(tasks, GROUP_SIZE)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.failure is None, trajectory.failure
    rows = rows_from(groups, RowRules(tokenizer.eos_token_id, len(tokenizer)))
    return [{name: getattr(row, name) for name in FIELDS} for row in rows]


async def main(out: Path) -> None:
    with running(application(policies.ROLLOUTS, token="secret")) as url:
        out.write_text(json.dumps(await play(url, await list_tasks(url, token="secret"))))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
