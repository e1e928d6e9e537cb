"""verl's own functions on our rows, and what its workers do with mistakes, failures and cancellation."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from hydra import compose, initialize_config_module
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.rollout.replica import TokenOutput

from skyenv.errors import EngineError
from tests.adapters import policies
from tests.adapters.playing import verl as playing

RECIPE = Path(__file__).parents[3] / "recipes/verl"


class Broken(playing.Servers):
    """Fails for the samples of odd number."""

    async def generate(self, request_id: str, **more: Any) -> TokenOutput:
        if int(request_id.rpartition("#")[2].split(".")[1]) % 2:
            raise EngineError("the server is gone")
        return await super().generate(request_id, **more)


class Silent(playing.Servers):
    """Never answers, and tells when it was asked."""

    async def generate(self, request_id: str, **more: Any) -> TokenOutput:
        self.asked.append(more)
        return await asyncio.Future()


def train(config: Any, output: DataProto, model: Any) -> dict[str, Any]:
    """One step with verl's advantages and its policy loss; how it moved what each row had sampled."""
    data = output.batch
    data["token_level_rewards"] = data["rm_scores"]
    settled = compute_advantage(output, adv_estimator="grpo").batch
    logprobs = [_logprobs(model, data)]
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=logprobs[0].detach(),
        log_prob=logprobs[0],
        advantages=settled["advantages"],
        response_mask=data["response_mask"],
        config=omega_conf_to_dataclass(config.actor_rollout_ref.actor),
    )
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
        logprobs.append(_logprobs(model, data))
    moved = ((logprobs[1] - logprobs[0]) * data["response_mask"]).sum(-1)
    outside = settled["advantages"][data["response_mask"] == 0]
    return {
        "advantages": [row[row != 0].unique().tolist() for row in settled["advantages"]],
        "advantages_outside": float(outside.abs().sum()),
        "gradient": float(sum(parameter.grad.abs().sum() for parameter in model.parameters())),
        "moved": moved.tolist(),
    }


def advantages(config: Any, output: DataProto, name: str) -> list[float]:
    """What verl's trainer gives to each row by an estimator of this name."""
    output.batch["token_level_rewards"] = output.batch["rm_scores"]
    settled = compute_advantage(output, adv_estimator=name, config=config.algorithm)
    return settled.batch["advantages"].sum(-1).tolist()


def _logprobs(model: Any, data: Any) -> torch.Tensor:
    """Of what stands in the responses; columns that are padding in every row are not computed."""
    used, width = data["attention_mask"].bool().any(0), data["responses"].shape[1]
    answered = int(used[-width:].sum())
    seen = model(**{name: data[name][:, used] for name in ("input_ids", "attention_mask", "position_ids")})
    logprobs = logprobs_from_logits(seen.logits[:, -answered - 1 : -1].float(), data["responses"][:, :answered])
    return torch.nn.functional.pad(logprobs, (0, width - answered))


class Unpadded(AgentLoopWorker):
    """Returns what an agent loop returns, not padded."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **fields: Any) -> Any:
        return output


async def one(worker: AgentLoopWorker, **fields: Any) -> Any:
    """One sample, made and run as verl's workers do."""
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    place = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": False}
    return await worker._run_agent_loop(sampling, place, trace=False, agent_name="skyenv", **fields)


async def mistakes(folder: Path, config: Any) -> list[str]:
    """What a sample raises that cannot be played."""
    servers = playing.Servers(config, policies.tokenizer())
    narrow = playing.made(folder, "data.max_response_length=512")
    short = playing.made(folder, "data.max_prompt_length=16")
    asked: list[tuple[Any, dict[str, Any]]] = [
        (config, {}),
        (config, {"task_id": "no-such-task"}),
        (narrow, {"task_id": policies.TASKS[0]}),
        (short, {"task_id": policies.TASKS[0]}),
    ]
    said = []
    for settings, fields in asked:
        try:
            await one(Unpadded(settings, servers), **fields)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  hydra wraps what a constructor raises
            said.append(f"{type(error.__cause__).__name__}: {error.__cause__}")
    return said


