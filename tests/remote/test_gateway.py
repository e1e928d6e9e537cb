"""One gateway and two nodes as processes: everything that works at a node works through it, and the fleet is one."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from fleet_processes import Fleet, fleet_in, nodes_known

from skyenv.errors import ConfigError, SandboxProtocolError, SandboxUnavailable
from skyenv.remote.client import SandboxClient, connect
from skyenv.testing import check_sandbox

TOKENS = "# who may ask\nalice: alices-token\nbob: bobs-token\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    (folder / "tokens").write_text(TOKENS)
    with fleet_in(folder) as fleet:
        fleet.gateway("--token-file", str(folder / "tokens"))
        for name in ("one", "two"):
            fleet.node(name, backend="local")
        yield fleet


@asynccontextmanager
async def reached(fleet: Fleet) -> AsyncIterator[SandboxClient]:
    async with connect(fleet.url, "alices-token") as client:
        await nodes_known(client, 2)
        yield client


def raw(fleet: Fleet, token: str = "alices-token", **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=fleet.url, headers={"authorization": f"Bearer {token}", **headers}, timeout=100)


async def test_the_conformance_suite_passes_through_a_gateway(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        await check_sandbox(client)


async def test_sandboxes_without_an_image_spread_and_their_ids_name_the_node(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        async with anyio.create_task_group() as group:
            nodes, all_there = list[str](), anyio.Event()

            async def one() -> None:
                async with client.sandbox() as box:
                    assert (await box.exec("echo alive")).output == "alive\n"
                    nodes.append(box.name.partition(".")[2])
                    if len(nodes) == 12:
                        all_there.set()
                    await all_there.wait()

            for _each in range(12):
                group.start_soon(one)
        assert set(nodes) == {"one", "two"}


async def test_large_files_go_through_in_pieces(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        data = secrets.token_bytes(1 << 20) * 24
        async with client.sandbox() as box:
            await box.write_file("/root/large", data)
            assert await box.read_file("/root/large") == data
            assert (await box.exec("head -c 3000000 /dev/zero", max_output_bytes=4 << 20)).output_bytes == 3_000_000


async def test_snapshots_stay_on_their_node(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        async with client.sandbox() as box:
            await box.exec("echo kept > /root/f; cd /usr; export KEPT=yes")
            snapshot = await box.snapshot()
            node = box.name.partition(".")[2]
            assert snapshot.endswith(f".{node}")
            async with client.sandbox(snapshot=snapshot) as twin:
                assert twin.name.endswith(f".{node}")
                assert (await twin.exec("cat /root/f; pwd; echo $KEPT")).output == "kept\n/usr\nyes\n"
            await box.exec("rm /root/f")
            await box.rollback(snapshot)
            assert (await box.exec("cat /root/f")).output == "kept\n"
            await client.delete_snapshot(snapshot)


async def test_a_creation_that_comes_again_finds_the_first_one(fleet: Fleet) -> None:
    async with reached(fleet):
        name = secrets.token_hex(16)
        async with raw(fleet) as http:
            ids = []
            for attempt in range(1, 5):
                answer = await http.put(f"/sandboxes/{name}", content="{}", headers={"skyenv-attempt": str(attempt)})
                assert answer.status_code == 200
                ids.append(json.loads(answer.headers["skyenv-meta"])["id"])
            assert len(set(ids)) == 1
            assert (await http.delete(f"/sandboxes/{ids[0]}")).status_code == 200
            assert (await http.delete(f"/sandboxes/{ids[0]}")).status_code == 200


async def test_a_creation_that_was_given_up_before_its_answer_leaves_nothing(fleet: Fleet) -> None:
    async with reached(fleet) as client, raw(fleet) as http:
        name = secrets.token_hex(16)
        answer = await http.put(f"/sandboxes/{name}", content="{}", headers={"skyenv-sandbox-token": "s"})
        identifier = json.loads(answer.headers["skyenv-meta"])["id"]
        path, key = f"/sandboxes/{identifier}/exec", {"idempotency-key": "k", "skyenv-sandbox-token": "s"}
        assert (await http.delete(f"/sandboxes/{name}")).status_code == 200
        assert (await http.post(path, content="echo alive", headers=key)).content == b"alive\n"
        assert (await http.delete(f"/sandboxes/{name}", headers=key)).status_code == 200
        assert (await http.post(path, content="true", headers=key)).status_code == 410
        assert (await http.put(f"/sandboxes/{name}", content="{}", headers=key)).status_code == 410
        for delay in (0.0, 0.01, 0.05):
            with anyio.move_on_after(delay):
                async with client.sandbox():
                    await anyio.sleep(60)
        with anyio.fail_after(100):
            while any(node["used"] for node in (await http.get("/sandboxes")).json()["nodes"]):
                await anyio.sleep(0.05)


async def test_warm_sandboxes_wait_on_every_node_for_who_names_no_image(fleet: Fleet) -> None:
    async with reached(fleet) as client:

        async def warm() -> int:
            ready = 0
            for name in ("one", "two"):
                async with connect(fleet.urls[name], (fleet.folder / "join").read_text().strip()) as node:
                    pools = (await node.health())["pools"]
                    assert all(pool["count"] in (0, 2) for pool in pools)
                    ready += sum(pool["ready"] for pool in pools)
            return ready

        await client.prefetch(count=4)
        with anyio.fail_after(100):
            while await warm() < 4:
                await anyio.sleep(0.05)
        async with client.sandbox() as box:
            assert (await box.exec("echo warm")).output == "warm\n"
        await client.prefetch(count=0)
        with anyio.fail_after(100):
            while await warm():
                await anyio.sleep(0.05)
        with pytest.raises(ConfigError, match="count"):
            await client.prefetch(count=-1)


async def test_leases_of_several_nodes_are_renewed_in_one_request(fleet: Fleet) -> None:
    async with reached(fleet):
        async with raw(fleet) as http:
            ids: list[str] = []
            while len({identifier.partition(".")[2] for identifier in ids}) < 2:
                answer = await http.put(f"/sandboxes/{secrets.token_hex(16)}", content="{}")
                ids.append(json.loads(answer.headers["skyenv-meta"])["id"])
            dead = [f"{'0' * 32}.one", f"{'1' * 32}.two"]
            answer = await http.post("/leases", json=[*ids, *dead])
            assert sorted(json.loads(answer.headers["skyenv-meta"])["lost"]) == dead
            for identifier in ids:
                await http.delete(f"/sandboxes/{identifier}")


async def test_a_sandbox_answers_only_to_who_has_its_token(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        async with client.sandbox() as box, raw(fleet, "bobs-token", **{"idempotency-key": "k"}) as bob:
            path = f"/sandboxes/{box.name}"
            for answer in (
                await bob.post(f"{path}/exec", content="true"),
                await bob.get(f"{path}/file", params={"path": "/etc/passwd"}),
                await bob.delete(path),
                await bob.get(f"/creations/{box.name}"),
            ):
                assert (answer.status_code, answer.json()["reason"]) == (403, "sandbox_token")
            wrong = await bob.delete(path, headers={"skyenv-sandbox-token": "0" * 32})
            assert wrong.status_code == 403
            shared = {"skyenv-sandbox-token": box.secret}
            assert (await bob.post(f"{path}/exec", content="echo hi", headers=shared)).content == b"hi\n"


async def test_tokens_of_clients_and_nodes_are_not_exchangeable(fleet: Fleet) -> None:
    join = (fleet.folder / "join").read_text().strip()
    for token in (None, "wrong", join):
        async with connect(fleet.url, token) as client:
            with pytest.raises(ConfigError, match="token"):
                await client.health()
    async with raw(fleet) as http:
        for method, path in (("POST", "/nodes/three"), ("DELETE", "/nodes/one"), ("POST", "/nodes/one/drain")):
            assert (await http.request(method, path, content="{}")).status_code == 401
        async with connect(fleet.urls["one"], "alices-token") as direct:
            with pytest.raises(ConfigError, match="token"):
                await direct.health()


async def test_prometheus_finds_the_nodes(fleet: Fleet) -> None:
    async with reached(fleet):
        async with raw(fleet) as http:
            targets = (await http.get("/nodes/targets")).json()
            assert {entry["labels"]["node"] for entry in targets} == {"one", "two"}
            assert {f"http://{entry['targets'][0]}" for entry in targets} == {fleet.urls["one"], fleet.urls["two"]}
            assert {node["name"] for node in (await http.get("/nodes")).json()} == {"one", "two"}


async def test_what_is_nowhere_is_refused_with_a_reason(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        async with raw(fleet, **{"idempotency-key": "k"}) as http:
            unknown = await http.post(f"/sandboxes/{'a' * 32}.nowhere/exec", content="true")
            assert (unknown.status_code, unknown.json()["reason"]) == (503, "node_unknown")
            assert float(unknown.headers["retry-after"]) > 0
            lost = await http.post(f"/sandboxes/{'a' * 32}.one/exec", content="true")
            assert lost.status_code == 410
            assert (await http.post(f"/sandboxes/{'a' * 32}/exec", content="true")).status_code == 410
            assert (await http.put("/sandboxes/short", content="{}")).status_code == 422
            assert (await http.put(f"/sandboxes/{'a' * 32}", content="[]")).status_code == 422
            assert (await http.get("/nothing")).status_code == 404
            assert (await http.get(f"/sandboxes/{'a' * 32}%2eone/info?path=/")).status_code == 400
            huge = await http.put(f"/sandboxes/{'b' * 32}", content=b" " * (9 << 20))
            assert (huge.status_code, huge.json()["reason"]) == (413, "too_large")
        with pytest.raises(ConfigError, match="memory_bytes"):
            async with client.sandbox(memory_byte=1):
                pass


async def test_a_drained_node_finishes_what_it_has(fleet: Fleet) -> None:
    async with reached(fleet) as client:
        fleet.node("three", backend="process")
        await nodes_known(client, 3)
        async with raw(fleet) as http:
            boxes: list[str] = []
            while not boxes or not boxes[-1].endswith(".three"):
                answer = await http.put(f"/sandboxes/{secrets.token_hex(16)}", content="{}")
                boxes.append(json.loads(answer.headers["skyenv-meta"])["id"])
            join = {"authorization": f"Bearer {(fleet.folder / 'join').read_text().strip()}"}
            drained = await http.post("/nodes/three/drain?wait=0", headers=join)
            assert drained.json() == {"draining": True, "sandboxes": 1}
            async with connect(fleet.urls["three"], join["authorization"].split()[1], patience=0.5) as direct:
                with pytest.raises(SandboxUnavailable) as caught:
                    async with direct.sandbox():
                        pass
                assert caught.value.reason == "draining"
            for _each in range(8):
                answer = await http.put(f"/sandboxes/{secrets.token_hex(16)}", content="{}")
                boxes.append(json.loads(answer.headers["skyenv-meta"])["id"])
            assert not any(identifier.endswith(".three") for identifier in boxes[-8:])
            last = next(identifier for identifier in boxes if identifier.endswith(".three"))
            done = await http.post(f"/sandboxes/{last}/exec", content="echo on", headers={"idempotency-key": "k"})
            assert done.content == b"on\n"
            for identifier in boxes:
                await http.delete(f"/sandboxes/{identifier}")
        assert fleet.end("three") == 0
        await nodes_known(client, 2)


async def test_another_major_version_is_refused(fleet: Fleet) -> None:
    async with raw(fleet, **{"skyenv-version": "2.0"}) as http:
        answer = await http.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (400, "version")
    async with connect(fleet.url, "alices-token") as client:
        with pytest.raises(SandboxProtocolError):
            await client.fetch("/nothing", headers={})
