"""What the controls of all servers share: the words of an update, and calls to a server's control endpoints.

Ownership: a controlled server owns one connection pool of its own, open inside `async with`, on the event loop that the
engine is used on: while the server is paused the engine keeps its requests back. Nothing is repeated: every call ends
at a deadline, in EngineError when the server refused, in EngineUnavailable when it did not answer, and then nobody
knows what it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from skyenv.engines.openai import API_KEY, OpenAIEngine
from skyenv.errors import ConfigError, EngineError, EngineUnavailable, ResetNeeded, boundary

PauseMode = Literal["abort", "keep", "recompute", "wait"]
"""What becomes of the requests under way while a server is paused; new ones wait until it resumes.

`abort`: they end with what they have; engines of this package ask for the rest once the server resumes, so that every
token's version is known. `keep`: they freeze and go on afterwards over the attention states of the old weights.
`recompute`: as keep, but the states of what they have so far are computed anew by the new weights. `wait`: they are
finished first (vLLM alone; an SGLang that is not paused finishes them before it takes weights).
"""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor as it is sent: name in the checkpoint, torch's name of the dtype (`bfloat16`), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the sender (rank 0) and the servers' workers (ranks from `rank_offset` on) form a group of `world_size`.

    At `address`:`port` the sender holds torch's TCP store. `unique_id` (standard base64 of NCCL's 128 bytes) takes its
    place for vLLM. `backend` is SGLang's choice at this call and vLLM's at its start. `packed` tells vLLM that tensors
    come in buckets as `vllm.distributed.weight_transfer.packed_tensor` makes them.
    """

    address: str
    port: int
    world_size: int
    rank_offset: int = 1
    backend: Literal["nccl", "gloo"] = "nccl"
    group: str = "skyenv"
    unique_id: str = ""
    packed: bool = False


class ControlledServer:
    """One connection pool to a server, and the engine whose completions are stamped."""

    def __init__(
        self,
        engine: OpenAIEngine,
        *,
        timeout: float = 30.0,
        update_timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if timeout <= 0 or update_timeout <= 0:
            raise ConfigError("timeout and update_timeout must be above 0 seconds")
        self._engine, self._timeout, self._update_timeout = engine, timeout, update_timeout
        self._transport = transport
        self._version = 0
        self._client: httpx.AsyncClient | None = None

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._engine.url

    @property
    def version(self) -> int:
        """Version of the last update that succeeded through this control; 0 before any."""
        return self._version

    async def __aenter__(self) -> Self:
        key = self._engine.token
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._timeout, connect=min(10.0, self._timeout)),
            limits=httpx.Limits(max_keepalive_connections=0),  # servers hang up after an error of theirs
            transport=self._transport,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def healthy(self) -> bool:
        """Whether the server answers its health page."""
        try:
            return (await self._opened().get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def call(self, method: str, path: str, *, body: Any = None, query: Any = None, slow: bool = False) -> Any:
        """One request; its JSON answer, or None where the answer is empty."""
        timeout = self._update_timeout if slow else self._timeout
        try:
            response = await self._opened().request(method, path, json=body, params=query, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise _refused(response)
        if not response.headers.get("content-type", "").startswith("application/json"):
            return None
        with boundary(EngineError, f"{self.url}{path} answered no JSON"):
            return response.json()

    async def holding(self, path: str, *, body: Any = None, query: Any = None, slow: bool = False) -> None:
        """As `call`; from now on the engine keeps its requests back, unless the call fails."""
        self._engine.hold()
        done = False
        try:
            await self.call("POST", path, body=body, query=query, slow=slow)
            done = True
        finally:
            if not done:
                self.release()

    async def take_back(self) -> None:
        """Requests that the server has not answered are sent again once it resumes."""
        await self._engine.take_back()

    def release(self) -> None:
        """The engine sends its requests again."""
        self._engine.release()

    def installed(self, version: int) -> None:
        """The server samples from `version` now."""
        self._version = version
        self._engine.policy_version = version

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            raise ResetNeeded("an engine's control is used inside `async with`")
        return self._client


def _refused(response: httpx.Response) -> EngineError:
    """What a status that is not 200 means."""
    where, status = response.request.url, response.status_code
    excerpt = " ".join(response.text.split())[:300] or "(empty)"
    if status == 404:
        return EngineError(f"{where} does not exist; vLLM needs VLLM_SERVER_DEV_MODE=1, SGLang a release that has it")
    if status in (401, 403):
        return EngineError(f"{where} answered {status}: set {API_KEY} to a key that may change the server")
    kind = EngineUnavailable if status in (429, 502, 503, 504) else EngineError
    return kind(f"{where} answered {status}: {excerpt}")
