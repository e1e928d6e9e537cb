"""The nodes that a gateway knows, by their heartbeats. Nothing here outlives the gateway: nodes tell it again.

A node that is silent for `silence` seconds gets no new sandboxes; those that it has are still asked for, because it may
come back and take them up again. After `forget` seconds without it they are lost. A gateway that has itself been up
for less than that cannot know who is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import anyio

from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError, SandboxUnavailable
from skyenv.remote.http1 import Origin
from skyenv.remote.metrics import Census
from skyenv.remote.placement import Seats
from skyenv.remote.protocol import NodeReport, check_node_name

INTERVAL = 2.0
SILENCE = 10.0
FORGET = 60.0


def origin_of(url: str) -> Origin:
    """Where a URL points. ConfigError when it is not http or https with a host."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"url {url!r}: must start with http:// or https:// and name a host")
    secure = parts.scheme == "https"
    return Origin(secure, host, port or (443 if secure else 80))


@dataclass(slots=True)
class Member:
    """A node as its last heartbeat described it."""

    name: str
    origin: Origin
    report: NodeReport
    seats: Seats
    seen: float
    suspect: bool = False


@dataclass(slots=True)
class Fleet:
    """Nodes by name. All times are seconds; `started` is the gateway's own start on anyio's clock."""

    silence: float = SILENCE
    forget: float = FORGET
    started: float = field(default_factory=anyio.current_time)
    _members: dict[str, Member] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)

    @property
    def interval(self) -> float:
        """How often nodes should send heartbeats."""
        return min(INTERVAL, self.silence / 3)

    def report(self, name: str, report: NodeReport) -> None:
        """Take a heartbeat. SandboxProtocolError while another living node has the name.

        Another instance at the same address is the same node, restarted.
        """
        check_node_name(name)
        now, known = anyio.current_time(), self._members.get(name)
        same = known is None or report.instance == known.report.instance or report.url == known.report.url
        if known is not None and not same and self._answers(known, now):
            message = f"another node called {name!r} is at {known.report.url}; choose another --name"
            raise SandboxProtocolError(message, reason="name_taken")
        seats = Seats(name, report.slots, report.used, report.queued, frozenset(report.images))
        self._left.discard(name)
        self._members[name] = Member(name, origin_of(report.url), report, seats, now)

    def leave(self, name: str, instance: str) -> None:
        """A node says goodbye: what it had is gone. Ignored from anybody but that node."""
        known = self._members.get(name)
        if known is not None and known.report.instance == instance:
            del self._members[name]
            self._left.add(name)

    def _answers(self, member: Member, now: float) -> bool:
        return not member.suspect and now - member.seen < self.silence

    def _expire(self) -> None:
        now = anyio.current_time()
        for name in [name for name, member in self._members.items() if now - member.seen >= self.forget]:
            del self._members[name]

    def find(self, name: str) -> Member:
        """A node by name. SandboxUnavailable while it may still come back, SandboxLost when it is gone."""
        self._expire()
        member = self._members.get(name)
        if member is not None:
            return member
        if name not in self._left and anyio.current_time() - self.started < self.forget:
            raise SandboxUnavailable(f"node {name!r} has not been heard of yet", 1.0, reason="node_unknown")
        raise SandboxLost(f"node {name!r} is gone, and its sandboxes with it", reason="node_lost")

    def open_seats(self) -> list[Seats]:
        """The nodes that take new sandboxes."""
        now = anyio.current_time()
        return [
            member.seats
            for member in self._members.values()
            if self._answers(member, now) and not member.report.draining
        ]

    def answering(self) -> list[Member]:
        """The nodes that can be asked for something."""
        now = anyio.current_time()
        return [member for member in self._members.values() if self._answers(member, now)]

    def assume_one_more(self, name: str) -> None:
        """A sandbox was started on a node, which its next heartbeat will tell."""
        member = self._members.get(name)
        if member is not None:
            member.seats = replace(member.seats, used=member.seats.used + 1)

    def suspect(self, name: str) -> None:
        """A node did not answer; it gets no new sandboxes before its next heartbeat."""
        member = self._members.get(name)
        if member is not None:
            member.suspect = True

    def census(self) -> Census:
        """For the metrics."""
        alive = self.answering()
        return Census(
            slots=sum(member.report.slots for member in alive),
            used=sum(member.report.used for member in alive),
            waiting=sum(member.report.queued for member in alive),
            nodes={"up": len(alive), "silent": len(self._members) - len(alive)},
        )

    def describe(self) -> list[dict[str, Any]]:
        """For people and programs that look at the fleet."""
        self._expire()
        now = anyio.current_time()
        return [
            {
                "name": member.name,
                "url": member.report.url,
                "slots": member.report.slots,
                "used": member.report.used,
                "queued": member.report.queued,
                "images": len(member.report.images),
                "pulling": member.report.pulling,
                "draining": member.report.draining,
                "version": member.report.version,
                "answers": self._answers(member, now),
                "seen_seconds_ago": round(now - member.seen, 3),
            }
            for member in sorted(self._members.values(), key=lambda member: member.name)
        ]
