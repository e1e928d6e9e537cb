"""The estimate of memory: parameters as published, the right direction of each setting, and what a run allocates."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sky_trainer import tiny
from sky_trainer.gpus import assumed
from sky_trainer.memory import TILES_CPU, Load, Shape, estimate, serving, shape_of
from sky_trainer.sections.lora import LoraConfig, with_adapters
from sky_trainer.shapes import PUBLISHED, model_config, without_weights
from skyenv.errors import ConfigError

FACTOR = 1.3
"""Between the estimate and the most that was allocated at a time (counted by torch, so without what libraries keep)."""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-0.6B", 0.60),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-14B", 14.77),
        ("Qwen/Qwen3-32B", 32.76),
        ("Qwen/Qwen3-30B-A3B", 30.53),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7.62),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    config, source = model_config(name, published=True)
    assert "published shapes" in source
    assert shape_of(without_weights(config)).parameters / 1e9 == pytest.approx(billions, abs=0.006)


def test_shapes_stand_in_only_when_asked_to() -> None:
    with pytest.raises(ConfigError, match="Qwen3-8B': no configuration to read"):
        model_config("Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="acme/none"):
        model_config("acme/none", published=True)
    assert "Qwen/Qwen3-8B" in PUBLISHED


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(without_weights(model_config("Qwen/Qwen3-8B", published=True)[0]))


WHOLE = Load(4, mixed=True, shards=1, reference=True, moments=8, checkpointing=False, rows=1, length=8192)


def test_weights_gradients_and_optimizer_of_one_gpu(shape: Shape) -> None:
    """Sixteen bytes a parameter in float32 with Adam, and four more for a reference."""
    needed = estimate(shape, WHOLE)
    held = needed.weights + needed.gradients + needed.optimizer + needed.reference
    assert held == 20 * shape.parameters
    assert needed.describe().startswith("activations")


@pytest.mark.parametrize(
    "change",
    [
        {"shards": 8},
        {"reference": False},
        {"checkpointing": True},
        {"length": 4096},
        {"moments": 2},
        {"width": 2, "moments": 4},
    ],
)
def test_what_saves_memory_is_seen_to(change: dict[str, Any], shape: Shape) -> None:
    assert estimate(shape, dataclasses.replace(WHOLE, **change)).total < estimate(shape, WHOLE).total


@pytest.mark.parametrize("change", [{"rows": 2}, {"cached": 64}, {"copies": 20}])
def test_what_costs_memory_is_seen_to(change: dict[str, Any], shape: Shape) -> None:
    assert estimate(shape, dataclasses.replace(WHOLE, **change)).total > estimate(shape, WHOLE).total


def test_adapters_are_what_trains() -> None:
    model = with_adapters(without_weights(model_config("Qwen/Qwen3-0.6B", published=True)[0]), LoraConfig(rank=8))
    whole = shape_of(model)
    # One adapter: rank x (in + out); seven linear layers a layer, 28 of them.
    sizes = [(1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024), (1024, 3072), (1024, 3072), (3072, 1024)]
    assert whole.trainable == 28 * sum(8 * (a + b) for a, b in sizes)
    needed = estimate(whole, WHOLE)
    assert needed.gradients == 4 * whole.trainable
    assert needed.weights == 4 * whole.parameters


def test_a_server_holds_weights_and_rows(shape: Shape) -> None:
    one = serving(shape, 32768, 80e9, 1, 0.9)
    assert (one.gpus, one.weights) == (1, 2 * shape.parameters)
    row = 32768 * 2 * 36 * 8 * 128 * 2
    assert one.rows == int((0.9 * 80e9 - one.weights - (1 << 30)) // row)
    assert serving(shape, 32768, 16e9, 1, 0.9).gpus == 2
    assert serving(shape, 32768, 80e6, 1, 0.9).rows == 0


@pytest.mark.parametrize(
    ("text", "count", "memory"), [("8xH100", 8, 80e9), ("H200", 1, 141e9), ("4", 4, 80e9), ("2L40S", 2, 48e9)]
)
def test_assumed_gpus(text: str, count: int, memory: float) -> None:
    gpus = assumed(text)
    assert (gpus.count, gpus.memory, gpus.kind) == (count, memory, "assumed")


@pytest.mark.parametrize("text", ["", "0xH100", "8xH1000", "x", "-1", "8 H100"])
def test_assumed_gpus_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--assume-gpu"):
        assumed(text)


SCRIPT = """
import json, sys
import torch
from sky_trainer import sft, tiny
from sky_trainer.config import Config
from sky_trainer.sections.sft import SftConfig
from skyenv.types import Segment

out, hidden, layers, rows, length, checkpointing = sys.argv[1], *map(int, sys.argv[2:])

def train(hidden, layers, rows, length):
    tokenizer = tiny.make_tokenizer(["abc def ghi"] * 5, 300)
    model = tiny.make_model(tokenizer, hidden, layers, 0)
    model.resize_token_embeddings(8192)
    segment = Segment()
    segment.append_context([5] * 16)
    segment.append_sampled([7] * (length - 16), [0.0] * (length - 16))
    options = {"use_cpu": True, "save_strategy": "no", "gradient_checkpointing": bool(checkpointing)}
    config = Config(out=out, micro_batch=rows, sft=SftConfig(steps=2, batch_size=rows, options=options))
    sft.SkySFTTrainer(
        model, [segment] * rows * 2, args=sft.sft_config(config, rows * 2), processing_class=tokenizer
    ).train()

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
    train(hidden, layers, rows, length)
profile.export_chrome_trace(out + "/trace.json")
with open(out + "/trace.json") as file:
    events = [event["args"] for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
print(max(event["Total Allocated"] for event in events if event["Device Type"] == 0))
"""


@pytest.mark.parametrize(
    ("hidden", "layers", "rows", "length", "checkpointing"),
    [(256, 8, 2, 512, False), (512, 4, 2, 256, True)],
)
def test_the_estimate_is_near_what_is_allocated(
    hidden: int, layers: int, rows: int, length: int, checkpointing: bool, tmp_path: Path
) -> None:
    words = [str(tmp_path), *(str(int(number)) for number in (hidden, layers, rows, length, checkpointing))]
    command = [sys.executable, "-c", SCRIPT, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = int(result.stdout.strip().splitlines()[-1])
    tokenizer = tiny.make_tokenizer(["abc def ghi"] * 5, 300)
    model = tiny.make_model(tokenizer, hidden, layers, 0)
    model.resize_token_embeddings(8192)
    load = Load(4, False, 1, False, 8, checkpointing, rows, length, tiles=TILES_CPU)
    assert taken / FACTOR < estimate(shape_of(model), load).total < taken * FACTOR
