"""Two processes over gloo: rollouts are made on rank 0 alone, groups are whole over both, errors reach both.

The step that they take together is the one that a single process takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sky_trainer.config import from_mapping
from sky_trainer.following import check_ranks
from sky_trainer.grpo import grpo_config
from skyenv.errors import ConfigError
from tests.ports import free_port

SCRIPT = """
import json, os, sys
from pathlib import Path
from sky_trainer import grpo, tiny
from sky_trainer.config import from_mapping
from skyenv.errors import EngineError
from skyenv.types import Segment, StopReason, Trajectory, TrajectoryGroup

class Task:
    def __init__(self, task_id): self.task_id = task_id

class Weights:
    version = 0
    def push(self, version): self.version = version

calls = []
def collect(tasks, size):
    calls.append([task.task_id for task in tasks])
    if len(calls) > 1:
        raise EngineError("server answered 500")
    groups = []
    for g, task in enumerate(tasks):
        members = []
        for s in range(size):
            segment = Segment()
            segment.append_context([10 + g, 11])
            segment.append_sampled([20 + s, tokenizer.eos_token_id], [-1.0, -1.0])
            done = StopReason.FINISH
            members.append(Trajectory(task.task_id, g, s, segments=[segment], reward=float(s), stop_reason=done))
        groups.append(TrajectoryGroup(task.task_id, g, members))
    return groups

tokenizer = tiny.make_tokenizer(["word"], 300)
config = from_mapping({"out": sys.argv[1], "micro_batch": 2, "steps": 1,
                       "rollout": {"group_size": 4, "groups_per_step": 2}, "grpo": {"use_cpu": True}})
args = grpo.grpo_config(config)
trainer = grpo.SkyGRPOTrainer(tiny.make_model(tokenizer, 32, 1, 0), args=args, tasks=[Task("a"), Task("b")],
                              collect=collect, weights=Weights(), processing_class=tokenizer)
trainer.model.train()
rank = trainer.accelerator.process_index
inputs = [dict(trainer.train_dataset[g]) for g in range(2) for _ in range(4)][4 * rank : 4 * rank + 4]
batch = trainer._generate_and_score_completions(inputs)
found = {"ids": batch["completion_ids"][:, 0].tolist(), "advantages": batch["advantages"].tolist()}
try:
    trainer._generate_and_score_completions(inputs)
except EngineError as error:
    found["error"] = str(error)
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps({**found, "calls": calls}))
"""


STEPS = """
import os, sys
import torch
import torch.multiprocessing
from sky_trainer import grpo, tiny
from sky_trainer.config import from_mapping
from skyenv.types import Segment, StopReason, Trajectory, TrajectoryGroup

class Task:
    def __init__(self, task_id): self.task_id = task_id

class Weights:
    version = 0
    def push(self, version): self.version = version

def collect(tasks, size):
    groups = []
    for g, task in enumerate(tasks):
        members = []
        for s in range(size):
            segment = Segment()
            for turn in range(1 + (g + s) % 3):
                segment.append_context([10 + g, 11 + turn])
                sampled = [20 + s + turn, *[30 + g] * (s % 3), tokenizer.eos_token_id]
                segment.append_sampled(sampled, [-5.0] * len(sampled))
            done = StopReason.FINISH
            members.append(Trajectory(task.task_id, g, s, segments=[segment], reward=float(s == g), stop_reason=done))
        groups.append(TrajectoryGroup(task.task_id, g, members))
    return groups

