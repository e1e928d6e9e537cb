"""Supervised training on TRL's SFTTrainer: beside `sky_trainer.grpo` the only module that imports trl.

TRL sees ids and labels that are made already and leaves them as they are: its own preparation, which would tokenise,
truncate and mask, is switched off. Labels are the ids under mask 1, everything else is ignored by the loss, which is
the mean over the learnt tokens of a whole batch, however it is split into micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from sky_trainer import files
from sky_trainer.config import Config
from sky_trainer.saving import writing
from sky_trainer.settings import foreign_options
from sky_trainer.sync.export import named_weights
from sky_trainer.sync.files import write_checkpoint
from skyenv.errors import ConfigError
from skyenv.types import Segment

OnNumbers = Callable[[int, Mapping[str, Any]], None]
IGNORED = -100

OWNED = {
    "output_dir": "out",
    "seed": "seed",
    "save_steps": "save_every",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "micro_batch and sft.batch_size",
    "learning_rate": "sft.learning_rate",
    "max_steps": "sft.steps",
    "num_train_epochs": "sft.epochs",
    "max_length": "sft.max_length",
    "packing": "nothing: rows are trained as they were recorded",
    "padding_free": "nothing: rows are padded",
    "dataset_kwargs": "nothing: rows hold ids and need no preparation",
    "completion_only_loss": "nothing: labels say what is learnt",
    "assistant_only_loss": "nothing: labels say what is learnt",
    "remove_unused_columns": "nothing: rows hold what the model takes",
    "logging_steps": "nothing: every step is recorded",
}


def sft_config(config: Config, rows: int) -> SFTConfig:
    """TRL's configuration for this many rows. Raises ConfigError for options that are unknown, ours or ill-typed."""
    settings = config.sft
    at_once = config.micro_batch * PartialState().num_processes
    if settings.batch_size % at_once:
        raise ConfigError(
            f"sft.batch_size is {settings.batch_size}; it must be a multiple of the {at_once} rows that go through the"
            f" model at once (micro_batch {config.micro_batch} on {at_once // config.micro_batch} processes)"
        )
    values = {
        "bf16": False,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "report_to": "none",
        "disable_tqdm": True,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
        **foreign_options(SFTConfig, settings.options, "sft.options", OWNED),
        "output_dir": str(config.run_dir),
        "seed": config.seed,
        "save_steps": config.save_every,
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": settings.batch_size // at_once,
        "learning_rate": settings.learning_rate,
        "max_steps": settings.steps or math.ceil(settings.epochs * rows / settings.batch_size),
        "max_length": None,
        "packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "logging_steps": 1,
    }
    try:
        return SFTConfig(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sft.options: {' '.join(str(error).split())}") from error


class SkySFTTrainer(SFTTrainer):
    """`trl.SFTTrainer` on segments. `on_numbers` hears of what is logged for a step."""

    def __init__(
        self,
        model: Any,
        segments: Sequence[Segment],
        *,
        args: SFTConfig,
        processing_class: Any,
        on_numbers: OnNumbers | None = None,
        **options: Any,
    ) -> None:
        self._on_numbers = on_numbers
        super().__init__(
            model=model, args=args, train_dataset=rows(segments), processing_class=processing_class, **options
        )
        self.remove_callback(PrinterCallback)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with writing(Path(self.args.output_dir or ".", f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: TRL's describes a model of the hub, and the run directory holds what there is to say."""

    def export(self, final: Path, adapter: Path) -> None:
        """Write the whole model and its tokenizer to `final`, adapters merged into it; called on every rank.

        Adapters also go to `adapter`, as PEFT loads them on the model that they were trained on.
        """
        if not is_peft_model(self.model):
            self.save_model(str(final))
            return
        self.save_model(str(adapter))
        main, weights = self.accelerator.is_main_process, {}
        for name, value in named_weights(self.accelerator.unwrap_model(self.model)):
            if main:
                weights[name] = value.cpu()
        if main:
            base = self.accelerator.unwrap_model(self.model).get_base_model()
            assert self.processing_class is not None
            with files.appearing(final) as partial:
                partial.mkdir(parents=True)
                write_checkpoint(partial, weights, base.config)
                self.processing_class.save_pretrained(partial)
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Tell of a step's numbers beside what TRL does with them."""
        super().log(logs, start_time)
        if self._on_numbers is not None and "loss" in logs:
            self._on_numbers(self.state.global_step, logs)


def rows(segments: Sequence[Segment]) -> Dataset:
    """One row a segment: its ids, and as labels the ids under mask 1."""
    return Dataset.from_list(
        [
            {
                "input_ids": segment.token_ids,
                "labels": [
                    token if mask else IGNORED for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True)
                ],
            }
            for segment in segments
        ]
    )
