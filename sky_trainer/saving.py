"""Writing models and checkpoints, with an error that a user can act on when the disk does not take them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from skyenv.errors import SkyEnvError

_TORCH_WRITES = ("PytorchStreamWriter", "inline_container")


class NotWritten(SkyEnvError):
    """A model or checkpoint could not be written; what lay there before stands, and the run goes on from it."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises NotWritten, with the room that is left, for whatever transformers and torch raise of a failed write."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        told = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and not any(name in told for name in _TORCH_WRITES):
            raise
        free = shutil.disk_usage(path.parent).free / 1e9
        raise NotWritten(
            f"{path} could not be written: {told[:200]} ({free:.1f} GB are free there); make room and give the same"
            " command again, it goes on from the checkpoint before"
        ) from error
