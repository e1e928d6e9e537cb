"""`skyenv tasks images`: build the container images of task folders that bring a Dockerfile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.commands.choosing import readable_tasks
from skyenv.commands.output import print_line
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from skyenv.envs.swe.building import Build


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv tasks images FOLDER`."""
    images = verbs.add_parser("images", help="build the images of task folders that bring a Dockerfile")
    images.add_argument("tasks", metavar="FOLDER", help="task folders of Harbor or terminal-bench")
    images.add_argument("--id", action="append", default=[], help="only this task (may be repeated)")
    images.add_argument("--push", metavar="REGISTRY", help="push them there too, below this prefix (host:5000/team)")
    images.add_argument("--engine", default="docker", help="the engine's program: docker (default) or podman")
    images.add_argument("--timeout", type=float, default=3600.0, help="seconds for one image (default 3600)")
    images.add_argument("--concurrency", type=int, default=1, help="images at a time (default 1)")
    images.add_argument("--logs", type=Path, help="folder for what the engine says (default: in the cache)")
    images.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    images.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Status 0 when every image is there."""
    from skyenv.envs.swe.building import builds

    if arguments.timeout <= 0 or arguments.concurrency < 1:
        raise ConfigError("--timeout must be above 0 and --concurrency at least 1")
    tasks, refused = readable_tasks(arguments.tasks, arguments.id)
    wanted = builds(tasks)
    failed = anyio.run(_build_all, wanted, arguments)
    made = [build.image for build in wanted if build.image not in failed]
    print_line(f"{len(made)} of {len(wanted)} images of {len(tasks)} tasks are there")
    if arguments.push and made:
        print_line(f"play them with image={arguments.push.rstrip('/') + '/{image}'!r}")
    if arguments.json:
        print_line(json.dumps({"images": made, "failed": failed, "refused": refused}))
    return 1 if failed or refused else 0


async def _build_all(wanted: Sequence[Build], arguments: argparse.Namespace) -> dict[str, str]:
    """Make every image; what went wrong by image. One failure never ends the others."""
    from skyenv.envs.swe.building import ImageEngine
    from skyenv.envs.swe.sources import default_cache

    engine = ImageEngine(arguments.logs or default_cache() / "image-logs", arguments.engine, arguments.timeout)
    limiter = anyio.CapacityLimiter(arguments.concurrency)
    failed: dict[str, str] = {}
    ended: dict[str, Any] = {}

    async def one(build: Build) -> None:
        async with limiter:
            started = anyio.current_time()
            try:
                done = await engine.ensure(
                    build, arguments.push, lambda step: print_line(f"        {build.task_id}: {step}")
                )
            except ConfigError as error:
                failed[build.image] = str(error)
                done = f"FAILED {error}"
            ended[build.image] = done
            seconds = anyio.current_time() - started
            print_line(f"{len(ended):3}/{len(wanted)} {build.image:50} {seconds:6.1f} s  {done}")

    async with anyio.create_task_group() as group:
        for build in wanted:
            group.start_soon(one, build)
    return failed
