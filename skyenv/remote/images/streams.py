"""What an unpacker reads from: a part of a file, decompressed and hashed on the way. Standard library only."""

from __future__ import annotations

import gzip
import hashlib
import io
from typing import IO, Any

CHUNK = 1 << 20


class Refused(Exception):
    """The blob is not what it claims to be. `kind` is corrupt, hostile, missing or full."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Hashed(io.RawIOBase):
    """A stream that knows the digest of all that was read from it."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Like any stream's."""
        data = self._inner.read(size)
        self._digest.update(data)
        return data

    def finish(self) -> str:
        """Read the rest and return the digest of everything."""
        while self.read(CHUNK):
            pass
        return f"sha256:{self._digest.hexdigest()}"


class Section(io.RawIOBase):
    """The part of a file from `offset` on, `size` bytes long."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        file.seek(offset)
        self._file, self._left = file, size

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Like any stream's."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The content of a blob, whatever it is compressed with; the first bytes tell."""
    head = raw.read(4)
    rest: IO[bytes] = io.BufferedReader(_Prefixed(head, raw), CHUNK)
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=rest)  # type: ignore[return-value]
    if head == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise Refused("missing", "the layer is compressed with zstd: install skyenv[oci]") from None
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(rest, read_across_frames=True)
        return _Translated(reader, zstandard.ZstdError)  # type: ignore[return-value]
    return rest


class _Translated(io.RawIOBase):
    """A stream whose own kind of error becomes ours."""

    def __init__(self, inner: IO[bytes], error: type[Exception]) -> None:
        self._inner, self._error = inner, error

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Like any stream's."""
        try:
            return self._inner.read(size)
        except self._error as error:
            raise Refused("corrupt", f"the layer cannot be decompressed: {error}") from error


class _Prefixed(io.RawIOBase):
    """`head`, then everything else."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Like any stream's."""
        data, self._head = (self._head, b"") if self._head else (self._rest.read(len(buffer)), b"")
        buffer[: len(data)] = data
        return len(data)
