"""Where the numbers of a pipeline go: files, TensorBoard, Prometheus, the console, a picture."""

from __future__ import annotations

import io
import json
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sky_trainer import tiny
from sky_trainer.cli import main
from sky_trainer.config import from_mapping
from sky_trainer.display import Display
from sky_trainer.drawing import busy_between, most_at_once
from sky_trainer.metering import Metering
from sky_trainer.readings import one_line, stage_table
from sky_trainer.run import train
from sky_trainer.sections.metrics import MetricsConfig
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, SandboxLost
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.prometheus import series_of, served
from skyenv.vector.stopping import FailureThreshold
from skyenv.vector.timeline import read_timeline
from tests.rollout.adventure import RENDERER, WIN, Adventure, Ledger, Plan, Quest


async def played(metering: Metering, count: int = 4, broken: str = "") -> None:
    """Runs of an adventure under this metering."""
    plan = lambda task_id: Plan(init_error=SandboxLost("gone") if task_id == broken else None)  # noqa: E731
    pipeline = RolloutPipeline(
        engine=ScriptedEngine(RENDERER, WIN),
        make_env=lambda: Adventure(Ledger(), plan),
        renderer=RENDERER,
        meter=metering.meter,
        failures=FailureThreshold(1.0),
    )
    async for _trajectory in pipeline.run([Quest(f"q{n}") for n in range(count)], 2):
        await metering.trajectory_ended()


def scraped(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_prometheus_reads_the_same_numbers_on_loopback() -> None:
    metering = Metering(None, MetricsConfig(prometheus_port=0))
    async with metering.opened():
        assert metering.port is not None
        assert await to_thread.run_sync(scraped, metering.port) == {
            f"{series_of(name)[0]}{sorted(series_of(name)[1])}": value
            for name, value in metering.meter.numbers().items()
        }
        await played(metering, broken="q1")
        told = await to_thread.run_sync(scraped, metering.port)
        numbers = metering.meter.numbers()
        assert told == pytest.approx(
            {f"{series_of(name)[0]}{sorted(series_of(name)[1])}": value for name, value in numbers.items()}
        )
        assert told["skyenv_failures[('kind', 'SandboxLost')]"] == 2
        assert told["skyenv_pass_at[('k', '2')]"] == numbers["pass@2"]
        assert "skyenv_stage_wait_p95[('stage', 'init')]" in told
        with pytest.raises(ConfigError, match=r"metrics\.prometheus_port: cannot listen"):
            with served(dict, metering.port):
                pass
    with pytest.raises(OSError, match="refused"):
        await to_thread.run_sync(scraped, metering.port)


async def test_files_and_tensorboard_hold_the_numbers(tmp_path: Path) -> None:
    metering = Metering(tmp_path / "run", rows=True, board=True)
    async with metering.opened():
        await played(metering)
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row.pop("step") == row["trajectories/done"] == 8
    assert len(read_timeline(tmp_path / "run/timeline.jsonl")) == 8
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    await to_thread.run_sync(board.Reload)
    assert {name: board.Scalars(name)[0].value for name in board.Tags()["scalars"]} == pytest.approx(row, rel=1e-5)


async def test_no_timeline_where_it_is_not_wanted(tmp_path: Path) -> None:
    metering = Metering(tmp_path, MetricsConfig(timeline=False))
    async with metering.opened():
        await played(metering)
        assert (await metering.step())["trajectories/done"] == 8
    assert list(tmp_path.iterdir()) == []


async def test_what_a_killed_loop_leaves_is_written_too(tmp_path: Path) -> None:
    metering = Metering(tmp_path, rows=True)
    with anyio.CancelScope() as scope:
        async with metering.opened():
            await played(metering)
            scope.cancel()
    assert (tmp_path / "metrics.jsonl").stat().st_size > 0


async def test_people_see_the_same_numbers() -> None:
    metering = Metering(None)
    assert one_line({}).count("-") > 10
    await played(metering, broken="q0")
    numbers = metering.meter.numbers()
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(stage_table(numbers))
    for text in (console.export_text(), one_line(numbers)):
        for words in ("8 done, 2 failed", "SandboxLost 2", "pass@2", "tokens/s", "init", "eval"):
            assert words in text


@pytest.mark.parametrize("config", [{"prometheus_port": 70000}, {"engine_slots": 0}])
def test_wrong_settings_are_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"metrics.{next(iter(config))}"):
        MetricsConfig(**config)


