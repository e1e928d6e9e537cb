"""What is trained: adapters beside frozen weights, a mixture of experts, activations computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer.config import from_mapping
from sky_trainer.models import load_model
from sky_trainer.sections.lora import LoraConfig, with_adapters
from skyenv.errors import ConfigError

from .conftest import MakeTrainer, Player, once
from .reference import Knobs
from .test_grpo import gradient, score
from .test_losses import assert_same, both, uneven

LORA = {"lora": {"rank": 4, "alpha": 8}}
WITH_HEAD = {"lora": {"rank": 4, "alpha": 8, "whole": ["lm_head"]}}


def shake(model: Any) -> None:
    """Adapters that change something: a fresh one is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "modules_to_save.default" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def test_adapters_alone_train(player: Player, make_trainer: MakeTrainer, model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(player, {**LORA, "steps": 2})
    trainer.train()
    after = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    added = after.keys() - before.keys()
    assert added
    assert all("lora_" in name for name in added)
    assert any(after[name].abs().max() > 0 for name in added if "lora_B" in name)
    for name, value in before.items():
        assert torch.equal(value, after[name])
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-4  # the engine has them too


def test_a_head_that_trains_whole_beside_adapters(player: Player, make_trainer: MakeTrainer, model: Any) -> None:
    before = model.lm_head.weight.clone()
    trainer = make_trainer(player, {**WITH_HEAD, "steps": 2})
    trainer.train()
    assert torch.equal(before, model.lm_head.original_module.weight)
    assert not torch.equal(before, model.lm_head.weight)
    assert trainer.state.log_history[1]["sampling/sampling_logp_difference/max"] < 1e-4  # the engine has it too


@pytest.mark.parametrize("lora", [LORA, WITH_HEAD])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_loss_and_gradient_with_adapters(
    lora: Any, beta: float, player: Player, make_trainer: MakeTrainer, model: Any
) -> None:
    """The reference of the KL is the model without adapters, also when they were trained before."""
    import copy

    uneven(player)
    reference = copy.deepcopy(model) if beta else None
    trainer = make_trainer(player, lora, beta=beta)
    shake(trainer.model)
    assert_same(both(player, trainer, Knobs(beta=beta), reference))


@pytest.mark.parametrize("lora", [LORA, WITH_HEAD])
def test_a_saved_adapter_is_the_policy(
    lora: Any, player: Player, make_trainer: MakeTrainer, model: Any, tmp_path: Path, tokenizer: Any
) -> None:
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = model.name_or_path = str(tmp_path / "base")
    trainer = make_trainer(player, lora)
    shake(trainer.model)
    trainer.save_model(str(tmp_path / "final"))
    again = load_model(str(tmp_path / "final")).eval()
    ids = torch.tensor([tokenizer.encode("alpha beta")])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": -1}, "lora.rank is -1; it must be at least 0"),
        ({"rank": 4, "alpha": 0}, "lora.alpha is 0; it must be above 0"),
        ({"rank": 4, "targets": "q_proj,lm_head"}, "lora.targets: lm_head cannot have an adapter"),
        ({"targets": "q_proj"}, "lora.rank is 0, so lora.targets"),
        ({"whole": "lm_head"}, "lora.rank is 0, so lora.whole"),
    ],
)
def test_wrong_adapters(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"lora": lora})


def test_a_target_that_the_model_does_not_have(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"lora: .*q_porj"):
        with_adapters(model, LoraConfig(rank=4, targets=("q_porj",)))


def test_what_cannot_train_whole(model: Any) -> None:
    with pytest.raises(ConfigError, match="no module lm_haed"):
        with_adapters(model, LoraConfig(rank=4, whole=("lm_haed",)))
    model.config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="lm_head is tied"):
        with_adapters(model, LoraConfig(rank=4, whole=("lm_head",)))


def test_checkpointed_activations_give_the_same_gradient(player: Player, make_trainer: MakeTrainer) -> None:
    uneven(player)
    collect = once(player)
    found = []
    for checkpointing in (False, True):
        trainer = make_trainer(collect, gradient_checkpointing=checkpointing)
        if checkpointing:
            trainer.model.gradient_checkpointing_enable()  # what TRL's training loop does first
        _, batch = score(trainer)
        found.append(gradient(trainer, batch))
    assert torch.allclose(found[0], found[1], atol=1e-6)


def experts(tokenizer: Any) -> Any:
    """A small mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


class TestExperts:
    """A mixture of experts: its load-balancing loss trains the router, and the rest is as for any model."""

    @pytest.fixture
    def model(self, tokenizer: Any) -> Any:
        return experts(tokenizer)

    def test_loss_and_gradient(self, player: Player, make_trainer: MakeTrainer) -> None:
        uneven(player)
        assert_same(both(player, make_trainer(player, router_aux_loss_coef=0.0), Knobs()))

    def test_the_router_is_balanced_where_nothing_else_trains(self, player: Player, make_trainer: MakeTrainer) -> None:
        player.reward = lambda group, sample: 1.0
        collect = once(player)
        for coefficient in (0.0, 0.5):
            trainer = make_trainer(collect, router_aux_loss_coef=coefficient)
            _, batch = score(trainer)
            trained = float(gradient(trainer, batch).abs().max())
            assert (trained > 1e-6) == (coefficient > 0)

    def test_it_trains_and_the_engine_sees_it(self, player: Player, make_trainer: MakeTrainer) -> None:
        trainer = make_trainer(player, {"steps": 2, "micro_batch": 2}, router_aux_loss_coef=0.01)
        trainer.train()
        logged = trainer.state.log_history[1]
        assert logged["aux_loss"] > 0
        assert logged["sampling/sampling_logp_difference/max"] < 1e-3
