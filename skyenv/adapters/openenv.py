"""OpenEnv 0.10 (the distribution `openenv`, never `openenv-core`), in both directions; this module needs it to import.

`application` and `serve` put any of our environments behind OpenEnv's own server: tools by `list_tools`, actions as
`CallToolAction`, the reward and the verdict with the step that ends the episode. `OpenEnvEnv`, from
`openenv_client.py`, makes a running OpenEnv environment one of ours.

Invariants: OpenEnv has no typed errors, so what failed here is an observation that is done, without a reward, and says
so in `metadata["failure"]`; a reward that is None never becomes 0.0. Sessions share one provider of sandboxes, which
lives as long as the application; each has one task on the server's portal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import uvicorn
from anyio import to_thread
from fastapi import FastAPI
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import (
    RESERVED_TOOL_NAMES,
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
)
from openenv.core.env_server.types import EnvironmentMetadata, Observation, State
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import skyenv
from skyenv.adapters.openenv_client import OpenEnvEnv, OpenEnvTask, list_tasks
from skyenv.adapters.opening import Rollouts
from skyenv.core import Env, SandboxProvider
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, DeadlineExceeded, ResetNeeded, SandboxUnavailable, SkyEnvError
from skyenv.portal import Actor, Portal
from skyenv.remote.listen import Listening
from skyenv.remote.tokens import Tokens, bearer
from skyenv.types import ToolCall

__all__ = ["OpenEnvEnv", "OpenEnvTask", "SkyEnvironment", "application", "list_tasks", "serve"]

SPLIT = "train"


class Beginning(Observation):
    """What `reset` answers: the task as text, and the messages that our own pipeline would begin with."""

    prompt: str
    messages: list[dict[str, str]]


def application(rollouts: Rollouts, *, sessions: int = 16, token: str | None = None) -> FastAPI:
    """The ASGI application that serves `rollouts.env` to OpenEnv's clients, at most `sessions` at a time.

    `reset` takes `task` (an id), `split` with `index`, or a `seed`. Connections and sandboxes are opened by the
    application's lifespan and end with it. With `token` everything but `/health` wants it as a bearer token; OpenEnv
    itself has none. Deadlines are those of `rollouts.limits`; turns are counted by the environment's own `max_turns`.
    ConfigError for wrong settings and for tools whose names OpenEnv reserves.
    """
    served = _Served(rollouts)
    app: FastAPI = create_fastapi_app(
        partial(SkyEnvironment, served),
        CallToolAction,
        CallToolObservation,
        max_concurrent_envs=sessions,
        env_name=served.name,
        reset_observation_cls=Beginning,
    )
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        await to_thread.run_sync(served.open)
        try:
            async with inner(app) as state:
                yield state
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(served.close)

    app.router.lifespan_context = lifespan
    if token is not None:
        app.add_middleware(_Guard, tokens=Tokens([("client", token)]))
    return app


def serve(
    rollouts: Rollouts, *, host: str = "127.0.0.1", port: int = 8000, sessions: int = 16, token: str | None = None
) -> None:
    """Serve until interrupted. ConfigError when other machines could connect and no token is asked of them."""
    if not Listening(host=host, port=port).loopback and not token:
        raise ConfigError(f"token: {host} can be reached by other machines; give a token that clients must send")
    uvicorn.run(application(rollouts, sessions=sessions, token=token), host=host, port=port, log_level="warning")


class _Guard:
    """Lets in who has a token."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        if not closed or self._tokens.owner(bearer(dict(scope["headers"]))) is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"error": "the bearer token is missing or wrong"}, 401)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "the bearer token is missing or wrong"})


class _Served:
    """What all sessions of a server share: tasks, and while it is open a thread with one provider of sandboxes."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.tasks = rollouts, rollouts.load()
        self.name = rollouts.env.replace("/", "-")
        self._stack = ExitStack()
        self._portal: Portal | None = None
        self._provider: SandboxProvider | None = None
        self.tools = [
            Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
            for spec in self.make_env().tools
        ]
        if reserved := sorted({tool.name for tool in self.tools} & RESERVED_TOOL_NAMES):
            raise ConfigError(f"{rollouts.env}: OpenEnv reserves the tool name {reserved[0]!r}; give it another")

    def open(self) -> None:
        """Start the thread and connect."""
        with ExitStack() as stack:
            portal = stack.enter_context(Portal())
            connection = skyenv.connect(self.rollouts.sandbox, self.rollouts.token)
            self._provider = stack.enter_context(portal.enter(connection))
            self._portal, self._stack = portal, stack.pop_all()

    def close(self) -> None:
        """End sessions, connection and thread."""
        self._portal = self._provider = None
        self._stack.close()

    def make_env(self) -> Env:
        """A fresh environment on the shared provider."""
        return skyenv.make(self.rollouts.env, tasks=self.tasks, sandbox=self._provider, **self.rollouts.env_options)

    def actor(self, finalise: Callable[[], Awaitable[None]]) -> Actor:
        """A task on the thread. SandboxUnavailable when the server is not open."""
        if self._portal is None:
            raise SandboxUnavailable("the server is not open; its application's lifespan opens it")
        return self._portal.actor(finalise)

    def task_of(self, split: str | None, index: int | None) -> SweTask:
        """The task at an index; IndexError, as OpenEnv's task routes want it, where there is none."""
        if split not in (None, SPLIT) or index is None or not 0 <= index < len(self.tasks):
            raise IndexError(f"split {split!r} has no task {index!r}; {SPLIT!r} has {len(self.tasks)}")
        return self.tasks[index]


