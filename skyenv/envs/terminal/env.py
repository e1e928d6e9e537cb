"""`SkyRL/Terminal-v0`: do what a Harbor or terminal-bench task says on a machine that its verifier judges afterwards.

Loading, sandboxes and grading are those of `skyenv.envs.swe`, where such tasks are of the runner `harbor`; what is
here is the agent's time, which the task sets, and where the images come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import anyio

from skyenv.core import Sandbox
from skyenv.envs.swe.building import placed
from skyenv.envs.swe.env import SWEEnv
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, SandboxUnavailable
from skyenv.types import Step, StopReason, ToolCall

TIME_IS_UP = "The time for this task is up."


class TerminalEnv(SWEEnv):
    """One machine, one instruction, a verifier.

    `tasks`: what `load_tasks` takes; all have to be task folders of Harbor or terminal-bench. `image` replaces the
    image of every task; in it `{task}` stands for the task's id and `{image}` for the image that the task names
    (`docker-daemon:{image}`), and `host` alone means the host's system directories. `network=False` gives no sandbox a
    network, whatever its task says. After the task's `agent_timeout` seconds a command that runs is given up, and the
    episode is truncated and graded. All other arguments are those of `SWEEnv`.
    """

    def __init__(
        self,
        *arguments: Any,
        image: str = "{image}",
        network: bool = True,
        prompt: str = "terminal",
        tools: Any = "terminal",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, prompt=prompt, tools=tools, **options)
        for task in self._tasks:
            _check(task)
            placed(task, image)
        self._image, self._network = image, network
        self._ends = 0.0

    async def begin(self, task: SweTask, resources: AsyncExitStack) -> Sandbox:
        """As `SWEEnv.begin`; the agent's time begins. An error about an image that nobody built says how to."""
        try:
            sandbox = await super().begin(task, resources)
        except ConfigError as error:
            raise ConfigError(f"{error}{_advice(task, str(error))}") from error
        except SandboxUnavailable as error:
            text = f"{error}{_advice(task, str(error))}"
            raise SandboxUnavailable(text, error.retry_after, reason=error.reason) from error
        self._ends = anyio.current_time() + (task.agent_timeout or float("inf"))
        return sandbox

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        """As `SWEEnv.astep`, within what is left of the agent's time."""
        with anyio.CancelScope(deadline=self._ends):
            return await super().astep(action)
        return self._out_of_time()

    def _out_of_time(self) -> Step:
        episode = self._current()
        episode.over = True
        info = {
            **{"task_id": episode.task.task_id, "turn": episode.turns, "failed": False},
            "stop_reason": StopReason.WALL_CLOCK.value,
        }
        return Step(TIME_IS_UP, 0.0, False, True, info)

    def _choose(self, options: Mapping[str, Any]) -> SweTask:
        task = super()._choose(options)
        _check(task)
        task = placed(task, self._image)
        if self._network:
            return task
        verifier = None if task.verifier is None else replace(task.verifier, network=False)
        return replace(task, environment=replace(task.environment, network=False), verifier=verifier)


def _check(task: SweTask) -> None:
    if not task.whole_machine:
        raise ConfigError(f"tasks: {task.task_id!r} repairs a repository, which SkyRL/SWE-v0 plays; name task folders")


def _advice(task: SweTask, error: str) -> str:
    """What to do about an image that is not there, when the task says how it is made."""
    environment = task.environment
    if not environment.context or not (error.startswith("image") or str(environment.image) in error):
        return ""
    made = f"{environment.context}/Dockerfile by `skyenv tasks images {task.base}`"
    return f"; that of {task.task_id!r} is made from {made}, for nodes of backend docker or oci"
