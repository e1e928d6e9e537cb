"""Ranks that die, freeze or give up: the others end with a typed error that says so, wherever they wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from sky_trainer.peers import Watch, watched_ranks
from tests.ports import free_port

SCRIPT = """
import json, os, signal, sys, time
import torch.distributed as dist
import torch.multiprocessing
from sky_trainer import peers
from skyenv.errors import ConfigError

def die(): os._exit(9)
def freeze(): os.kill(os.getpid(), signal.SIGSTOP)
def refuse(): raise ConfigError("out: holds other files")
def leave(): pass

def collective(): dist.barrier()
def plain(): time.sleep(600)

def rank(number, port, loser, what, where, out):
    os.environ.update(WORLD_SIZE="2", RANK=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
    ended = "nothing"
    try:
        with peers.watched_ranks(6.0 if what is freeze else 60.0):
            dist.barrier()
            what() if number == loser else leave() if what is leave else where()
    except (peers.RankLost, ConfigError) as error:
        ended = f"{type(error).__name__}: {error}"
    with open(f"{out}/{loser}.{what.__name__}.{where.__name__}.{number}", "w") as file:
        file.write(ended)
    os._exit(0)  # not to wait for what torch still wants of the other rank

cases = [(0, die, plain), (1, die, collective), (0, freeze, plain), (1, freeze, plain), (0, freeze, collective),
         (0, refuse, collective), (1, refuse, plain), (0, leave, plain)]
peers.GRACE = 2.0
if __name__ == "__main__":
    out, *ports = sys.argv[1:]
    fork = torch.multiprocessing.get_context("fork")
    for port, case in zip(ports, cases, strict=True):
        loser, what, _ = case
        both = [fork.Process(target=rank, args=(n, port, *case, out)) for n in range(2)]
        for process in both:
            process.start()
        both[1 - loser].join()
        if what is freeze:
            both[loser].kill()
        both[loser].join()
"""
LOST = "RankLost: {}; start the run again, it goes on from its newest checkpoint"


def test_the_others_end_and_say_why(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(tmp_path), *(str(free_port()) for _ in range(8))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    said = {path.name: path.read_text() for path in tmp_path.iterdir() if path != script}
    in_c = said.pop("0.freeze.collective.1", None)  # where no interrupt reaches: it was ended from outside
    assert in_c is None
    assert LOST.format("rank 0 gave no sign of life for 6 s").removeprefix("RankLost: ") in errors
    assert said == {
        "0.die.plain.1": LOST.format("rank 0 died"),
        "1.die.collective.0": LOST.format("rank 1 died"),
        "0.freeze.plain.1": LOST.format("rank 0 gave no sign of life for 6 s"),
        "1.freeze.plain.0": LOST.format("rank 1 gave no sign of life for 6 s"),
        "0.refuse.collective.0": "ConfigError: out: holds other files",
        "0.refuse.collective.1": LOST.format("rank 0 ended with ConfigError: out: holds other files"),
        "1.refuse.plain.0": LOST.format("rank 1 ended with ConfigError: out: holds other files"),
        "1.refuse.plain.1": "ConfigError: out: holds other files",
        "0.leave.plain.0": "nothing",
        "0.leave.plain.1": "nothing",
    }


def test_a_stranger_is_no_rank() -> None:
    """Who does not know the word is hung up on; a rank that never comes is missed."""
    watch = Watch(0, 2, 3.0)
    assert watch._listener is not None
    watch.cause_of(ValueError())  # on its way out: nothing is interrupted here
    watch.start()
    for said in (b"rank 1 guess\n", b"end well\n", b"x" * 10000):
        with socket.create_connection(watch._listener.getsockname(), 10) as stranger:
            stranger.sendall(said)
            try:
                while stranger.recv(100):
                    pass
            except ConnectionResetError:
                pass
    watch._thread.join(60)
    assert watch.lost == "rank 1 did not come within 3 s"
    watch.end("over")


def test_one_process_watches_nobody() -> None:
    with watched_ranks(1.0):
        pass
