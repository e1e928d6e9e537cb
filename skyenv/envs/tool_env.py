"""The base of environments whose actions are tool calls: a new one is a task type, its tools, a prompt and a grade.

Whatever the model does wrong (unknown tool, bad arguments) is an observation and costs a turn; only infrastructure and
authors' bugs raise. An episode owns what `begin` puts on its stack; it is freed by the next `areset`, by `aclose`, or
earlier by `grade`. All calls of an instance come from one task, as everything it opens is bound to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, TypeVar, cast

from skyenv.core import Sandbox, Task, Tool
from skyenv.envs.gymnasium_env import GymnasiumEnv
from skyenv.errors import ConfigError, EnvError, ResetNeeded, RewardError, boundary, did_you_mean
from skyenv.spaces import ToolCallSpace, Unicode
from skyenv.tools import ToolChoice, check_arguments, observation_limit, presets
from skyenv.tools.output import cut_middle
from skyenv.types import Message, Step, StopReason, ToolCall, ToolSpec

TaskT = TypeVar("TaskT", bound=Task)
FINISH = "finish"
_NOTES_CHARS = 1_000  # tools cut their own output and then add lines that say so


class NoSandbox:
    """Stands where an environment opened no sandbox; a tool that uses it has a bug."""

    def __getattr__(self, name: str) -> Any:
        raise EnvError(f"a tool used sandbox.{name}, but this environment opened no sandbox")


class ToolEnv(GymnasiumEnv, Generic[TaskT]):
    """Tool calls in, text out. Subclasses implement `begin`, `instructions` and `grade`.

    `tasks` are chosen from by `options={"task": task_or_id}` or by seed; `make_tools` makes a fresh set for each
    episode, or says what `skyenv.tools.make_tools` makes it of: a preset or a list of tools; a tool named `finish`
    ends the episode; after `max_turns` actions it is truncated; observations are cut to `observation_max_chars`
    (None: as the preset has it) and some notes.
    """

    def __init__(
        self,
        tasks: Sequence[TaskT],
        make_tools: Callable[[], Sequence[Tool]] | ToolChoice | Sequence[ToolChoice],
        *,
        max_turns: int = 50,
        observation_max_chars: int | None = None,
        render_mode: None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns: {max_turns} leaves no turn; use at least 1")
        limit = observation_limit(make_tools) if observation_max_chars is None else observation_max_chars
        if limit < 200:
            raise ConfigError(f"observation_max_chars: {observation_max_chars} is too small; use at least 200")
        if render_mode is not None:
            raise ConfigError(f"render_mode: {render_mode!r} is not supported; observations are text already")
        self.render_mode = None
        self._tasks = tuple(tasks)
        self._make_tools = _tool_maker(make_tools, limit)
        self._max_turns, self._max_chars = max_turns, limit
        self._specs = tuple(tool.spec for tool in self._make_tools())
        self.observation_space = Unicode()
        self.action_space = ToolCallSpace(self._specs)
        self._episode: _Episode[TaskT] | None = None

    @abstractmethod
    async def begin(self, task: TaskT, resources: AsyncExitStack) -> Sandbox | None:
        """Make the world of an episode; what is entered on `resources` lives as long as the episode."""

    @abstractmethod
    def instructions(self, task: TaskT) -> tuple[Message, ...]:
        """System and task messages; the last one is the first observation."""

    @abstractmethod
    async def grade(self, task: TaskT, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        """Judge what the episode left behind: reward (None: not valid for training) and verdict."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that an action may name."""
        return self._specs

    @property
    def prompt(self) -> tuple[Message, ...]:
        """System and task messages of the current episode. Raises `ResetNeeded` before `areset`."""
        return self.instructions(self._current().task)

    @property
    def task(self) -> TaskT:
        """The task of the current episode. Raises `ResetNeeded` before `areset`."""
        return self._current().task

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox of the current episode, None where there is none or no longer. Raises `ResetNeeded`."""
        return self._current().sandbox

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode. ConfigError for an unknown task or option; SandboxError when no sandbox can be had."""
        self.seed_episode(seed)
        await self._end_episode()
        task = self._choose(options or {})
        async with AsyncExitStack() as resources:
            sandbox = await self.begin(task, resources)
            tools = {tool.spec.name: tool for tool in self._make_tools()}
            self._episode = _Episode(task, sandbox, tools, resources.pop_all())
        return self.instructions(task)[-1].content, {"task_id": task.task_id}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """Run one tool call. `{"error": text}` stands for an answer that held none: a turn that shows the text.

        Raises `ResetNeeded`, SandboxError, and EnvError for a bug of a tool. `info` has `task_id`, `turn`, `failed`
        (the call was refused) and at the end `stop_reason`.
        """
        episode = self._current()
        if episode.over:
            raise ResetNeeded("the episode has ended; call reset")
        episode.turns += 1
        observation, failed, finished = await self._act(episode, action)
        truncated = not finished and episode.turns >= self._max_turns
        episode.over = finished or truncated
        info = {"task_id": episode.task.task_id, "turn": episode.turns, "failed": failed}
        if episode.over:
            info["stop_reason"] = (StopReason.FINISH if finished else StopReason.MAX_TURNS).value
        return Step(cut_middle(observation, self._max_chars + _NOTES_CHARS), 0.0, finished, truncated, info)

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        """Grade what the episode left behind, once; later calls return the same. No step is possible after it."""
        episode = self._current()
        episode.over = True
        if episode.graded is None:
            with boundary(RewardError, f"grading {episode.task.task_id}"):
                episode.graded = await self.grade(episode.task, episode.sandbox)
        return episode.graded

    async def aclose(self) -> None:
        """Free the episode; idempotent."""
        await self._end_episode()

    async def free(self) -> None:
        """For `grade`: free what `begin` opened as soon as it is not needed any more."""
        episode = self._current()
        episode.sandbox = None
        await episode.resources.aclose()

    def _current(self) -> _Episode[TaskT]:
        if self._episode is None:
            raise ResetNeeded("call reset first")
        return self._episode

    async def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.resources.aclose()

    def _choose(self, options: Mapping[str, Any]) -> TaskT:
        if unknown := sorted(set(options) - {"task"}):
            raise ConfigError(f"options: unknown key {unknown[0]!r}; the only one is 'task'")
        choice = options.get("task")
        if choice is None:
            return self._tasks[int(self.np_random.integers(len(self._tasks)))]
        if isinstance(choice, str):
            for task in self._tasks:
                if task.task_id == choice:
                    return task
            hint = did_you_mean(choice, (task.task_id for task in self._tasks))
            raise ConfigError(f"options: no task {choice!r} among the {len(self._tasks)} of this environment{hint}")
        if not isinstance(choice, Task):
            raise ConfigError(f"options: task must be a task or an id, not {type(choice).__name__}")
        return cast(TaskT, choice)

    async def _act(self, episode: _Episode[TaskT], action: object) -> tuple[str, bool, bool]:
        """Observation, whether the call was refused, whether it ended the episode."""
        if isinstance(action, ToolCall):
            name, arguments = action.name, action.arguments
        elif isinstance(action, Mapping) and "error" in action:
            return str(action["error"]), True, False
        elif isinstance(action, Mapping) and "name" in action:
            name, arguments = action["name"], action.get("arguments", {})
        else:
            return "An action is a tool call with `name` and `arguments`.", True, False
        tool = episode.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            return f"There is no tool {str(name)[:80]!r}. The tools are: {', '.join(episode.tools)}.", True, False
        checked = check_arguments(tool.spec, arguments)
        if isinstance(checked, str):
            return checked, True, False
        sandbox = episode.sandbox or cast(Sandbox, NoSandbox())
        with boundary(EnvError, f"tool {name}"):
            observation = await tool.run(checked, sandbox)
        return observation, False, name == FINISH


def _tool_maker(
    choice: Callable[[], Sequence[Tool]] | ToolChoice | Sequence[ToolChoice], limit: int
) -> Callable[[], Sequence[Tool]]:
    """A plain function makes the whole set itself; everything else says what to make it of."""
    if callable(choice) and not isinstance(choice, type | Tool):
        return cast(Callable[[], Sequence[Tool]], choice)
    return partial(presets.make_tools, cast(ToolChoice, choice), observation_max_chars=limit)


class _Episode(Generic[TaskT]):
    """State of one episode; `resources` is closed with it."""

    def __init__(
        self, task: TaskT, sandbox: Sandbox | None, tools: Mapping[str, Tool], resources: AsyncExitStack
    ) -> None:
        self.task, self.sandbox, self.tools, self.resources = task, sandbox, tools, resources
        self.turns = 0
        self.over = False
        self.graded: tuple[float | None, dict[str, Any]] | None = None
