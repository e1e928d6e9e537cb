"""The node's side of `unpack`: a bounded number of unpackers, each a process that ends with the request for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio

from skyenv.errors import ConfigError, SandboxError, SandboxUnavailable
from skyenv.remote.images.sources import Blob

CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from images.unpack import main; main()"


class Unpacker:
    """Runs unpackers, at most `workers` at a time, as user `run_as` (None: as we are)."""

    def __init__(self, *, workers: int, base_uid: int | None, run_as: int | None, max_bytes: int) -> None:
        self._limiter = anyio.CapacityLimiter(workers)
        self._shared = {"base_uid": base_uid, "run_as": run_as, "max_bytes": max_bytes}

    async def unpack(self, blob: Blob, target: Path, diff_id: str | None, what: str) -> dict[str, Any]:
        """Make a layer in the empty directory `target`. Returns its size and digest.

        ConfigError for a layer that is damaged or cannot be meant well, SandboxUnavailable for a full disk.
        """
        place = {"blob": str(blob.path), "offset": blob.offset, "size": blob.size}
        return await self._run({**place, "target": str(target), "diff_id": diff_id}, what)

    async def pack(self, source: str, target: Path) -> None:
        """Write the directory `source` as a tar file."""
        await self._run({"source": source, "blob": str(target)}, f"dir:{source}")

    async def _run(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        # Site packages stay reachable: zstd is one of them.
        command = [sys.executable, "-I", "-c", CODE, str(Path(__file__).parent.parent)]
        async with self._limiter:
            done = await anyio.run_process(
                command,
                input=json.dumps({**self._shared, **request}).encode(),
                stderr=subprocess.PIPE,
                check=False,
                start_new_session=True,
            )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            text = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxError(f"image {what}: its unpacker ended with status {done.returncode}: {text}") from None
        if "error" in answer:
            raise _error(answer, what)
        return answer


def _error(answer: dict[str, Any], what: str) -> Exception:
    text = f"image {what}: {answer['error']}"
    match answer["kind"]:
        case "full":
            return SandboxUnavailable(text, retry_after=60.0, reason="disk_full")
        case "machine":
            return SandboxError(text)
    return ConfigError(text)
