"""Two processes over gloo: rollouts are made on rank 0 alone, groups are whole over both, errors reach both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

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
args.gradient_accumulation_steps = args.steps_per_generation = 2
args.generation_batch_size = 8
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


def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (first["calls"], second["calls"]) == ([["a", "b"]] * 2, [])
    assert first["ids"] == second["ids"] == [20, 21, 22, 23]
    assert first["advantages"] == second["advantages"] == [-1.5, -0.5, 0.5, 1.5]
    assert first["error"] == second["error"] == "server answered 500"
