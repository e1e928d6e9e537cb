"""What a node counts: the text parses, and the numbers move with what really happens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from node_processes import SERVE, served
from prometheus_client.parser import text_string_to_metric_families

from skyenv.remote.client import connect
from skyenv.remote.metrics import Census, Metrics

NAME = re.compile("skyenv_[a-z_]+")
Sample = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
def url() -> Iterator[str]:
    """A node of our own: others would count too."""
    with served(SERVE, "process") as (_process, url):
        yield url


def parse(text: str) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


async def read(url: str) -> dict[Sample, float]:
    async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}, trust_env=False, timeout=100) as http:
        answer = await http.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return parse(answer.text)


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


async def test_numbers_move_with_real_operations(url: str) -> None:
    before = await read(url)
    assert value(before, "skyenv_slots", use="used") == 0
    async with connect(url, "secret") as client:
        async with client.sandbox() as box:
            await box.exec("true")
            await box.exec("exit 3")
            await box.exec("sleep 30", timeout=0.2)
            during = await read(url)
            assert value(during, "skyenv_slots", use="used") == 1
            assert value(during, "skyenv_slots", use="free") == value(before, "skyenv_slots", use="free") - 1
            assert value(during, "skyenv_sandboxes", state="running") == 1
        after = await read(url)
    assert value(after, "skyenv_sandboxes", state="running") == 0
    assert value(after, "skyenv_sandboxes_ended_total", reason="deleted") == 1
    for outcome in ("zero", "nonzero", "timeout"):
        assert value(after, "skyenv_execs_total", outcome=outcome) == 1, outcome
    assert value(after, "skyenv_phase_seconds_count", phase="exec") == 3
    assert 0.2 <= value(after, "skyenv_phase_seconds_sum", phase="exec") < 30
    for phase in ("queue", "start", "delete"):
        assert value(after, "skyenv_phase_seconds_count", phase=phase) == 1, phase


async def test_metrics_are_for_those_with_a_token(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=100) as http:
        answer = await http.get(f"{url}/metrics")
    assert answer.status_code == 401
    assert b"skyenv_slots" not in answer.content


def test_two_nodes_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.leaked("cgroup", 2)
    first.refused(429, "full")
    first.watch(lambda: Census(slots=4, used=1, states={"frozen": 1}, nodes={"up": 2}))
    ours, theirs = parse(first.render().decode()), parse(second.render().decode())
    assert value(ours, "skyenv_leaks_total", what="cgroup") == 2
    assert value(ours, "skyenv_refused_total", status="429", reason="full") == 1
    assert value(ours, "skyenv_slots", use="free") == 3
    assert value(ours, "skyenv_nodes", state="up") == 2
    assert value(theirs, "skyenv_leaks_total", what="cgroup") == 0


def test_a_failed_block_is_not_timed() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="no"), metrics.timed("start"):
        raise ValueError("no")
    assert value(parse(metrics.render().decode()), "skyenv_phase_seconds_count", phase="start") == 0


def test_the_dashboard_asks_for_what_there_is() -> None:
    metrics = Metrics()
    metrics.watch(lambda: Census(slots=1, states={"running": 1}, nodes={"up": 1}))
    known = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    dashboard = Path(__file__).parent.parent.parent / "deploy" / "dashboard.json"
    panels = json.loads(dashboard.read_text())["panels"]
    known = {name for name in known if not name.endswith("_created")}
    asked = {name for panel in panels for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert {re.sub("_(total|bucket)$", "", name) for name in asked} == known
