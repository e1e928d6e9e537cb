"""What a command came to, from an answer of the wire."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable

import httpx

from skyenv.remote.protocol import META, decode_meta
from skyenv.types import ExecResult


def exec_result(response: httpx.Response) -> ExecResult:
    """The whole of an answer to `exec` or `poll`, decoded by itself."""
    return _result(response, lambda data, _final: data.decode(errors="replace"))


class Pieces:
    """The answers about one command, one after the other; a character may begin in one and end in the next."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, response: httpx.Response) -> ExecResult:
        """The next piece."""
        return _result(response, self._decoder.decode)


def _result(response: httpx.Response, decode: Callable[[bytes, bool], str]) -> ExecResult:
    meta, data = decode_meta(response.headers.get(META)), response.content
    total, head, final = meta["output_bytes"], meta["head"], not meta.get("running", False)
    left_out = total - len(data)
    if left_out > 0:
        note = f"\n[... {left_out} bytes left out ...]\n"
        output = decode(data[:head], True) + note + decode(data[head:], final)
    else:
        output = decode(data, final)
    return ExecResult(
        exit_code=meta["exit_code"],
        output=output,
        timed_out=meta.get("timed_out", False),
        truncated=left_out > 0,
        oom=meta.get("oom", False),
        session_restarted=meta.get("session_restarted", False),
        seconds=meta["seconds"],
        running=not final,
        cwd=os.fsencode(meta["cwd"]).decode(errors="replace"),
        cwd_missing=meta.get("cwd_missing", False),
        output_bytes=total,
    )
