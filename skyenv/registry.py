"""Environments by id: what `skyenv.make` builds and what Gymnasium is told.

This is where environments meet the sandbox client; neither imports the other. Gymnasium costs 0.2 s to import (numpy),
so it is told when it is there: at once when it was imported before skyenv, else by an import hook that removes itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from skyenv.core import Env, SandboxProvider
from skyenv.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from skyenv.adapters.openenv_client import OpenEnvEnv
    from skyenv.envs.agent.env import AgentEnv
    from skyenv.envs.swe.env import SWEEnv
    from skyenv.envs.terminal.env import TerminalEnv
    from skyenv.vector.vector_env import SkyVectorEnv


class Registration(NamedTuple):
    """Where an environment is made: `module:function` for one, and for a vector of them, empty where there is none."""

    entry_point: str
    vector_entry_point: str


ENVIRONMENTS: Mapping[str, Registration] = MappingProxyType(
    {
        "SkyRL/SWE-v0": Registration("skyenv.registry:make_swe", "skyenv.registry:make_swe_vector"),
        "SkyRL/Agent-v0": Registration("skyenv.registry:make_agent", ""),
        "SkyRL/Terminal-v0": Registration("skyenv.registry:make_terminal", "skyenv.registry:make_terminal_vector"),
        "SkyRL/OpenEnv-v0": Registration("skyenv.registry:make_openenv", ""),
    }
)
GYMNASIUM_REGISTRY = "gymnasium.envs.registration"


def announce() -> None:
    """Register with Gymnasium now if it is loaded, else as soon as it is."""
    if GYMNASIUM_REGISTRY in sys.modules:
        register_all()
    elif not any(isinstance(finder, _AfterGymnasium) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterGymnasium())


class _AfterGymnasium(MetaPathFinder):
    """Waits for Gymnasium's registry to be imported, registers, and is gone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != GYMNASIUM_REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_all()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_all() -> None:
    """Tell Gymnasium of every environment; harmless when repeated."""
    from gymnasium.envs.registration import register, registry

    for env_id, registration in ENVIRONMENTS.items():
        if env_id not in registry:
            register(
                env_id,
                entry_point=registration.entry_point,
                vector_entry_point=registration.vector_entry_point or None,
                nondeterministic=True,
            )


def make(env_id: str, **kwargs: Any) -> Env:
    """Make the unwrapped asynchronous environment. ConfigError for an unknown id or wrong keyword arguments."""
    if env_id not in ENVIRONMENTS:
        hint = did_you_mean(env_id, ENVIRONMENTS)
        raise ConfigError(f"no environment {env_id!r}; known: {', '.join(ENVIRONMENTS)}{hint}")
    module, _, function = ENVIRONMENTS[env_id].entry_point.partition(":")
    entry_point: Callable[..., Env] = vars(import_module(module))[function]
    return entry_point(**kwargs)


def make_swe(*, sandbox: str | SandboxProvider | None = None, token: str | None = None, **kwargs: Any) -> SWEEnv:
    """Make a `SWEEnv`. `sandbox`: the URL of a node server, None for one in this process, or an open provider."""
    from skyenv.envs.swe.env import SWEEnv

    _check_keywords(kwargs, _SWE_KEYWORDS)
    if sandbox is not None and not isinstance(sandbox, str):
        return SWEEnv(sandbox=sandbox, **kwargs)
    return SWEEnv(sandbox=_opener(sandbox, token), **kwargs)


def make_agent(*, sandbox: str | SandboxProvider | None = None, token: str | None = None, **kwargs: Any) -> AgentEnv:
    """Make an `AgentEnv`; `sandbox` as for `make_swe`."""
    from skyenv.envs.agent.env import AgentEnv

    _check_keywords(kwargs, (*_SWE_KEYWORDS, "command", "packages", "env", "address", "listen"))
    if "command" not in kwargs:
        example = _example("SkyRL/Agent-v0", """command='my-agent "$SKYENV_ISSUE"'""")
        raise ConfigError(f"command: SkyRL/Agent-v0 needs a shell command that runs the agent{example}")
    provider = sandbox if sandbox is not None and not isinstance(sandbox, str) else _opener(sandbox, token)
    return AgentEnv(sandbox=provider, **kwargs)