def step(loss, rows, out):
    config = from_mapping({"out": out, "micro_batch": 2, "steps": 1,
        "rollout": {"group_size": 4, "groups_per_step": 2, "rows": rows, "max_context": 64, "max_tokens_per_turn": 8},
        "grpo": {"use_cpu": True, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "loss_type": loss,
                 "entropy_coef": 0.05, "save_strategy": "no"}})
    model = tiny.make_model(tokenizer, 32, 1, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = grpo.SkyGRPOTrainer(model, args=grpo.grpo_config(config), tasks=[Task("a"), Task("b")], collect=collect,
                                  weights=Weights(), processing_class=tokenizer, rows=rows)
    trainer.train()
    return torch.cat([(p.detach() - before[name]).flatten() for name, p in model.named_parameters()])

def rank(number, ranks, port, out):
    if ranks > 1:
        os.environ.update(WORLD_SIZE=str(ranks), RANK=str(number), LOCAL_RANK=str(number),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    cases = (("dapo", "trajectory"), ("dapo", "turn"), ("grpo", "turn"), ("dr_grpo", "segment"))
    found = {case: step(*case, out) for case in cases}
    if number == 0:
        torch.save(found, f"{out}/steps{ranks}.pt")

torch.set_num_threads(1)
tokenizer = tiny.make_tokenizer(["word"], 300)
if __name__ == "__main__":
    fork = torch.multiprocessing.get_context("fork")  # libraries are imported once
    both = [fork.Process(target=rank, args=(n, 2, sys.argv[2], sys.argv[1])) for n in range(2)]
    for process in both:
        process.start()
    rank(0, 1, "", sys.argv[1])
    for process in both:
        process.join()
    sys.exit(any(process.exitcode for process in both))
"""


def start(script: Path, out: Path) -> list[subprocess.Popen[str]]:
    """The script on two ranks."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(out)],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """All ended well."""
    for process in processes:
        _, errors = process.communicate(timeout=550)
        assert process.returncode == 0, errors


def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(SCRIPT)
    finish(start(script, tmp_path))
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (first["calls"], second["calls"]) == ([["a", "b"]] * 2, [])
    assert first["ids"] == second["ids"] == [20, 21, 22, 23]
    assert first["advantages"] == second["advantages"] == [-1.5, -0.5, 0.5, 1.5]
    assert first["error"] == second["error"] == "server answered 500"


def test_two_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, str(script), str(tmp_path), str(free_port())]
    finish([subprocess.Popen(words, env={**alone, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)])
    one, two = (torch.load(tmp_path / f"steps{ranks}.pt") for ranks in (1, 2))
    for case, expected in one.items():
        assert expected.abs().max() > 1e-3, case
        assert torch.allclose(expected, two[case], rtol=1e-3, atol=1e-6), case


PATIENCE = """
import os, sys
import torch.distributed as dist
from sky_trainer.supervise import PatientWeights
from sky_trainer.sync.ranks import share
from sky_trainer.weights import WeightSyncFailed

class Servers:
    version, pushes = 0, 0
    def push(self, version):
        self.pushes += 1
        if share(self.pushes < comes_back):
            raise WeightSyncFailed("all are being started again")
        self.version = version

dist.init_process_group("gloo")
main = dist.get_rank() == 0
for comes_back, answering, ending in ((2, True, "2"), (3, True, "gave up"), (2, False, "gave up")):
    servers = Servers()
    try:
        PatientWeights(servers, lambda: main and answering).push(1)
        ended = str(servers.pushes)
    except WeightSyncFailed:
        ended = "gave up"
    assert ended == ending, (comes_back, answering, ended)
    assert servers.pushes == (2 if answering else 1)
"""


def test_ranks_push_again_together(tmp_path: Path) -> None:
    """Whether servers come back is known on rank 0 alone."""
    script = tmp_path / "patience.py"
    script.write_text(PATIENCE)
    finish(start(script, tmp_path))


def test_sharding_is_refused_where_it_would_be_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({"out": str(tmp_path / "run"), "grpo": {"use_cpu": True}})
    check_ranks(config, grpo_config(config))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="ignores on CPUs"):
        check_ranks(config, grpo_config(config))


def test_a_batch_that_the_processes_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="micro_batch is 8, which on 3 processes does not divide the 32 rows"):
        grpo_config(from_mapping({"grpo": {"use_cpu": True}}))
