"""GRPO on TRL with our rollouts: the only module that imports trl.

TRL keeps what it does well: losses, advantages, importance-sampling correction, KL, distribution, checkpoints. Ours is
what goes in: groups of trajectories from the pipeline, made on rank 0, validated as rows, scattered to the ranks.

TRL wants one row a prompt and takes its statistics over rows. Ours are over trajectories, each of one or more rows: a
batch is rolled out before TRL asks for it, so that TRL is handed as many prompts as there are rows, and the advantages
that it computes are replaced by ours. More rows than micro-batches hold become more forward passes, not larger ones.

TRL applies its sampler/trainer correction only when `use_vllm` is set, so the flag is set after construction; weights
are pushed here. Private names of TRL that this relies on, each covered by a test: `_generate_and_score_completions`,
`_compute_loss`, `_get_per_token_logps_and_entropies`, `_metrics`, `_logs`, `use_vllm`, `_last_loaded_step`,
`_entropy_bonus_enabled`, `aux_loss_enabled`, `router_aux_loss_coef`; of transformers `_save_checkpoint`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, cast

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, is_peft_model
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer import TRAINING_ARGS_NAME
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from sky_trainer import files
from sky_trainer.advantages import AdvantageConfig, AdvantageRules, Scale
from sky_trainer.algorithm import check_algorithm
from sky_trainer.batch import Batch, Shape, make_batch, summary
from sky_trainer.config import Config
from sky_trainer.filters import Collect, FilterConfig, silent, unmasked
from sky_trainer.saving import writing
from sky_trainer.settings import foreign_options
from sky_trainer.weights import WeightSync
from skyenv.adapters.trl import columns
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.samples import Mode, RowRules

OnNumbers = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""Called on rank 0 with an optimizer step and all its numbers; what it returns is logged beside them."""


class Evaluation(Protocol):
    """Looks at the policy after some of the steps; step 0 is before the first. `best` is where the best one is kept."""

    @property
    def best(self) -> Path:
        """The directory of the best policy's export."""
        ...

    def due(self, step: int) -> bool:
        """Whether the policy after this step is to be evaluated; the same on every rank."""
        ...

    def run(self, step: int) -> bool:
        """Evaluate what the engine samples from; called on rank 0. Returns whether it is the best so far."""
        ...


OWNED = {
    "output_dir": "out",
    "seed": "seed",
    "max_steps": "steps",
    "save_steps": "save_every",
    "num_generations": "rollout.group_size",
    "temperature": "rollout.temperature",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "micro_batch and rollout.groups_per_step",
    "generation_batch_size": "rollout.groups_per_step",
    "use_vllm": "nothing: generation goes through the pipeline's engine",
    "mask_truncated_completions": "rollout.stop_policy",
    "remove_unused_columns": "nothing: rows need every column",
    "logging_steps": "nothing: every step is recorded",
    "shuffle_dataset": "tasks.shuffle",
    "reward_weights": "nothing: a trajectory has one reward, see env.options.reward",
    "multi_objective_aggregation": "nothing: a trajectory has one reward",
}

ROW_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that TRL divides by the rows of a micro-batch; the others by the tokens of the whole batch, or of its own."""


REFERENCE = "ref"
"""What TRL calls the copy of fresh adapters that a KL penalty compares with; it is no part of the policy."""


def batch_shape(args: GRPOConfig) -> tuple[int, int]:
    """Groups in one batch of rollouts, and the optimizer steps that it serves."""
    assert args.generation_batch_size is not None
    assert args.num_generations is not None
    serves = (args.steps_per_generation or 1) * args.num_iterations // args.gradient_accumulation_steps
    return args.generation_batch_size // args.num_generations, max(1, serves)


def grpo_config(config: Config) -> GRPOConfig:
    """TRL's configuration of a run. Raises ConfigError for a key under `grpo:` that is unknown, ours or ill-typed."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if config.rows_per_step % (config.micro_batch * ranks):
        raise ConfigError(
            f"micro_batch is {config.micro_batch}, which on {ranks} processes does not divide the"
            f" {config.rows_per_step} rows of a step (rollout.group_size x rollout.groups_per_step)"
        )
    values = {
        "bf16": False,
        "ddp_timeout": 1 << 20,
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "scale_rewards": "none",
        "report_to": "none",
        "disable_tqdm": True,
        "max_completion_length": config.rollout.max_context,
        "vllm_importance_sampling_mode": "token_truncate",
        "save_total_limit": 2,
        **foreign_options(GRPOConfig, config.grpo, "grpo", OWNED),
        "output_dir": str(config.run_dir),
        "seed": config.seed,
        "max_steps": config.steps,
        "save_steps": config.save_every,
        "num_generations": config.rollout.group_size,
        "temperature": config.rollout.temperature,
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.rows_per_step // config.micro_batch // ranks,
        "mask_truncated_completions": False,
        "remove_unused_columns": False,
        "logging_steps": 1,
        "shuffle_dataset": False,
    }
    try:
        made = GRPOConfig(**values)
    except (TypeError, ValueError, ImportError, OSError) as error:
        raise ConfigError(f"grpo: {' '.join(str(error).split())}") from error
    check_algorithm(made)
    return made


