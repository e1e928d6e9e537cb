"""Images of task folders with a Dockerfile: built once by a real engine, found by their tag, pushed to a registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import docker
import pytest
from images import BUSYBOX, DEBIAN
from registries import registry

import skyenv
from skyenv.cli import main
from skyenv.envs.swe.building import builds
from skyenv.envs.swe.loading import load_tasks
from tests.tasks.public_rows import write_harbor

pytestmark = pytest.mark.docker
DOCKERFILE = f"""FROM {DEBIAN}
WORKDIR /srv/greet
COPY word .
RUN tr a-z A-Z < word > loud
"""
TEST = "#!/bin/sh\ngrep -qx HELLO /srv/greet/greeting.txt && echo 1 > /logs/verifier/reward.txt || " \
    "echo 0 > /logs/verifier/reward.txt\n"  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path, engine: str) -> Iterator[Path]:
    """A folder with one task; the images that were made of it go afterwards."""
    files: dict[str, str | None] = {
        **{"task.toml": "[environment]\nmemory_mb = 256\n", "environment__Dockerfile": DOCKERFILE},
        **{"environment__word": "hello\n", "tests__test.sh": TEST, "solution__solve.sh": "cp loud greeting.txt\n"},
    }
    write_harbor(tmp_path / "set" / "greet", **files)
    yield tmp_path / "set"
    api = docker.APIClient(base_url=engine, timeout=60)
    for image in api.images():
        for tag in image["RepoTags"] or ():
            if "hb__greet" in tag or "hb__broken" in tag:
                api.remove_image(tag, force=True)
    api.close()


def build(tasks: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, dict[str, Any]]:
    """Status, output and report of the command."""
    capsys.readouterr()
    status = main(["tasks", "images", str(tasks), "--logs", str(tasks.parent / "logs"), "--json", *options])
    shown = capsys.readouterr().out
    return status, shown, json.loads(shown.splitlines()[-1])


async def play(tasks: Path, url: str, **options: Any) -> tuple[float | None, dict[str, Any]]:
    async with skyenv.make("SkyRL/Terminal-v0", tasks=tasks, sandbox=url, token="secret", **options) as env:
        await env.areset()
        await env.astep({"name": "execute_bash", "arguments": {"command": "cp loud greeting.txt"}})
        return await env.aevaluate()


def image_of(tasks: Path) -> str:
    (made,) = builds(load_tasks(tasks))
    return made.image


def test_an_image_is_built_once_for_what_it_is_made_of(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, report = build(tasks, capsys)
    assert (status, report["images"]) == (0, [image_of(tasks)]), shown
    assert "greet: Step 3/4 : COPY word ." in shown or "COPY word" in shown
    assert shown.splitlines()[-3].endswith("built")
    assert "Step" in (tasks.parent / "logs" / f"{image_of(tasks).replace(':', '-')}.log").read_text()
    status, shown, _ = build(tasks, capsys)
    assert (status, shown.splitlines()[-3].endswith("there already")) == (0, True), shown
    before = image_of(tasks)
    (tasks / "greet" / "environment" / "word").write_text("other\n")
    status, shown, report = build(tasks, capsys)
    assert report["images"] == [image_of(tasks)] != [before]
    assert shown.splitlines()[-3].endswith("built")


def test_a_dockerfile_that_fails_is_named_and_others_are_built(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dockerfile = f"FROM {DEBIAN}\nRUN echo it is $((40 + 2)); false\n"
    write_harbor(tasks / "broken", **{"task.toml": "", "environment__Dockerfile": dockerfile})
    status, shown, report = build(tasks, capsys)
    assert (status, report["images"]) == (1, [b.image for b in builds(load_tasks(tasks)) if b.task_id == "greet"])
    (why,) = report["failed"].values()
    assert f"broken: {tasks}/broken/environment/Dockerfile: docker build failed" in why
    assert "it is 42" in why
    assert "FAILED" in shown


def test_an_environment_finds_it_by_its_tag(
    tasks: Path, capsys: pytest.CaptureFixture[str], engine: str, docker_url: str
) -> None:
    assert build(tasks, capsys)[0] == 0
    reward, verdict = anyio.run(play, tasks, docker_url)
    assert (reward, verdict["status"]) == (1.0, "resolved"), verdict
    api = docker.APIClient(base_url=engine, timeout=60)
    repository, _, tag = image_of(tasks).partition(":")
    api.tag(image_of(tasks), f"skyenv-test/{repository}", tag)
    api.close()
    records = tasks.parent / "records.jsonl"
    options = ["--sandbox", docker_url, "--token", "secret", "--image", "skyenv-test/{image}", "--out", str(records)]
    assert main(["tasks", "validate", str(tasks), *options]) == 0, capsys.readouterr().out
    assert json.loads(records.read_text())["digest"] == load_tasks(tasks)[0].digest


@pytest.mark.oci
def test_a_registry_hands_it_on(
    tasks: Path, capsys: pytest.CaptureFixture[str], engine: str, oci_url: str, tmp_path: Path
) -> None:
    dockerfile = tasks / "greet" / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(DEBIAN, BUSYBOX))
    with registry(tmp_path) as address:
        host = address.removeprefix("http://")
        status, shown, _ = build(tasks, capsys, "--push", f"{host}/tasks/")
        assert status == 0, shown
        assert f"image='{host}/tasks/{{image}}'" in shown
        template = f"{host}/tasks/{{image}}"

        async def played() -> tuple[float | None, dict[str, Any]]:
            return await play(tasks, oci_url, image=template)

        reward, verdict = anyio.run(played)
        assert (reward, verdict["status"]) == (1.0, "resolved"), verdict
        api = docker.APIClient(base_url=engine, timeout=60)
        for name in (image_of(tasks), f"{host}/tasks/{image_of(tasks)}"):
            api.remove_image(name, force=True)
        api.close()
        status, shown, _ = build(tasks, capsys, "--push", f"{host}/tasks")
        assert (status, shown.splitlines()[-4].endswith("fetched")) == (0, True), shown
