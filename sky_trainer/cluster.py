"""A training run on a Ray cluster: its roles, where they run, and in which environments.

The driver (`launch_on_ray`) reserves a placement group for each role, starts the trainer's ranks as actors and waits.
Rank 0 starts the servers and the rollout workers in their groups when it needs them (`Cluster`): it alone knows the
policy that they serve. Whatever ends the driver ends the run: actors and groups belong to it, Ray frees them with it.
Every role may have packages of its own (`ray.*_env`), for nothing but data travels between them.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from sky_trainer.config import Config, from_mapping, to_mapping
from sky_trainer.environments import ensure_environment
from sky_trainer.layout import Machine
from sky_trainer.paths import over_paths, whole
from sky_trainer.sections.ray import RayConfig
from sky_trainer.settings import build
from sky_trainer.sharding import worker_spec
from sky_trainer.supervise import LOGS, EngineServers, Launched, server_specs
from skyenv.errors import ConfigError, EngineUnavailable, SkyEnvError, boundary
from skyenv.vector.progress import OnEvent
from skyenv.vector.ray import ray_pipeline
from skyenv.vector.sharded import ShardedPipeline, ShardRules

PASSED_ON = ("HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH")
RANKS, SERVERS, WORKERS = "ranks", "servers", "workers"


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """The groups of this run, by role; rank 0 starts servers and workers in them."""

    groups: Mapping[str, Any]

    @contextmanager
    def launched(self, config: Config, model: str, say: Callable[[str], None]) -> Iterator[Launched]:
        """The servers that the configuration asks for, which serve `model` during the block.

        `model` must be a hub name or a directory that their nodes see too. Raises EngineUnavailable when one cannot be
        brought up, and in place of an error of the block when none is left.
        """
        if not config.launch.servers:
            yield Launched(config, lambda: False)
            return
        say(f"starting {config.launch.servers} engine servers for {model} on the cluster")
        with ExitStack() as stack:
            actors = [stack.enter_context(self._server(config)) for _ in range(config.launch.servers)]
            answers = _results([actor.start.remote(model, number) for number, actor in enumerate(actors)])
            for answer in answers:
                if answer["error"]:
                    raise EngineUnavailable(answer["error"])
            urls = tuple(answer["url"] for answer in answers)
            named = dataclasses.replace(config, engine=dataclasses.replace(config.engine, urls=urls))
            try:
                yield Launched(named, lambda: any(_results([actor.answering.remote() for actor in actors])))
            except SkyEnvError as error:
                failures = _results([actor.failure.remote() for actor in actors])
                if all(failures):
                    raise EngineUnavailable(failures[0]) from error
                raise

    @contextmanager
    def _server(self, config: Config) -> Iterator[Any]:
        settings = config.ray
        options = _options(
            self.groups[SERVERS], settings.server_cpus, settings.server_gpus, settings.server_env, config
        )
        actor = _ray().remote(ServerActor).options(**options).remote(to_mapping(config))
        try:
            yield actor
        finally:
            _ray().wait([actor.stop.remote()], timeout=30.0)
            _ray().kill(actor)

    def pipeline(self, config: Config, policy: str, on_event: OnEvent) -> ShardedPipeline:
        """Rollouts in the workers; open it on the portal. `config.engine` names the servers."""
        settings = config.ray
        options = _options(self.groups[WORKERS], settings.worker_cpus, 0.0, settings.worker_env, config)
        rules = ShardRules(shards=settings.workers, start_timeout=settings.start_timeout)
        return ray_pipeline(worker_spec(config, policy), rules, options, on_event)


class ServerActor:
    """One inference server on a node of the cluster, watched there."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = from_mapping(config)
        self._servers: EngineServers | None = None

    def start(self, model: str, number: int) -> dict[str, str]:
        """Returns once it is ready: its URL, or what went wrong."""
        try:
            return {"url": self._start(model, number), "error": ""}
        except SkyEnvError as error:
            return {"url": "", "error": f"server {number} on {socket.gethostname()}: {error}"}

    def _start(self, model: str, number: int) -> str:
        config, launch = self._config, self._config.launch
        python = sys.executable
        if launch.program == "engine":
            python = str(ensure_environment(Path(launch.environment), launch.install, launch.installer))
        here = dataclasses.replace(launch, servers=1, gpus=(), host=_address())
        self._servers = EngineServers(
            server_specs(dataclasses.replace(config, launch=here), model, python),
            (Path(launch.logs) if launch.logs else config.run_dir / LOGS) / str(number),
            restarts=launch.restarts,
            ready_timeout=launch.ready_timeout,
            health_timeout=launch.health_timeout,
        )
        self._servers.__enter__()
        return self._servers.urls[0]

    def answering(self) -> bool:
        """See `EngineServers.answering`."""
        return self._servers is not None and self._servers.answering()

    def failure(self) -> str:
        """Why it was given up, else nothing."""
        return str(self._servers.failure) if self._servers is not None and self._servers.failure is not None else ""

    def stop(self) -> None:
        """End the server."""
        if self._servers is not None:
            self._servers.__exit__(None, None, None)


class RankActor:
    """One rank of the trainer."""

    def address(self) -> tuple[str, int]:
        """Where ranks may meet this one."""
        host = _address()
        with closing(socket.socket()) as listener:
            listener.bind((host, 0))
            return host, listener.getsockname()[1]

    def train(self, config: Mapping[str, Any], variables: Mapping[str, str], groups: Mapping[str, Any]) -> Any:
        """The outcome's fields, or the kind and message of what went wrong."""
        os.environ.update(variables)
        from sky_trainer.commands.output import make_console
        from sky_trainer.display import Display
        from sky_trainer.run import train

        run = from_mapping(config)
        try:
            display = Display(make_console(), f"training: {run.run_dir}", run.steps)
            return dataclasses.asdict(train(run, display, Cluster(groups)))
        except SkyEnvError as error:
            return type(error).__name__, str(error)


