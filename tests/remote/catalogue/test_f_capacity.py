"""F: many sandboxes on one machine, each with limits that it sees and that hit nobody else."""

from __future__ import annotations

import anyio
import pytest

from catalogue.sessions import PATIENCE, session
from skyenv.remote.client import connect

MiB = 1 << 20
EATER = "python3 -c 'x = bytearray(300 << 20)'"
POOL = """
import multiprocessing as m
def eat(_):
    x = bytearray(80 << 20)
    import time; time.sleep(0.3); return len(x)
if __name__ == "__main__":
    with m.Pool() as pool:
        print(m.cpu_count(), pool.map(eat, range(4)))
"""


@pytest.mark.parametrize("count", [32])
async def test_f1_f2_f5_many_creations_at_once(url: str, count: int) -> None:
    """No ports to race for, no networks to run out of, and an engine that is never asked for all at once."""
    async with connect(url, "secret") as client:
        together, here = anyio.Event(), 0

        async def one(number: int) -> None:
            nonlocal here
            async with client.sandbox(memory_bytes=64 * MiB) as box:
                assert (await box.exec(f"echo {number}")).output == f"{number}\n"
                here += 1
                if here == count:
                    together.set()
                await together.wait()
                assert (await box.exec(f"echo {number} again")).output == f"{number} again\n"

        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(one, number)


async def test_f6_processors_are_told_truly(url: str) -> None:
    asked = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    async with session(url, cpus=1) as box:
        assert (await box.exec(f'nproc; python3 -c "{asked}"')).output == "1\n1 1 1\n"


async def test_f6_a_pool_that_eats_too_much_is_a_typed_result(url: str) -> None:
    async with session(url, cpus=1, memory_bytes=64 * MiB) as box:
        await box.write_file("/root/pool.py", POOL.encode())
        result = await box.exec("python3 pool.py", timeout=10.0)
        assert result.oom
        assert result.exit_code != 0


async def test_f7_f9_out_of_memory_is_a_typed_result_of_one_sandbox(url: str) -> None:
    async with connect(url, "secret") as client:
        assert (await client.health())["limits"]["memory"].startswith("cgroup")
        async with client.sandbox() as other, session(url, memory_bytes=100 * MiB) as box:
            result = await box.exec(f"{EATER}; echo rc $?", timeout=PATIENCE)
            assert result.oom
            assert "rc 137" in result.output
            alive = await box.exec("echo alive", timeout=PATIENCE)
            assert (alive.output, alive.oom) == ("alive\n", False)
            inside = await box.exec("x=$(head -c 300M /dev/zero | tr '\\0' x); echo survived", timeout=PATIENCE)
            assert inside.oom
            assert inside.session_restarted
            fine = await other.exec(f"{EATER}; echo rc $?", timeout=PATIENCE)
            assert (fine.output, fine.oom) == ("rc 0\n", False)


async def test_f7_many_neighbours_live_on(url: str) -> None:
    async with connect(url, "secret") as client:
        ready, over = anyio.Semaphore(0), anyio.Event()

        async def neighbour() -> None:
            async with client.sandbox(memory_bytes=64 * MiB) as box:
                await box.exec("export STATE=kept")
                ready.release()
                await over.wait()
                result = await box.exec("echo $STATE", timeout=PATIENCE)
                assert (result.output, result.oom, result.session_restarted) == ("kept\n", False, False)

        async with anyio.create_task_group() as group:
            for _number in range(5):
                group.start_soon(neighbour)
            for _number in range(5):
                await ready.acquire()
            async with client.sandbox(memory_bytes=64 * MiB) as box:
                assert (await box.exec(EATER, timeout=PATIENCE)).oom
            over.set()
