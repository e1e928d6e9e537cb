"""The Slurm launcher on two "hosts": loopback addresses of this machine, and an `srun` that starts it for each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio

from skyenv.remote.client import connect

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $(jobs -p); wait; exit' TERM
for host in 0 1; do
    SLURM_NODEID=$host SLURM_CPUS_ON_NODE=1 SKYENV_ADDRESS=127.0.0.$((host + 1)) "$@" &
done
wait
"""
PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m skyenv.cli "$@"\n'


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


async def test_each_host_of_an_allocation_joins_the_gateway(tmp_path: Path) -> None:
    program(tmp_path / "srun", SRUN)
    program(tmp_path / "skyenv", PROGRAM)
    (tmp_path / "join").write_text("joined\n")
    shutil.copy(SLURM / "nodes.sbatch", tmp_path / "slurm_script")  # as sbatch does
    env = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(SLURM.parents[1]),
        "SLURM_JOB_ID": "7", "SLURM_TMPDIR": str(tmp_path), "SKYENV_JOIN_TOKEN_FILE": str(tmp_path / "join"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    gateway = subprocess.Popen(
        [sys.executable, "-m", "skyenv.cli", "gateway", "--port", "0", "--join-token-file", str(tmp_path / "join")],
        stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert gateway.stdout is not None
    url = gateway.stdout.readline().split()[-1]
    job = subprocess.Popen([tmp_path / "slurm_script", url], env=env)
    try:
        async with connect(url) as client:
            with anyio.fail_after(100):
                while (await client.health())["nodes"] < 2:
                    await anyio.sleep(0.2)
            async with client.sandbox() as one:
                assert (await one.exec("echo $((6 * 7))")).output == "42\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=300) == 0
    finally:
        for process in (job, gateway):
            process.terminate()
            process.wait(timeout=300)
        gateway.stdout.close()
    assert not list(tmp_path.glob("skyenv-*/*/launcher.sock"))
