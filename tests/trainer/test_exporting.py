"""`sky_trainer export`: what an adapter run left, as one whole model with the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer.cli import main
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.sections.lora import LoraConfig, with_adapters

from .conftest import MakeTrainer, Player
from .test_models import experts, shake


def adapted(base: Any, folder: Path, tokenizer: Any, lora: LoraConfig) -> Any:
    """A base in `warm_start`, an adapter for it in `final`, and the policy that both are."""
    base.save_pretrained(folder / "warm_start")
    tokenizer.save_pretrained(folder / "warm_start")
    policy = with_adapters(load_model(str(folder / "warm_start")), lora)
    shake(policy)
    policy.save_pretrained(folder / "final", save_embedding_layers=False)
    tokenizer.save_pretrained(folder / "final")
    (folder / "config.yaml").write_text("{}\n")
    return policy


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.tensor([tokenizer.encode("alpha beta gamma")])).logits
    return found


def same_and_whole(policy: Any, folder: Path, out: Path, tokenizer: Any) -> None:
    """`out` is loaded by transformers alone, and is neither the base nor an adapter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert not (out / "adapter_config.json").exists()
    whole = AutoModelForCausalLM.from_pretrained(out)
    expected = logits(policy, tokenizer)
    torch.testing.assert_close(logits(whole, tokenizer), expected, atol=1e-5, rtol=1e-4)
    assert (logits(load_model(str(folder / "warm_start")), tokenizer) - expected).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, alpha=8),
        LoraConfig(rank=4, rslora=True, targets=("q_proj", "down_proj")),
        LoraConfig(rank=4, whole=("lm_head",)),
    ],
)
def test_the_merged_model_has_the_logits_of_the_adapter_over_its_base(
    lora: LoraConfig, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    policy = adapted(model, tmp_path / "run", tokenizer, lora)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_and_whole(policy, tmp_path / "run", tmp_path / "out", tokenizer)


def test_a_tied_head_stays_tied(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    policy = adapted(model, tmp_path / "run", tokenizer, LoraConfig(rank=4))
    assert main(["export", str(tmp_path / "run" / "final"), str(tmp_path / "out")]) == 0
    same_and_whole(policy, tmp_path / "run", tmp_path / "out", tokenizer)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_packed_experts_are_written_under_the_names_of_checkpoints(tokenizer: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    lora = LoraConfig(rank=4, targets=("q_proj",), parameters=("mlp.experts.down_proj",))
    policy = adapted(experts(tokenizer), tmp_path / "run", tokenizer, lora)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    same_and_whole(policy, tmp_path / "run", tmp_path / "out", tokenizer)
    written, began = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "run/warm_start"))
    assert written.keys() == began.keys()


def test_a_run_that_moved_is_exported_and_a_base_may_be_named(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    policy = adapted(model, tmp_path / "run", tokenizer, LoraConfig(rank=4))
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "run", moved)
    assert main(["export", str(moved), str(tmp_path / "first")]) == 0
    same_and_whole(policy, moved, tmp_path / "first", tokenizer)
    base = tmp_path / "base"
    shutil.copytree(moved / "warm_start", base)
    shutil.move(moved / "final", tmp_path / "alone")
    assert main(["export", str(tmp_path / "alone"), str(tmp_path / "second"), "--base", str(base)]) == 0
    same_and_whole(policy, moved, tmp_path / "second", tokenizer)


def test_a_type_may_be_asked_for(
    model: Any, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted(model, tmp_path / "run", tokenizer, LoraConfig(rank=4))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (said["dtype"], said["merged"]) == ("bfloat16", True)
    assert load_model(str(tmp_path / "out"), "auto").dtype == torch.bfloat16


def test_what_training_left_is_exported(
    player: Player, make_trainer: MakeTrainer, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The trainer's own export and checkpoint, with the base that it began from."""
    run = tmp_path / "run"
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = model.name_or_path = str(tmp_path / "base")
    trainer = make_trainer(player, {"lora": {"rank": 4}, "steps": 2, "save_every": 1})
    trainer.train()
    trainer.export(run / "final")
    (run / "config.yaml").write_text("{}\n")
    assert main(["export", str(run), str(tmp_path / "last")]) == 0
    assert main(["export", str(run), str(tmp_path / "second"), "--step", "2"]) == 0
    assert main(["export", str(run), str(tmp_path / "first"), "--step", "1"]) == 0
    last, second, first = (logits(load_model(str(tmp_path / n)), tokenizer) for n in ("last", "second", "first"))
    torch.testing.assert_close(last, logits(trainer.model, tokenizer), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, second)
    assert not torch.allclose(first, second, atol=1e-6)
    assert len(load_tokenizer(str(tmp_path / "first"))) == len(tokenizer)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "nowhere is no directory of a run, and no model or adapter lies there"),
        (["run", "out", "--best"], "run has no best; it has final"),
        (["run", "out", "--step", "7"], "run has no checkpoint-7; it has final"),
        (["run", "run"], "run is there already; name a new directory"),
        (["run/final", "out", "--best"], "is a policy and no run; leave --best and --step out"),
        (["run/warm_start", "out", "--base", "x"], "--base is for adapters"),
        (["run", "out", "--base", "gone"], "is an adapter for 'gone', which cannot be loaded"),
        (["run", "out", "--base", "other"], "is an adapter for another model than 'other'"),
        (["run", "run/config.yaml/out"], "cannot write to run/config.yaml/out"),
    ],
)
def test_wrong_input(
    words: list[str],
    message: str,
    model: Any,
    tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sky_trainer import tiny

    adapted(model, tmp_path / "run", tokenizer, LoraConfig(rank=4))
    tiny.make_model(tokenizer, hidden=64, layers=1, seed=0).save_pretrained(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
