"""What `doctor` makes of installed versions: told ones, and those of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sky_trainer.checks import engine, packages, run_checks
from sky_trainer.cli import main
from sky_trainer.versions import (
    Installed,
    between,
    mismatches,
    read_environment,
    read_installed,
    server_mismatches,
)

EXTRA = (
    'trl>=1.16,<1.17 ; extra == "train"',
    'torch>=2.6 ; extra == "train"',
    'ray>=2 ; extra == "ray"',
    "anyio>=4,<5",
)
SOUND: dict[str, Any] = {
    "versions": {"skyenv": "0.1.0", "trl": "1.16.2", "torch": "2.13.0+cpu", "transformers": "5.24.0", "anyio": "4.9"},
    "requires": {"skyenv": EXTRA},
}
VLLM = {
    "vllm": (
        "torch==2.14.0",
        "transformers<5.21,>=5.16.1",
        "numpy",
        'xformers==1 ; extra == "x"',
        'torch==9 ; python_version < "3"',
    )
}


def told(cuda: str | None = None, driver: str | None = None, **versions: str | None) -> Installed:
    merged = {**SOUND["versions"], **{name.replace("_", "-"): version for name, version in versions.items()}}
    here = {name: version for name, version in merged.items() if version is not None}
    return Installed(here, {**SOUND["requires"], **VLLM}, cuda, driver)


def test_a_sound_installation_has_none() -> None:
    assert mismatches(told()) == []
    assert mismatches(told(cuda="12.8", driver="525.60.13", torch="2.13.0+cu128")) == []
    assert mismatches(told(cuda="13.0", driver="580.95.05", torch="2.14.0")) == []


@pytest.mark.parametrize(
    ("installed", "what", "fix"),
    [
        (told(trl=None), "trl is not installed", "pip install 'trl>=1.16,<1.17'"),
        (told(trl="1.17.0"), "trl 1.17.0 is outside >=1.16,<1.17", "pip install 'trl>=1.16,<1.17'"),
        (told(torch="2.5.1"), "torch 2.5.1 is outside >=2.6", "pip install 'torch>=2.6'"),
        (told(torch="2.13.0+cpu", driver="580.65.06"), "torch 2.13.0+cpu has no CUDA", "CUDA build"),
        (
            told(cuda="13.0", driver="550.54.14", torch="2.14.0"),
            "CUDA 13.0, which needs driver 580.65.06; here is 550.54.14",
            "driver to 580.65.06 or newer, or install a build of torch for CUDA 12",
        ),
        (
            told(cuda="12.4", driver="470.1", torch="2.14.0"),
            "needs driver 525.60.13",
            "or install a build of torch for CUDA 11",
        ),
        (told(torchvision="0.28.0"), "torchvision 0.28.0 is not of the same build", "pip uninstall torchvision"),
    ],
)
def test_what_does_not_fit_is_named_with_its_fix(installed: Installed, what: str, fix: str) -> None:
    ((found, mended),) = mismatches(installed)
    assert what in found
    assert fix in mended


def test_a_server_in_the_same_environment_brings_its_pins() -> None:
    found = mismatches(told(vllm="0.33.0", torch="2.13.0+cpu"))
    assert [what for what, _ in found] == [
        "vllm 0.33.0 needs torch==2.14.0, here is 2.13.0+cpu",
        "vllm 0.33.0 needs transformers>=5.16.1,<5.21, here is 5.24.0",
        "vllm 0.33.0 is outside what TRL 1.16.2 takes in its process, >=0.22,<=0.31.0",
    ]
    assert all("uv venv .engines/vllm" in fix for _, fix in found)
    assert mismatches(told(vllm="0.31.0", torch="2.14.0", transformers="5.17.0")) == []


def test_this_installation_fits_and_its_own_metadata_is_read() -> None:
    installed = read_installed()
    assert any(text.startswith("trl") for text in installed.requires["skyenv"])
    assert mismatches(installed) == []


def test_doctor_says_what_to_run() -> None:
    checks = {check.name: check for check in run_checks(lambda: told(trl="1.17.0"))}
    assert not checks["versions"].ok
    assert checks["versions"].required
    assert checks["versions"].advice == ("trl 1.17.0 is outside >=1.16,<1.17: pip install 'trl>=1.16,<1.17'",)
    (missing,) = packages(None)
    assert "pip install 'skyenv[train]'" in missing.advice[0]


# Environments of servers.


def engines(folder: Path, cuda: str | None = None, **versions: str) -> Path:
    site = folder / "lib/python3.11/site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\nhip = None\n")
    for name, version in versions.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        needs = "Requires-Dist: torch==2.14.0\n" if name == "vllm" else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    return folder


def test_an_environment_of_servers_is_read_without_running_it(tmp_path: Path) -> None:
    place = engines(tmp_path / "vllm", "12.8", vllm="0.33.0", torch="2.14.0", nvidia_nccl_cu12="2.27.5")
    there = read_environment(place)
    assert (there.cuda, there.versions["vllm"]) == ("12.8", "0.33.0")
    assert server_mismatches(there, place) == []
    assert engine(place, told()).ok


@pytest.mark.parametrize(
    ("versions", "cuda", "driver", "what", "fix"),
    [
        ({"torch": "2.13.0"}, "12.8", "580.95.05", "needs torch==2.14.0, here is 2.13.0", "uv pip install --python"),
        ({"torch": "2.14.0"}, "13.0", "550.54.14", "needs driver 580.65.06; here is 550.54.14", "update the NVIDIA"),
        ({"torch": "2.14.0"}, None, "550.54.14", "torch 2.14.0 has no CUDA", "CUDA build"),
    ],
)
def test_what_does_not_fit_there_is_named(
    versions: dict[str, str], cuda: str | None, driver: str, what: str, fix: str, tmp_path: Path
) -> None:
    place = engines(tmp_path / "vllm", cuda, vllm="0.33.0", **versions)
    ((found, mended),) = server_mismatches(dataclasses.replace(read_environment(place), driver=driver), place)
    assert what in found
    assert fix in mended


def test_two_versions_of_nccl_cannot_share_a_broadcast(tmp_path: Path) -> None:
    place = engines(tmp_path / "vllm", "12.8", vllm="0.33.0", torch="2.14.0", nvidia_nccl_cu12="2.27.5")
    ours = told(**{"nvidia-nccl-cu12": "2.28.0"})
    found = engine(place, ours)
    assert not found.ok
    assert not found.required  # files need no common NCCL
    assert "the trainer has NCCL 2.28.0" in found.advice[0]
    assert "write engine.sync: disk" in found.advice[0]
    assert between(told(), read_environment(place), "x") == []


def test_doctor_looks_at_the_environments_in_the_project(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = engines(tmp_path / ".engines" / "vllm", vllm="0.33.0", torch="2.13.0")
    (place / "bin").mkdir()
    (place / "bin" / "python").touch()
    monkeypatch.chdir(tmp_path)
    main(["doctor"])
    told_here = capsys.readouterr().out
    main(["doctor", "--engine", str(tmp_path / "none")])
    assert "-    engine         .engines/vllm: vllm 0.33.0, torch 2.13.0, no CUDA" in told_here
    assert "needs torch==2.14.0" in told_here
    assert "none holds no vLLM or SGLang" in capsys.readouterr().out
