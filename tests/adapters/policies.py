"""One seeded scripted policy for every adapter: even samples mend their task, odd ones change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import skyenv
from sky_trainer.tiny import make_tokenizer
from skyenv import formats
from skyenv.adapters.opening import Rollouts
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.loading import load_tasks
from skyenv.renderer import Renderer
from skyenv.samples import Row, RowRules, rows_from
from skyenv.types import Completion, Limits, Message, SamplingParams, ToolCall

TASKS = ["clamp-upper-bound", "fahrenheit-offset"]
ROLLOUTS = Rollouts(
    tasks=[task for task in load_tasks("builtin") if task.task_id in TASKS],
    env_options={"prompt": "brief"},
    limits=Limits(max_turns=4, max_tokens_per_turn=2048, max_context=8192),
    sampling=SamplingParams(max_tokens=2048),
)
_DATA = Path(skyenv.__file__).parent / "envs/swe/data/builtin"


def patch(task_id: str) -> str:
    return (_DATA / task_id / "gold.patch").read_text()


def tokenizer() -> Any:
    """Small, with a chat template of its own."""
    return make_tokenizer([patch(task_id) for task_id in TASKS], 400)


class HalfRight:
    """An engine: which script it plays follows from the session's id alone."""

    def __init__(self, renderer: Renderer) -> None:
        call = renderer.format.render_call
        end = call(ToolCall("finish", {}))
        right = {
            task_id: [call(ToolCall("execute_bash", {"command": f"git apply - <<'END'\n{patch(task_id)}\nEND"})), end]
            for task_id in TASKS
        }
        self._right = ScriptedEngine(renderer, right)
        self._wrong = ScriptedEngine(renderer, [call(ToolCall("execute_bash", {"command": "ls"})), end])

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        sample = int(session_id.rpartition("#")[2].split(".")[1])
        engine = self._wrong if sample % 2 else self._right
        return await engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)


def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer, formats.get("hermes"))


async def own_rows(tokenizer: Any, group_size: int) -> list[Row]:
    """What our own pipeline makes of the policy: what every adapter must come to."""
    made = renderer(tokenizer)
    async with ROLLOUTS.open(HalfRight(made), made) as pipeline:
        groups = await pipeline.collect(ROLLOUTS.load(), group_size)
    return rows_from(groups, RowRules(tokenizer.eos_token_id, len(tokenizer)))
