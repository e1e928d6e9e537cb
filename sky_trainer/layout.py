"""Which GPUs train and which serve, by the `launch:` and `ray:` sections: computed, nothing is started.

On one machine servers have the devices that `launch.gpus` names, and the trainer those that are left. On a cluster each
role's bundles are laid onto machines as Ray does it: ranks packed, servers and workers spread.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from sky_trainer.config import Config
from sky_trainer.gpus import Gpus
from sky_trainer.sections.ray import RayConfig
from skyenv.errors import ConfigError

SERVER_SHARE = 0.9
"""Of a GPU's memory, what an inference server takes unless its options say otherwise."""
MULTIPLIED = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "tp-size", "pp-size", "dp-size")
_PART = re.compile(r"0?\.\d+|1")
SHARES = ("gpu-memory-utilization", "mem-fraction-static")


@dataclass(frozen=True, slots=True)
class Layout:
    """Of `gpus`, `training` train; each of `servers` has `serving` (0: this run places it on none).

    `share` of such a GPU's memory is a server's; `beside`: of a GPU that trains, what servers on the same one take.
    `text` says who is where.
    """

    gpus: Gpus
    training: int
    servers: int = 0
    serving: int = 0
    share: float = SERVER_SHARE
    beside: float = 0.0
    text: str = ""


@dataclass(slots=True)
class Machine:
    """What one machine of a cluster has left, and how many of each role are on it."""

    cpus: float
    gpus: float
    holds: Counter[str] = field(default_factory=Counter)

    def take(self, role: str, cpus: float, gpus: float) -> bool:
        """Whether there was room for one more."""
        if cpus > self.cpus + 1e-9 or gpus > self.gpus + 1e-9:
            return False
        self.cpus, self.gpus = self.cpus - cpus, self.gpus - gpus
        self.holds[role] += 1
        return True


def layout_of(config: Config, gpus: Gpus, machines: Sequence[Machine] | None = None) -> Layout:
    """Where the parts of a run go; `machines` are those of a cluster. ConfigError names what does not fit.

    Without `machines` a run with a `ray:` section is laid onto those that `gpus` tells of, whose CPUs are not counted.
    """
    if machines is not None or config.ray != RayConfig():
        return _on_cluster(config, gpus, machines or _told(gpus))
    if not config.launch.servers or config.launch.device == "cpu" or gpus.kind == "none":
        text = f"{config.launch.servers} servers on the processor" if config.launch.servers else "no servers to start"
        return Layout(gpus, gpus.count, text=text)
    return _on_machine(config, gpus)


def _told(gpus: Gpus) -> list[Machine]:
    each = 0 if gpus.kind == "none" else gpus.count // gpus.machines
    return [Machine(inf, each) for _ in range(gpus.machines)]


def _on_machine(config: Config, gpus: Gpus) -> Layout:
    """One machine. Devices are counted as `CUDA_VISIBLE_DEVICES` names them for the servers."""
    launch, share = config.launch, _share(config.launch.options)
    wanted, present = _parallel(config.launch.options), _visible(gpus)
    sets = [[device.strip() for device in devices.split(",")] for devices in launch.gpus]
    if not sets:
        return _beside(config, gpus, wanted, share)
    every = Counter(device for devices in sets for device in devices)
    for device, times in every.items():
        if times * share > 1:
            raise ConfigError(f"launch.gpus: {times} servers on GPU {device} take {times * share:.0%} of its memory")
        if gpus.kind == "assumed" and device.isdigit() and int(device) >= gpus.count:
            raise ConfigError(f"launch.gpus names GPU {device}, but there are {gpus.count}, counted from 0")
    for number, devices in enumerate(sets):
        if len(devices) != wanted:
            raise ConfigError(
                f"launch.gpus gives server {number} {len(devices)} GPUs, but launch.options ask for {wanted}; write"
                f" --tensor-parallel-size {len(devices)} there, or other devices"
            )
    left = [device for device in present if device not in every]
    if gpus.kind == "probed" and len(left) < len(present):
        raise ConfigError(
            f"launch.gpus: the trainer sees GPUs {','.join(present)}, of which servers have"
            f" {','.join(sorted(every.keys() & set(present)))}; start it with CUDA_VISIBLE_DEVICES={','.join(left)}"
        )
    if not left:
        raise ConfigError("launch.gpus gives all GPUs to servers, and none is left to train on; name fewer")
    ranks = "sky_trainer" if len(left) == 1 else f"torchrun --nproc-per-node={len(left)} -m sky_trainer.cli"
    named = " | ".join(",".join(devices) for devices in sets)
    text = (
        f"GPUs {','.join(left)} train, {named} serve ({len(sets)} servers of {wanted}); start it with"
        f" CUDA_VISIBLE_DEVICES={','.join(left)} {ranks} train"
    )
    return Layout(gpus, len(left), len(sets), wanted, share, text=text)


