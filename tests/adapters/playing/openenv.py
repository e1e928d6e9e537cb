"""The policy's rows with an environment of ours behind OpenEnv's server, played through OpenEnv's client as ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import uvicorn

import skyenv
from skyenv.adapters.openenv import OpenEnvTask, application, list_tasks
from skyenv.remote.listen import Listening
from skyenv.samples import RowRules, rows_from
from tests.adapters import policies

GROUP_SIZE = 2
FIELDS = ("task_id", "prompt_ids", "completion_ids", "loss_mask", "logprobs", "reward")


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The URL of an application, served by a thread of this process."""
    listener = Listening(port=0).bind()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Listening().url(listener)
    finally:
        server.should_exit = True
        thread.join()


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