def test_a_rollout_keeps_numbers_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rollout", "--policy", "gold", "--level", "1", "--limit", "2", "--out", str(tmp_path / "t.jsonl")]
    assert main([*words, "--metrics", str(tmp_path / "run"), "--prometheus-port", "0"]) == 0
    assert "2 done" in capsys.readouterr().out
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert row["trajectories/done"] == 2
    for name in ("a.svg", "b.png"):
        assert main(["timeline", str(tmp_path / "run"), "--out", str(tmp_path / "out" / name)]) == 0
    assert ET.parse(tmp_path / "out/a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "out/b.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "out/a.svg").read_bytes()
    assert main(["timeline", str(tmp_path / "run" / "timeline.jsonl"), "--out", str(tmp_path / "out/a.svg")]) == 0
    assert (tmp_path / "out/a.svg").read_bytes() == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["timeline", "RUN", "--out", "a.svg"], "cannot read"),
        (["rollout", "--policy", "empty", "--out", "t.jsonl", "--tensorboard"], "--metrics"),
        (["rollout", "--policy", "empty", "--out", "t.jsonl", "--prometheus-port", "99999"], "prometheus_port"),
    ],
)
def test_wrong_words_are_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_needs_a_known_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "timeline.jsonl"
    row = {"task": "t", "group": 0, "sample": 0, "outcome": "x", "reward": None, "spans": [["init", 0, 1]]}
    file.write_text('{"timeline": 1, "unix": 5}\n' + json.dumps({**row, "generations": []}) + "\n")
    assert main(["timeline", str(file), "--out", str(tmp_path / "a.gif")]) == 2
    assert "must end with .svg" in capsys.readouterr().err
    assert main(["timeline", str(file), "--out", str(tmp_path / "a.svg")]) == 0
    assert main(["timeline", str(file), "--out", str(tmp_path / "a.svg"), "--skip", "1"]) == 2
    assert "only 1" in capsys.readouterr().err


requests = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


@given(requests, st.integers(1, 50))
def test_the_area_below_the_curve_is_the_time_that_requests_took(spans: Any, parts: int) -> None:
    edges = [15 * place / parts for place in range(parts + 1)]
    shares = busy_between(spans, edges)
    assert sum(shares) * 15 / parts == pytest.approx(sum(end - start for start, end in spans), abs=1e-6)
    assert max(shares) <= most_at_once(spans) + 1e-6


def test_a_training_step_records_what_its_rollouts_cost(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(["fix the function in this file so that its tests pass"] * 3, 300)
    tiny.make_model(tokenizer, hidden=32, layers=1, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rollout = {"describe_tools": "names", "group_size": 2, "groups_per_step": 2, "max_turns": 1}
    values = {
        "out": str(tmp_path / "run"),
        "steps": 2,
        "micro_batch": 4,
        "cpu_threads": 1,
        "model": {"path": str(tmp_path / "model")},
        "tasks": {"level": 1, "limit": 2},
        "rollout": {**rollout, "max_tokens_per_turn": 4, "max_context": 8192},
        "metrics": {"engine_slots": 4},
        "grpo": {"use_cpu": True},
    }
    screen = io.StringIO()
    train(from_mapping(values), Display(Console(file=screen, width=200), "test", 2))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["trajectories/done"] for row in rows] == [4, 4]
    assert all(0 < row["engine/idle"] < 1 and row["stage/eval/service_p50"] > 0 for row in rows)
    assert rows[0]["engine/sampled_tokens_per_second"] > 0
    assert len(read_timeline(tmp_path / "run/timeline.jsonl")) == 8
    assert "idle" in screen.getvalue()
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("trajectories/done")] == [4, 4]
