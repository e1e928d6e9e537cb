"""Weights as directories on a disk that trainer and servers share.

A directory appears whole or not at all: it is written under another name, flushed, and renamed. Its name is its
version. Whatever else lies in the parent is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyenv.errors import ConfigError

if TYPE_CHECKING:
    import torch

_VERSION = re.compile(r"v(\d{8,})")
_UNFINISHED = re.compile(r"\.v\d{8,}\.\d+")


class VersionedFiles:
    """The directories `v00000000`, `v00000001`, ... below `parent`, the newest `keep` of them kept.

    `seen_as` is what servers call `parent`. ConfigError when it cannot be written to.
    """

    def __init__(self, parent: Path, seen_as: str = "", keep: int = 2) -> None:
        self._parent = parent.absolute()
        self._seen_as = seen_as or str(self._parent)
        self._keep = keep
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            for path in self._parent.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path)
        except OSError as error:
            raise ConfigError(f"engine.directory: cannot write to {self._parent}: {error.strerror}") from error

    def path(self, version: int) -> Path:
        """Where a version lies on this machine."""
        return self._parent / f"v{version:08d}"

    def server_path(self, version: int) -> str:
        """Where a version lies for the servers."""
        return f"{self._seen_as.rstrip('/')}/v{version:08d}"

    def begin(self, version: int) -> Path:
        """A fresh directory to write the version's files into."""
        path = self._parent / f".v{version:08d}.{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def finish(self, written: Path, version: int) -> None:
        """Make what was written the version, durable and at once; it replaces an older writing of the same version."""
        for path in written.iterdir():
            _flush(path)
        _flush(written)
        target = self.path(version)
        if target.exists():
            shutil.rmtree(target)
        written.rename(target)
        _flush(self._parent)

    def forget_older(self) -> None:
        """Remove all but the newest."""
        found = sorted(
            (int(match[1]), path) for path in self._parent.iterdir() if (match := _VERSION.fullmatch(path.name))
        )
        for _, path in found[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(path: Path, weights: Mapping[str, torch.Tensor], config: Any) -> None:
    """Write safetensors in shards and `config.json` into an existing directory.

    The configuration says untied where the head is written on its own, so that the directory can be served as it is.
    """
    import copy

    from huggingface_hub import save_torch_state_dict

    separate = {name: value.detach().to("cpu") for name, value in weights.items()}
    if getattr(config, "tie_word_embeddings", False) and "lm_head.weight" in separate:
        separate["lm_head.weight"] = separate["lm_head.weight"].clone()
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
    save_torch_state_dict(separate, path)
    config.save_pretrained(path)
