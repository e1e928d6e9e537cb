"""Who may ask: named client tokens, kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from skyenv.errors import ConfigError
from skyenv.remote.answers import error_answer
from skyenv.remote.protocol import VERSION, VERSION_HEADER, WireError, speaks

LOG = logging.getLogger(__name__)
Named = tuple[str, str]


def parse_tokens(text: str, source: str) -> list[Named]:
    """Names and tokens of a token file: `name: token` a line, or a bare token, whose name is "client".

    Empty lines and those that start with '#' are skipped; a name may have several tokens. ConfigError naming the line.
    """
    found: list[Named] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _colon, token = line.partition(":") if ":" in line else ("client", ":", line)
        if not name.strip() or not token.strip() or " " in token.strip():
            raise ConfigError(f"{source}, line {number}: wanted is `name: token`")
        found.append((name.strip(), token.strip()))
    if not found:
        raise ConfigError(f"{source}: holds no token")
    return found


def read_tokens(path: Path) -> list[Named]:
    """The tokens of a file. ConfigError when it cannot be read or a line is wrong."""
    try:
        return parse_tokens(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"token file {path}: not text") from error


def read_token(path: Path) -> str:
    """The only token of a file. ConfigError when there are more."""
    tokens = read_tokens(path)
    if len(tokens) != 1:
        raise ConfigError(f"token file {path}: one token is wanted, it holds {len(tokens)}")
    return tokens[0][1]


def digest(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def fingerprint(secret: str) -> str:
    """`digest` as text, for records."""
    return digest(secret).hex()


class Tokens:
    """The tokens that a server takes: fixed ones and those of a file, which `reload` reads again."""

    def __init__(self, fixed: Iterable[Named] = (), file: Path | None = None) -> None:
        self._fixed = [(name, digest(token)) for name, token in fixed]
        self._file = file
        self._known = self._load()

    def _load(self) -> list[tuple[str, bytes]]:
        read = read_tokens(self._file) if self._file is not None else []
        return self._fixed + [(name, digest(token)) for name, token in read]

    def reload(self) -> None:
        """Read the file again; when it is broken the tokens stay as they are, and the log says why."""
        try:
            self._known = self._load()
        except ConfigError as error:
            LOG.error("tokens were not reloaded: %s", error)
        else:
            LOG.info("%d tokens are in force", len(self._known))

    def __bool__(self) -> bool:
        return bool(self._known)

    def owner(self, token: str) -> str | None:
        """The name that goes with a token. Takes as long for a wrong one as for a right one."""
        sent, found = digest(token), None
        for name, known in self._known:
            if hmac.compare_digest(sent, known):
                found = name
        return found


class Door:
    """Lets requests in whose version is ours and, where tokens are wanted, which carry a known one.

    The name that goes with the token is put into `scope["state"]["client"]`.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None = None) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400 or 401, or hand the request on."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            refusal = self._refusal(headers, scope)
            if refusal is not None:
                await error_answer(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes], scope: Scope) -> WireError | None:
        version = headers.get(VERSION_HEADER.encode())
        if version is not None and not speaks(version.decode("latin-1")):
            return WireError(code="protocol", message=f"this server speaks version {VERSION}", reason="version")
        if self._tokens is None:
            return None
        owner = self._tokens.owner(bearer(headers))
        if owner is None:
            return WireError(code="unauthorized", message="token is missing or wrong; pass token=", reason="token")
        scope.setdefault("state", {})["client"] = owner
        return None


def bearer(headers: dict[bytes, bytes]) -> str:
    """The token that a request's headers carry; empty when there is none."""
    kind, _space, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return token if kind.lower() == "bearer" else ""