async def recipe(folder: Path) -> dict[str, Any]:
    """What verl makes of the recipe, but for its model: its settings, and what its agent loop is made of."""
    words = shlex.split((RECIPE / "swe-7b.sh").read_text().partition("main_ppo")[2], comments=True)
    overrides = [
        word.replace("recipes/verl", str(RECIPE)).replace("$1", "tasks.parquet") for word in words if "=" in word
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*overrides, f"actor_rollout_ref.model.path={folder}"])
    validate_config(config, use_reference_policy=True, use_critic=False)
    try:
        await one(Unpadded(config, playing.Servers(config, policies.tokenizer())), task_id="no-such-task")
    except ValueError as error:
        return {"settings": len(overrides), "said": str(error)}
    return {}


class Queue:
    """Stands for TransferQueue, which needs Ray, in verl's newer worker: keeps what that puts in."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}

    def init(self) -> None:
        """Nothing to start."""

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        """How the samples of a prompt stand."""
        self.states[key] = tag["status"]

    async def async_kv_batch_put(
        self, keys: list[str], fields: TensorDict, tags: list[dict[str, Any]], partition_id: str
    ) -> None:
        """The rows of one sample."""
        for place, key in enumerate(keys):
            row, tag = fields[place], tags[place]
            columns = [row[name] for name in ("responses", "response_mask", "rollout_log_probs", "rm_scores")]
            self.rows[key] = {
                "trained": int(row["response_mask"].sum()),
                "score": float(row["rm_scores"].sum()),
                "lengths": [len(column) for column in columns],
                "steps": [tag["min_global_steps"], tag["max_global_steps"]],
            }


async def queued(config: Any, servers: Any) -> dict[str, Any]:
    """What verl's newer worker puts into its queue for two samples of each of two tasks."""
    queue = agent_loop_tq.tq = Queue()
    worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, servers)
    prompts = [[{"role": "user", "content": task_id}] for task_id in policies.TASKS]
    columns = {"task_id": NonTensorStack(*policies.TASKS), "uid": NonTensorStack("a", "b")}
    columns |= {"raw_prompt": NonTensorStack(*prompts), "index": torch.arange(2), "global_steps": NonTensorData(3)}
    await worker.generate_sequences(TensorDict(columns, batch_size=2))
    await asyncio.gather(*worker.background_tasks)
    return {"rows": queue.rows, "states": queue.states}


async def cancelled(config: Any) -> dict[str, Any]:
    """A sample that is cancelled while the server says nothing."""
    servers = Silent(config, policies.tokenizer())
    task = asyncio.create_task(one(Unpadded(config, servers), task_id=policies.TASKS[0]))
    while not servers.asked:
        await asyncio.sleep(0.05)
    during = len(psutil.Process().children())
    task.cancel()
    await asyncio.wait([task])
    return {"cancelled": task.cancelled(), "during": during, "after": len(psutil.Process().children())}


def main(out: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = playing.made(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        servers = playing.Servers(config, policies.tokenizer())
        pair = playing.batch(np.repeat(policies.TASKS[:1], 2).tolist())
        worker = AgentLoopWorker(config, servers)
        output = asyncio.run(worker.generate_sequences(pair))
        broken = Broken(config, policies.tokenizer())
        four = playing.batch(np.repeat(policies.TASKS[:1], 4).tolist())
        failed = asyncio.run(AgentLoopWorker(config, broken).generate_sequences(four))
        found = {
            "meta": {name: output.non_tensor_batch[name].tolist() for name in ("status", "turns", "failed")},
            "steps": [output.non_tensor_batch[f"{end}_global_steps"].tolist() for end in ("min", "max")],
            "asked": servers.asked,
            "trained": train(config, output, model),
            "failed": playing.rows(failed),
            "baselines": {name: advantages(config, failed, name) for name in ("grpo", "skyenv_grpo")},
            "queued": asyncio.run(queued(config, servers)),
            "left_out": asyncio.run(queued(config, broken)),
            "mistakes": asyncio.run(mistakes(folder, config)),
            "recipe": asyncio.run(recipe(folder)),
            "cancelled": asyncio.run(cancelled(config)),
        }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
