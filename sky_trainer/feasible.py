"""Whether a run fits: memory of each GPU, the width of its numbers, room on the disk. Computed, nothing is loaded."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from sky_trainer.config import Config
from sky_trainer.gpus import GIB, Gpus
from sky_trainer.layout import Layout
from sky_trainer.memory import TILES_CPU, TILES_GPU, Estimate, Load, Shape, estimate, serving
from skyenv.errors import ConfigError

MAX_BATCH = 64
"""Rows that an engine in this process decodes at a time at most."""
SMALL_STEP = 1e-4
"""Learning rates below this are lost on weights of 16 bits, which keep two to three digits."""


def memory_of(config: Config, layout: Layout, shape: Shape, args: Any, length: int) -> str:
    """What a GPU has to hold for rows of `length` tokens. ConfigError when it cannot, with what to change."""
    load, gpus = load_of(config, layout, args, length), layout.gpus
    needed = estimate(shape, load)
    total = needed.total if gpus.kind == "none" else needed.on_gpu
    room = gpus.memory * (1 - layout.beside)
    text = f"training {total / GIB:.1f} of {room / GIB:.0f} GiB a GPU ({needed.describe()})"
    if total > room:
        raise ConfigError(f"{text}; {_advice(needed, load, config)}")
    if not config.engine.remote:
        return text
    return f"{text}; {_serving(config, layout, shape, length)}"


def _serving(config: Config, layout: Layout, shape: Shape, length: int) -> str:
    """What a server holds, in the GPUs that it has or in the fewest that do."""
    if config.launch.servers and not layout.serving:
        return f"{config.launch.servers} server(s) on processors, which share the memory of their machines"
    share, memory = layout.share, layout.gpus.memory
    server = serving(shape, length, memory, max(layout.serving, 1), share)
    if not server.rows:
        raise ConfigError(f"no server of such GPUs holds a row of {length} tokens; lower rollout.max_context")
    if layout.serving and server.gpus > layout.serving:
        raise ConfigError(
            f"{layout.serving} GPU(s), of which a server takes {share:.0%}, do not hold {server.weights / GIB:.1f} GiB"
            f" of weights and a row of {length} tokens; give each server {server.gpus}, in launch.options and in"
            " launch.gpus or ray.server_gpus"
        )
    needs = "has" if layout.serving else "needs"
    return (
        f"a server {needs} {server.gpus} such GPU(s) for {server.weights / GIB:.1f} GiB of weights and then caches"
        f" {server.rows} rollouts of full length; {config.rollout.concurrency} run at a time on"
        f" {layout.servers or len(config.engine.urls)} server(s)"
    )


def load_of(config: Config, layout: Layout, args: Any, length: int) -> Load:
    """How the run trains its model, as far as memory goes. `args` are TRL's."""
    width = 4 if config.model.dtype == "float32" else 2
    optimizer = str(getattr(args.optim, "value", args.optim))
    return Load(
        width=width,
        mixed=bool(args.bf16 or args.fp16),
        shards=layout.training if args.fsdp or args.deepspeed else 1,
        reference=bool(args.beta) and not config.lora.rank,
        moments=2 if "8bit" in optimizer else 0 if "sgd" in optimizer else 2 * width,
        checkpointing=bool(args.gradient_checkpointing or (args.fsdp_config or {}).get("activation_checkpointing")),
        rows=config.micro_batch,
        length=length,
        tiles=TILES_CPU if layout.gpus.kind == "none" else TILES_GPU,
        cached=0 if config.engine.remote else min(config.rollout.concurrency, MAX_BATCH),
        copies=1 if config.engine.sync == "copy" else 0,
    )


def _advice(needed: Estimate, load: Load, config: Config) -> str:
    """What makes the largest difference."""
    held = needed.weights + needed.gradients + needed.optimizer + needed.reference
    if needed.generation > held:
        return "generate less at a time: lower rollout.concurrency or rollout.max_context, or use engine.kind vllm"
    if needed.activations > held and not load.checkpointing:
        return "set grpo.gradient_checkpointing to true"
    if needed.activations > held and load.rows > 1:
        return "lower micro_batch"
    if load.shards == 1:
        return "share the weights among GPUs with grpo.fsdp, or train adapters with lora.rank"
    return "use more or larger GPUs, train adapters with lora.rank, or lower rollout.max_context"


def precision_of(config: Config, args: Any) -> str:
    """What is computed and kept in how many bits. ConfigError when steps would be rounded away."""
    wide = config.model.dtype == "float32" or bool(config.lora.rank)
    if not wide and args.learning_rate < SMALL_STEP:
        raise ConfigError(
            f"model.dtype is {config.model.dtype}: steps of {args.learning_rate:g} are smaller than its weights'"
            " rounding and are lost; write float32 and grpo.bf16 true, which computes in 16 bits"
        )
    computed = "bfloat16" if args.bf16 else "float16" if args.fp16 else config.model.dtype
    return f"computes in {computed}, steps on {'float32' if wide else config.model.dtype} weights"


def disk_of(config: Config, gpus: Gpus, shape: Shape, args: Any) -> str:
    """Room for checkpoints: weights and optimizer state of those kept and of the one being written, and the model.

    With GPUs that are only assumed, this is not the machine whose disk counts, and its room is not looked at.
    """
    kept = (args.save_total_limit or 3) + 1
    width = 4 if config.model.dtype == "float32" else 2
    needed = kept * shape.trainable * 3 * width + shape.parameters * width
    text = f"{needed / GIB:.1f} GiB for {kept} checkpoints and the model"
    if gpus.kind == "assumed":
        return f"{text}, to be had where the GPUs are"
    place = existing(config.run_dir)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(f"out: cannot write to {place}: {error.strerror}") from error
    text += f", {free / GIB:.0f} GiB free in {place}"
    if needed > free:
        raise ConfigError(f"out: {text}; free some, choose another directory or lower grpo.save_total_limit")
    return text


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
