"""What test_openenv.py looks at: environments of OpenEnv's own kinds as ours, and ours under OpenEnv's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import gymnasium
from fastmcp import FastMCP
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from openenv.core import MCPToolClient
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

import skyenv
from skyenv import formats
from skyenv.adapters.openenv import OpenEnvEnv, OpenEnvTask, application, list_tasks, serve
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.raw_text import RawText
from skyenv.errors import SkyEnvError
from skyenv.remote import backends
from skyenv.remote.node import create_app
from skyenv.rollout import byte_renderer
from skyenv.types import Limits, ToolCall, Trajectory
from tests.adapters import policies
from tests.adapters.playing.serving import running

Scenario = Callable[[str], Awaitable[Any]]
LIMITS = Limits(max_turns=3, max_tokens_per_turn=512, max_context=1 << 16)
TASK = OpenEnvTask("seven", {"number": 7})
OURS = OpenEnvTask("clamp", {"task": policies.TASKS[0]})


class Guess(Action):
    """Guess a number."""

    number: int
    way: Literal["loud", "quiet"] = "loud"


class Answer(Observation):
    hint: str


class Guessing(Environment[Guess, Answer, State]):
    """An environment with an action of its own: half a point for coming closer, one for the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 7, **_: Any) -> Answer:
        self._number = number
        return Answer(hint="A number from 1 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        if action.number > 9:
            raise RuntimeError("out of cards")
        if action.number == self._number:
            return Answer(hint="Right.", reward=1.0, done=True)
        return Answer(hint="Higher." if action.number < self._number else "Lower.", reward=0.5)

    @property
    def state(self) -> State:
        return State()


class Adding(MCPEnvironment):
    """An environment with tools of MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("adding")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("tools only")

    @property
    def state(self) -> State:
        return State()


async def played(
    make_env: Callable[[], OpenEnvEnv], *calls: ToolCall, limits: Limits = LIMITS, task: OpenEnvTask = TASK
) -> Trajectory:
    """One trajectory of our pipeline on the environment."""
    renderer = byte_renderer()
    engine = ScriptedEngine(renderer, [renderer.format.render_call(call) for call in calls])
    pipeline = policies.ROLLOUTS.pipeline(engine, renderer, None, [])  # type: ignore[arg-type]
    pipeline = replace(pipeline, make_env=make_env, limits=limits, max_attempts=1)
    (group,) = await pipeline.collect([task], 1)
    return group.trajectories[0]


def told(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "observations": [turn.observation for turn in trajectory.turns],
        "verdict": trajectory.verdict,
        "failure": trajectory.failure and [trajectory.failure.kind, trajectory.failure.message],
    }


async def own_action(url: str) -> Any:
    def env() -> OpenEnvEnv:
        return OpenEnvEnv(url, [TASK], instructions="Guess.")

    guess = [ToolCall("act", {"number": number}) for number in (3, 9, 7)]
    gym = gymnasium.make("SkyRL/OpenEnv-v0", url=url, tasks=[TASK])
    observation, info = gym.reset(seed=1)
    faces = [observation, info, *gym.step({"name": "act", "arguments": {"number": 7}})]
    gym.close()
    wrapped = RecordEpisodeStatistics(TimeLimit(RawText(gymnasium.make("SkyRL/OpenEnv-v0", url=url)), 9))
    wrapped.reset(seed=1)
    texts = ["Seven?", *(formats.get("codeact").render_call(call) for call in guess)]
    stacked = [wrapped.step(text) for text in texts]
    wrapped.close()
    return {
        "wrapped": [[*step[:4], step[4].get("episode", {}).get("r")] for step in stacked],
        "solved": told(await played(env, *guess)),
        "budget": told(await played(env, *guess, limits=replace(LIMITS, max_turns=2))),
        "invalid": told(await played(env, ToolCall("act", {"number": "x"}), ToolCall("look", {}), guess[2])),
        "crashed": told(await played(env, ToolCall("act", {"number": 12}))),
        "gymnasium": faces,
        "parameters": gym.unwrapped.tools[0].parameters,
        "no task list": await refused(list_tasks(url)),
    }


async def mcp_tools(url: str) -> Any:
    calls = ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": "x"}), ToolCall("take", {})
    trajectory = await played(lambda: OpenEnvEnv(url, [TASK]), *calls)
    return told(trajectory)


async def refused(call: Awaitable[Any]) -> str:
    try:
        return f"not refused: {await call}"
    except (SkyEnvError, RuntimeError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}"


async def their_client(url: str) -> Any:
    """OpenEnv's own client of tools on an environment of ours."""
    async with MCPToolClient(url) as client:
        tools = await client.list_tools()
        begun = await client.reset(task=policies.TASKS[0])
        seen = await client.step(CallToolAction(tool_name="execute_bash", arguments={"command": "ls"}))
        state = await client.state()
        unknown = await refused(client.reset(task="no-such-task"))
        wrong = await refused(client.reset(tsak="x"))
        await client.reset(split="train", index=1)
        ended = await client.step(CallToolAction(tool_name="finish", arguments={}))
        again = await refused(client.step(CallToolAction(tool_name="finish", arguments={})))
    return {
        "tools": [tool.name for tool in tools],
        "required": tools[0].input_schema.get("required"),
        "prompt": begun.observation.prompt,
        "step": [seen.observation.result, seen.reward, seen.done, seen.metadata],
        "state": state.step_count,
        "end": [ended.reward, ended.done, ended.metadata["verdict"]["status"], ended.metadata["task_id"]],
        "refused": [unknown, wrong, again],
    }


async def budgets(url: str) -> Any:
    """An episode that a budget ends is graded, even when a call is on its way; what fails is no sample."""
    sleep = ToolCall("execute_bash", {"command": "sleep 3"})
    slow = await played(lambda: OpenEnvEnv(url), sleep, task=OURS, limits=replace(LIMITS, wall_clock=1.0))
    look = ToolCall("execute_bash", {"command": "ls"})
    idle = await played(lambda: OpenEnvEnv(url), look, task=OURS, limits=replace(LIMITS, max_turns=1))
    return {"slow": told(slow), "idle": told(idle)}


async def failing(url: str) -> Any:
    """A server whose deadline is shorter than the command."""
    return told(await played(lambda: OpenEnvEnv(url), ToolCall("execute_bash", {"command": "sleep 20"}), task=OURS))


async def cancelled() -> list[int]:
    """What a node holds during an episode, and once client and server ended in the middle of a call."""
    held: list[int] = []
    with running(create_app(backends.get("local"))) as node:
        served = application(replace(policies.ROLLOUTS, sandbox=node))
        with running(served) as url:
            async with skyenv.connect(node) as client:
                async with OpenEnvEnv(url, [OURS]) as env:
                    await env.areset()
                    held.append(len((await client.overview())["sandboxes"]))
                    with anyio.move_on_after(0.2):
                        await env.astep(ToolCall("execute_bash", {"command": "sleep 600"}))
        async with skyenv.connect(node) as client:
            held.append(len((await client.overview())["sandboxes"]))
    return held


async def capacity(url: str) -> Any:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(OpenEnvEnv(url)) for _ in range(2)]
        await first.areset()
        busy = await refused(second.areset())
        await first.aclose()
        observation, _ = await second.areset()
    closed = await refused(OpenEnvEnv("http://127.0.0.1:9").areset())
    return {"busy": busy, "then": observation, "closed": closed}


