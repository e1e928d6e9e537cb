"""What the node server and the gateway share of HTTP: bodies in, results and errors out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from skyenv.errors import ConfigError, SandboxError, SandboxProtocolError, SkyEnvError
from skyenv.remote.protocol import META, VERSION, VERSION_HEADER, WireError, decode_query, encode_error, encode_meta

LOG = logging.getLogger(__name__)


def error_answer(error: WireError) -> Response:
    """An error as it travels; Retry-After in whole seconds for others, `retry_after` exactly for our client."""
    headers = {VERSION_HEADER: VERSION}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return Response(error.model_dump_json(), error.status, headers=headers, media_type="application/json")


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's way to answer with one of our errors, which `app.state.metrics` counts."""
    known = encode_error(error if isinstance(error, SkyEnvError) else SandboxError(str(error)))
    request.app.state.metrics.answered(known)
    return error_answer(known)


async def answer_bug(request: Request, error: Exception) -> Response:
    """Starlette's way to answer when something else was raised; the log has the traceback."""
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    request.app.state.metrics.failed("internal")
    return error_answer(WireError(code="internal", message=f"{type(error).__name__}: {error}"))


def success(meta: Mapping[str, Any], body: bytes = b"", status: int = 200) -> Response:
    """A result: small fields and raw bytes."""
    headers = {META: encode_meta(meta), VERSION_HEADER: VERSION}
    return Response(body, status, headers=headers, media_type="application/octet-stream")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. SandboxProtocolError, which is answered with 413, when it has more than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect as error:  # nobody's bug
        raise SandboxProtocolError("the client went away before all of the body had come") from error
    return b"".join(parts)


def _too_large(limit: int) -> SandboxProtocolError:
    return SandboxProtocolError(f"the body is larger than the {limit} bytes that are taken here", reason="too_large")


def query_of(request: Request) -> dict[str, str]:
    """The query's parameters; undecodable bytes survive."""
    return decode_query(request.scope["query_string"])


def path_in(query: Mapping[str, str]) -> str:
    """The path that a query names. SandboxProtocolError when there is none."""
    if "path" not in query:
        raise SandboxProtocolError("the query has no 'path'")
    return query["path"]


def whole_number(query: Mapping[str, str], name: str) -> int | None:
    """A number of a query, None when it is not there. ConfigError naming it when it is none."""
    if name not in query:
        return None
    if not query[name].isdigit():
        raise ConfigError(f"{name}: not a whole number of at least 0")
    return int(query[name])


def names_in(text: str | bytes) -> list[str]:
    """A JSON list of names. SandboxProtocolError when it is something else."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list):
        raise SandboxProtocolError("a JSON list of names is wanted")
    return [str(name) for name in names]
