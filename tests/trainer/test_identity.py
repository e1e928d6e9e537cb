"""A run directory belongs to a run by what its configuration means, not by how that is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sky_trainer.cluster import with_whole_paths
from sky_trainer.config import from_mapping, load
from sky_trainer.grpo import grpo_config
from sky_trainer.identity import prepare_directory
from skyenv.errors import ConfigError

GIVEN: dict[str, Any] = {
    "out": "runs/x",
    "model": {"path": "models/m"},
    "tasks": {"source": "rows.jsonl"},
    "grpo": {"learning_rate": "1e-5"},
    "env": {"options": {"prompt": "brief"}},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what `GIVEN` names in it."""
    home = tmp_path / "home"
    (home / "models/m").mkdir(parents=True)
    (home / "rows.jsonl").touch()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    return home


def with_changes(**changes: Any) -> dict[str, Any]:
    return {
        key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value for key, value in GIVEN.items()
    } | changes


def began(home: Path) -> None:
    """As after a step."""
    (home / "runs/x/metrics.jsonl").write_text('{"step": 1}\n')


def test_a_run_goes_on_however_its_paths_are_spelled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_directory(from_mapping(GIVEN))
    began(home)
    (home / "link").symlink_to(home / "models")
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    for model, rows, out in (
        ("models/m", "rows.jsonl", "runs/x"),
        ("./models/../models/m/", f"{home}/rows.jsonl", "runs/./x"),
        ("~/models/m", "~/rows.jsonl", "~/runs/x"),
        ("link/m", "./rows.jsonl", f"{home}/runs/x"),
    ):
        prepare_directory(from_mapping(with_changes(model={"path": model}, tasks={"source": rows}, out=out)))
        prepare_directory(with_whole_paths(from_mapping(GIVEN)))
    prepare_directory(from_mapping(GIVEN))
    monkeypatch.chdir(elsewhere)
    prepare_directory(
        from_mapping(
            with_changes(model={"path": f"{home}/models/m"}, tasks={"source": "../rows.jsonl"}, out="../runs/x")
        )
    )
    assert not (elsewhere / "runs").exists()


def test_a_run_that_moved_with_all_it_names_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_directory(from_mapping(GIVEN))
    began(home)
    moved = tmp_path / "moved"
    shutil.move(home, moved)
    monkeypatch.chdir(moved)
    prepare_directory(from_mapping(GIVEN))


def test_numbers_are_numbers_also_as_text(home: Path) -> None:
    prepare_directory(from_mapping(GIVEN))
    began(home)
    prepare_directory(from_mapping(with_changes(grpo={"learning_rate": 0.00001, "report_to": "tensorboard"})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"path": "models/other"}},
            "model.path was 'models/m' and is 'models/other' now",
        ),
        ({"tasks": {"source": "builtin"}}, "tasks.source was 'rows.jsonl' and is 'builtin' now"),
        ({"grpo": {"learning_rate": 1e-4}}, "grpo.learning_rate was '1e-5' and is 0.0001 now"),
        ({"grpo": {"beta": 0.1}}, "grpo.beta was None and is 0.1 now"),
        ({"env": {"options": {"prompt": "full"}}}, "env.options.prompt was 'brief' and is 'full' now"),
        ({"seed": 3, "lora": {"rank": 4}}, "holds a run with another seed, lora.rank: seed was 0 and is 3 now"),
    ],
)
def test_what_differs_is_told_with_what_it_was(home: Path, changes: dict[str, Any], message: str) -> None:
    prepare_directory(from_mapping(GIVEN))
    began(home)
    before = (home / "runs/x/config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        prepare_directory(from_mapping(with_changes(**changes)))
    assert message in str(caught.value)
    assert "write what it was, or choose another directory" in str(caught.value)
    assert (home / "runs/x/config.yaml").read_text() == before


def test_the_written_configuration_starts_the_same_run(home: Path) -> None:
    prepare_directory(from_mapping(GIVEN))
    again = load(home / "runs/x/config.yaml")
    assert again == from_mapping(GIVEN)
    assert grpo_config(again).learning_rate == 1e-5
    assert yaml.safe_load((home / "runs/x/config.yaml").read_text())["model"]["path"] == "models/m"
    prepare_directory(again)


def test_a_run_that_never_began_may_be_put_right(home: Path) -> None:
    """A wrong option is found after the directory was made: the right one goes on in it."""
    prepare_directory(from_mapping(with_changes(env={"options": {"prompt": "brif"}})))
    prepare_directory(from_mapping(GIVEN))
    assert load(home / "runs/x/config.yaml") == from_mapping(GIVEN)
