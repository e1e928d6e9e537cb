"""The wire between a client and a node server: what may be asked, and the closed set of errors.

Bodies are raw bytes (commands, file contents, archives, output), parameters travel in the query string and results in
the `skyenv-meta` header as JSON, so that nothing large is ever parsed. Every request that changes something carries an
`Idempotency-Key`; asking again with the same key attaches to the first request and never runs it twice. A request
that takes longer than `wait` seconds answers 202 and is followed under `/calls/{key}`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl, quote_from_bytes

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyenv.errors import (
    ConfigError,
    EnvError,
    SandboxConflict,
    SandboxError,
    SandboxLost,
    SandboxPathError,
    SandboxProtocolError,
    SandboxUnavailable,
    SkyEnvError,
)

META = "skyenv-meta"
KEY = "idempotency-key"
MAX_WAIT = 25.0
GiB = 1 << 30
MAX_VARIABLE = 131_000
MAX_ENVIRONMENT = 1_500_000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Model = TypeVar("Model", bound=BaseModel)

ErrorCode = Literal["unavailable", "lost", "protocol", "path", "conflict", "busy", "config", "unauthorized", "internal"]


class Spec(BaseModel):
    """What a sandbox may use. None means unlimited; sizes in bytes, `ttl` in seconds without any use.

    `file_bytes` bounds one file, `disk_bytes` all files that the sandbox writes, which are then held in memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: Annotated[int, Field(ge=32 << 20)] | None = 4 * GiB
    pids: Annotated[int, Field(ge=16)] | None = 1024
    cpus: Annotated[float, Field(gt=0)] | None = None
    file_bytes: Annotated[int, Field(ge=1 << 20)] | None = 16 * GiB
    disk_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    tmpfs_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    ttl: Annotated[float, Field(ge=1)] = 600.0
    shell: Literal["bash", "sh"] = "bash"


class CreateRequest(BaseModel):
    """The body of `PUT /sandboxes/{id}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    snapshot: str | None = None
    env: dict[str, str] = {}
    spec: Spec = Spec()


class ExecParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/exec`; the command is the body."""

    model_config = ConfigDict(frozen=True)

    timeout: Annotated[float, Field(gt=0, le=7 * 86400)] = 60.0
    soft_timeout: Annotated[float, Field(gt=0)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1, le=64 << 20)] = 1 << 20
    terminal: bool = False


class PollParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/poll`; a body is typed on the command's terminal first."""

    model_config = ConfigDict(frozen=True)

    soft_timeout: Annotated[float, Field(gt=0)] | None = None


class WireError(BaseModel):
    """The body of every answer that is not a success."""

    code: ErrorCode
    message: str
    retry_after: float | None = None
    errno: int | None = None


STATUS: Mapping[ErrorCode, int] = {
    "unavailable": 503,
    "lost": 410,
    "protocol": 400,
    "path": 404,
    "conflict": 409,
    "busy": 409,
    "config": 422,
    "unauthorized": 401,
    "internal": 500,
}

# The most specific type comes first.
_CODES: tuple[tuple[type[SkyEnvError], ErrorCode], ...] = (
    (SandboxConflict, "conflict"),
    (SandboxPathError, "path"),
    (SandboxUnavailable, "unavailable"),
    (SandboxLost, "lost"),
    (SandboxProtocolError, "protocol"),
    (EnvError, "busy"),
    (ConfigError, "config"),
    (SkyEnvError, "internal"),
)

_TYPES: Mapping[ErrorCode, type[SkyEnvError]] = {
    "lost": SandboxLost,
    "protocol": SandboxProtocolError,
    "busy": EnvError,
    "config": ConfigError,
    "unauthorized": ConfigError,
    "internal": SandboxError,
}


def encode_error(error: SkyEnvError) -> WireError:
    """One of our errors as it travels."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    message = (error.strerror if isinstance(error, SandboxPathError) else None) or str(error)
    return WireError(
        code=code,
        message=message.encode("utf-8", "backslashreplace").decode(),
        retry_after=error.retry_after if isinstance(error, SandboxUnavailable) else None,
        errno=error.errno if isinstance(error, SandboxPathError) else None,
    )


def decode_error(body: bytes) -> SkyEnvError:
    """What an error's body means; `SandboxProtocolError` when it is none of ours."""
    try:
        wire = WireError.model_validate_json(body)
    except ValidationError:
        return SandboxProtocolError(f"the node answered with something else than an error: {body[:200]!r}")
    if wire.code == "unavailable":
        return SandboxUnavailable(wire.message, wire.retry_after)
    if wire.code in ("path", "conflict"):
        kind = SandboxConflict if wire.code == "conflict" else SandboxPathError
        return kind(wire.errno, wire.message)
    return _TYPES[wire.code](wire.message)


def nearest_key(key: str, known: Mapping[str, Any]) -> str:
    """A hint naming the known key that `key` looks most like, or all of them."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


def parse_spec(values: Mapping[str, Any]) -> Spec:
    """Check a spec. ConfigError naming the field and the fix."""
    for key in values:
        if key not in Spec.model_fields:
            raise ConfigError(f"spec has no key {key!r}; {nearest_key(key, Spec.model_fields)}")
    try:
        return Spec(**values)
    except ValidationError as error:
        raise ConfigError(f"spec.{_first_problem(error)}") from error


def parse_create(body: bytes) -> CreateRequest:
    """Check the body of a create request. ConfigError naming the field."""
    try:
        request = CreateRequest.model_validate_json(body)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from error
    check_environment(request.env)
    return request


def check_environment(env: Mapping[str, str]) -> None:
    """ConfigError for variables that no process could be started with."""
    total = 0
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ConfigError(f"env[{name!r}]: a name has letters, digits and '_' only, a value no NUL")
        size = len(name.encode()) + len(value.encode("utf-8", "surrogateescape"))
        if size > MAX_VARIABLE:
            raise ConfigError(f"env[{name!r}] is {size} bytes long; the kernel passes at most {MAX_VARIABLE}")
        total += size
    if total > MAX_ENVIRONMENT:
        raise ConfigError(f"env is {total} bytes long; the kernel passes at most about {MAX_ENVIRONMENT}")


def parse_query(model: type[Model], query: Mapping[str, str]) -> Model:
    """Check query parameters against a model, ignoring those it does not have. ConfigError naming the field."""
    known = {key: value for key, value in query.items() if key in model.model_fields}
    try:
        return model.model_validate_strings(known)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    return f"{where}: {first['msg']}"


def encode_query(**values: str | float | None) -> str:
    """A query string; undecodable bytes in strings survive, None is left out."""
    return "&".join(
        f"{key}={quote_from_bytes(str(value).encode('utf-8', 'surrogateescape'))}"
        for key, value in values.items()
        if value is not None
    )


def decode_query(query: bytes) -> dict[str, str]:
    """The opposite of `encode_query`."""
    pairs = parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True, errors="surrogateescape")
    return dict(pairs)


def encode_meta(meta: Mapping[str, Any]) -> str:
    """A result's fields as a header value (ASCII)."""
    return json.dumps(meta, separators=(",", ":"))


def decode_meta(value: str | None) -> dict[str, Any]:
    """The opposite of `encode_meta`. SandboxProtocolError when it is missing or broken."""
    try:
        meta = json.loads(value or "")
    except ValueError as error:
        raise SandboxProtocolError(f"the node's answer has no readable {META} header") from error
    if not isinstance(meta, dict):
        raise SandboxProtocolError(f"the node's {META} header is not an object")
    return meta
