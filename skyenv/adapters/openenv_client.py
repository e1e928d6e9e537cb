"""A running OpenEnv environment as one of ours, for the pipeline and for Gymnasium; needs `openenv` and asyncio.

Those that list tools keep them; those with an action of their own get one tool, `act`, whose parameters it is.

Invariants: each episode is a session, a connection of its own. Answers come in the order of the messages, so a call
that was interrupted stays on its way and the next one waits for it first: nothing is sent into a session that is not
known to be idle, and a connection that broke is never silently replaced by a new, unreset one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed

from skyenv import errors
from skyenv.envs.gymnasium_env import GymnasiumEnv
from skyenv.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvError,
    ResetNeeded,
    RewardError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    SkyEnvError,
    boundary,
    did_you_mean,
)
from skyenv.spaces import ToolCallSpace, Unicode
from skyenv.tools import check_arguments
from skyenv.types import Message, Step, StopReason, ToolCall, ToolSpec

ACT, FINISH = "act", "finish"
CLOSE_SECONDS = 20.0
_SERVER_ERROR = re.compile(r"Server error: (?P<message>.*) \(code: (?P<code>\w+)\)", re.DOTALL)
_BESIDE = ("metadata", "done", "reward", "tool_name")


@dataclass(frozen=True, slots=True)
class OpenEnvTask:
    """What an OpenEnv environment is reset with: `reset` goes to its `reset` as keyword arguments."""

    task_id: str
    reset: Mapping[str, Any] = field(default_factory=dict)


async def list_tasks(url: str, *, token: str | None = None, timeout: float = 30.0) -> list[OpenEnvTask]:
    """The tasks that a server tells of, of all its splits. ConfigError when it has none to tell."""
    found: list[OpenEnvTask] = []
    async with httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=timeout) as http:
        try:
            for name in (await http.get("/list_environments")).raise_for_status().json():
                for split in (await http.get(f"/{name}/splits")).raise_for_status().json():
                    body = {"split": split["name"]}
                    tasks = (await http.post(f"/{name}/tasks", json=body)).raise_for_status().json()["tasks"]
                    found += [_listed_task(split["name"], index, task) for index, task in enumerate(tasks)]
        except httpx.HTTPStatusError as error:
            status, where = error.response.status_code, error.request.url
            raise ConfigError(f"{where} answers {status}: it lists no tasks; give tasks=[OpenEnvTask(...)]") from error
        except httpx.HTTPError as error:
            raise SandboxUnavailable(f"{url}: {error!r}") from error
    return found


def _listed_task(split: str, index: int, task: Any) -> OpenEnvTask:
    named = task if isinstance(task, Mapping) else {}
    return OpenEnvTask(
        str(named.get("id", f"{split}-{index}")), {"split": split, "index": int(named.get("index", index))}
    )


class OpenEnvEnv(GymnasiumEnv):
    """An OpenEnv environment at `url` as one of ours; needs asyncio. Each episode is a session of its own.

    An action's observation is the tool's result, or what `render` makes of OpenEnv's observation (a mapping). The
    reward of an episode is the sum of what its steps gave, None when none gave any or the server says that it is not
    valid; `info["reward"]` has the single ones. Where there is a tool `finish`, an episode that a budget ended is
    finished by it before it is graded. `instructions` are a system message, where the server sends none itself. The
    `token` goes with every request; an answer may take `timeout` seconds. What the server refuses as no valid action is
    an observation; what it says went wrong is EnvError in a step and SandboxError in `areset`.
    """

    def __init__(
        self,
        url: str,
        tasks: Sequence[OpenEnvTask] = (OpenEnvTask("default"),),
        *,
        instructions: str = "",
        render: Callable[[Mapping[str, Any]], str] | None = None,
        token: str | None = None,
        timeout: float = 900.0,
    ) -> None:
        if not re.match(r"(http|ws)s?://", url):
            raise ConfigError(f"url: {url!r} is none; give that of a running server, such as http://127.0.0.1:8000")
        if not tasks:
            raise ConfigError("tasks: there are none; give at least one OpenEnvTask, or leave it out")
        self.url = re.sub(r"^ws", "http", url).rstrip("/")
        self.observation_space = Unicode()
        self._tasks, self._instructions, self._render = tuple(tasks), instructions, render or render_observation
        self._token, self._timeout = token, timeout
        self._tools: tuple[ToolSpec, ...] = ()
        self._single = False
        self._episode: _Episode | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the server lists; known from the first `areset` on."""
        return self._tools

    @property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        """Calls of `tools`."""
        return ToolCallSpace(self._tools)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages that the server sends, else the instructions and the first observation."""
        return self._current().prompt

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Open a session and reset it with the task's arguments, and with the seed where the task has none."""
        self.seed_episode(seed)
        await self.aclose()
        task = self._choose(options or {})
        client = GenericEnvClient(self.url, message_timeout_s=self._timeout, headers=_headers(self._token))
        self._episode = episode = _Episode(task, client, self._timeout)
        arguments = dict(task.reset) if seed is None else {"seed": seed, **task.reset}
        await episode.ask(partial(_connect, client))
        if not self._tools:
            self._tools, self._single = await self._discover(episode)
        result = await episode.ask(partial(client.reset, **arguments))
        if result is None:
            raise ConfigError(f"{self.url}: reset refuses the arguments {arguments!r} of task {task.task_id!r}")
        system = [Message("system", self._instructions)] if self._instructions else []
        text = self._render(result.observation)
        episode.begin(_messages(result.observation) or (*system, Message("user", text)))
        return episode.prompt[-1].content, {"task_id": task.task_id}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """Run one action. `info` has `task_id`, `turn`, `failed`, `reward`, what the server adds, and `stop_reason`."""
        episode = self._current()
        if episode.over:
            raise ResetNeeded("the episode has ended; call reset")
        episode.turns += 1
        payload = self._payload(action)
        if isinstance(payload, str):
            return episode.step(payload, failed=True)
        result = await episode.ask(partial(episode.client.step, payload))
        if result is None:
            return episode.step(f"The environment refused this action as invalid: {json.dumps(payload)}", failed=True)
        failed = isinstance(result.observation, Mapping) and bool(result.observation.get("error"))
        return episode.step(self._render(result.observation), failed=failed, reward=result.reward)

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        """The sum of the episode's rewards and the server's verdict, if it sends one; finishes first what can be."""
        episode = self._current()
        await episode.settle()
        if not episode.over and any(tool.name == FINISH for tool in self._tools):
            await episode.ask(partial(episode.client.step, _call(FINISH, {})))
        episode.over = True
        return episode.graded()

    async def aclose(self) -> None:
        """End the session; idempotent."""
        episode, self._episode = self._episode, None
        if episode is not None:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                await episode.close()

    def _current(self) -> _Episode:
        if self._episode is None:
            raise ResetNeeded("call reset first")
        return self._episode

    def _choose(self, options: Mapping[str, Any]) -> OpenEnvTask:
        choice = options.get("task")
        if isinstance(choice, OpenEnvTask):
            return choice
        if choice is None:
            return self._tasks[int(self.np_random.integers(len(self._tasks)))]
        for task in self._tasks:
            if task.task_id == choice:
                return task
        hint = did_you_mean(str(choice), (task.task_id for task in self._tasks))
        raise ConfigError(f"options: no task {choice!r} among the {len(self._tasks)} of this environment{hint}")

    async def _discover(self, episode: _Episode) -> tuple[tuple[ToolSpec, ...], bool]:
        """The tools, and whether they are one that stands for the environment's own kind of action."""
        async with httpx.AsyncClient(headers=_headers(self._token), timeout=self._timeout) as http:
            with boundary(SandboxUnavailable, f"{self.url}/schema"):
                schema = (await http.get(f"{self.url}/schema")).raise_for_status().json()["action"]
        if schema.get("title") in ("Action", "CallToolAction", "ListToolsAction"):
            listed = await episode.ask(partial(episode.client.step, {"type": "list_tools"}))
            if listed is None or not listed.observation.get("tools"):
                raise ConfigError(f"{self.url}: the environment lists no tools and has no action of its own")
            return tuple(_spec(tool) for tool in listed.observation["tools"]), False
        properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
        description = schema.get("description", "Act on the environment.").strip()
        return (ToolSpec(ACT, description, {**parameters, "type": "object", "properties": properties}),), True

    def _payload(self, action: ToolCall | Mapping[str, Any]) -> dict[str, Any] | str:
        """The action on the wire, or what is wrong with it."""
        if isinstance(action, ToolCall):
            name, arguments = action.name, action.arguments
        elif isinstance(action, Mapping) and "error" in action:
            return str(action["error"])
        elif isinstance(action, Mapping) and "name" in action:
            name, arguments = action["name"], action.get("arguments", {})
        else:
            return "An action is a tool call with `name` and `arguments`."
        if not self._single:
            return _call(str(name), arguments)
        return check_arguments(self._tools[0], arguments) if name == ACT else f"There is no tool {str(name)[:80]!r}."


