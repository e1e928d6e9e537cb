"""Configuration: values from file and command line, and what each mistake is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.assembly import make_format, make_pipeline, make_renderer, make_rules, with_scripts
from sky_trainer.commands.demo import recipe
from sky_trainer.config import Config, RolloutConfig, from_mapping, load, to_mapping, write
from sky_trainer.grpo import grpo_config
from sky_trainer.settings import every_key, with_overrides
from skyenv.core import SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.loading import load_tasks
from skyenv.errors import ConfigError
from skyenv.history import MaskObservations
from skyenv.rollout import TurnRules, byte_renderer
from skyenv.types import Message
from skyenv.vector.lanes import StageWidths


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
        ({"rollout": {"rows": "all"}}, "must be one of trajectory, last, segment, turn"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size is 1; it must be at least 2"),
        ({"rollout": {"stop_policy": {"stuk": "mask"}}}, "unknown reason 'stuk'"),
        ({"rollout": {"stop_policy": {"stuck": "hide"}}}, "stop_policy.stuck: 'hide'"),
        ({"tasks": {"ids": [1]}}, "tasks.ids is [1]; write a list of strings"),
        ({"tasks": {"source": 7}}, "tasks.source is 7; write text"),
        ({"grpo": [1]}, "grpo is [1]; write a mapping"),
        ({"micro_batch": 7}, "micro_batch is 7, which does not divide the 32 rows"),
        ({"rollout": {"deadlines": {"wall_clock": 5}}}, "rollout.deadlines.wall_clock: choose of init_timeout, turn_"),
        ({"rollout": {"deadlines": {"init_timeout": 0}}}, "rollout.deadlines.init_timeout is 0; write a number of s"),
        ({"rollout": {"format": "hermis"}}, "rollout.format: unknown tool-call format 'hermis'; did you mean 'hermes'"),
        ({"rollout": {"format": "no.such:Thing"}}, "rollout.format: cannot import 'no.such'"),
        ({"rollout": {"format": ".:Thing"}}, "rollout.format: cannot import '.'"),
        ({"rollout": {"format": "json:dumps"}}, "rollout.format: <function dumps"),
        ({"rollout": {"format": "openai"}}, "rollout.format is openai, whose calls a server reports"),
        ({"rollout": {"format": "openai", "describe_tools": "names"}}, "rollout.describe_tools is names, but openai"),
        ({"rollout": {"history": "trim"}}, "rollout.history is 'trim'; it must be one of keep, strip"),
        ({"rollout": {"template_options": [1]}}, "rollout.template_options is [1]; write a mapping"),
        ({"rollout": {"template_options": {"tools": []}}}, "rollout.template_options.tools: the renderer sets it"),
        (
            {"rollout": {"condenser": "forget"}},
            "rollout.condenser: unknown name 'forget'; choose none",
        ),
        ({"rollout": {"condenser": "json:dumps"}}, "has no method condense"),
        ({"rollout": {"condense_tokens": 9}}, "rollout.condense_tokens is 9, but rollout.condenser is none"),
        ({"rollout": {"condense_turns": 9}}, "rollout.condense_turns is 9, but rollout.condenser is none"),
        ({"rollout": {"condense_turns": 1}}, "rollout.condense_turns is 1; it must be at least 2"),
        ({"rollout": {"condense_tokens": -1}}, "rollout.condense_tokens is -1; it must be at least 0"),
        ({"rollout": {"observation_tokens": -1}}, "rollout.observation_tokens is -1; it must be at least 0"),
        ({"rollout": {"remind_turns": 2.5}}, "rollout.remind_turns is 2.5; write a whole number"),
        ({"rollout": {"remind_tokens": -1}}, "rollout.remind_tokens is -1; it must be at least 0"),
        ({"rollout": {"remind_seconds": "nan"}}, "rollout.remind_seconds is 'nan'; write a number"),
        ({"rollout": {"remind_seconds": 10**400}}, "write a number"),
        ({"rollout": {"wall_clock": 0}}, "rollout.wall_clock is 0.0; it must be at least 1"),
        ({"rollout": {"stuck": "lenient"}}, "rollout.stuck is 'lenient'; it must be one of strict, skyrl, off"),
        (
            {"rollout": {"max_context": 1024}},
            "rollout.max_context is 1024; it must be above rollout.max_tokens",
        ),
        ({"rollout": {"history": "strip"}}, "rollout.history is strip, which makes several segments"),
        (
            {"rollout": {"condenser": "summarise"}},
            "set rollout.rows to segment, which trains on all",
        ),
        ({"rollout": {"stop_policy": {"max_turns": -1}}}, "rollout.stop_policy.max_turns: -1 is not keep"),
        ({"rollout": {"stop_policy": {"engine_error": "zero"}}}, "rollout.stop_policy.engine_error: a failure"),
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


@given(
    st.dictionaries(st.sampled_from(every_key(Config)), st.one_of(st.none(), st.booleans(), st.integers(), st.text()))
)
def test_any_values_are_taken_or_refused_by_name(data: dict[str, Any]) -> None:
    words = [word for key, value in data.items() for word in (f"--{key}", str(value))]
    config, complaint = None, ""
    try:
        config = from_mapping(with_overrides({}, words))
    except ConfigError as error:
        complaint = str(error)
    assert complaint if config is None else from_mapping(to_mapping(config)) == config


MEMORY = """
rollout:
  rows: last
  history: strip
  template_options: {enable_thinking: false}
  condenser: skyenv.history:MaskObservations
  condense_tokens: 9000
  condense_turns: 12
  remind_turns: 5
  remind_tokens: 2000
  remind_seconds: 60
  observation_tokens: 1500
  stuck: off
  format: skyenv.formats.codeact:CodeAct
  stop_policy: {max_turns: zero, stuck: penalty, context: 0.25}
