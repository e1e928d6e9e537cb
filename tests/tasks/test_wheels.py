"""Wheels on the host: pinned only, resolved once, repaired when the cache rots."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from skyenv.envs.swe.wheels import fetch_wheels
from skyenv.errors import ConfigError, SourceUnavailable


def make_wheel(directory: Path, name: str, requires: str = "") -> None:
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(text)}\n")
        wheel.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that pip uses instead of an index."""
    make_wheel(tmp_path / "links", "alpha", "Requires-Dist: beta\n")
    make_wheel(tmp_path / "links", "beta")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.mark.parametrize("requirement", ["alpha", "alpha>=1", "alpha==1.*", "./alpha", "--pre", "alpha @ file:///x"])
async def test_only_pinned_requirements(tmp_path: Path, requirement: str) -> None:
    with pytest.raises(ConfigError, match="is not pinned"):
        await fetch_wheels([requirement], cache=tmp_path)


async def test_nothing_asked_nothing_fetched(tmp_path: Path) -> None:
    assert await fetch_wheels([], cache=tmp_path / "cache") == []
    assert not (tmp_path / "cache").exists()


async def test_dependencies_come_along_and_the_cache_is_kept_and_repaired(tmp_path: Path, links: Path) -> None:
    cache = tmp_path / "cache"
    wheels = await fetch_wheels(["alpha==1.0"], cache=cache)
    assert [wheel.name[:5] for wheel in wheels] == ["alpha", "beta-"]
    content = wheels[0].read_bytes()
    links.rename(tmp_path / "away")
    assert await fetch_wheels(["alpha==1.0"], cache=cache) == wheels
    wheels[0].write_bytes(b"rot")
    (tmp_path / "away").rename(links)
    assert await fetch_wheels(["alpha==1.0"], cache=cache) == wheels
    assert wheels[0].read_bytes() == content
    assert [path.name for path in (cache / "wheels").iterdir()] == [wheels[0].parent.name]


@pytest.mark.usefixtures("links")
async def test_unknown_requirement(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no wheels of \['gamma==1.0'\]"):
        await fetch_wheels(["gamma==1.0"], cache=tmp_path)


async def test_unreachable_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceUnavailable, match="cannot download wheels"):
        await fetch_wheels(["gamma==1.0"], cache=tmp_path)
