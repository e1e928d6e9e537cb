"""Inference servers that belong to a run: started, watched, started again, and ended with it.

One thread watches them. A server that ends or stops answering is started again on its own port; it gets no work there
before it has taken the weights of the day, which is the pool's and `WeightSync`'s affair. When the last one is given
up, the run is interrupted, and the interrupt becomes an error with the servers' last words. A run that is killed takes
its servers along, for they hang on a lifeline (`skyenv.engines.starting`).
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from sky_trainer.config import Config
from sky_trainer.environments import ensure_environment
from sky_trainer.sections.launch import check_adapter_options
from sky_trainer.sync.ranks import is_main, share
from sky_trainer.weights import WeightSync, WeightSyncFailed
from skyenv.engines.starting import RunningServer, ServerSpec, free_port, last_lines, start
from skyenv.errors import EngineUnavailable

logger = logging.getLogger(__name__)

LOGS, LOOK_EVERY = "engines", 0.5


class OwnServerSpec(ServerSpec):
    """`sky_trainer serve-engine` of this environment: transformers in SGLang's dialect."""

    def command(self) -> list[str]:
        """The command line."""
        where = ("--host", self.host, "--port", str(self.port))
        return [self.python, "-m", "sky_trainer.cli", "serve-engine", self.model, *where, *self.options]


@dataclasses.dataclass(slots=True)
class _Watched:
    """One server over its lives. `answered`: when it last did, on the monotonic clock; None: not yet in this life."""

    spec: ServerSpec
    log: Path
    running: RunningServer | None = None
    started: float = 0.0
    answered: float | None = None
    restarts: int = 0
    given_up: str = ""


