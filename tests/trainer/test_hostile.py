"""What goes wrong around a step: disks that fill, adapters with a reference, modes of losses together."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer.record import last_checkpoint
from sky_trainer.saving import NotWritten

from .conftest import MakeTrainer, Player
from .reference import Knobs
from .test_losses import WIDE, assert_same, both, uneven

MODES = ("token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("pair", itertools.product(("grpo", "dr_grpo", "cispo", "sapo", "luspo"), MODES), ids="-".join)
def test_every_loss_with_every_correction(pair: tuple[str, str], player: Player, make_trainer: MakeTrainer) -> None:
    loss_type, mode = pair
    uneven(player)
    bound = 1.02 if loss_type == "cispo" else 0.2
    options = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode, "epsilon_high": bound}
    trainer = make_trainer(player, **options, **(WIDE if mode == "sequence_mask" else {}))
    limit = 1000.0 if mode == "sequence_mask" else 3.0
    assert_same(both(player, trainer, Knobs(loss_type, mode=mode, epsilon_high=bound, truncate_at=limit)))


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "model.safetensors"])
def test_a_disk_that_fills_at_a_checkpoint_is_said_and_the_one_before_stands(
    name: str, player: Player, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    second = tmp_path / "run" / "checkpoint-2"
    second.mkdir(parents=True)
    if name == "optimizer.pt":
        (second / name).symlink_to("/dev/full")
    else:
        (second / name).mkdir()  # what is written in another way would replace a link
    trainer = make_trainer(player, {"steps": 3, "save_every": 1})
    with pytest.raises(NotWritten, match=r"checkpoint-2 could not be written: .* goes on from the checkpoint before"):
        trainer.train()
    found = last_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.name == "checkpoint-1"
    shutil.rmtree(second)
    again = make_trainer(player, {"steps": 3, "save_every": 1})
    again.train(resume_from_checkpoint=str(found))
    assert last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-3"


def test_adapters_with_a_reference_go_on_as_if_never_stopped(
    player: Player, make_trainer: MakeTrainer, model: Any, engine: Any, tmp_path: Path
) -> None:
    """The reference stays the model without adapters, and is in no export."""
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = model.name_or_path = str(tmp_path / "base")
    played: dict[str, Any] = {}

    def collect(tasks: Any, size: int) -> Any:
        names = " ".join(task.task_id for task in tasks)
        if names not in played:
            played[names] = player(tasks, size)
        return played[names]

    def run(checkpoint: Path | None) -> Any:
        torch.manual_seed(0)
        trainer = make_trainer(collect, {"steps": 4, "save_every": 2, "lora": {"rank": 4}}, beta=0.1)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return trainer

    whole = run(None)
    expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert [row["kl"] > 0 for row in whole.state.log_history if "kl" in row][1:] == [True] * 3
    whole.export(tmp_path / "final")
    assert [path.name for path in (tmp_path / "final").iterdir() if path.is_dir()] == []
    whole.model.unload()
    engine.policy_version = 0
    resumed = run(tmp_path / "run" / "checkpoint-2")
    assert resumed.model.state_dict().keys() == expected.keys()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
