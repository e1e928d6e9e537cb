"""verifiers 0.4 (`verifiers.v1`) and prime-rl: our tasks, environments, sandboxes and turn loop as its plugins.

verifiers finds them as `skyenv_verifiers`. `SkyTaskset` are the tasks. `SkyEnv` opens one of our environments for each
episode and lends it to the agent as a `SkyRuntime`, so that verifiers' own harnesses can run programs in its sandbox;
`SkyHarness` is our turn loop, in this process. `SkyTask` has what was left behind graded by the environment.

Invariants: every model call goes through verifiers' interception server, whose trace is the record and what is trained
on; with `verifiers_renderer.SkyRenderer` its ids are those of our own pipeline. A sandbox has no network: the way to
that server is a tunnel to it alone. An episode whose grade is not valid for training is an error, never reward 0.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import DockerRuntimeInfo

import skyenv
from skyenv import formats
from skyenv.core import Sandbox, SandboxProvider, SelfPlayed
from skyenv.engines.dialects import Request, chat_answer, chat_body
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.tool_env import ToolEnv
from skyenv.errors import ConfigError, DeadlineExceeded, EngineError, SandboxError, SandboxPathError, boundary
from skyenv.renderer import Renderer
from skyenv.rollout import RolloutOptions, rollout
from skyenv.tokenizer import ByteTokenizer
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, Trajectory

OUTPUT_BYTES = 16 << 20
FIRST_PORT = 41081
UNBOUNDED = 1 << 40
ANSWER_TOKENS = 2048


class SkyTasksetConfig(vf.TasksetConfig):
    """`tasks`: what `skyenv.envs.swe.loading.load_tasks` takes. `env`, `env_options`: an environment's id and options.

    `sandbox`: the URL of a node server or gateway, None for one in this process; the variable `token_var` holds its
    token.
    """

    tasks: str = "builtin"
    env: str = "SkyRL/SWE-v0"
    env_options: dict[str, Any] = Field(default_factory=dict)
    sandbox: str | None = None
    token_var: str = "SKYENV_TOKEN"


class SkyState(vf.State):
    """What the environment's grading gave."""

    reward: float = 0.0


class SkyTask(vf.Task[vf.TaskData, SkyState, vf.TaskConfig]):
    """One task; `data.id` is its id."""

    @property
    def key(self) -> str:
        """The task's id."""
        return str(self.data.id)

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Grade what the agent left behind; the verdict goes to `trace.info`. TaskError when it is not valid."""
        reward, verdict = await _ours(runtime).grade()
        trace.info["verdict"] = verdict
        if reward is None:
            raise vf.TaskError(f"{self.key}: the grade is {verdict.get('status')!r}, which is not valid for training")
        trace.state.reward = reward

    @vf.reward
    async def outcome(self, trace: vf.Trace) -> float:
        """The environment's reward."""
        return float(trace.state.reward)


class SkyTaskset(vf.Taskset[SkyTask, SkyTasksetConfig]):
    """The tasks of a set, in its order."""

    def __init__(self, config: SkyTasksetConfig) -> None:
        super().__init__(config)
        self.tasks: dict[str, SweTask] = {task.task_id: task for task in load_tasks(config.tasks)}

    def load(self) -> Iterable[SkyTask]:
        """Build and yield the tasks. `prompt` is the issue, for harnesses that bring prompts of their own."""
        for task in self.tasks.values():
            data = vf.TaskData(id=task.task_id, name=task.task_id, prompt=task.problem, workdir=task.repo_path)
            yield SkyTask(data, self.config.task)


