"""What a sandbox from an image costs with each OCI runtime: create and first command, a command, delete, a fork.

    python benchmarks/oci.py [--cycles 40] [--runtime crun --runtime runc] [--run-as UID] [--json]

The image is one static busybox (Debian: busybox-static); `bare` is the runtime alone, started and deleted by hand over
the same root, as the limit below which no server can get. Needs root, crun or runc, and catatonit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio
import httpx

from skyenv.remote.backends import runtimes
from skyenv.remote.backends.oci import OciBackend
from skyenv.remote.client import SandboxClient
from skyenv.remote.images.settings import ImageSettings
from skyenv.remote.node import create_app
from skyenv.remote.sending import Sender

WARM_UP = 5


def make_root(folder: Path) -> Path:
    """A root file system that is one binary."""
    root, busybox = folder / "root", shutil.which("busybox")
    if busybox is None:
        raise SystemExit("busybox is not installed (Debian: busybox-static)")
    for name in ("bin", "proc", "dev", "sys", "run/skyenv", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    shutil.copy2(busybox, root / "bin/busybox")
    for name in ("sh", "echo", "true", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    return root


def bare(runtime: str, root: Path, folder: Path, cycles: int) -> list[float]:
    """Milliseconds for `runtime run --detach`, nothing else."""
    sysfs = folder / "sysfs"
    sysfs.mkdir(exist_ok=True)
    bundle = runtimes.bundle(base_uid=None, sleeper=runtimes.find_sleeper("oci"), tmpfs_bytes=1 << 20)
    bundle["root"] = {"path": str(root), "readonly": False}
    for mount in bundle["mounts"]:
        mount["source"] = mount["source"] or str(sysfs)
    (folder / "config.json").write_text(json.dumps(bundle))
    found, reasons = runtimes.candidates(runtime)
    if not found:
        raise SystemExit(reasons[0])
    command = [*found[0].command(), "--root", str(folder / "state")]
    hidden = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
    times = []
    for _ in range(cycles):
        start = time.perf_counter()
        run = ["unshare", "-m", "sh", "-c", hidden, "sh", *command, "run", "--detach", "--bundle", str(folder), "bare"]
        with (folder / "log").open("w") as log:
            subprocess.run(run, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        times.append((time.perf_counter() - start) * 1e3)
        subprocess.run([*command, "delete", "--force", "bare"], check=True)
    return times[WARM_UP:]


async def measure(runtime: str, root: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Through the client and the node server's application, without a socket in between."""
    settings = ImageSettings(root=folder / "store", paths=(folder,))
    backend = OciBackend(f"dir:{root}", runtime, settings, run_as=arguments.run_as)
    app = create_app(backend)
    times: dict[str, list[float]] = {"create_and_first_exec": [], "exec": [], "fork": [], "delete": []}

    async def timed(name: str, work: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        result = await work
        times[name].append((time.perf_counter() - start) * 1e3)
        return result

    async with app.router.lifespan_context(app), Sender(httpx.ASGITransport(app), "http://node", {}) as sender:
        client = SandboxClient(sender)
        for _ in range(arguments.cycles):
            opening = client.sandbox()

            async def create(opening: Any = opening) -> Any:
                box = await opening.__aenter__()
                await box.exec("true")
                return box

            box = await timed("create_and_first_exec", create())
            await timed("exec", box.exec("true"))
            twin = box.fork()
            await timed("fork", twin.__aenter__())
            await twin.__aexit__(None, None, None)
            await timed("delete", opening.__aexit__(None, None, None))
    return {name: summary(values[WARM_UP:]) for name, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    return {
        "min": round(ordered[0], 2),
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(len(ordered) * 0.95)], 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--runtime", action="append")
    parser.add_argument("--run-as", type=int, help="give up root for this user id first")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for runtime in arguments.runtime or ["crun", "runc"]:
        with tempfile.TemporaryDirectory(prefix="bench-oci-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            root = make_root(folder)
            found = {"bare": summary(bare(runtime, root, folder, arguments.cycles))}
            results[runtime] = found | anyio.run(measure, runtime, root, folder, arguments)
        for what, numbers in results[runtime].items():
            print(f"{runtime:6} {what:24} {numbers}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