def _beside(config: Config, gpus: Gpus, wanted: int, share: float) -> Layout:
    """Servers that were given no devices see all and take the first ones, as the trainer does."""
    servers = config.launch.servers
    if gpus.count > 1:
        raise ConfigError(
            f"launch.gpus is empty, so that {servers} servers and the trainer would all take the first of"
            f" {gpus.count} GPUs; name the devices of each server, such as ['{gpus.count - 1}'] for one"
        )
    if wanted > 1:
        raise ConfigError(f"launch.options ask for {wanted} GPUs a server, and there is one")
    if servers * share >= 1:
        raise ConfigError(
            f"launch.gpus is empty and there is one GPU, of which servers take {servers * share:.0%}, so that nothing"
            " is left to train; lower their share with --gpu-memory-utilization 0.4 (vLLM) or --mem-fraction-static"
            " 0.4 (SGLang) in launch.options"
        )
    text = f"one GPU, of which servers take {servers * share:.0%} and training has the rest"
    return Layout(gpus, 1, servers, wanted, share, servers * share, text)


def _on_cluster(config: Config, gpus: Gpus, machines: Sequence[Machine]) -> Layout:
    settings, launch = config.ray, config.launch
    wanted, on_gpus = _parallel(launch.options), launch.device == "cuda" and gpus.kind != "none"
    if launch.servers and on_gpus and settings.server_gpus != wanted:
        raise ConfigError(
            f"ray.server_gpus is {settings.server_gpus:g}, but launch.options ask for {wanted} GPUs a server; make"
            " them agree"
        )
    if on_gpus and not settings.rank_gpus and not config.grpo.get("use_cpu"):
        raise ConfigError("ray.rank_gpus is 0, so ranks would train without a GPU; set it to 1")
    roles: list[tuple[str, int, float, float]] = [
        ("rank", settings.ranks, settings.rank_cpus, settings.rank_gpus),
        ("server", launch.servers, settings.server_cpus, settings.server_gpus),
        ("worker", settings.workers, settings.worker_cpus, 0.0),
    ]
    for role, count, cpus, each in roles:
        for number in range(count):
            order = machines if role == "rank" else sorted(machines, key=lambda machine: machine.holds[role])
            if not any(machine.take(role, cpus, each) for machine in order):
                raise ConfigError(
                    f"ray: no room for {role} {number} of {count}, which takes {cpus:g} CPUs and {each:g} GPUs, beside"
                    f" {_described(machines)}"
                )
    training = int(settings.ranks * settings.rank_gpus) or gpus.count
    serving = wanted if launch.servers and on_gpus else 0
    return Layout(gpus, training, launch.servers, serving, _share(launch.options), text=_described(machines))


def _described(machines: Sequence[Machine]) -> str:
    """Alike machines together."""
    kinds = Counter(tuple(sorted(machine.holds.items())) for machine in machines)
    return "; ".join(f"{times} machine(s) with {_held(dict(held))}" for held, times in kinds.items())


def _held(held: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {role}{'s' * (count > 1)}" for role, count in held.items()) or "nothing on it"


def _visible(gpus: Gpus) -> list[str]:
    """The trainer's own devices, by the names that servers call them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus.kind == "probed" else ""
    return [device.strip() for device in named.split(",")] if named else [str(n) for n in range(gpus.count)]


def _parallel(options: Sequence[str]) -> int:
    """How many GPUs a server with these options takes."""
    product = 1
    for name, value in _settings(options):
        product *= int(value) if name in MULTIPLIED and value.isdigit() else 1
    return product


def _share(options: Sequence[str]) -> float:
    shares = [float(value) for name, value in _settings(options) if name in SHARES and _PART.fullmatch(value)]
    return shares[-1] if shares else SERVER_SHARE


def _settings(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each option, written as one word or as two."""
    for word, following in pairwise([*options, ""]):
        name, joined, value = word.removeprefix("--").partition("=")
        yield name, value if joined else following
