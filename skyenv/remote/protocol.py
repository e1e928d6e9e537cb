"""The wire between client, gateway and node server: what may be asked, and the closed set of errors.

Bodies are raw bytes (commands, file contents, archives, output), parameters travel in the query string and results in
the `skyenv-meta` header as JSON, so that nothing large is ever parsed. Every request that changes something carries an
`Idempotency-Key`; asking again with the same key attaches to the first request and never runs it twice. A request
that takes longer than `wait` seconds answers 202 with its state and is followed under `/calls/{key}`.

Old and new versions work together: headers, query parameters, meta fields, states, codes and reasons that the other
side does not know are ignored, and what it left out has a default. A field of a request's body is refused by a server
that does not know it (422, named), because it is a promise that the server could not keep; clients therefore send only
fields that were set. `skyenv-version` is `MAJOR.MINOR`; a server refuses another major.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast, get_args
from urllib.parse import parse_qsl, quote_from_bytes

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from skyenv.errors import (
    ConfigError,
    EnvError,
    NotCarried,
    SandboxConflict,
    SandboxError,
    SandboxLost,
    SandboxPathError,
    SandboxProtocolError,
    SandboxUnavailable,
    SkyEnvError,
    did_you_mean,
)

VERSION = "1.1"
META = "skyenv-meta"
KEY = "idempotency-key"
ACK = "skyenv-ack"  # the key of the last finished call whose answer arrived; the server may forget it
ATTEMPT = "skyenv-attempt"  # on a creation: how often it was sent, this time included
SECRET = "skyenv-sandbox-token"  # chosen by the client at creation, sent with each later request
VERSION_HEADER = "skyenv-version"
MAX_WAIT = 25.0
MAX_COMMAND = 64 << 20
MAX_JSON = 8 << 20
GiB = 1 << 30
MAX_VARIABLE = 131_000
MAX_ENVIRONMENT = 1_500_000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Model = TypeVar("Model", bound=BaseModel)
Wanted = TypeVar("Wanted", bound="CreateRequest")

ErrorCode = Literal[
    "unavailable", "lost", "protocol", "path", "conflict", "busy", "not_carried", "config", "unauthorized", "internal",
]  # fmt: skip

State = Literal["queued", "pulling", "starting", "running"]
"""How far a call is that was answered with 202; meta `state`."""

Reason = Literal[
    # unavailable, 429: come back when somebody else is done
    "full", "queue_full", "queue_timeout",
    # unavailable, 503 and 507
    "draining", "closing", "pulling", "registry", "launcher", "disk_full", "no_nodes", "node_unknown",
    "node_unreachable", "proxy",
    # lost, 410
    "node_lost", "lease", "deleted", "ended",
    # unauthorized, protocol
    "token", "sandbox_token", "too_large", "version", "name_taken",
]  # fmt: skip
"""Why, for programs; the message is for people."""

_NAME = re.compile(r"[0-9a-f]{32}")
_NODE_NAME = re.compile(r"[a-z0-9-]{1,63}")


def join_id(name: str, node: str) -> str:
    """The id of a sandbox or snapshot behind a gateway; it says on which node it is."""
    return f"{name}.{node}"


def split_id(identifier: str) -> tuple[str, str]:
    """The name on the node and the node; the node is empty in a plain name."""
    name, _dot, node = identifier.rpartition(".")
    return (name, node) if name else (node, "")


SnapshotName = Annotated[str, AfterValidator(lambda identifier: split_id(identifier)[0])]
"""A snapshot's id, of which the node needs no more than its own part."""


class Spec(BaseModel):
    """What a sandbox may use. None means unlimited; sizes in bytes, `ttl` in seconds without any use.

    `file_bytes` bounds one file, `disk_bytes` all files that the sandbox writes, which are then held in memory. After
    `freeze_after` seconds without any use a sandbox in which hardly anything moves is frozen until the next request.
    `network`: only a loopback of its own, or the network of the node's machine, which a node must allow.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: Annotated[int, Field(ge=32 << 20)] | None = 4 * GiB
    pids: Annotated[int, Field(ge=16)] | None = 1024
    cpus: Annotated[float, Field(gt=0)] | None = None
    file_bytes: Annotated[int, Field(ge=1 << 20)] | None = 16 * GiB
    disk_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    tmpfs_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    ttl: Annotated[float, Field(ge=1)] = 600.0
    freeze_after: Annotated[float, Field(ge=1)] | None = 30.0
    shell: Literal["bash", "sh"] = "bash"
    network: Literal["none", "host"] = "none"


class CreateRequest(BaseModel):
    """The body of `PUT /sandboxes/{id}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    snapshot: SnapshotName | None = None
    env: dict[str, str] = {}
    spec: Spec = Spec()


class ExecParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/exec`; the command is the body.

    The answer comes before the command has ended when it printed nothing for `soft_timeout` seconds, or when its output
    has waited for `flush` seconds.
    """

    model_config = ConfigDict(frozen=True)

    timeout: Annotated[float, Field(gt=0, le=7 * 86400)] = 60.0
    soft_timeout: Annotated[float, Field(gt=0)] | None = None
    flush: Annotated[float, Field(ge=0)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1, le=64 << 20)] = 1 << 20
    terminal: bool = False


class PollParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/poll`; a body is typed on the command's terminal first."""

    model_config = ConfigDict(frozen=True)

    soft_timeout: Annotated[float, Field(gt=0)] | None = None
    flush: Annotated[float, Field(ge=0)] | None = None


class NodeReport(BaseModel):
    """The body of `POST /nodes/{name}`: a node's heartbeat to a gateway.

    `instance` changes with every start of the node server; `images` start without a pull.
    """

    model_config = ConfigDict(frozen=True)

    url: str
    instance: str
    slots: Annotated[int, Field(ge=0)]
    used: Annotated[int, Field(ge=0)] = 0
    queued: Annotated[int, Field(ge=0)] = 0
    images: list[str] = []
    pulling: list[str] = []
    draining: bool = False
    version: str = "1.0"


