"""SkyRL's own checks, tensors, advantages and policy loss on our rows, its gym on our environments, and mistakes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.adapters.playing import skyrl as playing  # isort: skip  (what it does to `typing` comes first)

import numpy as np
import psutil
import skyrl_gym
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, compute_advantages_and_returns
from skyrl.train.config import AlgorithmConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.utils.trainer_utils import validate_generator_output

from sky_trainer.tiny import make_model
from skyenv.adapters.skyrl import SkyEnvGenerator
from skyenv.types import ToolCall
from tests.adapters import policies


def train(output: GeneratorOutput, uids: list[str]) -> dict[str, Any]:
    """One step as SkyRL's trainer takes it; how it moved what each row had sampled."""
    validate_generator_output(len(uids), output)
    tokenizer, config = policies.tokenizer(), AlgorithmConfig()
    rewards = [
        [0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    ids, attention, answered, per_token, mask, sampled, _ = convert_prompts_responses_to_batch_tensors(
        tokenizer,
        output["prompt_token_ids"],
        output["response_ids"],
        rewards,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    advantages, _ = compute_advantages_and_returns(per_token, answered, np.array(uids), "grpo", config)
    model = make_model(tokenizer, hidden=32, layers=1, seed=0)
    before = logprobs(model, ids, attention, mask.shape[1])
    loss, _ = PolicyLossRegistry.get("regular")(
        before, before.detach(), advantages, config=config, loss_mask=mask, rollout_logprobs=sampled
    )
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 / mask.sum() * parameter.grad
        after = logprobs(model, ids, attention, mask.shape[1])
    return {
        "advantages": [float(row[kept > 0].mean()) for row, kept in zip(advantages, answered, strict=True)],
        "gradient": float(sum(parameter.grad.abs().sum() for parameter in model.parameters())),
        "moved": ((after - before) * mask).sum(-1).tolist(),
        "sampled": int(mask.sum()),
    }


def logprobs(model: Any, ids: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """Of the last `width` ids of each row."""
    places = (attention.cumsum(-1) - 1).clamp(min=0)
    seen = model(input_ids=ids, attention_mask=attention, position_ids=places).logits[:, -width - 1 : -1]
    return torch.log_softmax(seen.float(), -1).gather(-1, ids[:, -width:, None]).squeeze(-1)


async def mistakes() -> list[str]:
    """What a batch raises that cannot be played."""
    generator, said = SkyEnvGenerator(policies.ROLLOUTS, None, policies.tokenizer()), []
    for extras in ({}, {"task_id": "no-such-task"}):
        batch, _ = playing.asked()
        batch["env_extras"] = [extras for _ in batch["prompts"]]
        try:
            await generator.generate(batch)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


async def cancelled() -> dict[str, Any]:
    """A batch that is cancelled while the server says nothing."""
    server = playing.Server(policies.tokenizer(), silent=True)
    task = asyncio.create_task(playing.played(server, samples=1))
    while len(server.asked) < len(policies.TASKS):
        await asyncio.sleep(0.05)
    during = len(psutil.Process().children())
    task.cancel()
    await asyncio.wait([task])
    return {
        "cancelled": task.cancelled(),
        "during": during,
        "after": len(psutil.Process().children()),
        "finished": len(server.finished),
    }


def in_the_gym() -> dict[str, Any]:
    """Our environment as SkyRL's gym makes it, played by texts."""
    skyrl_gym.register(
        id="skyenv", entry_point="skyenv.adapters.skyrl:SkyEnvTextEnv", kwargs={"rollouts": policies.ROLLOUTS}
    )
    format = policies.renderer(policies.tokenizer()).format
    mend = {"command": f"git apply - <<'END'\n{policies.patch(policies.TASKS[0])}\nEND"}
    env = skyrl_gym.make("skyenv", env_config={}, extras={"task_id": policies.TASKS[0], "max_turns": 4})
    try:
        prompt, _ = env.init([])
        steps = [
            env.step(text)
            for text in (
                "no call",
                format.render_call(ToolCall("execute_bash", mend)),
                format.render_call(ToolCall("finish", {})),
            )
        ]
        return {
            "roles": [message["role"] for message in prompt],
            "prompt": "\n".join(message["content"] for message in prompt),
            "steps": [(step["reward"], step["done"], step["observations"]) for step in steps],
            "metrics": env.get_metrics(),
        }
    finally:
        env.close()


def main(out: str) -> None:
    server, broken = playing.Server(policies.tokenizer()), playing.Server(policies.tokenizer(), broken=(1,))
    output, uids = asyncio.run(playing.played(server))
    failed, _ = asyncio.run(playing.played(broken))
    validate_generator_output(len(uids), failed)
    evaluated, _ = asyncio.run(playing.played(broken, phase="eval"))
    steps, _ = asyncio.run(playing.played(broken, rows="segment"))
    validate_generator_output(len(uids), steps, step_wise=True)
    found = {
        "steps": [
            [step.instance_id, step.repetition_id, last]
            for step, last in zip(steps["trajectory_ids"], steps["is_last_step"], strict=True)
        ],
        "trained": train(output, uids),
        "metrics": output["rollout_metrics"],
        "stop_reasons": output["stop_reasons"],
        "asked": server.asked,
        "finished": server.finished,
        "failed": {name: failed[name] for name in ("rewards", "loss_masks", "stop_reasons")},
        "evaluated": evaluated["rewards"],
        "mistakes": asyncio.run(mistakes()),
        "cancelled": asyncio.run(cancelled()),
        "gym": in_the_gym(),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
