"""What `doctor` looks at. Each check tries the thing itself where that is cheap, and never raises."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sky_trainer.versions import Installed

NEEDED_DISK = 2 << 30
PACKAGES = ("skyenv", "gymnasium", "torch", "transformers", "trl", "accelerate", "datasets")
EXTRA_HINT = "pip install 'skyenv[train]'"
# What the extra brings, as it is imported.
EXTRA_MODULES = frozenset(
    ["accelerate", "datasets", "matplotlib", "packaging", "peft", "rich", "safetensors", "tensorboard", "tokenizers",
     "torch", "transformers", "trl"]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `required`: without it neither demo nor training runs. `advice` says what to change."""

    name: str
    ok: bool
    detail: str
    advice: tuple[str, ...] = ()
    required: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "advice": list(self.advice)}


def installed_here() -> Installed | None:
    """What is installed on this machine; None where even the package that reads versions is missing."""
    if importlib.util.find_spec("packaging") is None:
        return None
    from sky_trainer.versions import read_installed

    return read_installed()


def run_checks(installed: Callable[[], Installed | None] = installed_here, engines: Sequence[Path] = ()) -> list[Check]:
    """Every check, the cheap ones first. `installed` reads what is installed, `engines` are servers' environments."""
    here = installed()
    servers = [engine(path, here) for path in engines] if here is not None else []
    return [system(), *packages(here), *servers, sandboxes(), programs(), disk(), gpu(), docker()]


def system() -> Check:
    """Operating system, interpreter and cores."""
    linux = sys.platform == "linux"
    detail = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    advice = () if linux else ("sandboxes need Linux; use a virtual machine, or --sandbox URL of a server on Linux",)
    return Check("system", linux, detail, advice, required=True)


def packages(installed: Installed | None) -> list[Check]:
    """Installed versions, and whether they fit each other, CUDA and the driver. None: not even that can be read."""
    if installed is None:
        return [Check("packages", False, "the trainer's packages are missing", (f"install them: {EXTRA_HINT}",), True)]
    missing = [name for name in PACKAGES if name not in installed.versions]
    detail = ", ".join(f"{name} {installed.versions[name]}" for name in PACKAGES if name in installed.versions)
    advice = (f"install {', '.join(missing)}: {EXTRA_HINT}",) if missing else ()
    found = [Check("packages", not missing, detail, advice, required=True)]
    from sky_trainer.versions import mismatches

    wrong = mismatches(installed)
    fits = "packages, CUDA and driver fit each other" if not wrong else f"{len(wrong)} do not fit"
    lines = tuple(f"{what}: {fix}" for what, fix in wrong)
    return [*found, Check("versions", not wrong, fits, lines, required=True)]


def engine(path: Path, installed: Installed) -> Check:
    """An environment of inference servers: what is in it, and whether that fits itself, the driver and the trainer."""
    from sky_trainer.versions import SERVERS, between, read_environment, server_mismatches

    there = read_environment(path)
    found = [f"{name} {there.versions[name]}" for name in (*SERVERS, "torch") if name in there.versions]
    if not any(name in there.versions for name in SERVERS):
        making = f"uv venv {path} && uv pip install --python {path} vllm"
        return Check("engine", False, f"{path} holds no vLLM or SGLang", (f"make it: {making}",))
    wrong = [*server_mismatches(there, path), *between(installed, there, str(path))]
    cuda = f"CUDA {there.cuda}" if there.cuda else "no CUDA"
    lines = tuple(f"{what}: {fix}" for what, fix in wrong)
    return Check("engine", not wrong, f"{path}: {', '.join(found)}, {cuda}", lines)


def sandboxes() -> Check:
    """Whether namespaces, overlay and limits work, by trying them."""
    from skyenv.remote.backends.local import probe

    result = probe()
    if not result.usable:
        return Check("sandboxes", False, "no isolation possible", result.reasons, required=True)
    limits = ", ".join(f"{name}: {how}" for name, how in sorted(result.limits.items()))
    overlay = "overlay" if result.overlay else "no overlay"
    return Check("sandboxes", True, f"namespaces ({result.mode}), {overlay}, limits {limits}", result.reasons, True)


def programs() -> Check:
    """Programs that sandboxes and graders take from the host."""
    missing = [name for name in ("bash", "git", "python3") if shutil.which(name) is None]
    detail = "bash, git, python3" if not missing else f"missing: {', '.join(missing)}"
    advice = (f"install {' '.join(missing)} with the system's package manager",) if missing else ()
    return Check("programs", not missing, detail, advice, required=True)


def disk() -> Check:
    """Room where sandboxes keep their files."""
    place = Path(os.environ.get("SKYENV_STATE_DIR") or os.environ.get("TMPDIR") or "/tmp")
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("disk", False, f"{place}: {error.strerror}", ("set SKYENV_STATE_DIR to a directory that exists",))
    detail = f"{free / 2**30:.1f} GiB free in {place}"
    advice = () if free >= NEEDED_DISK else ("free some space, or set SKYENV_STATE_DIR to a larger file system",)
    return Check("disk", free >= NEEDED_DISK, detail, advice)


def gpu() -> Check:
    """Whether torch sees an accelerator."""
    if importlib.util.find_spec("torch") is None:
        return Check("gpu", False, "torch is not installed", (EXTRA_HINT,))
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", True, f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")
    advice = ("the demo runs on the CPU; to train larger models use a GPU machine and torch's CUDA build",)
    return Check("gpu", False, f"none seen by torch {torch.__version__}", advice)


def docker() -> Check:
    """Whether a container engine answers."""
    if shutil.which("docker") is None:
        return Check("docker", False, "not installed", ("only needed for tasks with container images",))
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("docker", False, f"does not answer: {error}", ("start the docker service",))
    if answer.returncode != 0:
        advice = ("start the docker service, or add yourself to the docker group",)
        return Check("docker", False, "installed, but the engine does not answer", advice)
    return Check("docker", True, f"engine {answer.stdout.strip()}")