class _Episode:
    """One session: what was asked, what came back, and the call that is still on its way."""

    def __init__(self, task: OpenEnvTask, client: GenericEnvClient, timeout: float) -> None:
        self.task, self.client, self._timeout = task, client, timeout
        self.prompt: tuple[Message, ...] = ()
        self.turns = 0
        self.over = self.done = False
        self._rewards: list[float] = []
        self._metadata: Mapping[str, Any] = {}
        self._under_way: asyncio.Future[Any] | None = None

    async def ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The answer; None when the server refused the message as invalid. Raises SkyEnvError."""
        await self.settle()
        self._under_way = asyncio.ensure_future(call())
        return await self.settle()

    async def settle(self) -> Any:
        """Wait for what is on its way, and keep what it says of the episode. Interrupted, it can be called again."""
        running = self._under_way
        if running is None:
            return None
        try:
            result = await asyncio.shield(running)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {self._timeout:g} s") from error
        except ConnectionClosed as error:
            raise SandboxLost(f"the session ended: {error}") from error
        except ConnectionError as error:
            raise SandboxUnavailable(str(error), retry_after=1.0) from error
        except RuntimeError as error:
            return self._refused(error)
        finally:
            if running.done():
                self._under_way = None
        if result is not None:
            self._note(result)
        return result

    def begin(self, prompt: tuple[Message, ...]) -> None:
        """The episode starts: what came before is no part of it."""
        self.prompt, self._rewards, self.over, self.done = prompt, [], False, False

    def step(self, text: str, *, failed: bool, reward: float | None = None) -> Step:
        """What our side sees of one action; rewards come with the evaluation, as everywhere."""
        info = {"failed": failed, **self._metadata, "task_id": self.task.task_id, "turn": self.turns, "reward": reward}
        self.over = self.done
        if not self.over:
            return Step(text, 0.0, False, False, info)
        named = str(info.get("stop_reason"))
        info["stop_reason"] = named if named in tuple(StopReason) else StopReason.FINISH.value
        terminated = info["stop_reason"] == StopReason.FINISH
        return Step(text, 0.0, terminated, not terminated, info)

    def graded(self) -> tuple[float | None, dict[str, Any]]:
        """Reward and verdict. An episode that a budget ended without any reward has 0.0, a done one has None."""
        status = "done" if self.done else "unfinished"
        verdict = self._metadata.get("verdict") or {"status": status, "rewards": list(self._rewards)}
        invalid = self._metadata.get("valid_for_training") is False or (self.done and not self._rewards)
        return None if invalid else sum(self._rewards, 0.0), dict(verdict)

    async def close(self) -> None:
        """End the session."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
            self._under_way = None
        with boundary(SandboxError, "closing the session"):
            await self.client.close()

    def _note(self, result: Any) -> None:
        self._metadata = result.metadata or {}
        failure = self._metadata.get("failure")
        if failure:
            raise _error_of(failure)
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        self.done = self.done or bool(result.done)

    def _refused(self, error: RuntimeError) -> None:
        """What the server says instead of an answer; returns when it is about the message alone."""
        match = _SERVER_ERROR.fullmatch(str(error))
        if match is None:
            raise EnvError(f"OpenEnv's client: {error}") from error
        code, message = match["code"], match["message"]
        if code == "VALIDATION_ERROR":
            return
        if code == "CAPACITY_REACHED":
            raise SandboxUnavailable(message, retry_after=1.0) from error
        if code == "EXECUTION_ERROR" and self.prompt:
            raise EnvError(f"the environment: {message}") from error
        raise SandboxError(f"the server: {message} ({code})") from error