async def guarded(url: str) -> Any:
    return [await refused(OpenEnvEnv(url).areset()), await refused(list_tasks(url))]


async def misused() -> Any:
    async def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return [
        await refused(call(OpenEnvEnv, "localhost:8000")),
        await refused(call(OpenEnvEnv, "http://localhost:8000", [])),
        await refused(call(serve, policies.ROLLOUTS, host="0.0.0.0")),
        await refused(OpenEnvEnv("http://127.0.0.1:9").areset(options={"task": "no-such-task"})),
    ]


def guessing(sessions: int) -> Any:
    return create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=sessions)


async def main(out: Path) -> None:
    short = replace(policies.ROLLOUTS, limits=replace(policies.ROLLOUTS.limits, turn_timeout=1.0))
    scenarios: list[tuple[Scenario, Callable[[], Any]]] = [
        (own_action, lambda: guessing(4)),
        (mcp_tools, lambda: create_fastapi_app(Adding, CallToolAction, CallToolObservation)),
        (their_client, lambda: application(policies.ROLLOUTS)),
        (budgets, lambda: application(policies.ROLLOUTS)),
        (failing, lambda: application(short)),
        (capacity, lambda: guessing(1)),
        (guarded, lambda: application(policies.ROLLOUTS, token="secret")),
    ]
    found: dict[str, Any] = {"misused": await misused(), "cancelled": await cancelled()}
    for scenario, make in scenarios:
        with running(make()) as url:
            found[scenario.__name__] = await scenario(url)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