def task_reward(env_reward: list[float | None], **columns: Any) -> list[float | None]:
    """The environments' own rewards; None leaves a row out of its group. Says in TRL's table what each row is."""
    for name in ("task_id", "status"):
        columns["log_extra"](name, columns[name])
    return env_reward


class _AfterStep(TrainerCallback):
    """Evaluates between a step and its log, and before the first step."""

    def __init__(self, trainer: SkyGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._trainer.evaluate_policy(0)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer.evaluate_policy(state.global_step)


class SkyGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose rollouts are our trajectories.

    `collect` runs whole groups of tasks and blocks; it is called on rank 0 only, and `weights.push` on every rank
    before it whenever an optimizer step was taken. `processing_class` supplies eos and padding; ids pass unchanged
    from the trajectories into the batch, cut into rows by `rows`; `on_numbers` hears of what is logged. Neither the
    model nor what `collect` drives is closed here.
    """

    args: GRPOConfig
    _logs: dict[str, Any]

    def __init__(
        self,
        model: Any,
        *,
        args: GRPOConfig,
        tasks: Sequence[Any],
        collect: Collect,
        weights: WeightSync,
        processing_class: PreTrainedTokenizerBase,
        rows: Mode = "trajectory",
        advantage: AdvantageConfig | None = None,
        order: Sequence[int] | None = None,
        filters: FilterConfig | None = None,
        on_numbers: OnNumbers | None = None,
        evaluation: Evaluation | None = None,
        **options: Any,
    ) -> None:
        if not tasks:
            raise ConfigError("there are no tasks to train on; check tasks.source, tasks.ids and tasks.level")
        if args.mask_truncated_completions:
            raise ConfigError("mask_truncated_completions hides rows from attention; use the pipeline's stop_policy")
        if args.beta and not is_peft_model(model) and not getattr(model.config, "_name_or_path", ""):
            raise ConfigError("grpo.beta above 0 needs a model that was loaded from a path, to load the reference from")
        self._tasks = list(tasks)
        self._collect = collect
        self._weights = weights
        self._on_numbers = on_numbers
        self._evaluation = evaluation
        self._batch = Batch([], [], [], 1, 0.0)
        self._rollout_numbers: dict[str, list[float]] = defaultdict(list)
        super().__init__(
            model=model,
            reward_funcs=task_reward,
            args=args,
            train_dataset=task_dataset(tasks, args, order),
            processing_class=processing_class,
            rollout_func=self._rollout,
            **options,
        )
        self.remove_callback(PrinterCallback)
        self.add_callback(_AfterStep(self))
        self._rules = RowRules(self._tokenizer.eos_token_id, model.config.vocab_size, rows)
        self._advantage = advantage or AdvantageConfig()
        self._filters = filters or FilterConfig()
        self.use_vllm = True
        self.vllm_generation: Any = None
        self._last_loaded_step = -1
        self._entropy_weight = 0.0
        if not args.use_adaptive_entropy and args.top_entropy_quantile == 1.0:
            self._entropy_weight, self._entropy_bonus_enabled = args.entropy_coef, False

    @property
    def _training(self) -> bool:
        return bool(self.model is not None and self.model.training)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Roll out, then let TRL make tensors of one prompt a row; advantages and weights of rows are ours."""
        if self.state.global_step != self._last_loaded_step:
            started = time.monotonic()
            self._weights.push(self.state.global_step)
            self._rollout_numbers["sync/seconds"].append(time.monotonic() - started)
            self._last_loaded_step = self.state.global_step
        self._batch = batch = self._shared_batch([row["task_index"] for row in inputs], len(inputs))
        count = len(batch.rows) // self.accelerator.num_processes
        own = slice(self.accelerator.process_index * count, (self.accelerator.process_index + 1) * count)
        prompts: list[dict[str, Any]] = [{"prompt": row.task_id} for row in batch.rows[own]]
        with self._groups_of_one():
            scored: dict[str, Any] = super()._generate_and_score_completions(prompts)
        self._logs["advantages"].clear()
        self._logs["advantages"].extend(values[0] for values in batch.advantages_RT)
        self._metrics["train" if self._training else "eval"]["frac_reward_zero_std"] = [batch.uniform]
        width, device = scored["completion_ids"].shape[1], self.accelerator.device
        values_RT = [values + [0.0] * (width - len(values)) for values in batch.advantages_RT[own]]
        advantages = torch.tensor(values_RT, device=device)  # (R, T)
        scored["advantages"] = advantages if self._advantage.credit == "turn" else advantages[:, 0]
        scored["row_weights"] = torch.tensor(batch.weights_R[own], device=device)  # (R,)
        scored["parts"] = torch.tensor(batch.parts)
        return scored

    @contextmanager
    def _groups_of_one(self) -> Iterator[None]:
        """TRL reshapes rewards by the group size; rows are no multiple of it."""
        before = self.num_generations, self.num_generations_eval
        self.num_generations = self.num_generations_eval = 1
        try:
            yield
        finally:
            self.num_generations, self.num_generations_eval = before

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: this rank's rows, in order."""
        start = self.accelerator.process_index * len(prompts)
        return {name: values[start : start + len(prompts)] for name, values in columns(self._batch.rows).items()}

    def _shared_batch(self, indices: list[int], count: int) -> Batch:
        """The batch of all ranks, made on rank 0; its failure is raised on all."""
        size = (self.num_generations if self._training else self.num_generations_eval) or 1
        indices = gather_object(indices)
        batch: Batch | None = None
        failure: SkyEnvError | None = None
        if self.accelerator.is_main_process:
            try:
                batch = self._make_batch(indices, size, count)
            except SkyEnvError as error:
                failure = error
        if self.accelerator.num_processes > 1:
            batch, failure = broadcast_object_list([batch, failure])
        if failure is not None:
            raise failure
        assert batch is not None
        return batch

    def _make_batch(self, indices: Sequence[int], size: int, count: int) -> Batch:
        tasks = [self._tasks[index] for index in indices[::size]]
        if any(indices[i] != indices[i - i % size] for i in range(len(indices))):
            raise SkyEnvError(f"the batch does not hold whole groups of {size}")
        started = time.monotonic()
        groups = self._collect(tasks, size)
        self._rollout_numbers["rollout/seconds"].append(time.monotonic() - started)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if len(trajectories) != len(indices):
            raise SkyEnvError(f"{len(trajectories)} trajectories for {len(indices)} prompts")
        steps = (self.args.steps_per_generation or 1) if self._training else 1
        row_mean = self.loss_type in ("grpo", "sapo")
        shape = Shape(self.accelerator.num_processes, steps, count // steps, row_mean)
        scale = cast("Scale", self.scale_rewards)
        rules = AdvantageRules(self._advantage.baseline, scale, self._advantage.credit)
        left_out = silent(groups, self._filters, rules.credit) if self._training else frozenset()
        self._rollout_numbers["rollout/silent"].append(len(left_out) / len(trajectories))
        batch = make_batch(groups, self._rules, rules, shape, left_out)
        if self._filters.unmask:
            batch = dataclasses.replace(batch, rows=[unmasked(row) for row in batch.rows])
        for name, value in summary(groups).items():
            self._rollout_numbers[name].append(value)
        if not any(trajectory.exact for trajectory in trajectories):
            raise ConfigError("the engine returned no token ids for a whole batch; train with one that returns them")
        return batch

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of a micro-step. All but the last of its parts go backward here; their value is in what returns."""
        parts = int(inputs["parts"])
        if parts == 1 or not self._training:
            loss: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss
        *first, last = split_tensor_dict(inputs, parts)
        done = torch.zeros((), device=self.accelerator.device)
        with self._finer(parts):
            for part in first:
                with self._unsynced(model):
                    loss = self._compute_loss(model, part)
                    self.accelerator.backward(loss)
                done += loss.detach()
            return self._compute_loss(model, last) + done

    @contextmanager
    def _finer(self, parts: int) -> Iterator[None]:
        """As if there were so many times more accumulation steps: TRL scales losses by their number."""
        before = self.current_gradient_accumulation_steps, self.args.steps_per_generation or 1
        self.current_gradient_accumulation_steps *= parts
        self.args.steps_per_generation = before[1] * parts
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps, self.args.steps_per_generation = before

    @contextmanager
    def _unsynced(self, model: Any) -> Iterator[None]:
        """A backward pass that ranks do not reduce yet."""
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        with nullcontext() if deepspeed else self.accelerator.no_sync(model):
            yield
        state._set_sync_gradients(before)

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        self._forward = super()._get_per_token_logps_and_entropies(*args, **options)
        return self._forward

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss with rows weighted as parts of trajectories, and an entropy bonus that is a mean over all tokens.

        TRL's own bonus is a mean of the micro-batches' means, which changes with their size.
        """
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        _, entropies, router = self._forward
        if not self._training:
            return loss
        accumulated = self.current_gradient_accumulation_steps
        if self.loss_type in ROW_LOSSES:
            weight = inputs["row_weights"][0] * int(inputs["parts"])
            balance = self.router_aux_loss_coef * router / accumulated if self.aux_loss_enabled else 0.0
            loss = (loss - balance) * weight + balance
        if self._entropy_weight:
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            share = accumulated / (self.args.steps_per_generation or 1) / self.accelerator.num_processes
            total = inputs["num_items_in_batch"].clamp(min=1.0) * share
            loss = loss - self._entropy_weight * (entropies * mask).sum() / total
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with writing(Path(self.args.output_dir or ".", f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: TRL's describes a model of the hub, and the run directory holds what there is to say."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the rollouts' numbers since the last call to what TRL logs."""
        prefix = "" if self._training else "eval_"
        logs.update({f"{prefix}{name}": fmean(values) for name, values in self._rollout_numbers.items()})
        self._rollout_numbers.clear()
        if self._on_numbers is not None and self._training and "loss" in logs and self.accelerator.is_main_process:
            known: dict[str, float] = {}
            for name, values in self._metrics["train"].items():
                numbers = [value for value in values if not math.isnan(value)]
                known |= {name: fmean(numbers)} if numbers else {}
            logs.update(self._on_numbers(self.state.global_step, {**logs, **known}))
        super().log(logs, start_time)

    def evaluate_policy(self, step: int) -> None:
        """Evaluate the policy after this step where that is due, and keep it if it is the best."""
        if self._evaluation is None or not self._evaluation.due(step):
            return
        self._weights.push(step)
        best = self.accelerator.is_main_process and self._evaluation.run(step)
        if self.accelerator.num_processes > 1:
            (best,) = broadcast_object_list([best])
        if best:
            self.export(self._evaluation.best)

    def export(self, path: Path) -> None:
        """Write the policy and its tokenizer as transformers load them; called on every rank."""
        partial = files.partial_of(path)
        if self.accelerator.is_main_process:
            files.remove(partial)
        self.accelerator.wait_for_everyone()
        with writing(partial):
            self.save_model(str(partial))
        if self.accelerator.is_main_process:
            (partial / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            files.remove(partial / REFERENCE)
            files.publish(partial, path)
        self.accelerator.wait_for_everyone()


def task_dataset(tasks: Sequence[Any], args: GRPOConfig, order: Sequence[int] | None = None) -> Dataset:
    """One row a group, in this order; else one a task, repeated so that whole batches take every task equally often."""
    assert args.generation_batch_size is not None
    assert args.num_generations is not None
    groups = args.generation_batch_size // args.num_generations
    order = order or list(range(len(tasks))) * (groups // math.gcd(groups, len(tasks)))
    return Dataset.from_list([{"prompt": tasks[i].task_id, "task_index": i} for i in order])
