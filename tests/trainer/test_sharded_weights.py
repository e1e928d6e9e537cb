"""Weights of a module that FSDP2 shards over two gloo processes: every rank gets the whole, under the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

SCRIPT = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from sky_trainer import tiny
from sky_trainer.sync.export import named_weights
from sky_trainer.sync.ranks import is_main, share

def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = tiny.make_model(tiny.make_tokenizer(["word"], 300), 32, 1, 0)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.lm_head.weight.to_local().shape[0] < whole["lm_head.weight"].shape[0]
    found = dict(named_weights(model))
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert is_main() == (rank == 0)
    assert share(("of rank", rank)) == ("of rank", 0)
    print("whole", flush=True)

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_every_rank_gets_the_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(free_port())],
        capture_output=True,
        text=True,
        timeout=550,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("whole") == 2
