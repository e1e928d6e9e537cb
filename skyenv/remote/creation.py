"""The making of one sandbox as a client sees it, from the first request to a sandbox that answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from skyenv.errors import SandboxLost
from skyenv.remote.protocol import ATTEMPT, META, decode_meta, encode_query
from skyenv.remote.sending import Headers, Sender

LOG = logging.getLogger(__name__)
FIRST_WAIT = 1.0  # a creation that takes longer than this tells its states
CREATIONS = 3


class Creation:
    """One sandbox that is being made. `id` is how it is called."""

    def __init__(
        self, sender: Sender, name: str, body: bytes, secret: Headers, on_state: Callable[[str], None] | None
    ) -> None:
        self.id = name
        self._name = name
        self._sender = sender
        self._body = body
        self._secret = secret
        self._on_state = on_state

    async def finish(self) -> None:
        """Create, and follow the states until it is done. A node that dies meanwhile is replaced by another."""
        for left in range(CREATIONS - 1, -1, -1):
            try:
                return await self._create(first=left == CREATIONS - 1)
            except SandboxLost as error:
                if error.reason != "node_lost" or not left:
                    raise
                LOG.info("sandbox %s: %s; creating it again", self._name, error)

    async def _create(self, *, first: bool) -> None:
        headers = self._secret if first else {**self._secret, ATTEMPT: "2"}
        path = f"/sandboxes/{self._name}?{encode_query(wait=FIRST_WAIT)}"
        response = await self._sender.send("PUT", path, self._body, headers)
        while True:
            meta = decode_meta(response.headers.get(META))
            self.id = str(meta.get("id", self.id))
            if response.status_code != 202:
                return
            state = str(meta.get("state", "starting"))
            LOG.info("sandbox %s is %s", self.id, state)
            if self._on_state is not None:
                self._on_state(state)
            follow = f"/creations/{self.id}?{encode_query(state=state)}"
            response = await self._sender.send("GET", follow, headers=self._secret)
