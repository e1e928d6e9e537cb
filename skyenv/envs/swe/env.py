"""`SkyRL/SWE-v0`: repair a repository with a shell and an editor until its hidden tests pass.

The agent's sandbox holds the repository and the environment, never tests or ids. Grading reads the work tree from
outside, frees that sandbox, and judges the patch in a clean one, so that one sandbox is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Self

from skyenv.core import Beginning, Reward, Sandbox, SandboxProvider, Task
from skyenv.envs.swe.beginnings import ReadySandbox, agent_sandbox
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.extraction import WorkTree
from skyenv.envs.swe.grading import grade_work_tree, read_agent
from skyenv.envs.swe.loading import TaskSet, load_tasks
from skyenv.envs.swe.machine import grade_machine
from skyenv.envs.swe.progress import Progress
from skyenv.envs.swe.prompts import get_preset, task_messages
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.tool_env import ToolEnv
from skyenv.errors import EnvError
from skyenv.rewards import reward_function, reward_terms
from skyenv.tools import ToolChoice
from skyenv.types import Message, Step, ToolCall, Trajectory

OpenProvider = Callable[[], AbstractAsyncContextManager[SandboxProvider]]


class SWEEnv(ToolEnv[SweTask]):
    """One repository, one issue, hidden tests.

    `tasks`: a set's name, a path, or a list. `sandbox`: an open provider, which stays its owner's, or a function that
    opens one, entered by `async with` or the first `areset` and left by `aclose`. `reward`: a name of
    `skyenv.rewards`, weights of milestones or a function; the verdict's `reward_terms` say what it is made of.
    `prompt`: a preset of `prompts`. `tools`: what `skyenv.tools.make_tools` takes. `aevaluate` returns the verdict of
    `grading`.
    """

    def __init__(
        self,
        tasks: TaskSet = "builtin",
        sandbox: SandboxProvider | OpenProvider | None = None,
        *,
        reward: str | Reward | Mapping[str, float] = "outcome",
        prompt: str = "codeact",
        tools: ToolChoice | Sequence[ToolChoice] = "strict",
        **options: Any,
    ) -> None:
        super().__init__(load_tasks(tasks), tools, **options)
        self._reward = reward_function(reward)
        self._preset = get_preset(prompt)
        self._sandbox = sandbox
        self._connection = AsyncExitStack()
        self._environments: Environments | None = None
        self._opened: SandboxProvider | None = None
        self._left: WorkTree | None = None
        self._progress: Progress | None = None
        self._beginning: Beginning | None = None
        self._ready: ReadySandbox | None = None

    def instructions(self, task: SweTask) -> tuple[Message, ...]:
        """The issue, under the chosen preset."""
        return task_messages(task, self._preset)

    async def begin(self, task: SweTask, resources: AsyncExitStack) -> Sandbox:
        """A sandbox with the environment, the repository with one commit, and the shell standing in it."""
        self._left = None
        self._progress = Progress(task)
        beginning, self._beginning = self._beginning, None
        environments = await self._connect()
        if beginning is not None and (task.whole_machine or self._opened is not None):
            beginning.decline()  # there is nothing to save, or siblings cannot reach what is opened here
            beginning = None
        return await resources.enter_async_context(agent_sandbox(environments, self.for_agent(task), beginning))

    def for_agent(self, task: SweTask) -> SweTask:
        """The task as the agent's sandbox is made for it; grading knows the task as it is."""
        return task

    def begin_with(self, beginning: Beginning) -> None:
        """Start the next episode from a sibling's sandbox, or let siblings start from this one's."""
        self._beginning = beginning

    async def aprepare_evaluation(self) -> None:
        """Open the clean sandbox of the grading while the agent still works. Raises SandboxError."""
        if self.task.whole_machine or self._ready is not None:
            return
        ready = ReadySandbox(await self._connect(), self.task)
        await ready.prepare()
        self._ready = ready

    async def aprefetch(self, tasks: Sequence[Task | str], count: int) -> None:
        """Prepare what episodes of these tasks need, where the provider outlives this environment."""
        environments = await self._connect()
        if self._opened is None:
            chosen = [self.for_agent(self._choose({"task": task})) for task in tasks]
            await environments.prefetch(chosen, count)

    async def _drop_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            await ready.aclose()

    async def grade(self, task: SweTask, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        """Read what was left, free the agent's sandbox, grade in a clean one."""
        environments = await self._connect()
        if task.whole_machine:
            return await self._grade_machine(task, sandbox, environments)
        if self._left is None and sandbox is not None:
            self._left = await read_agent(task, sandbox, environments)
            await self.free()
        if self._left is None:
            raise EnvError("the agent's sandbox is gone and was never read")
        verdict = await grade_work_tree(task, self._left, environments, self._ready)
        await self._drop_ready()
        return self._rewarded(task, verdict)

    async def _grade_machine(
        self, task: SweTask, sandbox: Sandbox | None, environments: Environments
    ) -> tuple[float | None, dict[str, Any]]:
        if sandbox is None:
            raise EnvError("the agent's sandbox is gone, and its work with it")
        verdict = await grade_machine(task, sandbox, environments, self.free)
        await self.free()
        return self._rewarded(task, verdict)

    def _rewarded(self, task: SweTask, verdict: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
        """The reward, and the verdict with what was achieved on the way and what the reward is made of."""
        if self._progress is not None:
            verdict["milestones"] = self._progress.milestones(verdict)
        trajectory = Trajectory(task.task_id, verdict=verdict)
        reward = self._reward(trajectory)
        return reward, {**verdict, "reward_terms": reward_terms(self._reward, trajectory)}

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """As `ToolEnv.astep`; the rewards that shape are told of each action."""
        step = await super().astep(action)
        if self._progress is not None:
            self._progress.watch(action, step.observation)
        return step

    async def aclose(self) -> None:
        """Free the episode and leave the provider if it was opened here; idempotent."""
        try:
            await super().aclose()
        finally:
            self._beginning = None
            self._environments = None
            connection, self._connection = self._connection, AsyncExitStack()
            await connection.aclose()

    async def _end_episode(self) -> None:
        try:
            await self._drop_ready()
        finally:
            await super()._end_episode()

    async def __aenter__(self) -> Self:
        """Connect now, so that no scope around a later call is left with the connection open."""
        await self._connect()
        return self

    async def _connect(self) -> Environments:
        if self._environments is None:
            provider = self._sandbox
            if provider is None:
                raise EnvError("SWEEnv needs a sandbox provider; skyenv.make and gym.make open one")
            if callable(provider):
                self._opened = await self._connection.enter_async_context(provider())
                self._environments = Environments.of(self._opened)
                self._connection.push_async_callback(self._environments.aclose)
            else:
                self._environments = Environments.of(provider)
        return self._environments