def _error_of(failure: Mapping[str, Any]) -> SkyEnvError:
    """What failed on a server of ours: whose fault it was decides whether it is tried again."""
    kind, text = str(failure.get("kind")), f"{failure.get('kind')}: {failure.get('message')}"
    known = vars(errors).get(kind)
    if isinstance(known, type) and issubclass(known, SandboxError):
        return SandboxError(text)
    return RewardError(text) if failure.get("stage") == "eval" else EnvError(text)


async def _connect(client: GenericEnvClient) -> None:
    await client.connect()


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _spec(tool: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(tool["name"], tool.get("description", ""), tool.get("input_schema") or {"type": "object"})


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _messages(observation: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages that a server sends to begin with; empty when it sends none, or something else under that name."""
    sent = observation.get("messages")
    if not isinstance(sent, list) or not sent:
        return ()
    messages = [
        Message(one["role"], one["content"])
        for one in sent
        if isinstance(one, Mapping) and one.get("role") in ("system", "user") and isinstance(one.get("content"), str)
    ]
    return tuple(messages) if len(messages) == len(sent) else ()


def render_observation(observation: Mapping[str, Any]) -> str:
    """A tool's result or error as text, a lone text as it is, anything else as JSON without what is empty."""
    fields = {name: value for name, value in observation.items() if name not in _BESIDE and value is not None}
    error = fields.get("error")
    if isinstance(error, Mapping) and "message" in error:
        return str(error["message"])
    value = next(iter(fields.values())) if len(fields) == 1 else fields
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):  # a result of MCP
        value = "\n".join(str(part.get("text", part)) for part in value["content"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
