"""Configuration: values from file and command line, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, every_key, from_mapping, load, to_mapping, with_overrides, write
from sky_trainer.grpo import grpo_config
from skyenv.errors import ConfigError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"group_size": 4}, "unknown key 'group_size'; did you mean 'rollout.group_size'?"),
        ({"rollout": {"groupsize": 4}}, "unknown key 'rollout.groupsize'; did you mean 'rollout.group_size'?"),
        ({"steps": "many"}, "steps is 'many'; write a whole number"),
        ({"steps": True}, "steps is True; write a whole number"),
        ({"steps": 2.5}, "steps is 2.5; write a whole number"),
        ({"resume": "yes please"}, "resume is 'yes please'; write true or false"),
        ({"rollout": 3}, "rollout is a section"),
        ({"rollout": {"temperature": "hot"}}, "rollout.temperature is 'hot'; write a number"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature is 0.0; training needs a positive one"),
        ({"rollout": {"segments": "all"}}, "must be one of refuse, last"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size is 1; it must be at least 2"),
        ({"rollout": {"stop_policy": {"stuk": "mask"}}}, "unknown reason 'stuk'"),
        ({"rollout": {"stop_policy": {"stuck": "hide"}}}, "stop_policy.stuck: 'hide'"),
        ({"tasks": {"ids": [1]}}, "tasks.ids is [1]; write a list of strings"),
        ({"tasks": {"source": 7}}, "tasks.source is 7; write text"),
        ({"grpo": [1]}, "grpo is [1]; write a mapping"),
        ({"micro_batch": 7}, "micro_batch is 7, which does not divide the 32 rows"),
    ],
)
def test_mistakes_name_field_and_fix(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "holds a list"), ("a: [", "not valid YAML"), ("\x00", "not valid YAML")],
)
def test_files_that_hold_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")


def test_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("steps: 5\nrollout: {group_size: 4}\n")
    words = ["--steps", "9", "--rollout.group_size=2", "--grpo.learning_rate", "1e-4", "--tasks.ids", "[a, b]"]
    config = load(path, words)
    assert (config.steps, config.rollout.group_size, config.tasks.ids) == (9, 2, ("a", "b"))
    assert grpo_config(config).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps", "9"], "unexpected argument 'steps'"),
        (["--steps"], "--steps needs a value"),
        (["--steps.x", "1"], "steps is 5, not a section"),
        (["--steps", "["], "not valid YAML"),
    ],
)
def test_wrong_overrides(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_overrides({"steps": 5}, words)


def test_what_is_written_is_read_back_without_secrets(tmp_path: Path) -> None:
    config = load(recipe("demo"), ["--sandbox.token", "secret", "--rollout.stop_policy", "{stuck: 0.25}"])
    path = tmp_path / "resolved.yaml"
    write(config, path)
    assert "secret" not in path.read_text()
    again = load(path, ["--sandbox.token", "secret"])
    assert again == config


@given(st.dictionaries(st.sampled_from(every_key()), st.one_of(st.none(), st.booleans(), st.integers(), st.text())))
def test_any_values_are_taken_or_refused_by_name(data: dict[str, Any]) -> None:
    words = [word for key, value in data.items() for word in (f"--{key}", str(value))]
    config, complaint = None, ""
    try:
        config = from_mapping(with_overrides({}, words))
    except ConfigError as error:
        complaint = str(error)
    assert complaint if config is None else from_mapping(to_mapping(config)) == config


def test_defaults_are_valid() -> None:
    assert from_mapping({}) == Config()
    assert grpo_config(Config()).num_generations == Config().rollout.group_size