def launch_on_ray(config: Config, address: str) -> dict[str, Any]:
    """Train on the cluster at `address` ("auto": the one of this machine) and return the outcome's fields.

    Raises ConfigError when the cluster has no room within `ray.start_timeout`, and what the run raised.
    """
    ray = _ray()
    ray.init(address=address)
    config = with_whole_paths(_with_token(config))
    try:
        with ExitStack() as stack:
            groups = {
                role: stack.enter_context(_reserved(role, bundles, strategy, config.ray.start_timeout))
                for role, bundles, strategy in _bundles(config)
            }
            return _train(config, groups)
    finally:
        ray.shutdown()


def machines_of(address: str) -> list[Machine]:
    """What each node of the cluster at `address` has free of others' reservations. ConfigError when nobody answers."""
    ray = _ray()
    with boundary(ConfigError, f"no Ray cluster answers at {address}; start one, or name its head with --ray"):
        ray.init(address=address, log_to_driver=False)
    try:
        free = ray._private.state.available_resources_per_node()
    finally:
        ray.shutdown()
    return [Machine(resources.get("CPU", 0.0), resources.get("GPU", 0.0)) for resources in free.values()]


def _with_token(config: Config) -> Config:
    """Servers of a cluster can be reached by others: they ask for a token, one of this run if none is given."""
    token = config.engine.token or os.environ.get("OPENAI_API_KEY") or secrets.token_urlsafe(32)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, token=token))


def with_whole_paths(config: Config) -> Config:
    """Actors work in directories of their own: what is relative here is named as it is called from the root."""
    return build(Config, over_paths(to_mapping(config), whole(Path.cwd())))


def _train(config: Config, groups: Mapping[str, Any]) -> dict[str, Any]:
    ray, settings = _ray(), config.ray
    options = _options(groups[RANKS], settings.rank_cpus, settings.rank_gpus, settings.rank_env, config)
    ranks = [
        ray.remote(RankActor).options(**_at_bundle(options, groups[RANKS], number)).remote()
        for number in range(settings.ranks)
    ]
    try:
        host, port = _results([ranks[0].address.remote()], settings.start_timeout)[0]
        pending = [
            actor.train.remote(to_mapping(config), rank_variables(number, settings.ranks, host, port), dict(groups))
            for number, actor in enumerate(ranks)
        ]
        outcome: dict[str, Any] = {}
        while pending:  # the first that fails ends the others, which would wait for it
            (ended, *_), pending = ray.wait(pending)
            (answer,) = _results([ended])
            if not isinstance(answer, dict):
                kind, message = answer
                raise ConfigError(message) if kind == ConfigError.__name__ else SkyEnvError(f"{kind}: {message}")
            outcome = answer
        return outcome
    finally:
        for actor in ranks:
            ray.kill(actor)


def rank_variables(rank: int, ranks: int, host: str, port: int) -> dict[str, str]:
    """What torch.distributed and accelerate read; none for a single rank."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # each actor sees its own GPUs alone
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _bundles(config: Config) -> list[tuple[str, list[dict[str, float]], str]]:
    settings: RayConfig = config.ray
    rank = {"CPU": settings.rank_cpus, "GPU": settings.rank_gpus}
    server = {"CPU": settings.server_cpus, "GPU": settings.server_gpus}
    roles = [
        (RANKS, [rank] * settings.ranks, "PACK"),
        (SERVERS, [server] * config.launch.servers, "SPREAD"),
        (WORKERS, [{"CPU": settings.worker_cpus}] * settings.workers, "SPREAD"),
    ]
    return [
        (role, [{name: count for name, count in bundle.items() if count} for bundle in bundles], strategy)
        for role, bundles, strategy in roles
        if bundles
    ]


@contextmanager
def _reserved(role: str, bundles: list[dict[str, float]], strategy: str, timeout: float) -> Iterator[Any]:
    util = _ray().util
    group = util.placement_group(bundles, strategy=strategy)
    try:
        if not group.wait(timeout):
            total = _ray().cluster_resources()
            has = ", ".join(f"{total.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
            raise ConfigError(
                f"ray: no room for the {role} within {timeout:g} s: {len(bundles)} bundles of {bundles[0]} beside the"
                f" others, and the cluster has {has} in all"
            )
        yield group
    finally:
        util.remove_placement_group(group)


def _options(group: Any, cpus: float, gpus: float, runtime_env: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Of an actor anywhere in a group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    token = {"OPENAI_API_KEY": config.engine.token} if config.engine.token else {}
    variables = {**passed, **token, **runtime_env.get("env_vars", {})}
    return {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
        "runtime_env": {**runtime_env, "env_vars": variables},
        "max_restarts": 0,
    }


def _at_bundle(options: Mapping[str, Any], group: Any, number: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {**options, "scheduling_strategy": strategy}


def _results(references: list[Any], timeout: float | None = None) -> list[Any]:
    """What actors answer; SkyEnvError when one of them died."""
    errors = _ray().exceptions
    try:
        return list(_ray().get(references, timeout=timeout))
    except errors.GetTimeoutError as error:
        raise SkyEnvError(f"no answer from the cluster within {timeout:g} s") from error
    except errors.RayError as error:
        raise SkyEnvError(f"a part of the run died: {type(error).__name__}: {error}") from error


def _address() -> str:
    """Of this node, as the cluster knows it."""
    ray = _ray()
    mine = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == mine)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("launching on Ray needs the extra: pip install 'skyenv[ray]'") from error
    return ray
