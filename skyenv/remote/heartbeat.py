"""A node's heartbeats to its gateways, which are all that gateways know of nodes.

Every URL is resolved again each time and every address behind it is told, so gateways may come and go behind one DNS
name. A gateway that does not answer hinders nobody; the log says when it stops and when it is back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from skyenv.errors import SkyEnvError
from skyenv.remote.fleet import INTERVAL, origin_of
from skyenv.remote.http1 import Broken, NotSent, Origin, Pool, Request
from skyenv.remote.protocol import NodeReport, check_node_name, decode_error

LOG = logging.getLogger(__name__)
TIMEOUT = 3.0
SHORTEST = 0.1


@dataclass(slots=True)
class Heartbeat:
    """Tells `gateways` (URLs) about the node called `name`; `report` says what.

    Every `interval` seconds, or more often where a gateway wants that.
    """

    name: str
    gateways: Sequence[str]
    join_token: str
    report: Callable[[str], NodeReport]
    tls: ssl.SSLContext | None = None
    interval: float = INTERVAL
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _trouble: dict[Origin, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_node_name(self.name)
        for url in self.gateways:
            origin_of(url)

    def hurry(self) -> None:
        """Tell the gateways now: something changed that they should know."""
        self._changed.set()

    async def run(self) -> None:
        """Beat until cancelled, then say goodbye."""
        async with Pool(self.tls, connect_timeout=TIMEOUT) as pool:
            try:
                while True:
                    await self._tell_all(pool, b"POST", self.report(self.instance).model_dump_json().encode())
                    with anyio.move_on_after(self.interval):
                        await self._changed.wait()
                    self._changed = anyio.Event()
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(TIMEOUT):
                    await self._tell_all(pool, b"DELETE", self.instance.encode())

    async def _tell_all(self, pool: Pool, method: bytes, body: bytes) -> None:
        async with anyio.create_task_group() as group:
            for url in self.gateways:
                group.start_soon(self._tell_each, pool, url, method, body)

    async def _tell_each(self, pool: Pool, url: str, method: bytes, body: bytes) -> None:
        origin = origin_of(url)
        addresses = await self._resolve(origin)
        async with anyio.create_task_group() as group:
            for address in addresses:
                group.start_soon(self._tell, pool, origin._replace(address=address), method, body)

    async def _resolve(self, origin: Origin) -> list[str]:
        try:
            with anyio.fail_after(TIMEOUT):
                found = await anyio.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            self._note(origin, f"its name cannot be resolved: {error or 'no answer'}")
            return []
        return list(dict.fromkeys(str(address[0]) for *_kind, address in found))

    async def _tell(self, pool: Pool, origin: Origin, method: bytes, body: bytes) -> None:
        headers = [(b"authorization", f"Bearer {self.join_token}".encode())]
        request = Request(method, f"/nodes/{self.name}".encode(), headers, body)
        try:
            async with pool.exchange(origin, request, timeout=TIMEOUT) as answer:
                said = await answer.read()
            self._note(origin, "" if answer.status == 200 else str(decode_error(said, answer.status)))
            if answer.status == 200:
                self._obey(said)
        except (NotSent, Broken) as error:
            self._note(origin, str(error))
        except SkyEnvError as error:
            self._note(origin, str(error))

    def _obey(self, said: bytes) -> None:
        """Beat as often as the gateway wants, whatever version it is of."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            wanted = float(json.loads(said).get("interval", self.interval))
            self.interval = max(SHORTEST, min(self.interval, wanted))

    def _note(self, origin: Origin, trouble: str) -> None:
        """Log what changed, once."""
        before = self._trouble.get(origin)
        if trouble == before:
            return
        self._trouble[origin] = trouble
        where = f"gateway {origin.netloc}" + (f" at {origin.address}" if origin.address else "")
        if trouble:
            LOG.warning("%s does not know this node: %s", where, trouble)
        else:
            LOG.info("%s knows this node as %r", where, self.name)
