"""Agent programs as policies: a small one of our own, and mini-swe-agent as it is published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import skyenv
from skyenv import formats
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, ToolCall, Trajectory
from skyenv.vector.pipeline import RolloutPipeline

TASK = "clamp-upper-bound"
GOLD = (Path(skyenv.__file__).parent / "envs/swe/data/builtin" / TASK / "gold.patch").read_text()
RENDERER = Renderer(ByteTokenizer(), formats.get("hermes"))
AGENT = """cat >/tmp/agent.py <<'EOF'
import json, os, subprocess, urllib.request
tool = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": os.environ["SKYENV_ISSUE"]}]
while True:
    body = json.dumps({"model": os.environ["SKYENV_MODEL"], "messages": messages, "tools": [tool]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls", []):
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not message.get("tool_calls"):
        break
EOF
python3 /tmp/agent.py"""


def bash(command: str) -> str:
    return RENDERER.format.render_call(ToolCall("bash", {"command": command}))


APPLY = bash(f"git apply - <<'END'\n{GOLD}\nEND")


def script(texts: Sequence[str]) -> Any:
    return lambda messages: texts[sum(message.role == "assistant" for message in messages)]


async def play(
    texts: Sequence[str], *, engine: Any = None, limits: Limits | None = None, group_size: int = 1, **options: Any
) -> list[Trajectory]:
    options = {"command": AGENT, "tasks": "builtin", **options}
    async with skyenv.connect() as provider:
        pipeline = RolloutPipeline(
            engine=engine or ScriptedEngine(RENDERER, script(texts)),
            make_env=lambda: skyenv.make("SkyRL/Agent-v0", sandbox=provider, **options),
            renderer=RENDERER,
            limits=limits or Limits(max_context=1 << 16),
            sampling=SamplingParams(max_tokens=4096),
            max_attempts=1,
        )
        async with pipeline.run([TASK], group_size=group_size) as run:
            return [trajectory async for trajectory in run]


async def test_an_agent_that_mends_is_rewarded_and_its_ids_are_exact() -> None:
    trajectories = await play([bash("ls"), APPLY, "Mended."], group_size=2)
    for trajectory in trajectories:
        assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.FINISH), trajectory.failure
        assert trajectory.trainable
        assert len(trajectory.segments) == 1
        assert len(trajectory.turns) == 3
        assert "ranges.py" in trajectory.turns[0].observation
        assert RENDERER.drift(trajectory) == 0
        assert trajectory.verdict["agent"]["exit_code"] == 0
        sampled = [*RENDERER.encode("Mended."), RENDERER.stop_token_ids[0]]
        assert trajectory.segments[0].token_ids[-len(sampled) :] == sampled


async def test_an_agent_that_mends_nothing_is_not() -> None:
    (trajectory,) = await play([bash("curl -s http://example.com || echo nothing"), "Done."])
    assert (trajectory.reward, trajectory.failure) == (0.0, None)


async def test_budgets_end_the_agent() -> None:
    (trajectory,) = await play([bash("true")] * 5, limits=Limits(max_turns=3, max_context=1 << 16))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)
    assert trajectory.reward == 0.0
    forever = f"{AGENT}; sleep 1000"
    limits = Limits(wall_clock=6.0, max_context=1 << 16)
    (slow,) = await play([APPLY, "Done."], limits=limits, command=forever)
    assert (slow.stop_reason, slow.failure) == (StopReason.WALL_CLOCK, None)


async def test_what_is_no_fault_of_the_policy_is_a_failure() -> None:
    (missing,) = await play([], command="no-such-agent")
    assert missing.failure is not None
    assert "status 127" in missing.failure.message
    assert missing.stop_reason is StopReason.TOOL_BUG

    class Broken(ScriptedEngine):
        async def generate(self, *_: Any, **__: Any) -> Completion:
            raise EngineError("out of memory")

    (failed,) = await play([], engine=Broken(RENDERER, []))
    assert (failed.stop_reason, failed.reward) == (StopReason.ENGINE_ERROR, None)


async def test_by_hand_it_is_stepped_like_any_other() -> None:
    async with skyenv.make("SkyRL/Agent-v0", command="true") as env:
        await env.areset(options={"task": TASK})
        step = await env.astep(ToolCall("execute_bash", {"command": "pwd"}))
        assert step.observation.startswith("/")
    with pytest.raises(ConfigError, match="command"):
        skyenv.make("SkyRL/Agent-v0")
    with pytest.raises(ConfigError, match="did you mean"):
        skyenv.make("SkyRL/Agent-v0", command="true", package=[])


MINI = (
    "HOME=/tmp MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors mini -y --exit-immediately -l 0 "
    '-m openai/$SKYENV_MODEL -t "$SKYENV_ISSUE" -o /tmp/mini.json </dev/null'
)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
async def test_mini_swe_agent_is_a_policy_as_it_is_published() -> None:
    done = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    (trajectory,) = await play(
        [f"I look around.\n{bash('ls')}", f"I mend it.\n{APPLY}", f"Done.\n{done}"],
        command=MINI,
        packages=["mini-swe-agent==2.4.6"],
    )
    assert trajectory.failure is None, trajectory
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.FINISH), trajectory.verdict
    assert len(trajectory.segments) == 1
    assert trajectory.counters["rewritten"] == 0
    assert json.dumps(trajectory.verdict["agent"])
    assert isinstance(trajectory.prompt[0], Message)