def make_terminal(
    *, sandbox: str | SandboxProvider | None = None, token: str | None = None, **kwargs: Any
) -> TerminalEnv:
    """Make a `TerminalEnv`; `sandbox` as for `make_swe`."""
    from skyenv.envs.terminal.env import TerminalEnv

    _check_terminal(kwargs, _TERMINAL_KEYWORDS)
    provider = sandbox if sandbox is not None and not isinstance(sandbox, str) else _opener(sandbox, token)
    return TerminalEnv(sandbox=provider, **kwargs)


def make_openenv(url: str = "", **kwargs: Any) -> OpenEnvEnv:
    """Make an `OpenEnvEnv`, an OpenEnv environment that runs at `url`."""
    if not url:
        example = _example("SkyRL/OpenEnv-v0", 'url="http://127.0.0.1:8000"')
        raise ConfigError(f"url: SkyRL/OpenEnv-v0 needs the URL of a running OpenEnv server{example}")
    try:
        from skyenv.adapters.openenv_client import OpenEnvEnv
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("openenv", "websockets"):
            raise
        raise ConfigError("SkyRL/OpenEnv-v0 needs OpenEnv: pip install 'skyenv[openenv]'") from error

    _check_keywords(kwargs, ("tasks", "instructions", "render", "token", "timeout"))
    return OpenEnvEnv(url, **kwargs)


def make_swe_vector(**kwargs: Any) -> SkyVectorEnv:
    """Make `num_envs` SWE environments that step at the same time and share one connection to a node server.

    Takes the arguments of `make_swe`, and `autoreset_mode` and `timeout` of `SkyVectorEnv`.
    """
    from skyenv.envs.swe.env import SWEEnv

    return _make_vector(SWEEnv, _SWE_KEYWORDS, **{"tasks": "builtin", **kwargs})


def make_terminal_vector(**kwargs: Any) -> SkyVectorEnv:
    """Make `num_envs` terminal environments, as `make_swe_vector` does."""
    from skyenv.envs.terminal.env import TerminalEnv

    _check_terminal(kwargs, (*_TERMINAL_KEYWORDS, "num_envs", "autoreset_mode", "timeout"))
    return _make_vector(TerminalEnv, _TERMINAL_KEYWORDS, **kwargs)


def _make_vector(
    kind: type[SWEEnv],
    known: Sequence[str],
    *,
    num_envs: int = 1,
    sandbox: str | None = None,
    token: str | None = None,
    **kwargs: Any,
) -> SkyVectorEnv:
    from skyenv.envs.swe.environment import Environments
    from skyenv.envs.swe.loading import load_tasks
    from skyenv.vector.vector_env import SkyVectorEnv

    if sandbox is not None and not isinstance(sandbox, str):
        raise ConfigError("sandbox: a vector environment opens its own connection; give a URL or None")
    of_vector = ("autoreset_mode", "timeout")
    _check_keywords(kwargs, (*known, *of_vector))
    options = {name: kwargs.pop(name) for name in of_vector if name in kwargs}
    kwargs["tasks"] = load_tasks(kwargs["tasks"])
    spaces = kind(**kwargs)

    @asynccontextmanager
    async def connected() -> AsyncIterator[Callable[[], SWEEnv]]:
        async with _opener(sandbox, token)() as provider:
            yield partial(kind, sandbox=provider, **kwargs)
            await Environments.of(provider).aclose()

    return SkyVectorEnv(
        connected(),
        num_envs,
        observation_space=spaces.observation_space,
        action_space=spaces.action_space,
        **options,
    )


_SWE_KEYWORDS = ("tasks", "max_turns", "observation_max_chars", "reward", "prompt", "tools", "render_mode")
_TERMINAL_KEYWORDS = (*_SWE_KEYWORDS, "image", "network")


def _check_terminal(given: Mapping[str, Any], known: Sequence[str]) -> None:
    _check_keywords(given, known)
    if "tasks" not in given:
        example = _example("SkyRL/Terminal-v0", 'tasks="my-tasks"')
        raise ConfigError(f"tasks: SkyRL/Terminal-v0 needs a folder of Harbor's or terminal-bench's tasks{example}")


def _example(env_id: str, arguments: str) -> str:
    """The end of a message about a missing argument: a line that has it, to be copied."""
    return f", as in\n    gymnasium.make({env_id!r}, {arguments})"


def _check_keywords(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{name}: unknown keyword argument; known: sandbox, token, {', '.join(known)}{hint}")


def _opener(url: str | None, token: str | None) -> Callable[[], Any]:
    """What opens the connection when it is needed; the client is imported only then."""

    def open_provider() -> Any:
        from skyenv.remote.client import connect

        return connect(url, token)

    return open_provider
