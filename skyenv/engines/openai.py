"""Inference over HTTP: vLLM and SGLang with token ids and logprobs, any other OpenAI-compatible server as text.

Ownership: the engine owns one connection pool, open inside `async with`. The pool is unbounded, because how many
requests are under way is the pipeline's decision. Retries live here although the house keeps them in the sandbox
client: sampling has no effect on the server, so repeating a request that found no listener, lost its connection,
or was turned away with 429 or 503 is safe; nothing else is repeated, and all of it ends at a
deadline. Start vLLM with `--logprobs-mode processed_logprobs` when the temperature is not 1: its default logprobs are
those before temperature. SGLang heeds a seed only with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import httpx
import tenacity

from skyenv.engines.dialects import DIALECTS, Flavour, Request
from skyenv.engines.parts import joined, remaining
from skyenv.errors import ConfigError, EngineError, EngineUnavailable, ResetNeeded, boundary
from skyenv.types import Completion, Message, SamplingParams

API_KEY = "OPENAI_API_KEY"
ABORT_DEADLINE = 5.0
RETRIED_STATUS = frozenset({429, 503})
EMPTY_PARTS = 3
KEPT_ALIVE = 2.0  # seconds; servers hang up on an idle connection after five


class _Busy(EngineUnavailable):
    """Worth another try; `retry_after` seconds when the server said so."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OpenAIEngine:
    """An inference server at `url` (with or without `/v1`), used inside `async with`.

    `model` "" takes the server's first. `flavour` "auto" asks `/v1/models` who owns it. `timeout` bounds one request,
    `retry_for` the time spent on repeating refused ones, both in seconds. The bearer token comes from the environment
    variable OPENAI_API_KEY. `policy_version` is stamped on completions (SGLang reports its own when it is a number);
    `adapter` names the LoRA adapter that samples; whoever updates the weights sets both. `transport` replaces the
    network.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        flavour: Flavour | Literal["auto"] = "auto",
        timeout: float = 600.0,
        retry_for: float = 60.0,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url: {url!r} must start with http:// or https://")
        if flavour not in ("auto", *DIALECTS):
            raise ConfigError(f"engine.flavour: {flavour!r} is not auto, {', '.join(DIALECTS)}")
        self.policy_version, self.adapter = 0, ""
        self.model, self.flavour = model, flavour
        self._url = url.rstrip("/").removesuffix("/v1")
        self._token = token
        self._timeout, self._retry_for, self._transport = timeout, retry_for, transport
        self._client: httpx.AsyncClient | None = None
        self._open = AsyncExitStack()
        self._released: anyio.Event | None = None
        self._asking: set[anyio.CancelScope] = set()
        self._answered = anyio.Event()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.opened_later())
            await self.known()
            self._open = stack.pop_all()
        return self

    @property
    def token(self) -> str | None:
        """What the server is shown: the token that was given, else OPENAI_API_KEY."""
        return self._token or os.environ.get(API_KEY)

    @property
    def url(self) -> str:
        """Where the server is, without `/v1`."""
        return self._url

    @asynccontextmanager
    async def opened_later(self) -> AsyncIterator[Self]:
        """As `async with` on the engine, but the server need not answer yet; call `known` before `generate`."""
        key = self.token
        client = httpx.AsyncClient(
            base_url=self._url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._timeout, connect=min(10.0, self._timeout), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_ALIVE),
            transport=self._transport,
        )
        async with client as self._client:
            try:
                yield self
            finally:
                self._client = None

    async def known(self) -> None:
        """Ask the server what it is and which model it serves, where that was left open. Raises EngineError."""
        if self.flavour == "auto" or not self.model:
            await self._ask_model()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._open.aclose()

    def hold(self) -> None:
        """Let requests wait here until `release`: the server is paused to take new weights.

        They would wait there too, but then nobody could tell which weights sampled them. Call it on the engine's loop.
        """
        if self._released is None:
            self._released = anyio.Event()

    def release(self) -> None:
        """Send the requests that wait; harmless when none is held."""
        released, self._released = self._released, None
        if released is not None:
            released.set()

    async def take_back(self, patience: float = 1.0) -> None:
        """Give requests under way `patience` seconds to be answered, then hang up on the rest; they are sent again.

        A request that reached a server just as that was paused waits there, and new weights would sample it under the
        old version's name. Only while held.
        """
        with anyio.move_on_after(patience):
            while self._asking:
                self._answered = anyio.Event()
                await self._answered.wait()
        for scope in self._asking:
            scope.cancel()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """One completion. Raises EngineError; ResetNeeded outside `async with`.

        What the server broke off to take new weights is asked for again from there, and is one completion of several
        versions.
        """
        if self.flavour == "auto":
            raise ResetNeeded("OpenAIEngine: use it inside `async with`")
        started = anyio.current_time()
        request = Request(self.model, tuple(prompt_ids), tuple(messages), sampling, uuid.uuid4().hex, self.adapter)
        parts = [await self._ask(self.flavour, request, session_id)]
        while parts[-1].finish_reason == "abort":
            if len(parts) >= EMPTY_PARTS and not any(part.token_ids for part in parts[-EMPTY_PARTS:]):
                raise EngineUnavailable(f"{self._url} aborted one generation {EMPTY_PARTS} times without an id")
            rest = remaining(request, parts, uuid.uuid4().hex)
            parts.append(await self._ask(self.flavour, rest, session_id))
        return replace(joined(parts), seconds=anyio.current_time() - started)

    async def _ask(self, flavour: Flavour, request: Request, session_id: str) -> Completion:
        """One request that the server answers, perhaps with less than was asked for."""
        while self._released is not None:
            await self._released.wait()
        dialect = DIALECTS[flavour]
        version, request = self.policy_version, replace(request, adapter=self.adapter)
        body = None
        with anyio.CancelScope() as scope:
            self._asking.add(scope)
            try:
                body = await self._retried("POST", dialect.path, dialect.body(request), session_id)
            except anyio.get_cancelled_exc_class():
                if dialect.abort_path is not None:
                    await self._abort(dialect.abort_path, request.request_id)
                raise
            finally:
                self._asking.discard(scope)
                self._answered.set()
        if scope.cancelled_caught:  # taken back
            return Completion("", finish_reason="abort", policy_version=version)
        completion = dialect.answer(body)
        return replace(completion, policy_version=completion.policy_version or version)

    async def healthy(self, timeout: float = 2.0) -> bool:
        """Whether the server answers `/health`, or `/v1/models` where it has no such page, within `timeout` seconds."""
        if self._client is None:
            raise ResetNeeded("OpenAIEngine: use it inside `async with`")
        for path in ("/health", "/v1/models"):
            try:
                response = await self._client.get(path, timeout=timeout)
            except httpx.HTTPError:
                return False
            if response.status_code != 404:
                return response.status_code == 200
        return False

    async def _ask_model(self) -> None:
        """Fill in flavour and model from what the server serves."""
        body = await self._retried("GET", "/v1/models", None, "")
        models = body.get("data") if isinstance(body, dict) else None
        if not models or not isinstance(models, list) or not isinstance(models[0], dict):
            raise EngineError(f"{self._url}/v1/models names no model; set engine.model and engine.flavour")
        if self.flavour == "auto":
            owner = models[0].get("owned_by")
            self.flavour = owner if owner in ("vllm", "sglang") else "chat"
        self.model = self.model or str(models[0].get("id", ""))

    async def _retried(self, method: str, path: str, body: Any, session_id: str) -> Any:
        """Send until it is answered, refused for good, or `retry_for` is over."""
        deadline = anyio.current_time() + self._retry_for
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Busy),
            wait=_wait,
            stop=lambda state: anyio.current_time() + _wait(state) > deadline,
            sleep=anyio.sleep,
            reraise=True,
        )
        return await retrying(self._send, method, path, body, session_id)

    async def _send(self, method: str, path: str, body: Any, session_id: str) -> Any:
        """One request and its JSON answer."""
        if self._client is None:
            raise ResetNeeded("OpenAIEngine: use it inside `async with`")
        headers = {"x-session-id": session_id.encode("ascii", "replace").decode()} if session_id else {}
        try:
            response = await self._client.request(method, path, json=body, headers=headers)
        except (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError) as error:
            raise _Busy(f"{self._url} cannot be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{self._url}{path} did not answer within {self._timeout:g} s") from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self._url}{path}: {type(error).__name__}: {error}") from error
        return self._read(response)

    def _read(self, response: httpx.Response) -> Any:
        where = f"{self._url}{response.request.url.path}"
        if response.status_code in RETRIED_STATUS:
            raise _Busy(f"{where} answered {response.status_code}: {_excerpt(response)}", _retry_after(response))
        if response.status_code in (401, 403):
            raise EngineError(f"{where} answered {response.status_code}: set {API_KEY} to a valid key")
        if response.status_code != 200:
            kind = EngineUnavailable if response.status_code >= 500 else EngineError
            raise kind(f"{where} answered {response.status_code}: {_excerpt(response)}")
        with boundary(EngineError, f"{where} answered no JSON: {_excerpt(response)}"):
            return response.json()

    async def _abort(self, path: str, request_id: str) -> None:
        """Tell the server to stop; best effort, also while this task is being cancelled."""
        if self._client is None:
            return
        with anyio.move_on_after(ABORT_DEADLINE, shield=True):
            try:
                await self._client.post(path, json={"rid": request_id})
            except httpx.HTTPError:
                return


def _wait(state: tenacity.RetryCallState) -> float:
    """Seconds before the next try: what the server asked for, else growing with some chance in it."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after if isinstance(error, _Busy) else None
    return asked if asked is not None else float(tenacity.wait_random_exponential(multiplier=0.2, max=5.0)(state))


def _retry_after(response: httpx.Response) -> float | None:
    """The header in seconds; a date is left to the default wait."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None


def _excerpt(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:300] or "(empty)"
