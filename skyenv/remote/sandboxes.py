"""The sandboxes of one machine, by name, from creation to burial.

A sandbox has the name by which clients know it and another by which the backend does; here the one leads to the other.

`Node` owns the backend, every session and the reaper. What a client abandons ends with its lease; what a closed node
leaves behind is nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from skyenv.errors import ConfigError, SandboxError, SandboxLost, SandboxProtocolError, SandboxUnavailable, SkyEnvError
from skyenv.remote.admission import Admission
from skyenv.remote.backends import Backend, Held
from skyenv.remote.calls import CallLog, Result
from skyenv.remote.channel import Channel
from skyenv.remote.metrics import Census, Metrics
from skyenv.remote.pools import Pools
from skyenv.remote.protocol import (
    CreateRequest,
    PoolRequest,
    RollbackParameters,
    SnapshotParameters,
    State,
    check_name,
)
from skyenv.remote.records import new_record
from skyenv.remote.rest import freeze_idle
from skyenv.remote.session import ENDED, Session
from skyenv.remote.snapshots import Snapshots, refuse_to_end
from skyenv.remote.tasks import background_tasks
from skyenv.remote.tokens import fingerprint
from skyenv.remote.tunnels import Tunnels

LOG = logging.getLogger(__name__)
REAP_INTERVAL = 0.5
STARTS_AT_A_TIME = 4
ADOPTIONS_AT_A_TIME = 16
EXPIRED = "its lease ran out"
LAST_WORDS = 500
TOMBSTONES = 4096
CLOSE_TIMEOUT = 30.0


class Node:
    """Sandboxes by name, from creation to burial. Enter it with `open`.

    `pulling` are the images that are being made ready, `closing` says that no new sandboxes are taken.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        admission: Admission | None = None,
        allow_egress: bool = False,
        tunnels: Tunnels | None = None,
    ) -> None:
        self.backend = backend
        self.tunnels = tunnels or Tunnels()
        self._allow_egress = allow_egress
        self.admission = admission or Admission()
        self.metrics = Metrics()
        self.metrics.watch(self.census)
        self._sessions: dict[str, Session] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._starts = anyio.CapacityLimiter(STARTS_AT_A_TIME)
        self._secrets: dict[str, str] = {}
        self.pulling: Counter[str] = Counter()
        self.closing = False
        self._group: TaskGroup | None = None
        self._calls: CallLog | None = None
        self.snapshots = Snapshots(backend)
        self.pools = Pools(self._warm, self._end_warm, self._has_room)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve inside the block, at first what a former node left; every sandbox is gone afterwards."""
        async with self.backend.open(), background_tasks() as group:
            self._group, self._calls = group, CallLog(group)
            await self._adopt_all(group)
            group.start_soon(self._reap)
            group.start_soon(self.pools.run)
            group.start_soon(freeze_idle, self._sessions.values, self.backend)
            try:
                yield
            finally:
                self.close_sessions()

    async def _adopt_all(self, group: TaskGroup) -> None:
        async with anyio.create_task_group() as adopting:
            limit = anyio.Semaphore(ADOPTIONS_AT_A_TIME)
            for held in self.backend.held():
                adopting.start_soon(self._adopt, held, group, limit)

    async def _adopt(self, held: Held, group: TaskGroup, limit: anyio.Semaphore) -> None:
        """Take over what a former node left; what that had not finished making is ended."""
        async with limit:
            try:
                await self.backend.thaw(held.sandbox)
                sock = await self.backend.attach(held.sandbox)
                session = Session(held.sandbox, sock, held.record, self.backend, group, self.metrics)
                group.start_soon(self._serve, session, session.channel)
                if (await session.status())["begun"] and session.name not in self._sessions:
                    self._sessions[session.name] = session
                    self.admission.adopt(session.name)
                    if secret := held.record.get("secret"):
                        self._secrets[session.name] = secret
                    return
                session.channel.close("it was not finished, or rolled back")
            except SandboxError as error:
                LOG.warning("sandbox %s was not taken over: %s", held.sandbox, error)
            await self._bury(held.sandbox)

    def living(self) -> list[Session]:
        """The sandboxes that are there now."""
        return list(self._sessions.values())

    def close_sessions(self) -> None:
        """End every sandbox and take no new ones; whoever waits for one is told at once."""
        self.closing = True
        for session in list(self._sessions.values()):
            session.channel.close("the node is closing")

    @property
    def calls(self) -> CallLog:
        """Calls that belong to no sandbox: creations, snapshots."""
        if self._calls is None:
            raise SandboxUnavailable("the node is not open")
        return self._calls

    @property
    def group(self) -> TaskGroup:
        """Tasks that live as long as the node."""
        if self._group is None:
            raise SandboxUnavailable("the node is not open")
        return self._group

    def session(self, name: str, *, use: bool = True) -> Session:
        """A living sandbox, its lease renewed unless it is only looked at. SandboxLost with the reason if none."""
        session = self._sessions.get(name)
        if session is None:
            raise SandboxLost(f"sandbox {name}: {self._gone.get(name, 'unknown on this node')}")
        if use:
            session.touch()
        return session

    def holds(self, name: str) -> bool:
        """Whether a sandbox of this name lives here."""
        return name in self._sessions

    def check_secret(self, name: str, sent: str) -> None:
        """SandboxProtocolError unless `sent` is what the client of this sandbox chose; takes as long either way."""
        known = self._secrets.get(name)
        if known is not None and not hmac.compare_digest(known, fingerprint(sent)):
            raise SandboxProtocolError("the sandbox's own token is missing or wrong", reason="sandbox_token")

    def _say(self, name: str, state: State) -> None:
        """Tell whoever waits for a creation how far it is."""
        call = self.calls.find(name)
        if call is not None:
            call.enter(state)

    async def create(self, name: str, request: CreateRequest, *, secret: str = "", wait: bool = True) -> Result:
        """Start a sandbox under a name that the client chose, once there is a place; without `wait`, only if there is.

        Who sends another `secret` later is refused; an empty one protects nothing.
        """
        check_name(name)
        if request.spec.network != "none" and not self._allow_egress:
            raise ConfigError("network: this node gives its sandboxes none (it would need --allow-egress)")
        if name in self._gone:
            raise SandboxLost(f"sandbox {name}: {self._gone[name]}")
        if name in self._sessions:
            return Result({})  # a former node made it, and its answer was lost
        if self.closing:
            raise SandboxUnavailable("the node is closing", 1.0, reason="closing")
        if secret:
            self._secrets[name] = fingerprint(secret)
        try:
            request = self.snapshots.resolved(request)
            self._say(name, "queued")
            if await self._claim(name, request):
                return Result({})
            arrived = time.perf_counter()
            if self.admission.used >= self.admission.slots:
                await self.pools.make_room()
            await self.admission.enter(name, wait=wait)
            arrived += await self._pull(name, request.image)
            await self._starts.acquire_on_behalf_of(name)
            self.metrics.phase("queue").observe(time.perf_counter() - arrived)
            try:
                self._say(name, "starting")
                with self.metrics.timed("start"):
                    self._sessions[name] = await self._start(name, request)
            finally:
                self._starts.release_on_behalf_of(name)
        except SkyEnvError:
            await self._destroy(name)
            raise
        if name in self._gone:
            await self._destroy(name)
            raise SandboxLost(f"sandbox {name}: deleted")
        LOG.info("sandbox started", extra={"sandbox": name, "image": request.image})
        return Result({})

    async def _pull(self, name: str, image: str | None) -> float:
        """Make the image ready, before the creation takes part in the starts under way; how long that took, seconds."""
        started = time.perf_counter()
        if image is not None and image not in self.backend.images():
            self._say(name, "pulling")
            self.pulling[image] += 1
            try:
                with self.metrics.timed("pull"):
                    await self.backend.pull(image)
            finally:
                self.pulling -= Counter([image])
        return time.perf_counter() - started

    async def _start(self, name: str, request: CreateRequest) -> Session:
        sandbox, record = uuid.uuid4().hex, new_record(name, request, self._secrets.get(name))
        try:
            sock = await self.backend.create(sandbox, request, record)
        except SkyEnvError:
            await self._bury(sandbox)
            raise
        session = Session(sandbox, sock, record, self.backend, self.group, self.metrics)
        self.group.start_soon(self._serve, session, session.channel)
        try:
            await self._begin(session, request)
        except SkyEnvError:
            session.channel.close("the sandbox did not begin")
            await self._bury(sandbox)
            raise
        return session

    async def _claim(self, name: str, request: CreateRequest) -> bool:
        """Put a warm sandbox behind a client's name, if there is one."""
        session = self.pools.claim(request)
        if session is None:
            return False
        former, session.name = session.name, name
        session.record = new_record(name, request, self._secrets.get(name))
        self.admission.pass_on(former, name)
        self._sessions[name] = session
        session.touch()
        try:
            await self.backend.note(session.sandbox, session.record)
        except SandboxError:  # it ended just now
            await self._destroy(name)
            return False
        return True

    async def prefetch(self, wanted: PoolRequest) -> Result:
        """Have sandboxes of a kind ready soon, and their image; failures are tried again."""
        request = CreateRequest(**{key: value for key, value in wanted if key in CreateRequest.model_fields})
        self.pools.want(self.snapshots.resolved(request), wanted.count, wanted.keep)
        await self._pull("", wanted.image)
        return Result({"pools": self.pools.describe()})

    async def _warm(self, request: CreateRequest) -> Session:
        """A sandbox for a pool: it has a place, and a name that no client knows."""
        name = uuid.uuid4().hex
        await self.admission.enter(name, wait=False)
        try:
            await self._pull(name, request.image)
            async with self._starts:
                return await self._start(name, request)
        except SkyEnvError:
            self.admission.leave(name)
            raise

    async def _end_warm(self, session: Session) -> None:
        session.channel.close("the warm sandbox was not needed")
        await self._bury(session.sandbox)
        self.admission.leave(session.name)

    def _has_room(self) -> bool:
        """Whether a warm sandbox can be made at nobody's cost."""
        admission = self.admission
        busy = admission.waiting or self._starts.statistics().tasks_waiting or admission.draining or self.closing
        return not busy and admission.slots - admission.used > max(1, admission.slots // 16)

    async def _begin(self, session: Session, request: CreateRequest) -> None:
        env = self.backend.environment(session.sandbox)
        if request.spec.cpus is not None:
            env["OMP_NUM_THREADS"] = str(max(1, round(request.spec.cpus)))
        state = self.backend.shell_state(request.snapshot) if request.snapshot is not None else b""
        await session.begin(env | request.env, state, request.env)

    async def _serve(self, session: Session, channel: Channel) -> None:
        await channel.serve()
        if session.channel is channel and self._sessions.get(session.name) is session:
            await self._end(session.name, channel.last_words[:LAST_WORDS] or ENDED)

    async def delete(self, name: str) -> Result:
        """End a sandbox now. Idempotent; a creation under way is undone when it is done."""
        await self._end(name, "deleted")
        return Result({})

    async def _end(self, name: str, reason: str) -> None:
        self._gone.setdefault(name, reason)
        self.admission.withdraw(name)
        self.calls.drop(name)  # who creates it again is told that it is gone
        while len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)
        if self._sessions.get(name) is not None:
            self.metrics.ended({"deleted": "deleted", EXPIRED: "lease"}.get(reason, "ended"))
            LOG.info("sandbox ended", extra={"sandbox": name, "reason": reason})
            with self.metrics.timed("delete"):
                await self._destroy(name)

    async def _destroy(self, name: str) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT):
            session = self._sessions.pop(name, None)
            if session is not None:
                session.channel.close("the sandbox was deleted")
                await self._bury(session.sandbox)
            self.admission.leave(name)
            self._secrets.pop(name, None)

    async def _bury(self, sandbox: str) -> None:
        try:
            await self.backend.destroy(sandbox)
        except SandboxError as error:
            LOG.warning("not cleaned up: %s", error, extra={"sandbox": sandbox})
            self.metrics.leaked("sandbox")

    async def _reap(self) -> None:
        while True:
            await anyio.sleep(REAP_INTERVAL)
            for name, session in list(self._sessions.items()):
                if session.expired:
                    await self._end(name, EXPIRED)
                else:
                    with contextlib.suppress(SandboxError):
                        await session.note_use()

    async def snapshot(self, name: str, wanted: SnapshotParameters) -> Result:
        """Keep a sandbox as it is."""
        with self.metrics.timed("snapshot"):
            return Result({"snapshot": await self.snapshots.take(self.session(name), wanted)})

    async def rollback(self, name: str, wanted: RollbackParameters) -> Result:
        """Put a new instance that starts from a snapshot behind a sandbox's name; lease and calls stay."""
        session = self.session(name)
        request = CreateRequest(**(session.record["request"] | {"snapshot": self.snapshots.find(wanted.snapshot)}))
        async with session.alone():
            await refuse_to_end(session, wanted.drop)
            former, sandbox = session.sandbox, uuid.uuid4().hex
            try:
                sock = await self.backend.create(sandbox, request, session.record)
            except SkyEnvError:
                await self._bury(sandbox)
                raise
            session.exchange(sandbox, sock)
            self.group.start_soon(self._serve, session, session.channel)
            self.group.start_soon(self._bury, former)
            await self._begin(session, request)
        return Result({})

    def renew(self, names: list[str]) -> list[str]:
        """Renew leases; returns the names that are not alive."""
        lost = []
        for name in names:
            if (session := self._sessions.get(name)) is None:
                lost.append(name)
            else:
                session.touch()
        return lost

    async def drain(self) -> None:
        """Take no new sandboxes, and end those that nobody has asked for yet."""
        self.admission.drain()
        while self.pools.ready:
            await self.pools.make_room()

    def census(self) -> Census:
        """For the metrics and the overview."""
        starting = self.admission.used - len(self._sessions) - self.pools.ready
        return Census(
            slots=self.admission.slots,
            used=self.admission.used,
            states={"running": len(self._sessions), "starting": max(0, starting)},
            waiting=self.admission.waiting + self._starts.statistics().tasks_waiting,
        )