class SkyEnvConfig(vf.EnvConfig):
    """One agent; its `runtime` is never provisioned, as the environment's sandbox is lent to it. Seconds."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.DockerConfig())
    init_timeout: float = 600.0
    program_timeout: float = 3600.0


class SkyEnv(vf.Env[SkyEnvConfig]):
    """Opens an environment for each episode, on one provider of sandboxes for all of them."""

    def __init__(self, config: SkyEnvConfig) -> None:
        super().__init__(config)
        if not isinstance(self.taskset, SkyTaskset):
            raise ConfigError(f"taskset.id: {config.taskset.id!r} is no taskset of ours; use skyenv_verifiers")
        self._tasks, self._settings = self.taskset.tasks, self.taskset.config
        self._stack = AsyncExitStack()
        self._provider: SandboxProvider | None = None

    async def start(self) -> None:
        """Connect to where the sandboxes come from."""
        token = os.environ.get(self._settings.token_var) or None
        self._provider = await self._stack.enter_async_context(skyenv.connect(self._settings.sandbox, token))

    async def stop(self) -> None:
        """Leave it."""
        self._provider = None
        await self._stack.aclose()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One episode. Raises the errors of `areset`; what happens later is on the trace."""
        own = self._tasks.get(str(task.data.id))
        if own is None:
            raise ConfigError(f"task {task.data.id!r} is none of the {len(self._tasks)} of {self._settings.tasks}")
        options = self._settings.env_options
        env = skyenv.make(self._settings.env, tasks=[own], sandbox=self._provider, **options)
        if not isinstance(env, ToolEnv) or isinstance(env, SelfPlayed):
            raise ConfigError(f"taskset.env: {self._settings.env} has no sandbox to lend, or plays its episodes itself")
        try:
            await self._reset(env, own)
            inside = not isinstance(agents.agent.harness, SkyHarness)
            runtime = SkyRuntime(env, own.repo_path, timeout=self.config.program_timeout, inside=inside)
            await agents.agent.run(task, runtime=runtime)
        finally:
            with anyio.move_on_after(60.0, shield=True):
                await env.aclose()

    async def _reset(self, env: ToolEnv[Any], task: SweTask) -> None:
        with anyio.move_on_after(self.config.init_timeout):
            await env.areset(options={"task": task})
            return
        raise DeadlineExceeded(f"{task.task_id}: not ready within {self.config.init_timeout:g} s")


class SkyRuntime(vf.Runtime):
    """An environment's sandbox, which stays the environment's: programs and files in it, and the way to the model.

    verifiers' record knows its own kinds of runtimes alone, so it stands there as a docker container. `inside`: the
    harness's program runs in the sandbox, so that URLs of this machine are led into it.
    """

    def __init__(self, env: ToolEnv[Any], workdir: str, *, timeout: float, inside: bool) -> None:
        super().__init__()
        self.environment = env
        self.config = vf.DockerConfig(image="skyenv", workdir=workdir)
        self.info = DockerRuntimeInfo(image="skyenv", workdir=workdir, id=self.name)
        self._workdir, self._timeout, self._inside = workdir, timeout, inside
        self._ports: dict[str, int] = {}
        self._shell = anyio.Lock()

    async def start(self) -> None:
        """Nothing: it is lent out started."""

    async def grade(self) -> tuple[float | None, dict[str, Any]]:
        """Have the environment grade what its sandbox holds."""
        return await self.environment.aevaluate()

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        """Run a program to its end; one at a time."""
        errors = f"/tmp/.skyenv-{uuid.uuid4().hex}"
        with _typed("running a program"):
            async with self._shell:
                box = self._box()
                line = f"{self._line(argv, env)} 2>{errors}"
                result = await box.exec(line, timeout=self._timeout, max_output_bytes=OUTPUT_BYTES)
                said = await box.read_file(errors, max_bytes=OUTPUT_BYTES)
                await box.remove(errors)
        return vf.ProgramResult(result.exit_code, result.output, said.decode("utf-8", "replace"))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a program that runs as long as the sandbox."""
        with _typed("starting a program"):
            async with self._shell:
                line = f"nohup {self._line(argv, env)} >{shlex.quote(self._path(log))} 2>&1 </dev/null &"
                await self._box().exec(line, timeout=self._timeout)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; relative paths are below the repository."""
        with _typed(f"writing {path}"):
            await self._box().write_file(self._path(path), data)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        with _typed(f"reading {path}"):
            return await self._box().read_file(self._path(path), max_bytes=max_bytes)

    def host_url(self, url: str) -> str:
        """The URL under which the harness's program reaches `url`; the tunnels are opened by `prepare_execution`."""
        if not self._inside:
            return url
        parts = urlsplit(url)
        port = self._ports.setdefault(parts.netloc, FIRST_PORT + len(self._ports))
        return urlunsplit(("http", f"127.0.0.1:{port}", parts.path, parts.query, ""))

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """Open the ways out that `host_url` promised, and no others."""
        with _typed("opening a way to the model"):
            for target, port in self._ports.items():
                await self._box().tunnel(target, port=port)

    def _box(self) -> Sandbox:
        if self.environment.sandbox is None:
            raise vf.SandboxError("the environment has no sandbox, or gave it up for grading")
        return self.environment.sandbox

    def _path(self, path: str) -> str:
        return posixpath.join(self._workdir, path)

    def _line(self, argv: Sequence[str], env: dict[str, str]) -> str:
        variables = [f"{name}={value}" for name, value in self.process_env(env).items()]
        return shlex.join(["env", "-C", self._workdir, *variables, *argv])


