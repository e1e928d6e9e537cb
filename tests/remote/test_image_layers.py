"""Layers are unpacked inside their directory, whatever their tar file says, and become what overlayfs understands."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registries import COMPRESS, digest, layer, member

from skyenv.remote.images.streams import Refused
from skyenv.remote.images.unpack import unpack

BASE = 1_500_000_000
LINK, HARD, FOLDER, FIFO = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.fixture(autouse=True)
def _no_umask() -> Iterator[None]:
    """The unpacker runs with none."""
    before = os.umask(0)
    yield
    os.umask(before)


def unpacked(folder: Path, *members: tuple[tarfile.TarInfo, bytes | None], base: int | None = BASE) -> Path:
    data = layer(*members)
    return unpack_bytes(folder, data, diff_id=digest(data), base_uid=base)


def unpack_bytes(folder: Path, data: bytes, **config: Any) -> Path:
    (folder / "blob").write_bytes(data)
    target = folder / "target"
    target.mkdir()
    unpack({"blob": str(folder / "blob"), "target": str(target), "max_bytes": 1 << 30, "base_uid": BASE, **config})
    return target


def test_files_keep_what_they_are(tmp_path: Path) -> None:
    top = unpacked(
        tmp_path,
        member("etc", type=FOLDER, mode=0o750, mtime=7),
        member("etc/app", b"x" * 3_000_000, mode=0o4755, uid=1000, gid=1001, mtime=1_000_000_000.5),
        member("etc/link", type=LINK, linkname="/etc/app"),
        member("etc/twin", type=HARD, linkname="etc/app"),
        member("etc/fifo", type=FIFO),
        member("implied/below", b"1"),
    )
    found = (top / "etc/app").stat()
    assert (found.st_uid, found.st_gid) == (BASE + 1000, BASE + 1001)
    assert (stat.S_IMODE(found.st_mode), found.st_size, found.st_mtime) == (0o4755, 3_000_000, 1_000_000_000.5)
    assert (top / "etc/twin").stat().st_ino == found.st_ino
    assert os.readlink(top / "etc/link") == "/etc/app"
    assert (top / "etc/link").lstat().st_uid == BASE
    assert (stat.S_IMODE((top / "etc").stat().st_mode), (top / "etc").stat().st_mtime) == (0o750, 7)
    assert (top / "etc/fifo").is_fifo()
    assert (top / "implied").stat().st_uid == BASE


def test_whiteouts_become_what_overlays_know(tmp_path: Path) -> None:
    top = unpacked(
        tmp_path,
        member("a/.wh.gone"),
        member("b", type=FOLDER),
        member("b/.wh..wh..opq"),
        member("b/new", b"n"),
        member("c", type=FOLDER),
        member(".wh.c"),
        member(".wh.d"),
        member("d", type=FOLDER),
        member(".wh..wh.plnk", type=FOLDER),
    )
    hidden = (top / "a/gone").lstat()
    assert stat.S_ISCHR(hidden.st_mode)
    assert hidden.st_rdev == 0
    for name in ("b", "c", "d"):
        assert os.getxattr(top / name, "trusted.overlay.opaque") == b"y", name
    assert not (top / ".wh..wh.plnk").exists()
    assert sorted(os.listdir(top / "b")) == ["new"]


def test_devices_are_left_out_and_foreign_users_are_nobody(tmp_path: Path) -> None:
    top = unpacked(
        tmp_path,
        member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("disk", type=tarfile.BLKTYPE, devmajor=8),
        member("who", b"", uid=70_000, gid=1 << 40),
    )
    assert os.listdir(top) == ["who"]
    assert (top / "who").stat().st_uid == BASE + 65534


def test_only_user_attributes_are_kept(tmp_path: Path) -> None:
    info, content = member("tool", b"x")
    info.pax_headers = {
        f"SCHILY.xattr.{name}": "y"
        for name in ("user.mine", "user.overlay.opaque", "trusted.overlay.opaque", "security.capability")
    }
    top = unpacked(tmp_path, (info, content))
    assert os.listxattr(top / "tool") == ["user.mine"]


@pytest.mark.parametrize(
    "members",
    [
        [member("../out", b"evil")],
        [member("a/../../out", b"evil")],
        [member("link", type=LINK, linkname=".."), member("link/../out", b"evil")],
        [member("hard", type=HARD, linkname="../secret")],
        [member("hard", type=HARD, linkname="/etc/passwd")],
        [member("loop", type=LINK, linkname="loop"), member("loop/x", b"evil")],
        [member(".wh...", b"")],
    ],
)
def test_hostile_names_are_refused(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes | None]]) -> None:
    (tmp_path / "secret").write_text("untouched")
    with pytest.raises(Refused) as caught:
        unpacked(tmp_path, *members)
    assert caught.value.kind == "hostile"
    assert sorted(os.listdir(tmp_path)) == ["blob", "secret", "target"]


@pytest.mark.parametrize("target", ["/", "../../../..", "/tmp", "..", "../target/../.."])
def test_links_lead_nowhere_outside(tmp_path: Path, target: str) -> None:
    """A name below a link is looked up as it would be inside the image."""
    top = unpacked(
        tmp_path, member("link", type=LINK, linkname=target), member("link/evil", b"e"), member("/abs", b"a")
    )
    found = [path for path in (top / "evil", top / "tmp/evil", top / "target/evil", top / "evil") if path.exists()]
    assert found
    assert (top / "abs").read_bytes() == b"a"
    assert sorted(os.listdir(tmp_path)) == ["blob", "target"]
    assert not Path("/evil").exists()
    assert not Path("/tmp/evil").exists()


NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4).map(
    "/".join
)
MEMBERS = st.one_of(
    st.builds(lambda name: member(name, b"evil"), NAMES),
    st.builds(lambda name: member(name, type=FOLDER), NAMES),
    st.builds(
        lambda name, to, up: member(name, type=LINK, linkname=up + to), NAMES, NAMES, st.sampled_from(["", "/", "../"])
    ),
    st.builds(lambda name, to: member(name, type=HARD, linkname=to), NAMES, NAMES),
)


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(st.lists(MEMBERS, max_size=8))
def test_nothing_is_ever_written_outside(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes | None]]) -> None:
    top = tmp_path / "run"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    try:
        unpacked(top, *members)
    except (Refused, OSError):
        pass
    assert sorted(os.listdir(top)) == ["blob", "target"]
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("compression", sorted(COMPRESS))
def test_every_compression_is_understood(tmp_path: Path, compression: str) -> None:
    data = layer(member("file", os.urandom(200_000)))
    top = unpack_bytes(tmp_path, COMPRESS[compression](data), diff_id=digest(data))
    assert (top / "file").stat().st_size == 200_000


def test_a_part_of_a_file_is_enough(tmp_path: Path) -> None:
    data = layer(member("file", b"1"))
    top = unpack_bytes(tmp_path, b"x" * 100 + data + b"y" * 100, diff_id=digest(data), offset=100, size=len(data))
    assert (top / "file").read_bytes() == b"1"


def test_other_content_than_promised_is_refused(tmp_path: Path) -> None:
    data = layer(member("file", b"1"))
    with pytest.raises(Refused, match=hashlib.sha256(data).hexdigest()):
        unpack_bytes(tmp_path, data, diff_id="sha256:" + "0" * 64)


def test_a_layer_may_not_be_endless(tmp_path: Path) -> None:
    data = layer(member("zeros", bytes(5_000_000)))
    with pytest.raises(Refused, match="larger") as caught:
        unpack_bytes(tmp_path, COMPRESS["gzip"](data), diff_id=digest(data), max_bytes=1_000_000)
    assert caught.value.kind == "full"


def test_without_root_everything_is_ones_own(tmp_path: Path) -> None:
    """Whiteouts and opaque directories have names that an unprivileged overlay understands."""
    top = unpacked(
        tmp_path,
        member("closed", type=FOLDER, mode=0),
        member("closed/file", b"1", uid=5),
        member("d/.wh..wh..opq"),
        member(".wh.x"),
        base=None,
    )
    assert (top / "closed/file").stat().st_uid == os.getuid()
    assert stat.S_IMODE((top / "closed").stat().st_mode) == 0
    assert os.getxattr(top / "d", "user.overlay.opaque") == b"y"
    assert stat.S_ISCHR((top / "x").lstat().st_mode)
