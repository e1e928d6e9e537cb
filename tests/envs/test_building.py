"""Images of task folders as far as no engine is needed: their names, and an engine's program that misbehaves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.envs.swe.building import Build, ImageEngine, builds, image_name, placed
from skyenv.envs.swe.loading import load_tasks
from skyenv.errors import ConfigError
from tests.tasks.public_rows import write_harbor, write_terminal_bench

REPOSITORY = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text("FROM scratch\n")
    return folder


@given(st.text(st.sampled_from("aB9._- é/"), max_size=12))
def test_every_name_is_one_that_engines_take(context: Path, stem: str) -> None:
    assert re.fullmatch(rf"{REPOSITORY}:[0-9a-f]{{16}}", image_name(f"hb__{stem}", context) or "")
    assert re.fullmatch(rf"{REPOSITORY}:[0-9a-f]{{16}}", image_name(stem, context) or "")


def test_a_name_is_of_what_the_engine_is_sent(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "sub").mkdir(parents=True)
    assert image_name("x", folder) is None
    (folder / "Dockerfile").write_text("FROM scratch\n")
    names = [image_name("x", folder)]
    changes = (
        lambda: (folder / "sub" / "data").write_text("1"),
        lambda: (folder / "sub" / "data").write_text("2"),
        lambda: (folder / "sub" / "data").chmod(0o755),
        lambda: (folder / "sub" / "data").rename(folder / "data"),
        lambda: (folder / "link").symlink_to("data"),
        lambda: (folder / "sub").rmdir(),
    )
    for change in changes:
        change()
        names.append(image_name("x", folder))
    assert len(set(names)) == len(names)
    shutil.copytree(folder, tmp_path / "b", symlinks=True)
    assert image_name("x", tmp_path / "b") == names[-1]


def test_which_images_tasks_need(tmp_path: Path) -> None:
    judged = {"task.toml": '[verifier]\nenvironment_mode = "separate"\n', "tests__Dockerfile": "FROM scratch\n"}
    write_harbor(tmp_path / "set" / "a", **judged)
    write_harbor(tmp_path / "set" / "ready")  # names a docker_image
    write_terminal_bench(tmp_path / "set" / "old")
    tasks = load_tasks(tmp_path / "set")
    found = {(b.task_id, b.image.split(":")[0], str(b.context.relative_to(tmp_path / "set"))) for b in builds(tasks)}
    assert found == {
        ("a", "hb__a", "a/environment"),
        ("a", "hb__a__verifier", "a/tests"),
        ("old", "tb__old", "old"),
    }
    (a,) = [task for task in tasks if task.task_id == "a"]
    moved = placed(a, "here/{task}/{image}")
    assert moved.environment.image == f"here/a/{a.environment.image}"
    assert builds([placed(a, "host")]) == []


def program(folder: Path, script: str) -> str:
    """A program that stands where an engine's does."""
    path = folder / "engine"
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return str(path)


async def ensure(folder: Path, script: str, timeout: float = 60.0) -> list[str]:
    told: list[str] = []
    engine = ImageEngine(folder / "logs", program(folder, script), timeout)
    await engine.ensure(Build("greet", "hb__greet:1", folder), None, told.append)
    return told


async def test_an_engine_that_never_answers_is_ended(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/p; mv {tmp_path}/p {tmp_path}/pid; exec sleep 600\n"
    with pytest.raises(ConfigError, match=r"greet: .*/Dockerfile: .*engine image took longer than 3 s"):
        await ensure(tmp_path, script, 3.0)
    started = [path.read_text().strip() for path in tmp_path.glob("pid")]  # none where it was that slow to start
    assert not any(Path("/proc", pid).exists() for pid in started)


async def test_a_cancelled_build_ends_its_program(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(
                ensure, tmp_path, f"echo $$ > {tmp_path}/p; mv {tmp_path}/p {tmp_path}/pid; exec sleep 600\n"
            )
            while not (tmp_path / "pid").exists():
                await anyio.sleep(0.02)
            group.cancel_scope.cancel()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


async def test_whatever_an_engine_says_is_kept_and_the_end_of_it_shown(tmp_path: Path) -> None:
    script = (
        '[ "$1" = build ] || exit 1\n'
        "printf '\\377\\n#7 [2/3] RUN x\\r'; i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); done\n"
        "head -c 200000 /dev/zero | tr '\\0' x; echo; echo the end; exit 3\n"
    )
    with pytest.raises(ConfigError, match="failed with status 3") as caught:
        await ensure(tmp_path, script)
    assert str(caught.value).endswith("the end")
    assert "line 1\n" not in str(caught.value)
    assert "line 1\n" in (tmp_path / "logs" / "hb__greet-1.log").read_text()
    told = await ensure(tmp_path, '[ "$1" = build ] || exit 1; echo "#7 [2/3] RUN x"; echo "Step 1/2 : FROM y"\n')
    assert told == ["#7 [2/3] RUN x", "Step 1/2 : FROM y"]


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    engine = ImageEngine(tmp_path, "no-such-engine")
    with pytest.raises(ConfigError, match="no-such-engine: there is no such program"):
        await engine.ensure(Build("greet", "hb__greet:1", tmp_path), None, str)