"""


def test_long_memory_reaches_the_rules_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MEMORY)
    rollout = load(path).rollout
    assert make_rules(rollout) == TurnRules(
        stuck=None,
        remind_turns=5,
        remind_tokens=2000,
        remind_seconds=60.0,
        observation_tokens=1500,
        condenser=MaskObservations(),
        condense_tokens=9000,
        condense_turns=12,
    )
    assert make_format(rollout).name == "codeact"
    write(load(path), path)
    assert load(path).rollout == rollout


def test_the_chat_template_gets_its_options(tokenizer: Any) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template += "{%- if add_generation_prompt and enable_thinking is false %}(brief){%- endif %}"
    plain, brief = (
        make_renderer(thinking, RolloutConfig(history="strip", template_options=options))
        for options in ({}, {"enable_thinking": False})
    )
    prompt = [Message("user", "go")]
    assert brief.decode(brief.prompt(prompt, ())) == plain.decode(plain.prompt(prompt, ())) + "(brief)"
    assert brief.history == "strip"
    with pytest.raises(ConfigError, match=r"rollout.template_options.enable_thinkin: .* has no such variable"):
        make_renderer(tokenizer, RolloutConfig(template_options={"enable_thinkin": False}))


def test_scripts_are_never_asked_for_a_summary() -> None:
    rollout = RolloutConfig(condenser="summarise", condense_tokens=100, observation_tokens=10)
    assert make_rules(with_scripts(rollout)) == TurnRules()


def test_slots_and_order_reach_the_pipeline() -> None:
    deadlines = {"admission_timeout": 60, "eval_timeout": 90.5}
    data = {
        "deadlines": deadlines,
        "concurrency": 6,
        "init_concurrency": 2,
        "eval_concurrency": 3,
        "grade_ahead": 2,
        "longest_first": True,
    }
    config = from_mapping({"rollout": data})
    parts = (ScriptedEngine(byte_renderer(), []), byte_renderer(), cast(SandboxProvider, None), load_tasks("builtin"))
    pipeline = make_pipeline(*parts, config.env, config.rollout)
    assert pipeline.widths == StageWidths(init=2, run=6, eval=3, live=6, ahead=2)
    assert pipeline.longest_first is not None
    assert (pipeline.limits.admission_timeout, pipeline.limits.eval_timeout) == (60, 90.5)
    assert make_pipeline(*parts, config.env, RolloutConfig()).longest_first is None
    with pytest.raises(ConfigError, match=r"rollout\.grade_ahead is -1"):
        from_mapping({"rollout": {"grade_ahead": -1}})


def test_an_evaluation_may_be_greedy_and_forget() -> None:
    data = {"rollout": {"condenser": "forget_half", "history": "strip", "temperature": 0, "format": "openai"}}
    assert from_mapping(data, training=False).rollout.condenser == "forget_half"
    with pytest.raises(ConfigError, match=r"rollout.condense_turns is 1"):
        from_mapping({"rollout": {"condense_turns": 1}}, training=False)


def test_defaults_are_valid() -> None:
    assert from_mapping({}) == Config()
    assert grpo_config(Config()).num_generations == Config().rollout.group_size
