"""A client that works in a sandbox until it is told to stop, and checks all that it is told.

Arguments: URL, seed, lease in seconds. Prints `sandbox ID SECRET`, `done N` after each piece of work, and `complete N`.
Every piece of work appends its number to /root/log in the sandbox, whatever else it does.
"""

from __future__ import annotations

import random
import signal
import sys

import anyio

from skyenv.errors import SandboxError
from skyenv.remote.client import RemoteSandbox, SandboxClient, connect


def tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def work(box: RemoteSandbox, number: int, rng: random.Random) -> None:
    append, pause = f"echo {number} >> /root/log", rng.uniform(0.0, 0.6)
    match rng.randrange(5):
        case 0:
            result = await box.exec(f"{append}; pwd")
            assert result.output == "/root\n", result
        case 1:
            result = await box.exec(f"{append}; sleep {pause}; echo end {number}; exit 7")
            assert (result.exit_code, result.output) == (7, f"end {number}\n"), result
        case 2:
            pieces = [
                piece async for piece in box.stream(f"{append}; for i in 1 2 3; do echo $i; sleep {pause / 2}; done")
            ]
            assert "".join(piece.output for piece in pieces) == "1\n2\n3\n", pieces
        case 3:
            result = await box.exec(f"{append}; seq 60000 | tee last | wc -c; cat last")
            assert len(result.output) == 348_894 + len("348894\n"), result.output_bytes
        case 4:
            data = rng.randbytes(rng.choice([100, 2_000_000]))
            await box.write_file(f"/root/{number}", data)
            assert await box.read_file(f"/root/{number}") == data
            await box.remove(f"/root/{number}")
            await box.exec(append)


async def reached(client: SandboxClient) -> None:
    """A client gives up soon on a server that has never answered; this one may start while it is away."""
    while True:
        try:
            await client.health()
            return
        except SandboxError:
            await anyio.sleep(0.2)


async def main(url: str, seed: str, ttl: str) -> None:
    rng, number, told = random.Random(int(seed)), 0, anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:

        async def listen() -> None:
            async for _number in signals:
                told.set()

        async with connect(url, patience=120.0) as client, anyio.create_task_group() as group:
            group.start_soon(listen)
            await reached(client)
            async with client.sandbox(ttl=float(ttl)) as box:
                tell("sandbox", box.name, box.secret)
                while not told.is_set():
                    number += 1
                    await work(box, number, rng)
                    tell("done", number)
                log = (await box.exec("cat /root/log")).output.split()
                assert log == [str(each + 1) for each in range(number)], log
            group.cancel_scope.cancel()
    tell("complete", number)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