class SkyHarnessConfig(vf.HarnessConfig):
    """The turn loop's settings. `format` is a tool-call format that suits the model.

    `tokenizer`, a name or folder, is needed where `max_context` is to be kept to the token, and for templates that
    open an answer's thinking; without it verifiers' own limits bound the context. `wall_clock` in seconds.
    """

    id: vf.ID = "skyenv_verifiers"
    format: str = "hermes"
    tokenizer: str = ""
    max_turns: int = 50
    max_context: int = 32768
    wall_clock: float = 1800.0


class SkyHarness(vf.Harness[SkyHarnessConfig]):
    """Our turn loop on the environment that is lent to the agent, in this process; the model is verifiers'."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one episode. A turn that verifiers refuses (a limit, a stop) ends it as any budget does."""
        env, config = _ours(runtime).environment, self.config
        if data.system_prompt is not None:
            raise ConfigError("system_prompt: prompts are the environment's; set taskset.env_options.prompt")
        budget = _answer_budget(ctx)
        renderer = Renderer(_tokenizer(config.tokenizer), formats.get(config.format))
        limits = Limits(
            max_turns=config.max_turns,
            max_tokens_per_turn=budget,
            max_context=config.max_context if config.tokenizer else UNBOUNDED,
            wall_clock=config.wall_clock,
        )
        options = RolloutOptions(limits, SamplingParams(max_tokens=budget))
        trajectory = Trajectory(str(data.id))
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as http:
            engine = _Intercepted(http, f"{endpoint}/chat/completions", ctx, env, renderer)
            with _typed("the environment"):
                reason = await _until_refused(rollout(env, engine, renderer, trajectory, options), trace)
        trace.info["stop_reason"] = None if reason is None else str(reason)
        return vf.ProgramResult(0, "", "")


class _Intercepted:
    """The model behind verifiers' interception server, as an engine that answers text.

    A train client gets the environment's own messages and the tools beside them, for `SkyRenderer` to put together;
    any other gets the tools described in the system message.
    """

    def __init__(
        self, http: httpx.AsyncClient, url: str, ctx: vf.ModelContext, env: ToolEnv[Any], renderer: Renderer
    ) -> None:
        self._http, self._url, self._ctx, self._env = http, url, ctx, env
        self._prompt = len(renderer.conversation(env.prompt, env.tools))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """One answer. Sampling is verifiers' own, but for how long an answer may be."""
        with boundary(EngineError, "the interception server"):
            answer = await self._http.post(self._url, json=self._body(messages, sampling))
            if answer.status_code != 200:
                raise EngineError(f"the interception server answers {answer.status_code}: {answer.text[:500]}")
            return chat_answer(answer.json())

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        trained = isinstance(self._ctx.client, vf.TrainClientConfig)
        shown = tuple(messages)
        if trained:
            shown = (*self._env.prompt, *messages[self._prompt :])
            shown = (Message(shown[0].role, shown[0].content, tools=self._env.tools), *shown[1:])
        body = chat_body(Request(self._ctx.model, (), shown, sampling, ""))
        kept: dict[str, Any] = {
            name: body[name] for name in ("model", "messages", "max_tokens", "tools") if name in body
        }
        if trained:
            kept["messages"] = [_wire(message) for message in shown]
        return kept


def _wire(message: Message) -> dict[str, Any]:
    """A message with its role as it is, so that the renderer sees what our own pipeline's renderer sees."""
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    return {**sent, "tool_call_id": "", "name": message.name} if message.role == "tool" else sent


def _ours(runtime: vf.Runtime) -> SkyRuntime:
    if not isinstance(runtime, SkyRuntime):
        raise ConfigError(f"runtime: a {type(runtime).__name__} holds no environment of ours; run them by SkyEnv")
    return runtime


def _answer_budget(ctx: vf.ModelContext) -> int:
    """How long an answer may be. The train client takes it from the run's sampling and from nowhere else."""
    if ctx.sampling.max_tokens is None and isinstance(ctx.client, vf.TrainClientConfig):
        raise ConfigError("sampling.max_tokens: it is not set, and vLLM would end each answer after 16 tokens; set it")
    return int(ctx.sampling.max_tokens or ANSWER_TOKENS)


def _tokenizer(name: str) -> Any:
    if not name:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


async def _until_refused(playing: Any, trace: vf.Trace) -> StopReason | None:
    """Why the loop ended; None when verifiers stopped it."""
    try:
        reason: StopReason = await playing
        return reason
    except EngineError:
        if trace.stop_condition is None:
            raise
        return None


@contextmanager
def _typed(what: str) -> Iterator[None]:
    """Failures of a sandbox under verifiers' name for them, by which it decides what is tried again."""
    try:
        yield
    except (SandboxError, SandboxPathError) as error:
        raise vf.SandboxError(f"{what}: {type(error).__name__}: {error}") from error
