"""What a server tells of itself: in `GET /sandboxes` a line for each node and sandbox, in `GET /health`, to gateways.

Sizes are bytes, times seconds; None where it is not known. No secrets, no commands, no output: names, states and sizes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.errors import SandboxProtocolError, SkyEnvError
from skyenv.remote.protocol import VERSION, NodeReport

if TYPE_CHECKING:
    from skyenv.remote.sandboxes import Node
    from skyenv.remote.session import Session


AT_A_TIME = 16

Line = dict[str, Any]


async def node_overview(node: Node) -> dict[str, list[Line]]:
    """The lines of one node. Asking what sandboxes use thaws none of them and renews no lease."""
    sessions = node.living()
    lines: list[Line] = []
    limit = anyio.Semaphore(AT_A_TIME)

    async def add(session: Session) -> None:
        async with limit:
            lines.append(await _line(session))

    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(add, session)
    return {"nodes": [_node_line(node, lines)], "sandboxes": sorted(lines, key=lambda line: str(line["name"]))}


def node_health(node: Node) -> dict[str, Any]:
    """The backend, which limits are active and what is missing, and how full the node is."""
    return {
        **node.backend.describe(),
        "version": VERSION,
        "sandboxes": len(node.living()),
        "max_sandboxes": node.admission.slots,
        "queued": node.admission.waiting,
        "draining": node.admission.draining,
        "pools": node.pools.describe(),
    }


def node_report(node: Node, instance: str, url: str) -> NodeReport:
    """For heartbeats: what the node, which is reached at `url`, has and takes."""
    return NodeReport(
        url=url,
        instance=instance,
        slots=node.admission.slots,
        used=node.admission.used - node.pools.ready,
        queued=node.admission.waiting,
        images=node.backend.images(),
        pulling=sorted(node.pulling),
        draining=node.admission.draining or node.closing,
        version=VERSION,
    )


def _node_line(node: Node, lines: Iterable[Line]) -> Line:
    states = [line["state"] for line in lines]
    now = node.census()
    return {
        "name": "",
        "state": "draining" if node.admission.draining else "up",
        "backend": node.backend.name,
        "slots": now.slots,
        "used": now.used,
        "queued": now.waiting,
        **{state: states.count(state) for state in ("busy", "idle", "frozen")},
        **node.metrics.summary(),
    }


async def _line(session: Session) -> Line:
    created, request = session.record.get("created"), session.record.get("request") or {}
    try:
        usage = await session.stats()
    except SkyEnvError:
        usage = None
    return {
        "name": session.name,
        "state": "frozen" if session.frozen else "busy" if session.calls.busy else "idle",
        "image": request.get("image"),
        "age": max(0.0, time.time() - created) if created is not None else None,
        "idle": session.idle_seconds,
        "ttl": session.ttl,
        "memory": usage.memory_bytes if usage else None,
        "pids": usage.pids if usage else None,
        "cpu": usage.cpu_seconds if usage else None,
        "last": session.last_seconds,
    }


def merge(answers: Iterable[tuple[str, bytes]], silent: Iterable[str]) -> dict[str, list[Line]]:
    """The lines of many nodes, by name, and one for each node that does not answer. SandboxProtocolError."""
    nodes: list[Line] = [{"name": name, "state": "silent"} for name in silent]
    sandboxes: list[Line] = []
    for name, body in answers:
        try:
            said = json.loads(body)
            nodes += [{**line, "name": name} for line in said["nodes"]]
            sandboxes += [{**line, "node": name} for line in said["sandboxes"]]
        except (ValueError, TypeError, KeyError) as error:
            raise SandboxProtocolError(f"node {name!r} does not list its sandboxes: {error!r}") from error
    by_name = lambda line: str(line["name"])  # noqa: E731
    return {"nodes": sorted(nodes, key=by_name), "sandboxes": sorted(sandboxes, key=by_name)}
