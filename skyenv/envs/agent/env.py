"""`SkyRL/Agent-v0`: the tasks and the grader of `SkyRL/SWE-v0`, played by an agent program inside the sandbox.

The program is started unchanged, with a URL and a key; its calls come through a tunnel to a recorder, which answers
them by the pipeline's engine and keeps the exact ids. The tunnel is the sandbox's only way out. Recorder, tunnel and
key live as long as the program.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from skyenv.core import Engine, Sandbox
from skyenv.envs.swe.env import SWEEnv
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, EnvError
from skyenv.recorder import RecordedSession, Recorder
from skyenv.renderer import Renderer
from skyenv.types import ExecResult, Limits, SamplingParams, StopReason, Trajectory

ISSUE = "/tmp/.skyenv/issue.md"
MODEL = "policy"
OUTPUT_BYTES = 1 << 16
OUTPUT_SHOWN = 4000


class AgentEnv(SWEEnv):
    """`command` is a shell command that runs the agent in the repository until it is done.

    It finds the issue in the file `$SKYENV_ISSUE_FILE` and as text in `$SKYENV_ISSUE`, and the model at
    `$OPENAI_BASE_URL`, `$OPENAI_API_BASE` and `$ANTHROPIC_BASE_URL` under the keys that belong to them, as
    `$SKYENV_MODEL`; `env` adds variables. `packages` are pinned requirements (`name==version`) installed beside the
    repository's own, whose programs come last on the `PATH`. `address` is the host under which sandboxes' nodes reach
    this machine, and `listen` the address to bind. All other arguments are those of `SWEEnv`. The verdict's `agent`
    says how the program ended. By hand, `areset` and `astep` work as in `SkyRL/SWE-v0`.
    """

    def __init__(
        self,
        *arguments: Any,
        command: str,
        packages: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
        listen: str = "127.0.0.1",
        prompt: str = "agent",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, prompt=prompt, **options)
        if not command.strip():
            raise ConfigError("command: it is empty; write how the agent is started")
        self._command, self._packages, self._variables = command, tuple(packages), dict(env or {})
        self._address, self._listen = address, listen
        self._ended: dict[str, Any] = {}

    async def begin(self, task: SweTask, resources: AsyncExitStack) -> Sandbox:
        """As `SWEEnv.begin`."""
        self._ended = {}
        return await super().begin(task, resources)

    def for_agent(self, task: SweTask) -> SweTask:
        """With the agent's packages installed."""
        return replace(task, environment=replace(task.environment, agent_packages=self._packages))

    async def grade(self, task: SweTask, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        """As `SWEEnv.grade`; the verdict says how the agent ended."""
        reward, verdict = await super().grade(task, sandbox)
        return reward, {**verdict, "agent": self._ended}

    async def aplay(
        self, engine: Engine, renderer: Renderer, trajectory: Trajectory, limits: Limits, sampling: SamplingParams
    ) -> StopReason:
        """See `core.SelfPlayed`. A budget that was used up is the stop reason, whatever the agent did then."""
        episode = self._current()
        episode.over = True
        if episode.sandbox is None:
            raise EnvError("the agent's sandbox is gone")
        recorder = Recorder(engine, renderer, model=MODEL)
        async with recorder.serve(self._listen) as url:
            with recorder.session(trajectory, limits=limits, sampling=sampling) as session:
                result = await self._run(episode.sandbox, url, session)
        return self._outcome(result, session)

    async def _run(self, box: Sandbox, url: str, session: RecordedSession) -> ExecResult:
        """Start the agent and wait for its end."""
        port = await box.tunnel(f"{self._address}:{urlsplit(url).port}")
        issue = self.prompt[-1].content
        await box.write_file(ISSUE, issue.encode("utf-8", "surrogateescape"))
        local = f"http://127.0.0.1:{port}"
        variables = {
            **{"OPENAI_BASE_URL": f"{local}/v1", "OPENAI_API_BASE": f"{local}/v1", "OPENAI_API_KEY": session.key},
            **{"ANTHROPIC_BASE_URL": local, "ANTHROPIC_API_KEY": session.key, "ANTHROPIC_AUTH_TOKEN": session.key},
            **{"CODEX_API_KEY": session.key, "SKYENV_ISSUE_FILE": ISSUE, "SKYENV_MODEL": MODEL, **self._variables},
        }
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        command = f'(export {exports} SKYENV_ISSUE="$(cat {ISSUE})"\n{self._command}\n)'
        return await box.exec(command, timeout=session.limits.wall_clock, max_output_bytes=OUTPUT_BYTES)

    def _outcome(self, result: ExecResult, session: RecordedSession) -> StopReason:
        """Why it ended. Raises what is no fault of the policy's."""
        shown = result.output[-OUTPUT_SHOWN:]
        self._ended = {"exit_code": result.exit_code, "seconds": round(result.seconds, 3), "output": shown}
        if session.failure is not None:
            raise session.failure
        if not session.calls:
            raise EnvError(f"the agent ended with status {result.exit_code} without asking the model: {shown.strip()}")
        if session.stop_reason is not None:
            return session.stop_reason
        return StopReason.WALL_CLOCK if result.timed_out else StopReason.FINISH
