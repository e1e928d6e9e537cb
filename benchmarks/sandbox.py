"""What a sandbox costs, with other people's beside it in the same minutes: `--json` ends with one object.

Parts (`--only` picks some): exec, create, fork, snapshot, burst, gateway, density, tax. Servers of ours are processes
of their own, reached over HTTP on loopback. Beside them run a bare pipe to bash (the limit), a fresh bash for each
command, SWE-ReX from PyPI (`--swerex DIR`, made by `--install-swerex`) and `docker exec` (needs DOCKER_HOST;
`.ci/services` starts an engine). What cannot run here is null, with the reason beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from _density import density
from _images import debian_folder, debian_in_docker
from _latency import (
    burst,
    create_latency,
    exec_latency,
    fork_latency,
    pause_latency,
    snapshot_latency,
    throughput,
    warm_latency,
)
from _measure import table
from _processes import TOKEN, gateway_with, node_server
from _substrates import BarePipe, CannotRun, DockerExec, FreshBash, Ours, Substrate, SweRex, docker_reason, local
from _tax import Plan, concurrent, measure

import skyenv

PARTS = ("exec", "create", "fork", "snapshot", "burst", "gateway", "density", "tax")
# The figures that are always told, and what each needs: its part first.
HEADLINES = {
    "exec_vs_swerex": ("exec", "substrate swerex", "exec swerex"),
    "create_vs_docker": ("create", "substrate docker_exec", "create docker_exec"),
    "group_fork_vs_one": ("fork",),
    "live_sandboxes": ("density",),
    "tax_hours_per_million": ("tax", "tax null local"),
}
Results = dict[str, Any]


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--times", type=int, default=500, help="commands of each substrate (default 500)")
    parser.add_argument("--creates", type=int, default=50, help="creations of each substrate (default 50)")
    parser.add_argument("--sandboxes", type=int, default=1000, help="living ones of the density part (default 1000)")
    parser.add_argument("--actions", type=int, default=150, help="actions of a trajectory (default 150)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one substrate in the tax (default 60)")
    parser.add_argument("--swerex", type=Path, default=Path(".venv-swerex"), help="virtual environment with SWE-ReX")
    parser.add_argument("--install-swerex", action="store_true", help="make that environment first")
    return parser.parse_args()


class Bench:
    """One run: which substrates there are, and what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.shuffle = random.Random(options.seed)
        self.results: Results = dict.fromkeys(HEADLINES)
        self.reasons: dict[str, str] = {}
        self.substrates: list[Substrate] = []

    def ratio(self, name: str, other: str, ours: str) -> None:
        """How many times faster ours is, at the median."""
        if other in self.results and ours in self.results:
            self.results[name] = self.results[other]["p50"] / self.results[ours]["p50"]

    def chosen(self, *names: str) -> list[Substrate]:
        """The substrates with these names that run here."""
        return [each for each in self.substrates if each.name in names]

    async def open_substrates(self, stack: AsyncExitStack) -> None:
        """Open everything that this machine can run, and note why the others cannot."""
        image, reason = None, docker_reason()
        if reason is None:
            image = debian_in_docker()
        limits = {"cpus": 1.0, "memory_bytes": 1 << 30}
        root = stack.enter_context(debian_folder())
        os.environ["SKYENV_LOCAL_IMAGES"] = str(root)
        wanted: list[Substrate] = [BarePipe(), FreshBash(), local(), SweRex(self.options.swerex)]
        wanted.append(Ours("oci", lambda: node_server("--backend", "oci"), f"dir:{root}", **limits))
        if image is not None:
            wanted.append(Ours("docker", lambda: node_server("--backend", "docker"), image, **limits))
            wanted.append(DockerExec(image))
        for each in wanted:
            try:
                await stack.enter_async_context(each.opened())
            except (CannotRun, RuntimeError) as error:
                self.reasons[f"substrate {each.name}"] = str(error)
            else:
                self.substrates.append(each)
        if reason is not None:
            self.reasons["substrate docker"] = self.reasons["substrate docker_exec"] = reason

    async def exec(self) -> None:
        """A command in a living session."""
        self.results |= await exec_latency(self.substrates, self.options.times, self.shuffle, self.reasons)
        self.ratio("exec_vs_swerex", "exec swerex ms", "exec local ms")
        self.ratio("exec_vs_docker", "exec docker_exec ms", "exec local ms")

    async def create(self) -> None:
        """Creation and its first command; deletion."""
        chosen = self.chosen("local", "oci", "docker", "docker_exec", "swerex", "bare_pipe")
        self.results |= await create_latency(chosen, self.options.creates, self.shuffle, self.reasons)
        self.ratio("create_vs_docker", "create + first exec docker_exec ms", "create + first exec local ms")
        self.ratio("create_oci_vs_docker", "create + first exec docker_exec ms", "create + first exec oci ms")
        self.ratio("create_docker_vs_docker", "create + first exec docker_exec ms", "create + first exec docker ms")

    async def on_local(self, part: Callable[[Any], Awaitable[Results]]) -> None:
        """A part that needs a client of the `local` node."""
        for each in self.substrates:
            if isinstance(each, Ours) and each.name == "local":
                self.results |= await part(each.client)

    async def fork(self) -> None:
        """Prepared once, forked for each."""
        await self.on_local(lambda client: fork_latency(client, self.options.creates))
        await self.on_local(lambda client: warm_latency(client, min(20, self.options.creates)))

    async def snapshot(self) -> None:
        """Files and shell state of a living session; a session that is paused."""
        await self.on_local(lambda client: snapshot_latency(client, self.options.creates))
        await self.on_local(lambda client: pause_latency(client, self.options.creates))

    async def burst(self) -> None:
        """Fifty creations at once."""
        await self.on_local(lambda client: burst(client, 50))

    async def gateway(self) -> None:
        """Commands through the gateway, one at a time and many, with 1, 2 and 4 nodes behind it."""
        for nodes in (1, 2, 4):
            through = Ours("gateway", functools.partial(gateway_with, nodes))
            async with through.opened():
                self.results[f"gateway_execs_per_second_{nodes}"] = await throughput(through.client, 16, 4.0)
                if nodes == 2:
                    self.results |= await exec_latency([through], self.options.times, self.shuffle, self.reasons)
                    self.results |= await create_latency([through], self.options.creates, self.shuffle, self.reasons)
                    await self.tax_through(through)
        with node_server("--backend", "local") as url:
            async with skyenv.connect(url, TOKEN) as client:
                self.results["node_execs_per_second"] = await throughput(client, 16, 4.0)

    async def tax_through(self, gateway: Ours) -> None:
        """The null trajectory through the gateway."""
        options = self.options
        plan = Plan("null", options.actions, options.creates, options.budget)
        rows = await measure([gateway], plan, self.shuffle, self.reasons)
        self.results["tax_gateway_hours_per_million"] = rows["gateway"]["hours_per_million"]

    async def density(self) -> None:
        """As many as were asked for."""
        options = self.options
        self.results |= await density(options.sandboxes, 0.05, 400, self.shuffle)

    async def tax(self) -> None:
        """Trajectories of null and of bug-fix actions."""
        options = self.options
        chosen = self.chosen("bare_pipe", "local", "oci", "docker", "docker_exec", "swerex")
        for kind, actions in (("null", options.actions), ("bug-fix", options.actions // 3)):
            plan = Plan(kind, actions, options.creates, options.budget)
            rows = await measure(chosen, plan, self.shuffle, self.reasons)
            bare = rows["bare_pipe"]["T ms"]["p50"]
            for name, row in rows.items():
                self.results[f"tax {kind} {name} ms"] = row.pop("T ms")
                self.results[f"tax {kind} {name}"] = {
                    **row,
                    "T/T_bare": self.results[f"tax {kind} {name} ms"]["p50"] / bare,
                }
            if kind == "null":
                self.results["tax_hours_per_million"] = rows["local"]["hours_per_million"]
        for each in self.chosen("local", "docker_exec"):
            for width in (8, 32):
                if each.name == "local" or width == 8:
                    hours = await concurrent(each, options.actions, width)
                    self.results[f"tax null {each.name} {width} at a time, hours per million"] = hours

    def why(self, headline: str) -> str:
        """Why a figure is not there."""
        part, *others = HEADLINES[headline]
        if part not in self.options.only:
            return f"the part {part!r} was not run"
        return next((self.reasons[name] for name in (part, *others) if name in self.reasons), "unknown")

    def report(self) -> None:
        """A table, then the JSON object."""
        table(self.results)
        for name, reason in self.reasons.items():
            print(f"{name}: not measured: {reason}")
        if self.options.json:
            machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "kernel": platform.release()}
            missing = {f"{name}_reason": self.why(name) for name in HEADLINES if self.results[name] is None}
            facts = {"machine": machine, "seed": self.options.seed, "python": platform.python_version()}
            print(json.dumps({**self.results, **missing, "not_measured": self.reasons, **facts}))


async def run(options: argparse.Namespace) -> None:
    """All chosen parts, one after the other; one that fails is told and costs the others nothing."""
    bench = Bench(options)
    parts: dict[str, Callable[[], Awaitable[None]]] = {
        "exec": bench.exec, "create": bench.create, "fork": bench.fork, "snapshot": bench.snapshot,
        "burst": bench.burst, "gateway": bench.gateway, "density": bench.density, "tax": bench.tax,
    }  # fmt: skip
    failed = []
    async with AsyncExitStack() as stack:
        await bench.open_substrates(stack)
        for name in options.only:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                await parts[name]()
            except (RuntimeError, AssertionError, OSError, skyenv.SkyEnvError) as error:
                failed.append(name)
                bench.reasons[name] = repr(error)
    bench.report()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    arguments = parse()
    if arguments.install_swerex:
        SweRex.install(arguments.swerex)
    anyio.run(run, arguments)