class SkyEnvironment(Environment[CallToolAction, CallToolObservation, State]):
    """One session of one of our environments, in OpenEnv's terms; made by `application`.

    All calls run in one task on the server's portal, which ends with `close`. Nothing is opened before `reset`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, served: _Served) -> None:
        super().__init__()
        self._served = served
        self._actor: Actor | None = None
        self._env: Env | None = None
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **choice: Any) -> Beginning:
        """Start an episode of the chosen task; see `application`."""
        return self._open_actor().call(partial(self._begin, seed, episode_id, self._choose(choice)))

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **choice: Any) -> Beginning:
        """As `reset`, for OpenEnv's server."""
        begin = partial(self._begin, seed, episode_id, self._choose(choice))
        return await asyncio.wrap_future(self._open_actor().submit(begin))

    def step(self, action: CallToolAction, timeout_s: float | None = None, **_: Any) -> Observation:
        """Run one action; `list_tools` needs no episode and is no turn of one."""
        if isinstance(action, ListToolsAction):
            return self._listed()
        return self._open_actor().call(partial(self._play, action, timeout_s))

    async def step_async(self, action: CallToolAction, timeout_s: float | None = None, **_: Any) -> Observation:
        """As `step`, for OpenEnv's server."""
        if isinstance(action, ListToolsAction):
            return self._listed()
        return await asyncio.wrap_future(self._open_actor().submit(partial(self._play, action, timeout_s)))

    @property
    def state(self) -> State:
        """The episode's id, how many actions it had, and the task."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """What the server says of itself."""
        count = len(self._served.tasks)
        return EnvironmentMetadata(name=self._served.name, description=f"{self._served.rollouts.env}, {count} tasks")

    def close(self) -> None:
        """End the episode and free what it holds, at once."""
        actor, self._actor = self._actor, None
        if actor is not None:
            actor.cancel()
            actor.close()

    def list_splits(self) -> list[str]:
        """All tasks are one split."""
        return [SPLIT]

    def num_tasks(self, split: str) -> int:
        """How many tasks there are."""
        return len(self.list_tasks(split))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Each task's id and index."""
        return [self.get_task(split, index) for index in range(len(self._served.tasks))]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """One task; IndexError where there is none."""
        return {"id": self._served.task_of(split, index).task_id, "index": index}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """A slice of the tasks."""
        return self.list_tasks(split)[start:stop]

    def _listed(self) -> ListToolsObservation:
        return ListToolsObservation(tools=self._served.tools)

    def _choose(self, choice: Mapping[str, Any]) -> str | None:
        if unknown := sorted(set(choice) - {"task", "split", "index"}):
            raise ConfigError(f"reset: unknown argument {unknown[0]!r}; known: task, split, index, seed, episode_id")
        if "index" in choice:
            return self._served.task_of(choice.get("split"), choice["index"]).task_id
        return choice.get("task")

    def _open_actor(self) -> Actor:
        if self._actor is None or self._actor.ended:
            self._actor = self._served.actor(self._free)
        return self._actor

    async def _free(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await env.aclose()

    async def _begin(self, seed: int | None, episode_id: str | None, task: str | None) -> Beginning:
        if self._env is None:
            self._env = self._served.make_env()
        options = {} if task is None else {"task": task}
        reset = self._env.areset(seed=seed, options=options)
        observation, info = await _within(self._served.rollouts.limits.init_timeout, "reset", reset)
        self._state = State(episode_id=episode_id, step_count=0, task_id=info["task_id"])
        messages = [{"role": message.role, "content": message.content} for message in self._env.prompt]
        return Beginning(prompt=observation, messages=messages, metadata={"task_id": info["task_id"]})

    async def _play(self, action: CallToolAction, timeout_s: float | None) -> CallToolObservation:
        if self._env is None:
            raise ResetNeeded("call reset first")
        limits, stage = self._served.rollouts.limits, "run"
        seconds = limits.turn_timeout if timeout_s is None else timeout_s
        name, self._state.step_count = action.tool_name, self._state.step_count + 1
        try:
            step = await _within(seconds, name, self._env.astep(ToolCall(name, action.arguments)))
            if not (step.terminated or step.truncated):
                return CallToolObservation(
                    tool_name=name, result=step.observation, reward=step.reward or None, metadata=step.info
                )
            stage = "eval"
            reward, verdict = await _within(limits.eval_timeout, "grading", self._env.aevaluate())
        except ResetNeeded:
            raise
        except SkyEnvError as error:
            return _failed(name, stage, error)
        return CallToolObservation(
            tool_name=name,
            result=step.observation,
            done=True,
            reward=None if reward is None else reward + step.reward,
            metadata={**step.info, "verdict": verdict, "valid_for_training": reward is not None},
        )


def _failed(tool: str, stage: str, error: SkyEnvError) -> CallToolObservation:
    """The end of an episode of which nothing can be learnt, and why."""
    failure = {"stage": stage, "kind": type(error).__name__, "message": str(error)}
    return CallToolObservation(
        tool_name=tool,
        error=ToolError(error_type="execution_error", message=f"{failure['kind']}: {error}"),
        done=True,
        metadata={"failure": failure, "valid_for_training": False},
    )


async def _within(seconds: float, what: str, call: Awaitable[Any]) -> Any:
    with anyio.move_on_after(seconds):
        return await call
    raise DeadlineExceeded(f"{what} did not return within {seconds:g} s")
