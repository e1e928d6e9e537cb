"""The shared policy through verl's own worker, its own configuration and its own settling of rewards.

What stands for verl's inference servers is its client with `generate` overridden, as its own subclasses do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sky_trainer.tiny import make_model
from skyenv.adapters.opening import Rollouts
from skyenv.types import Message, SamplingParams
from tests.adapters import policies

WIDTH = 8192
SAMPLES = 2


def rollouts() -> Rollouts:
    """What the agent loop's configuration names."""
    return policies.ROLLOUTS


class Servers(LLMServerClient):
    """Answers what the shared policy says; `weights` is the step of the weights that it claims to have."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config)
        self.weights = 7
        self.asked: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._policy = policies.HalfRight(policies.renderer(tokenizer))

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0, **more: Any
    ) -> TokenOutput:
        assert not more
        self.asked.append({"request_id": request_id, "priority": priority, **sampling_params})
        turns = self._tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        sampling = SamplingParams(
            max_tokens=sampling_params.pop("max_tokens"), stop_token_ids=tuple(sampling_params.pop("stop_token_ids"))
        )
        said = await self._policy.generate(
            prompt_ids, sampling, messages=[Message("assistant", "")] * turns, session_id=request_id.rpartition("/")[0]
        )
        steps = {"min_global_steps": self.weights, "max_global_steps": self.weights + 1}
        ids, logprobs = list(said.token_ids), list(said.logprobs)
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps)


def made(folder: Path, *overrides: str, **loop: Any) -> Any:
    """A tiny model, and verl's configuration for it and for our agent loop."""
    tokenizer = policies.tokenizer()
    make_model(tokenizer, hidden=32, layers=1, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = {"_target_": f"{__spec__.name}.rollouts"}
    entry = {"name": "skyenv", "_target_": "skyenv.adapters.verl.SkyEnvAgentLoop", "rollouts": named, **loop}
    (folder / "loop.yaml").write_text(yaml.safe_dump([entry]))
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.n={SAMPLES}",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/loop.yaml",
                "actor_rollout_ref.rollout.agent.default_agent_loop=skyenv",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "algorithm.adv_estimator=grpo",
                f"data.max_prompt_length={WIDTH}",
                f"data.max_response_length={WIDTH}",
                *overrides,
            ],
        )


def batch(task_ids: Sequence[str]) -> DataProto:
    """What verl's trainer hands to a worker, each sample in a row of its own."""
    raw = np.empty(len(task_ids), dtype=object)
    raw[:] = [[{"role": "user", "content": task_id}] for task_id in task_ids]
    columns = {"task_id": np.array(task_ids, dtype=object), "uid": np.array(task_ids, dtype=object), "raw_prompt": raw}
    columns["priority"] = np.arange(len(task_ids))
    dummy = TensorDict({"dummy_tensor": torch.zeros(len(task_ids), 1)}, batch_size=len(task_ids))
    return DataProto(batch=dummy, non_tensor_batch=columns)


def rows(output: DataProto) -> list[dict[str, Any]]:
    """What stands in verl's padded tensors, without the padding."""
    found = []
    for place, task_id in enumerate(output.non_tensor_batch["task_id"]):
        row = {name: output.batch[name][place] for name in output.batch.keys()}  # noqa: SIM118
        width = row["prompts"].shape[0]
        seen = row["attention_mask"].bool()
        kept = {name: row[name][seen[width:]].tolist() for name in ("responses", "response_mask", "rollout_log_probs")}
        found.append(
            {
                "task_id": task_id,
                "prompt_ids": row["prompts"][seen[:width]].tolist(),
                "completion_ids": kept["responses"],
                "loss_mask": kept["response_mask"],
                "logprobs": kept["rollout_log_probs"],
                "reward": float(row["rm_scores"].sum()),
            }
        )
    return found


def main(out: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = made(Path(folder))
        worker = AgentLoopWorker(config, Servers(config, policies.tokenizer()))
        output = asyncio.run(worker.generate_sequences(batch(np.repeat(policies.TASKS, SAMPLES).tolist())))
    Path(out).write_text(json.dumps(rows(output)))


if __name__ == "__main__":
    main(sys.argv[1])
