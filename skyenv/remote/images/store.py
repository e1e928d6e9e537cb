"""Unpacked images on disk, shared by every sandbox and every node server of this machine that uses the same directory.

    images/NAME.json      what an image is: its configuration and layers, under a hash of its reference
    layers/ID/            one unpacked layer, under the first digits of the digest of its content
    layers/ID.json        that digest in full, and its size; written last, so a layer without it is not complete
    scratch/              downloads and layers under way; each process has its own locked directory, dead ones are swept
    lock                  held while images are collected

A layer is unpacked once, whichever images share it, and becomes visible by a rename. What is in use is locked (shared)
by the process that uses it, each layer and each image's record; only what nobody locks is collected, oldest use first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyenv.remote.images.manifests import ImageConfig
from skyenv.remote.images.references import Reference

ID_DIGITS = 16
SCRATCH_PREFIX = "scratch-"


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image on this machine. `layers` are names below the store's `layers`, lowest first."""

    reference: str
    digest: str
    layers: tuple[str, ...]
    config: ImageConfig


def restore(saved: dict[str, Any]) -> Image:
    """The opposite of `dataclasses.asdict`, also after JSON."""
    config = saved["config"]
    lists = {key: tuple(config[key]) for key in ("diff_ids", "entrypoint", "command")}
    return Image(saved["reference"], saved["digest"], tuple(saved["layers"]), ImageConfig(**{**config, **lists}))


def layer_id(diff_id: str) -> str:
    """A short name, because an overlay's options must fit in one page; the whole digest is checked beside it."""
    return diff_id.removeprefix("sha256:")[:ID_DIGITS]


