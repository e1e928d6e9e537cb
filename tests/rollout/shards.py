"""Pipelines that tests open in other processes, by import path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import skyenv
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError
from skyenv.types import Limits, ToolCall
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from tests.rollout.adventure import RENDERER, say

BUILTIN = Path(skyenv.__file__).parent / "envs/swe/data/builtin"


@asynccontextmanager
async def gold(options: Mapping[str, Any]) -> AsyncIterator[RolloutPipeline]:
    """Real sandboxes of this process; a script makes the known fix of the built-in tasks, after `command`."""
    async with skyenv.connect() as client:

        def script(task_id: str) -> list[str]:
            patch = (BUILTIN / task_id / "gold.patch").read_text()
            fix = f"cd /testbed && git apply <<'END'\n{patch}END"
            commands = (options["command"], fix)
            calls = [ToolCall("execute_bash", {"command": command}) for command in commands]
            return [say(call) for call in (*calls, ToolCall("finish", {}))]

        yield RolloutPipeline(
            engine=ScriptedEngine(RENDERER, {task_id: script(task_id) for task_id in options["tasks"]}),
            make_env=lambda: skyenv.make("SkyRL/SWE-v0", tasks="builtin", sandbox=client),
            renderer=RENDERER,
            limits=Limits(),
            widths=StageWidths(init=2, run=options["live"], eval=2, live=options["live"]),
            meter=Meter(timeline=True),
        )


@asynccontextmanager
async def wrong(options: Mapping[str, Any]) -> AsyncIterator[RolloutPipeline]:
    """Cannot be opened."""
    raise ConfigError(f"tasks: there is no set {options['set']}")
    yield
