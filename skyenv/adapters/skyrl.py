"""SkyRL: our rollouts as a generator of its trainers, and our environments as text environments of its gym.

`SkyEnvGenerator` runs our pipeline with SkyRL's inference client as the engine: ids go to the servers and come back
unchanged, groups share stages, sandboxes and a beginning. SkyRL wants a number and a row for every sample. A trajectory
that may not train is a row without a trained id whose reward, in training, is the mean of its usable siblings', which
leaves the group's baseline where it is, and 0.0 in evaluation or when there is none.

`SkyEnvTextEnv` is for SkyRL's own generator, which templates text itself; ids are then SkyRL's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple

import anyio
import gymnasium
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import get_rollout_metrics
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

import skyenv
from skyenv import formats
from skyenv.adapters.opening import Rollouts, row_rules
from skyenv.adapters.sharing import SharedRollouts, named_task, sampled, shared_rollouts
from skyenv.envs.raw_text import RawText
from skyenv.errors import ConfigError, SkyEnvError, boundary
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.samples import Row, rows_from
from skyenv.types import Completion, Message, SamplingParams, StopReason, TrajectoryGroup
from skyenv.vector.request import Numbering

FINISH_SECONDS = 10.0


class InferenceClientEngine:
    """SkyRL's inference client as an engine, for one group. `params` are sampling parameters as its servers take them.

    Cancelling a call closes its connection. `finish` tells the router that the sessions are over.
    """

    def __init__(self, client: Any, renderer: Renderer, params: Mapping[str, Any], model: str | None) -> None:
        self._client, self._renderer = client, renderer
        self._params, self._model = params, model
        self._sessions: set[str] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """Sample one completion. Raises EngineError."""
        started, version = anyio.current_time(), getattr(self._client, "weight_version", 0)
        self._sessions.add(session_id)
        asked = {
            "prompt_token_ids": [list(prompt_ids)],
            "sampling_params": self._asked(sampling),
            "session_ids": [session_id],
        }
        output = await self._client.generate(asked, model=self._model)
        logprobs = (output["response_logprobs"] or [None])[0] or ()
        answer = sampled("SkyRL", output["response_ids"][0], logprobs, output["stop_reasons"][0], sampling)
        return replace(
            answer,
            text=self._renderer.decode(answer.token_ids),
            policy_version=version,  # not all of SkyRL's clients count; weights may change while this is sampled
            seconds=anyio.current_time() - started,
        )

    async def finish(self) -> None:
        """Let the router forget the sessions, also while the caller is being cancelled; at most `FINISH_SECONDS`."""
        with anyio.move_on_after(FINISH_SECONDS, shield=True):
            for session_id in sorted(self._sessions):
                await self._client.finish_session(session_id)

    def _asked(self, sampling: SamplingParams) -> dict[str, Any]:
        asked = {
            **self._params,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": self._params.get("logprobs") or 0,
        }
        return asked if sampling.seed is None else {**asked, "seed": sampling.seed}


class SkyEnvGenerator(GeneratorInterface):
    """What `get_generator` of an experiment returns: our pipeline under any of SkyRL's trainers.

    The data set's column `task_id` says which task a prompt plays, or `instance_id` of its column `instance`. `rows`:
    `trajectory` and `last` give one row a sample; `segment` gives a row for each stretch of unrewritten history, and
    needs `generator.step_wise_trajectories`. `model` is the name that the policy has on the servers.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        client: Any,
        tokenizer: Any,
        *,
        rows: Literal["trajectory", "last", "segment"] = "trajectory",
        model: str | None = None,
    ) -> None:
        self._rollouts, self._client, self._tokenizer = rollouts, client, tokenizer
        self._rules = row_rules(tokenizer, rows)
        self._model = model

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The rows of a batch, in its order. ConfigError for a data set that names no task, or none of ours."""
        shared = shared_rollouts(self._rollouts, self._tokenizer)
        params = dict(input_batch.get("sampling_params") or {})
        asked = _asked_groups(input_batch, shared)
        sampling = _sampling(self._rollouts.sampling, params)
        played: dict[int, TrajectoryGroup] = {}

        async def play(number: int, group: _Asked) -> None:
            engine = InferenceClientEngine(self._client, shared.renderer, params, self._model)
            try:
                played[number] = await shared.play(group.task_id, engine, sampling, group.numbering)
            finally:
                await engine.finish()

        with boundary(SkyEnvError, "rollouts"):
            async with anyio.create_task_group() as tasks:
                for number, group in enumerate(asked):
                    tasks.start_soon(play, number, group)
        metadata = input_batch.get("batch_metadata")
        training = metadata is None or metadata.training_phase == "train"
        return self._output([played[number] for number in range(len(asked))], input_batch, training)

    def _output(self, groups: list[TrajectoryGroup], batch: GeneratorInput, training: bool) -> GeneratorOutput:
        rows = rows_from(groups, self._rules)
        last = [row.trajectory != after for row, after in _with_next(rows)]
        neutral = [
            fmean(known) if training and (known := [r for r in group.rewards_G if r is not None]) else 0.0
            for group in groups
            for _ in group.trajectories
        ]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        seconds = [sum(trajectory.seconds.values()) for trajectory in trajectories]
        rewards = [neutral[row.trajectory] if row.reward is None else row.reward for row in rows]
        responses, masks = [row.completion_ids for row in rows], [row.loss_mask for row in rows]
        segments = self._rules.mode == "segment"
        ids = batch.get("trajectory_ids") or [TrajectoryID(t.task_id, t.sample_index) for t in trajectories]
        return {
            "prompt_token_ids": [row.prompt_ids for row in rows],
            "response_ids": responses,
            "rewards": rewards,
            "loss_masks": masks,
            "stop_reasons": ["stop" if row.status == StopReason.FINISH else row.status for row in rows],
            "rollout_metrics": {
                **get_rollout_metrics(responses, rewards, loss_masks=masks, trajectory_completion_times=seconds),
                "generate/failed": fmean(trajectory.reward is None for trajectory in trajectories),
            },
            "rollout_logprobs": [row.logprobs for row in rows],
            "trajectory_ids": [ids[row.trajectory] for row in rows] if segments else None,
            "trajectory_generation_times": [seconds[row.trajectory] for row in rows],
            "rollout_expert_indices": None,
            "is_last_step": last if segments else None,
            "env_metrics": None,
            "pixel_values": None,
            "image_grid_thw": None,
        }


class SkyEnvTextEnv(BaseTextEnv):
    """One of our environments in SkyRL's gym: tool calls in text, observations as user messages.

    Register it with `kwargs={"rollouts": ...}`, of which tasks, environment, sandbox and format count. Each instance
    has a thread and a connection of its own until `close`. The step that ends an episode has its reward.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, rollouts: Rollouts) -> None:
        super().__init__()
        task_id = named_task(extras or {})
        tasks = [task for task in rollouts.load() if task.task_id == task_id]
        if not tasks:
            raise ConfigError(f"task {task_id!r} is none of those of these rollouts")
        self.max_turns = int((extras or {}).get("max_turns", rollouts.limits.max_turns))
        options = {"max_turns": self.max_turns, **rollouts.env_options}
        made = skyenv.make(rollouts.env, tasks=tasks, sandbox=rollouts.sandbox, token=rollouts.token, **options)
        if not isinstance(made, gymnasium.Env):
            raise ConfigError(f"env: {rollouts.env} has no synchronous face; use SkyEnvGenerator")
        self._env = made
        self._format = formats.get(rollouts.format)
        self._text = RawText(made, rollouts.format)
        self._metrics: dict[str, Any] = {}

    def init(self, prompt: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Start the episode; the prompt is our environment's own, with the tools described, and not the data set's."""
        _, info = self._text.reset()
        messages = Renderer(ByteTokenizer(), self._format).conversation(self._env.prompt, self._env.tools)
        return [{"role": message.role, "content": message.content} for message in messages], info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the calls of an answer."""
        observation, reward, terminated, truncated, info = self._text.step(action)
        self.turns += 1
        done = terminated or truncated
        self._metrics = {"turns": self.turns, "reward": float(reward)}
        shown = [] if done else [{"role": "user", "content": observation}]
        return BaseTextEnvStepOutput(observations=shown, reward=float(reward), done=done, metadata=info)

    def close(self) -> None:
        """Free the episode, its connection and its thread; idempotent."""
        self._text.close()

    def get_metrics(self) -> dict[str, Any]:
        """Turns so far, and the last step's reward."""
        return self._metrics


def dataset(rollouts: Rollouts, env_class: str = "skyenv") -> Any:
    """One row a task, for `data.train_data`: `dataset(rollouts).to_parquet(path)`."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": task.task_id}],
                "env_class": env_class,
                "task_id": task.task_id,
                "data_source": rollouts.env,
            }
            for task in rollouts.load()
        ]
    )


class _Asked(NamedTuple):
    """One group of a batch."""

    task_id: str
    numbering: Numbering


def _asked_groups(batch: GeneratorInput, shared: SharedRollouts) -> list[_Asked]:
    """Neighbours with one trajectory id's instance and one task are a group; their repetitions are the samples."""
    extras = batch.get("env_extras") or [{} for _ in batch["prompts"]]
    tasks = [named_task(fields) for fields in extras]
    for task_id in tasks:
        shared.check(task_id)
    ids = batch.get("trajectory_ids")
    instances = [ids[place].instance_id if ids else task_id for place, task_id in enumerate(tasks)]
    groups = []
    for (task_id, _), places in groupby(range(len(tasks)), key=lambda place: (tasks[place], instances[place])):
        samples = tuple(ids[place].repetition_id if ids else count for count, place in enumerate(places))
        groups.append(_Asked(task_id, Numbering(next(shared.numbers), samples)))
    return groups


def _sampling(base: SamplingParams, params: Mapping[str, Any]) -> SamplingParams:
    """The rollouts' sampling with what SkyRL asks for."""
    return replace(
        base,
        temperature=float(params.get("temperature", base.temperature)),
        top_p=float(params.get("top_p", base.top_p)),
        top_k=max(0, int(params.get("top_k", base.top_k))),
    )


def _with_next(rows: Sequence[Row]) -> list[tuple[Row, int | None]]:
    """Each row with the trajectory of the one behind it."""
    return list(zip(rows, [*(row.trajectory for row in rows[1:]), None], strict=True))