class Store:
    """The files; every method blocks. `owner` (None: us) owns what is made."""

    def __init__(self, root: Path, owner: int | None) -> None:
        self.root = root
        self.layers = root / "layers"
        self._owner = owner
        self._locks: dict[str, tuple[int, int]] = {}
        self._scratch = Path()
        self._scratch_lock = -1

    def open(self) -> None:
        """Make the directories and sweep what dead processes left."""
        for folder in (self.root, self.layers, self.root / "images"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own(folder)
        with self._exclusive():
            for left in self.root.glob(f"{SCRATCH_PREFIX}*"):
                if _is_free(left / "lock"):
                    remove_tree(left)
            self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self.root))
            self._own(self._scratch)
            self._scratch_lock = os.open(self._scratch / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._scratch_lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Let go of every image and of what is under way."""
        for fd, _count in self._locks.values():
            os.close(fd)
        self._locks.clear()
        remove_tree(self._scratch)
        os.close(self._scratch_lock)

    def _own(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def scratch(self) -> Path:
        """A fresh name for a download."""
        fd, name = tempfile.mkstemp(dir=self._scratch)
        os.close(fd)
        self._own(Path(name))
        return Path(name)

    def scratch_directory(self) -> Path:
        """A fresh directory for a layer."""
        made = Path(tempfile.mkdtemp(dir=self._scratch))
        made.chmod(0o755)
        self._own(made)
        return made

    def _record(self, reference: Reference | str) -> Path:
        name = hashlib.sha256(str(reference).encode()).hexdigest()[:32]
        return self.root / "images" / f"{name}.json"

    def find(self, reference: Reference) -> Image | None:
        """An image with all its layers."""
        image = self._load(self._record(reference))
        return image if image is not None and all(map(self._has, image.config.diff_ids)) else None

    def _load(self, path: Path) -> Image | None:
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return restore(found)

    def stamp(self) -> tuple[int, int]:
        """Changes whenever the answer of `images` may."""
        return self.layers.stat().st_mtime_ns, (self.root / "images").stat().st_mtime_ns

    def images(self) -> list[Image]:
        """All complete ones."""
        found = [self._load(path) for path in sorted((self.root / "images").glob("*.json"))]
        return [image for image in found if image is not None and all(map(self._has, image.config.diff_ids))]

    def _has(self, diff_id: str) -> bool:
        return self.layer_info(diff_id) is not None

    def layer_info(self, diff_id: str) -> dict[str, Any] | None:
        """What is known of an unpacked layer; None unless it is complete."""
        name = layer_id(diff_id)
        try:
            found: dict[str, Any] = json.loads((self.layers / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if found["diff_id"] == diff_id and (self.layers / name).is_dir() else None

    def keep_layer(self, made: Path, info: dict[str, Any]) -> None:
        """Take a finished layer in, and hold it; another process may have been faster."""
        name = layer_id(info["diff_id"])
        with self._exclusive():
            if self._has(info["diff_id"]):
                remove_tree(made)
            else:
                remove_tree(self.layers / name)
                made.rename(self.layers / name)
                self._write(self.layers / f"{name}.json", info)
            self._lock(self.layers / f"{name}.json")

    def hold_layer(self, diff_id: str) -> bool:
        """Hold a layer while it is needed; False when it is not there."""
        path = self.layers / f"{layer_id(diff_id)}.json"
        return (str(path) in self._locks or self._has(diff_id)) and self._lock(path)

    def release_layer(self, diff_id: str) -> None:
        """The opposite of `hold_layer` and of what `keep_layer` holds."""
        self._unlock(self.layers / f"{layer_id(diff_id)}.json")

    def keep_image(self, image: Image) -> None:
        """Remember an image whose layers are held."""
        with self._exclusive():
            self._write(self._record(image.reference), asdict(image))

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        temporary = self.scratch()
        temporary.write_text(json.dumps(value))
        temporary.rename(path)

    def take(self, reference: Reference) -> Image | None:
        """`find` and `hold`."""
        image = self.find(reference)
        return image if image is not None and self.hold(image) else None

    def hold(self, image: Image) -> bool:
        """Use an image: it cannot be collected until as many `release`. False when it is not there any more."""
        held: list[str] = []
        for diff_id in image.config.diff_ids:
            if not self.hold_layer(diff_id):
                break
            held.append(diff_id)
        else:
            if self._lock(self._record(image.reference)):
                return True
        for diff_id in held:
            self.release_layer(diff_id)
        return False

    def release(self, image: Image) -> None:
        """The opposite of `hold`."""
        for diff_id in image.config.diff_ids:
            self.release_layer(diff_id)
        self._unlock(self._record(image.reference))

    def _lock(self, path: Path) -> bool:
        key = str(path)
        fd, count = self._locks.get(key, (-1, 0))
        if not count:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not os.fstat(fd).st_nlink:
                os.close(fd)
                return False
            os.utime(fd)
        self._locks[key] = (fd, count + 1)
        return True

    def _unlock(self, path: Path) -> None:
        if str(path) not in self._locks:  # what an earlier node used may have been collected before this one held it
            return
        fd, count = self._locks.pop(str(path))
        if count > 1:
            self._locks[str(path)] = (fd, count - 1)
        else:
            os.utime(fd)
            os.close(fd)

    def usage(self) -> float:
        """How full the file system is, from 0 to 1."""
        found = os.statvfs(self.root)
        return 1 - found.f_bavail / max(1, found.f_blocks - found.f_bfree + found.f_bavail)

    def collect(self, limit: float) -> list[str]:
        """Remove images that nobody uses, longest unused first, until the disk is no fuller than `limit`.

        Returns their references. Layers that no image needs any more go too.
        """
        gone: list[str] = []
        with self._exclusive():
            self._remove_unreferenced()
            records = [(path.stat().st_mtime, path) for path in (self.root / "images").glob("*.json")]
            for _used, path in sorted(records):
                if self.usage() <= limit:
                    break
                image = self._load(path)
                if _delete_unlocked(path):
                    gone.append(image.reference if image else path.stem)
                    self._remove_unreferenced()
        return gone

    def _remove_unreferenced(self) -> None:
        loaded = [self._load(path) for path in (self.root / "images").glob("*.json")]
        needed = {name for image in loaded if image is not None for name in image.layers}
        for path in self.layers.glob("*.json"):
            if path.stem not in needed and _delete_unlocked(path):
                remove_tree(self.layers / path.stem)


def _delete_unlocked(path: Path) -> bool:
    """Delete a file unless somebody holds a lock on it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_free(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def remove_tree(path: Path) -> None:
    """Remove a layer under way, whatever its directories' modes. Missing is fine."""
    if path.exists():
        for folder, names, _files in os.walk(path):
            for name in names:
                if not Path(folder, name).is_symlink():
                    Path(folder, name).chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