class PoolRequest(CreateRequest):
    """The body of `POST /pools`: have `count` such sandboxes ready until nobody asked for one for `keep` seconds.

    The image is made ready even for a count of 0, which ends a pool that there is.
    """

    count: Annotated[int, Field(ge=0, le=4096)] = 0
    keep: Annotated[float, Field(ge=1)] = 600.0


class SnapshotParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/snapshot`; without `shell` only files are kept."""

    model_config = ConfigDict(frozen=True)

    shell: bool = False
    drop: bool = False


class RollbackParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/rollback`."""

    model_config = ConfigDict(frozen=True)

    snapshot: SnapshotName
    drop: bool = False


class TunnelParameters(BaseModel):
    """The query of `POST /sandboxes/{id}/tunnel`: a port of its loopback, 0 for a free one, that leads to HOST:PORT."""

    model_config = ConfigDict(frozen=True)

    target: Annotated[str, Field(max_length=300)]
    port: Annotated[int, Field(ge=0, le=65535)] = 0


class WireError(BaseModel):
    """The body of every answer that is not a success."""

    code: ErrorCode
    message: str
    retry_after: float | None = None
    errno: int | None = None
    reason: Reason | None = None
    items: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_a_newer_server(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("code") not in STATUS:
                value = {**value, "code": "internal" if value.get("retry_after") is None else "unavailable"}
            if value.get("reason") not in get_args(Reason):
                value = {**value, "reason": None}
        return value

    @property
    def status(self) -> int:
        """The HTTP status that goes with it."""
        return REASON_STATUS.get(self.reason or "", STATUS[self.code])


STATUS: Mapping[ErrorCode, int] = {
    "unavailable": 503,
    "lost": 410,
    "protocol": 400,
    "path": 404,
    "conflict": 409,
    "busy": 409,
    "not_carried": 409,
    "config": 422,
    "unauthorized": 401,
    "internal": 500,
}

REASON_STATUS: Mapping[str, int] = {
    "full": 429,
    "queue_full": 429,
    "queue_timeout": 429,
    "disk_full": 507,
    "too_large": 413,
    "sandbox_token": 403,
    "name_taken": 409,
}

BUSY_PROXY = (429, 502, 503, 504)

# The most specific type comes first.
_CODES: tuple[tuple[type[SkyEnvError], ErrorCode], ...] = (
    (SandboxConflict, "conflict"),
    (SandboxPathError, "path"),
    (SandboxUnavailable, "unavailable"),
    (SandboxLost, "lost"),
    (SandboxProtocolError, "protocol"),
    (NotCarried, "not_carried"),
    (EnvError, "busy"),
    (ConfigError, "config"),
    (SkyEnvError, "internal"),
)

_SANDBOX_TYPES: Mapping[ErrorCode, type[SandboxError]] = {
    "lost": SandboxLost,
    "protocol": SandboxProtocolError,
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
        reason=cast("Reason | None", error.reason) if isinstance(error, SandboxError) else None,
        items=error.items if isinstance(error, NotCarried) else (),
    )


def decode_error(body: bytes, status: int = 500) -> SkyEnvError:
    """What an error's body means. One that is none of ours comes from a proxy on the way, which may be busy."""
    try:
        wire = WireError.model_validate_json(body)
    except ValidationError:
        message = f"status {status} with something else than an error of ours: {body[:200]!r}"
        if status in BUSY_PROXY:
            return SandboxUnavailable(message, 1.0, reason="proxy")
        return SandboxProtocolError(message)
    if wire.code == "unavailable":
        return SandboxUnavailable(wire.message, wire.retry_after, reason=wire.reason)
    if wire.code in ("path", "conflict"):
        kind = SandboxConflict if wire.code == "conflict" else SandboxPathError
        return kind(wire.errno, wire.message)
    if wire.code == "not_carried":
        return NotCarried(wire.items)
    if wire.code in _SANDBOX_TYPES:
        return _SANDBOX_TYPES[wire.code](wire.message, reason=wire.reason)
    return EnvError(wire.message) if wire.code == "busy" else ConfigError(wire.message)


def check_name(name: str) -> str:
    """A sandbox's name as its client chose it. ConfigError when it is none."""
    if not _NAME.fullmatch(name):
        raise ConfigError("a sandbox's name is 32 hexadecimal digits")
    return name


def check_node_name(name: str) -> str:
    """A node's name. ConfigError when it is none."""
    if not _NODE_NAME.fullmatch(name):
        raise ConfigError(f"node name {name!r}: 1 to 63 lower-case letters, digits and '-' are wanted")
    return name


def speaks(version: str) -> bool:
    """Whether a server of this version understands a client of that one; the same major is enough."""
    return version.partition(".")[0] == VERSION.partition(".")[0]


def parse_spec(values: Mapping[str, Any]) -> Spec:
    """Check a spec. ConfigError naming the field and the fix."""
    for key in values:
        if key not in Spec.model_fields:
            known = Spec.model_fields
            hint = did_you_mean(key, known) or f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"spec has no key {key!r}{hint}")
    try:
        return Spec(**values)
    except ValidationError as error:
        raise ConfigError(f"spec.{_first_problem(error)}") from error


def parse_request(model: type[Wanted], body: bytes) -> Wanted:
    """Check the body of a request for a sandbox or a pool of them. ConfigError naming the field."""
    try:
        request = model.model_validate_json(body)
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
    return dict(parse_qsl(query.decode("ascii", "replace"), keep_blank_values=True, errors="surrogateescape"))


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
