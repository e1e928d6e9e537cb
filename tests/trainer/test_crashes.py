"""Runs that are killed with SIGKILL wherever they change their directory, and go on: nothing lost, nothing twice."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer import tiny
from sky_trainer.config import from_mapping
from sky_trainer.curriculum import make_plan
from sky_trainer.display import Display
from sky_trainer.files import append_line, read_lines
from sky_trainer.record import consumed_tasks, last_checkpoint, read_metrics, stored_trajectories
from skyenv.errors import ConfigError

STEPS, GROUPS, GROUP = 5, 2, 2
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename": 0, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "shutil.rmtree": 0}


def settings(run_dir: Path, model: Path, staleness: int) -> dict[str, Any]:
    return {
        "out": str(run_dir),
        "staleness": staleness,
        "save_every": 2,
        "micro_batch": GROUPS * GROUP,
        "cpu_threads": 1,
        "model": {"path": str(model)},
        "stages": [
            {"steps": 3, "tasks": {"level": 1, "limit": 3}},
            {"steps": 2, "tasks": {"level": 2, "limit": 2}, "limits": {"max_turns": 2}},
        ],
        "env": {"options": {"prompt": "brief"}},
        "rollout": {
            "describe_tools": "names",
            "group_size": GROUP,
            "groups_per_step": GROUPS,
            "max_turns": 1,
            "max_tokens_per_turn": 4,
            "max_context": 4096,
        },
        "evaluation": {"every": 2, "tasks": {"level": 3, "limit": 1}},
        "grpo": {"use_cpu": True, "learning_rate": 1e-3},
    }


def train_until(values: dict[str, Any], change: int) -> None:
    """Train in this process, and kill it before its `change`-th change of the run directory (0: never)."""
    from sky_trainer.run import train

    left = change

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and arguments[2] & WRITES:
            path = os.fspath(arguments[0])
        elif event in CHANGES:
            path = os.fspath(arguments[CHANGES[event]])
        else:
            return
        if isinstance(path, str) and path.startswith(values["out"]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    train(from_mapping(values), Display(Console(), "test", STEPS))


def Console() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny.make_tokenizer(["fix the function in this file so that its tests pass"] * 3, 300)
    tiny.make_model(tokenizer, hidden=32, layers=1, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("staleness", "kills", "seed"), [(0, 2, 1), (1, 3, 2)])
def test_killed_anywhere_a_run_goes_on(tmp_path: Path, model: Path, staleness: int, kills: int, seed: int) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["sky_trainer.grpo", "sky_trainer.run", "tests.trainer.test_crashes"])
    run_dir, chosen = tmp_path / "run", random.Random(seed)
    values = settings(run_dir, model, staleness)
    statuses = []
    for change in [*(chosen.randint(1, 60) for _ in range(kills)), 0]:
        process = processes.Process(target=train_until, args=(values, change))
        process.start()
        process.join()
        statuses.append(process.exitcode)
    assert statuses[-1] == 0
    assert statuses.count(-signal.SIGKILL) >= 1
    config = from_mapping(values)
    plan = make_plan(config, GROUPS, 1)
    planned = [[task.task_id for task in plan.batch(number).tasks] for number in range(STEPS)]
    every_step = list(range(1, STEPS + 1))
    assert [row["step"] for row in read_metrics(run_dir)] == every_step
    assert [(row["step"], row["stage"]) for row in consumed_tasks(run_dir)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert [row["tasks"] for row in consumed_tasks(run_dir)] == planned
    rows = Counter((row["step"], row["group"], row["sample"]) for row in read_lines(run_dir / "rollouts.jsonl"))
    wanted = [(n + 1, number, s) for n in range(STEPS) for number, _ in plan.batch(n).groups() for s in range(GROUP)]
    assert rows == Counter(wanted)
    assert [row["step"] for row in read_lines(run_dir / "evaluations.jsonl")] == [0, 2, 4]
    played = stored_trajectories(run_dir, 0)
    assert {(step, t.group_id, t.sample_index) for step, found in played.items() for t in found} == set(wanted)
    checkpoint = last_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint-{STEPS}"
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {STEPS}
    for name in ("final", "best"):
        loads_back(run_dir / name)


def loads_back(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer("fix the function", return_tensors="pt").input_ids
    assert torch.isfinite(policy(ids).logits).all()
    assert not (path / "training_args.bin").exists()


def test_lines_cut_short_are_left_out_and_spoil_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path)) == []
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}]


def test_a_checkpoint_without_the_trainers_state_is_none(tmp_path: Path) -> None:
    for step, state in ((2, "{}"), (4, '{"global_st'), (6, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_task_set_that_changed_is_refused(tmp_path: Path, model: Path) -> None:
    from sky_trainer.run import check_consumed

    plan = make_plan(from_mapping(settings(tmp_path, model, 0)), GROUPS, 1)
    names = [task.task_id for task in plan.batch(0).tasks]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"step": 1, "stage": 1, "tasks": names}) + "\n")
    check_consumed(tmp_path, plan, 1)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"step": 1, "stage": 1, "tasks": ["x", "y"]}) + "\n")
    check_consumed(tmp_path, plan, 0)
    with pytest.raises(ConfigError, match="trained on other tasks in step 1"):
        check_consumed(tmp_path, plan, 1)
