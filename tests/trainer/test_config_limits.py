"""What is out of range, contradicts itself or cannot be meant: refused by field before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sky_trainer.config import from_mapping, load
from sky_trainer.supervise import server_specs
from skyenv.errors import ConfigError

VLLM = {"kind": "vllm", "urls": ["http://127.0.0.1:8000"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"out": ""}, "out is empty; name the run's directory"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"steps": 10**12}, "steps is 1000000000000; it must be at most 1000000000"),
        ({"cpu_threads": -1}, "cpu_threads is -1; it must be at least 0"),
        ({"sized_for": "8xH1000"}, "sized_for: "),
        ({"model": {"path": ""}}, "model.path is empty; name a directory or a model of the hub, or tiny"),
        ({"model": {"dtype": "fp32"}}, "model.dtype is 'fp32'; it must be one of float32, bfloat16, float16"),
        ({"model": {"hidden": 30}}, "model.hidden is 30; it must be a multiple of 8"),
        ({"model": {"hidden": 0}}, "model.hidden is 0; it must be at least 8"),
        ({"model": {"layers": 0}}, "model.layers is 0; it must be at least 1"),
        ({"model": {"vocab": 100}}, "model.vocab is 100; it must be at least 260"),
        ({"tasks": {"source": ""}}, "tasks.source is empty; name a set, a file or a folder"),
        ({"tasks": {"limit": 0}}, "tasks.limit is 0; it must be at least 1"),
        ({"tasks": {"limit": -1}}, "tasks.limit is -1; it must be at least 1"),
        ({"tasks": {"ids": ["a", "b", "a"]}}, "tasks.ids names a twice"),
        ({"stages": [{"steps": 0}]}, "stages[0].steps is 0; it must be at least 1"),
        ({"stages": [{"steps": 1, "tasks": {"limit": 0}}]}, "stages[0].tasks.limit is 0"),
        ({"stages": [{"steps": 1}, {"steps": 2, "limits": {"max_turns": 0}}]}, "stages[1].limits: with these"),
        ({"stages": [{"stepz": 1}]}, "unknown key 'stages[0].stepz'; did you mean 'stages[0].steps'?"),
        ({"stages": {"steps": 1}}, "stages is {'steps': 1}; write a list of sections"),
        ({"evaluation": {"tasks": {"limit": 0}}}, "evaluation.tasks.limit is 0"),
        ({"warm_start": {"learning_rate": 0}}, "warm_start.learning_rate is 0.0; it must be above 0"),
        ({"warm_start": {"expert_rate": 2.5}}, "warm_start.expert_rate is 2.5; it is a share, above 0 and at most 1"),
        ({"warm_start": {"expert_rate": 0}}, "warm_start.expert_rate is 0.0; it is a share"),
        ({"launch": {"env": {"A": 1}}}, "launch.env.A is 1; write text, in quotes where it looks like a number"),
        ({"sandbox": {"url": "node:8080"}}, "sandbox.url is 'node:8080'; it must start with http:// or https://"),
        ({"sandbox": {"url": ""}}, "sandbox.url is ''; it must start with http:// or https://"),
        ({"engine": {**VLLM, "sync": "lora"}}, "engine.sync is lora, but lora.rank is 0"),
        (
            {"engine": {**VLLM, "sync": "lora"}, "lora": {"rank": 8, "whole": ["lm_head"]}},
            "engine.sync is lora, which carries adapters alone, and lora.whole is set",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (8, [], "launch.options: vLLM takes adapters with --enable-lora"),
        (32, ["--enable-lora"], "lora.rank is 32, but vLLM takes up to 16; add --max-lora-rank 32 to launch.options"),
        (32, ["--enable-lora", "--max-lora-rank=8"], "lora.rank is 32, but vLLM takes up to 8"),
        (32, ["--enable-lora", "--max-lora-rank", "32"], ""),
    ],
)
def test_a_server_that_would_refuse_the_adapter_is_not_started(rank: int, options: list[str], message: str) -> None:
    launch = {"servers": 1, "environment": "venv", "options": options}
    config = from_mapping({"engine": {"kind": "vllm", "sync": "lora"}, "lora": {"rank": rank}, "launch": launch})
    if not message:
        assert len(server_specs(config, "model", "python")) == 1
        return
    with pytest.raises(ConfigError) as caught:
        server_specs(config, "model", "python")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 5\nseed: 1\nsteps: 6\n", "'steps' stands twice, in lines 1 and 3; leave one out"),
        ("rollout:\n  group_size: 2\n  group_size: 4\n", "'group_size' stands twice, in lines 2 and 3"),
        ("rollout: {group_size: 2, group_size: 4}\n", "'group_size' stands twice, in lines 1 and 1"),
        ("rollout:\n\tgroup_size: 2\n", "line 2"),
        ("steps 5\n", "holds a str; write a mapping"),
        ("? [a]\n: 1\n", "not valid YAML"),
    ],
)
def test_wrong_yaml_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "c.yaml")
    assert message in str(caught.value)
    assert str(tmp_path / "c.yaml") in str(caught.value)


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load(tmp_path)


def test_text_on_the_command_line_needs_no_second_quotes(tmp_path: Path) -> None:
    """What YAML would read as a date, a number or a truth is text where text is wanted."""
    (tmp_path / "c.yaml").write_text("")
    words = [
        "--out",
        "2026-11-30",
        "--engine.token",
        "12345",
        "--model.path",
        "1e5",
        "--env.id=on",
        "--sandbox.url",
        "null",
    ]
    config = load(tmp_path / "c.yaml", words)
    assert (config.out, config.engine.token, config.model.path, config.env.id) == ("2026-11-30", "12345", "1e5", "on")
    assert config.sandbox.url is None
    assert load(tmp_path / "c.yaml", ["--out", "'quoted'"]).out == "quoted"