class EngineServers:
    """Use as `with`: entering starts all and returns once each is ready, leaving ends them. Blocks.

    `on_lost` is called once, from the watching thread, when no server is left; `failure` says why. Raises
    EngineUnavailable when a server cannot be brought up within its restarts, ConfigError without an interpreter.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        logs: Path,
        *,
        restarts: int = 3,
        ready_timeout: float = 900.0,
        health_timeout: float = 120.0,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._logs, self._restarts, self._on_lost = logs, restarts, on_lost
        self._ready_timeout, self._health_timeout = ready_timeout, health_timeout
        self._watched = [
            _Watched(spec if spec.port else dataclasses.replace(spec, port=free_port(spec.host)), logs / f"{n}.log")
            for n, spec in enumerate(specs)
        ]
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="engine servers")
        self.failure: EngineUnavailable | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where they answer; the same over their lives."""
        return tuple(f"http://{watched.spec.host}:{watched.spec.port}" for watched in self._watched)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run now."""
        return tuple(watched.running.pid for watched in self._watched if watched.running is not None)

    def answering(self) -> bool:
        """Block until every server has been looked at from now on and answers or is given up; whether one answers."""
        begun = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.given_up or (each.answered or 0.0) >= begun for each in self._watched)
            )
        return not all(each.given_up for each in self._watched)

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        entered = False
        try:
            for watched in self._watched:
                self._start(watched)
            self._thread.start()
            self.answering()
            lost = [watched.given_up for watched in self._watched if watched.given_up]
            if lost:
                raise EngineUnavailable(lost[0])
            entered = True
        finally:
            if not entered:
                self._end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if self.failure is not None and error is not None:
            raise self.failure from error

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        for watched in self._watched:
            if watched.running is not None:
                watched.running.stop()

    def _watch(self) -> None:
        while not self._stopping:
            for watched in self._watched:
                if watched.running is not None and not self._stopping:
                    self._look(watched)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, LOOK_EVERY)

    def _look(self, watched: _Watched) -> None:
        """Ask one server whether it is well; start it again when it is not, or give it up."""
        assert watched.running is not None
        now, trouble = time.monotonic(), ""
        try:
            ready = watched.running.ready()
        except EngineUnavailable:
            ready, trouble = False, f"ended with status {watched.running.exit_code}"
        if ready:
            with self._changed:
                watched.answered = time.monotonic()
                self._changed.notify_all()
        elif not trouble and watched.answered is None and now - watched.started > self._ready_timeout:
            trouble = f"was not ready after {self._ready_timeout:g} s"
        elif not trouble and watched.answered is not None and now - watched.answered > self._health_timeout:
            trouble = f"answered no health check for {self._health_timeout:g} s"
        if trouble:
            self._replace(watched, trouble)

    def _replace(self, watched: _Watched, trouble: str) -> None:
        assert watched.running is not None
        watched.running.kill()
        watched.running = None
        name = f"{watched.spec.flavour} at {watched.spec.host}:{watched.spec.port}"
        if watched.restarts < self._restarts:
            watched.restarts += 1
            logger.warning("%s %s; started again (%d of %d)", name, trouble, watched.restarts, self._restarts)
            self._start(watched)
            return
        with self._changed:
            watched.given_up = f"{name} {trouble}, after {watched.restarts} restarts; {watched.log} ends with:"
            watched.given_up += last_lines(watched.log)
            self._changed.notify_all()
        logger.warning("%s", watched.given_up)
        if all(each.given_up for each in self._watched):
            self.failure = EngineUnavailable(f"no engine server is left: {watched.given_up}")
            if self._on_lost is not None:
                self._on_lost()

    def _start(self, watched: _Watched) -> None:
        watched.answered, watched.started = None, time.monotonic()
        watched.running = start(watched.spec, watched.log)


def interrupt_main_thread() -> None:
    """What Ctrl-C does, from any thread: a blocking wait of the main thread ends."""
    identity = threading.main_thread().ident
    if identity is not None:
        signal.pthread_kill(identity, signal.SIGINT)


def server_specs(config: Config, model: str, python: str) -> list[ServerSpec]:
    """The servers that the configuration asks for, serving `model`, a directory or hub name."""
    launch, engine = config.launch, config.engine
    assert engine.kind != "embedded"
    check_adapter_options(engine, launch, config.lora)
    kind = OwnServerSpec if launch.program == "transformers" else ServerSpec
    specs = []
    for number in range(launch.servers):
        devices = {"CUDA_VISIBLE_DEVICES": launch.gpus[number]} if launch.gpus else {}
        token = {"OPENAI_API_KEY": engine.token, "VLLM_API_KEY": engine.token} if engine.token else {}
        specs.append(
            kind(
                engine.kind,
                python,
                model,
                name=engine.model,
                host=launch.host,
                device=launch.device,
                options=launch.options,
                env={**devices, **token, **launch.env},
            )
        )
    return specs


def engine_servers(config: Config, model: str) -> EngineServers:
    """The servers of a training run that serve `model`, not started yet; their loss interrupts the main thread.

    Makes the engine's environment first if that is to be done, which may take minutes.
    """
    launch = config.launch
    python = sys.executable
    if launch.program == "engine":
        python = str(ensure_environment(Path(launch.environment), launch.install, launch.installer))
    in_main = threading.current_thread() is threading.main_thread()
    return EngineServers(
        server_specs(config, model, python),
        Path(launch.logs) if launch.logs else config.run_dir / LOGS,
        restarts=launch.restarts,
        ready_timeout=launch.ready_timeout,
        health_timeout=launch.health_timeout,
        on_lost=interrupt_main_thread if in_main else None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A configuration with the URLs of the servers; `answering` blocks until those that are left answer, if any is."""

    config: Config
    answering: Callable[[], bool]

    def patient(self, weights: WeightSync) -> WeightSync:
        """A `WeightSync` that waits for servers which are started again."""
        return PatientWeights(weights, self.answering)


class PatientWeights:
    """Pushes again when no server took a version because all were being started again.

    Every rank has one; whether servers answer is rank 0's to know.
    """

    def __init__(self, weights: WeightSync, answering: Callable[[], bool]) -> None:
        self._weights, self._answering = weights, answering

    @property
    def version(self) -> int:
        """Version that new completions are sampled with."""
        return self._weights.version

    def push(self, version: int) -> None:
        """As `WeightSync.push`, as often as servers come back; bounded by their restarts."""
        for last in (False, True):
            try:
                return self._weights.push(version)
            except WeightSyncFailed:
                if last or not share(is_main() and self._answering()):
                    raise


@contextmanager
def launched(config: Config, model: str, say: Callable[[str], None]) -> Iterator[Launched]:
    """The servers that the configuration asks for, which serve `model` during the block."""
    if not config.launch.servers:
        yield Launched(config, lambda: False)
        return
    say(f"starting {config.launch.servers} engine servers for {model}")
    with engine_servers(config, model) as servers:
        named = dataclasses.replace(config, engine=dataclasses.replace(config.engine, urls=servers.urls))
        yield Launched(named, servers.answering)
