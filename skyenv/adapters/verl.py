"""verl: our rollouts as an agent loop of verl's own trainers, with its own inference servers as the engine.

verl makes one `SkyEnvAgentLoop` for each sample and runs all samples of a batch at once on a worker's event loop; ours
share stages and sandboxes there (`skyenv.adapters.sharing`). Every id goes through `server_manager.generate` and back
unchanged; nothing is templated or tokenised by verl. A trajectory that may not train is left out of the batch, which
verl's trainer allows; its padded worker does not, and gets a row without a trained id whose score is 0, which the
advantage estimator `skyenv_grpo` leaves out of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

import anyio
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from skyenv.adapters.opening import Rollouts, row_rules
from skyenv.adapters.sharing import named_task, sampled, shared_rollouts
from skyenv.errors import ConfigError
from skyenv.renderer import Renderer
from skyenv.samples import Row, rows_from
from skyenv.types import Completion, Message, SamplingParams, Trajectory
from skyenv.vector.request import Numbering


class ServerManagerEngine:
    """verl's client of its inference servers, for one trajectory; `newest` is the newest weights that it sampled from.

    Turns of one session go to one server. Cancelling a call leaves the request to finish on the server.
    """

    def __init__(self, client: Any, renderer: Renderer, *, priority: int = 0, seed_name: str = "seed") -> None:
        self.newest: int | None = None
        self._client, self._renderer = client, renderer
        self._priority, self._seed_name = priority, seed_name
        self._own = uuid4().hex  # sessions of other workers may have the same name

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """Sample one completion. Raises EngineError."""
        started = anyio.current_time()
        output = await self._client.generate(
            request_id=f"{session_id}/{self._own}",
            prompt_ids=list(prompt_ids),
            sampling_params=self._asked(sampling),
            priority=self._priority,
        )
        answer = sampled("verl", output.token_ids, output.log_probs or (), output.stop_reason, sampling)
        oldest, newest = (output.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
        if newest is not None:
            self.newest = max(int(newest), self.newest or 0)
        return replace(
            answer,
            text=self._renderer.decode(answer.token_ids),
            policy_version=int(oldest or 0),
            seconds=anyio.current_time() - started,
            cached_tokens=output.extra_fields.get("num_cached_tokens"),
        )

    def _asked(self, sampling: SamplingParams) -> dict[str, Any]:
        """What both of verl's servers understand, anew for each call, since they change it."""
        asked = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": True,
        }
        return asked if sampling.seed is None else {**asked, self._seed_name: sampling.seed}


class SkyEnvAgentLoop(AgentLoopBase):
    """One trajectory of an environment of ours. Named in a file that `agent_loop_config_path` points to.

    The data set's column `task_id` says which task it plays, or `instance_id` of its column `instance`. `rollouts` says
    how; temperature, top_p and top_k are verl's. `rows` is what becomes of a trajectory whose history was rewritten:
    an error, the `last` part alone, or a row for each `segment`. ConfigError, naming the setting, for what cannot be.
    """

    def __init__(
        self, *args: Any, rollouts: Rollouts, rows: Literal["trajectory", "last", "segment"] = "trajectory", **more: Any
    ) -> None:
        super().__init__(*args, **more)
        width = self.rollout_config.response_length
        if rollouts.limits.max_context > width:
            raise ConfigError(
                f"data.max_response_length: {width} is less than limits.max_context {rollouts.limits.max_context};"
                " a trajectory's later part might not fit, so raise the one or lower the other"
            )
        self._shared = shared_rollouts(rollouts, self.tokenizer)
        self._rules = row_rules(self.tokenizer, rows)

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play the sample's task. ConfigError for a data set that names no task or for a prompt that is too long."""
        number, priority = next(self._shared.numbers), int(fields.get("priority", 0))
        sample = int(fields.get("session_id", fields.get("priority", number)))
        seed_name = "sampling_seed" if self.rollout_config.name == "sglang" else "seed"
        engine = ServerManagerEngine(self.server_manager, self._shared.renderer, priority=priority, seed_name=seed_name)
        sampling = self._sampling(sampling_params)
        group = await self._shared.play(named_task(fields), engine, sampling, Numbering(number, (sample,)))
        rows, (trajectory,) = rows_from([group], self._rules), group.trajectories
        outputs = [self._output(row, trajectory, engine.newest) for row in rows]
        if "session_id" not in fields:  # the padded worker: one row for each sample, whatever became of it
            return outputs[-1]
        return outputs if trajectory.trainable else []

    def _sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        return replace(
            self._shared.rollouts.sampling,
            temperature=float(params["temperature"]),
            top_p=float(params["top_p"]),
            top_k=max(0, int(params["top_k"])),
        )

    def _output(self, row: Row, trajectory: Trajectory, newest: int | None) -> AgentLoopOutput:
        width = self.rollout_config.prompt_length
        if len(row.prompt_ids) > width:
            raise ConfigError(
                f"data.max_prompt_length: {width} is less than the {len(row.prompt_ids)} tokens of {row.task_id}"
            )
        versions = {} if newest is None else {"min_global_steps": _oldest(trajectory), "max_global_steps": newest}
        extra = {
            "status": row.status,
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {"turns": float(len(trajectory.turns)), "failed": float(row.reward is None)},
            **versions,
        }
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.completion_ids,
            response_mask=row.loss_mask,
            response_logprobs=row.logprobs,
            reward_score=row.reward or 0.0,
            num_turns=2 * len(trajectory.turns),
            metrics=AgentLoopMetrics(
                generate_sequences=sum(turn.generate_seconds for turn in trajectory.turns),
                tool_calls=sum(turn.step_seconds for turn in trajectory.turns),
                compute_score=trajectory.seconds.get("eval", 0.0),
            ),
            extra_fields=extra,
        )


@register_adv_est("skyenv_grpo")
def grpo_without_failures(
    token_level_rewards: Any, response_mask: Any, index: Any, config: Any = None, **_: Any
) -> tuple[Any, Any]:
    """GRPO of verl over the rows that hold a trained id; the others count in no baseline and get zeros (rows x ids)."""
    advantages, played = torch.zeros_like(token_level_rewards), response_mask.sum(dim=-1) > 0
    if played.any():
        advantages[played], _returns = compute_grpo_outcome_advantage(
            token_level_rewards[played],
            response_mask[played],
            index[played.cpu().numpy()],
            norm_adv_by_std_in_grpo=config is None or config.get("norm_adv_by_std_in_grpo", True),
        )
    return advantages, advantages


def dataset(rollouts: Rollouts, agent_name: str = "skyenv") -> Any:
    """One row a task, for `data.train_files`: `dataset(rollouts).to_parquet(path)`."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "data_source": rollouts.env,
                "prompt": [{"role": "user", "content": task.task_id}],
                "task_id": task.task_id,
                "agent_name": agent_name,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            for index, task in enumerate(rollouts.load())
        ]
    )


def _oldest(trajectory: Trajectory) -> int:
    return min((turn.policy_version for turn in trajectory.turns), default=0)
