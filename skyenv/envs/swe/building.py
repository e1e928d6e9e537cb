"""Images of task folders that bring a Dockerfile: named by what they are made of, built once by a container engine.

The name ends in a digest of the folder that the engine is sent, so an edited folder is another image and an old one is
never taken for it. Engines are driven through their command-line program (docker, or podman, which takes the same
arguments), because Dockerfiles of today want the builder that it brings; no shell is involved. What a Dockerfile runs
while it is built, it runs in the engine, with the network that the engine gives.
"""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from skyenv.envs.swe.tasks import Environment, SweTask
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DOCKERFILE = "Dockerfile"
HOST = "host"
LAST_LINES = 15
MAX_LOG, MAX_LINE = 64 << 20, 1 << 16
KILLED_WITHIN = 10.0
_STEP = re.compile(r"(?:#\d+ \[[^\]]*\d+/\d+\]|Step \d+/\d+ :|STEP \d+/\d+:) ?.*")
Tell = Callable[[str], None]


def image_name(stem: str, context: Path) -> str | None:
    """The image that a folder with a Dockerfile makes, `stem:DIGEST`; None for one without. ConfigError."""
    if not (context / DOCKERFILE).is_file():
        return None
    return f"{_repository(stem)}:{_digest(context)}"


def _repository(stem: str) -> str:
    """The stem as engines allow it: small letters and digits with a dot, one or two underscores, or hyphens between."""

    def separator(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in (".", "_", "__") or set(found) == {"-"} else "-"

    return re.sub(r"[^a-z0-9]+", separator, stem.lower()).strip("._-") or "task"


def _digest(folder: Path) -> str:
    """Of names, kinds, the owner's right to execute, and content; not of times and owners."""
    total = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                kind, content = "link", str(path.readlink()).encode("utf-8", "surrogateescape")
            elif path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
                kind = "program" if path.stat().st_mode & 0o100 else "file"
            else:
                kind, content = "folder", b""
            name = str(path.relative_to(folder)).encode("utf-8", "surrogateescape")
            for part in (kind.encode(), name, content):
                total.update(len(part).to_bytes(8, "big") + part)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return total.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Build:
    """An image to make from a folder, for a task."""

    task_id: str
    image: str
    context: Path


def builds(tasks: Iterable[SweTask]) -> list[Build]:
    """The images that tasks need and whose Dockerfiles they bring, each once."""
    found: dict[str, Build] = {}
    for task in tasks:
        for environment in (task.environment, task.verifier):
            if environment is not None and environment.context and environment.image is not None:
                build = Build(task.task_id, environment.image, (task.base / environment.context).resolve())
                found.setdefault(build.image, build)
    return list(found.values())


def placed(task: SweTask, template: str) -> SweTask:
    """The task with its images where `template` says: `{image}` is the image's name, `{task}` the task's id.

    `host` alone means the host's system directories. ConfigError for other braces.
    """

    def put(environment: Environment) -> Environment:
        if template == HOST:
            return replace(environment, image=None, context="")
        try:
            name = template.format(task=task.task_id, image=environment.image)
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(f"image: {template!r} may only hold {{task}} and {{image}}") from error
        return environment if environment.image is None else replace(environment, image=name)

    verifier = None if task.verifier is None else put(task.verifier)
    return replace(task, environment=put(task.environment), verifier=verifier)


@dataclass(frozen=True, slots=True)
class ImageEngine:
    """A container engine's program. `timeout` bounds each of its commands, in seconds; `logs` is where they write."""

    logs: Path
    program: str = "docker"
    timeout: float = 3600.0

    async def ensure(self, build: Build, registry: str | None, tell: Tell) -> str:
        """Have an image in the engine and, with `registry`, under that prefix there too; what was done, in a word.

        `tell` hears of each step. ConfigError naming the task, the folder and the last lines when the engine fails.
        """
        remote = None if registry is None else f"{registry.rstrip('/')}/{build.image}"
        done = "there already"
        await to_thread.run_sync(lambda: self.logs.mkdir(parents=True, exist_ok=True))
        if await self._run(build, ["image", "inspect", build.image], tell):
            if remote is not None and not await self._run(build, ["pull", remote], tell):
                done = "fetched"
                await self._must(build, ["tag", remote, build.image], tell)
            else:
                done = "built"
                await self._must(build, ["build", "--force-rm", "--tag", build.image, str(build.context)], tell)
        if remote is not None and done != "fetched":
            await self._must(build, ["tag", build.image, remote], tell)
            await self._must(build, ["push", remote], tell)
        return done

    def log(self, build: Build) -> Path:
        """The file that holds everything the engine said about an image, the latest last."""
        return self.logs / f"{build.image.replace(':', '-')}.log"

    async def _must(self, build: Build, arguments: Sequence[str], tell: Tell) -> None:
        lines: deque[str] = deque(maxlen=LAST_LINES)
        status = await self._run(build, arguments, tell, lines)
        if status:
            said = "".join(f"\n  {line}" for line in lines)
            where = f"{build.task_id}: {build.context}/{DOCKERFILE}"
            raise ConfigError(
                f"{where}: {self.program} {arguments[0]} failed with status {status}; all of it is in "
                f"{self.log(build)}:{said}"
            )

    async def _run(self, build: Build, arguments: Sequence[str], tell: Tell, lines: deque[str] | None = None) -> int:
        """Run the program to its end; its exit status."""
        try:
            with anyio.fail_after(self.timeout):
                async with _process([self.program, *arguments]) as process, await anyio.open_file(
                    self.log(build), "a", encoding="utf-8", errors="replace"
                ) as log:  # fmt: skip
                    await log.write(f"$ {self.program} {' '.join(arguments)}\n")
                    async for line in _lines(process.stdout):
                        if await log.tell() < MAX_LOG:
                            await log.write(f"{line}\n")
                        if lines is not None:
                            lines.append(line)
                        if _STEP.fullmatch(line):
                            tell(line)
                    return int(await process.wait())
        except FileNotFoundError as error:
            raise ConfigError(f"{self.program}: there is no such program here; install it or choose another") from error
        except TimeoutError as error:
            raise ConfigError(
                f"{build.task_id}: {build.context}/{DOCKERFILE}: {self.program} {arguments[0]} took longer than "
                f"{self.timeout:g} s; allow more, or see {self.log(build)}"
            ) from error


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[Any]:
    """A program in a session of its own, which ends with the block: an engine's program hangs up then."""
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            with anyio.move_on_after(KILLED_WITHIN):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def _lines(stream: Any) -> AsyncIterator[str]:
    """Lines as they come, whatever bytes they hold; what has no end is cut into several."""
    rest = b""
    async for chunk in stream:
        *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
        if len(rest) > MAX_LINE:
            yield rest.decode("utf-8", "replace")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "replace")
