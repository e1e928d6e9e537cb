"""A run's other processes: rank 0 owns rollouts, records and evaluation, the rest train beside it.

What the ranks share is the run directory, which all of them see, and collectives. Rank 0 prepares the directory and
the policy to start from while the others wait; from then on all take the same steps, and what rank 0 raises while it
rolls out is raised on all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_trainer.assembly import make_renderer
from sky_trainer.config import Config, EvaluationConfig
from sky_trainer.in_loop import BEST, is_due
from sky_trainer.opening import opened_engine
from sky_trainer.record import last_checkpoint
from sky_trainer.sampling import shared_urls
from sky_trainer.sections.lora import with_adapters
from sky_trainer.starting import settled_policy
from sky_trainer.supervise import PatientWeights
from sky_trainer.weights import WeightSync
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.types import TrajectoryGroup

if TYPE_CHECKING:
    from sky_trainer.curriculum import Plan


def check_ranks(config: Config, args: Any) -> None:
    """ConfigError where weights cannot be sharded, or are while one rank is to sample from them."""
    launched = any(os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true" for kind in ("FSDP", "DEEPSPEED"))
    if not (args.fsdp or args.deepspeed or launched):
        return
    if args.device.type == "cpu":
        raise ConfigError(
            "weights are to be sharded over the processes (FSDP or DeepSpeed), which accelerate does on GPUs only and"
            " ignores on CPUs; launch without it, each process then holds all weights"
        )
    if not config.engine.remote:
        raise ConfigError(
            "engine.kind is embedded, but the weights are sharded over the processes (FSDP or DeepSpeed), and no"
            " process holds them whole; set engine.kind to vllm or sglang"
        )


def follow(config: Config, args: Any, plan: Plan, final: Path) -> None:
    """Train beside rank 0 to the end of the run; returns at once where there is nothing left to do."""
    from anyio.from_thread import start_blocking_portal

    from sky_trainer.grpo import SkyGRPOTrainer

    args.distributed_state.wait_for_everyone()  # the directory is prepared
    checkpoint = last_checkpoint(config.run_dir) if config.resume else None
    if checkpoint is not None and int(checkpoint.name.rpartition("-")[2]) >= config.steps:
        return
    args.distributed_state.wait_for_everyone()  # the policy is there
    model, tokenizer = settled_policy(config)
    model = with_adapters(model, config.lora)
    with start_blocking_portal() as portal, _weights(config, portal, model, tokenizer) as weights:
        trainer = SkyGRPOTrainer(
            model,
            args=args,
            tasks=plan.tasks,
            order=plan.order(),
            collect=_never,
            weights=weights,
            processing_class=tokenizer,
            rows=config.rollout.rows,
            advantage=config.advantage,
            filters=config.filter,
            evaluation=_Evaluated(config.evaluation, config.run_dir / BEST) if config.evaluation.every else None,
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.export(final)


@contextmanager
def _weights(config: Config, portal: Any, model: Any, tokenizer: Any) -> Iterator[WeightSync]:
    """What a rank does to bring weights to servers; an embedded engine has them from rank 0."""
    if not config.engine.remote:
        yield _Elsewhere()
        return
    with opened_engine(shared_urls(config), portal, model, make_renderer(tokenizer, config.rollout)) as (_, weights):
        yield PatientWeights(weights, lambda: False)


def _never(tasks: Sequence[Any], group_size: int) -> list[TrajectoryGroup]:
    raise SkyEnvError("only rank 0 rolls out")


class _Elsewhere:
    """Weights that rank 0 alone pushes."""

    version = 0

    def push(self, version: int) -> None:
        self.version = version


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Rank 0's evaluation, as seen from another rank."""

    config: EvaluationConfig
    best: Path

    def due(self, step: int) -> bool:
        return is_due(self.config, step)

    def run(self, step: int) -> bool:
        raise SkyEnvError("only rank 0 evaluates")
