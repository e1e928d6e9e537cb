"""`skyenv tasks build`: make tasks from a package's releases, a repository's history, or injected bugs."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.commands.output import print_line
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from skyenv.envs.swe.making.candidates import Admission, Admitted, Refusal, Testing, WriteProblem

PYTEST = ("iniconfig==2.0.0", "packaging==24.2", "pluggy==1.5.0", "pytest==8.3.5")
Made = AsyncGenerator["Admitted | Refusal", None]


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv tasks build pypi|git|mutate`."""
    build = verbs.add_parser("build", help="make tasks from releases, commits or injected bugs")
    kinds = build.add_subparsers(required=True, metavar="KIND")
    pypi = kinds.add_parser("pypi", help="one task: the older release, to be brought to the newer one's tests")
    pypi.add_argument("name", metavar="NAME", help="package of the index")
    pypi.add_argument("old", metavar="OLD", help="version that the agent starts from")
    pypi.add_argument("new", metavar="NEW", help="version whose tests are graded")
    pypi.set_defaults(make=_from_releases)
    git = kinds.add_parser("git", help="commits that fix code together with tests")
    git.add_argument("url", metavar="PATH_OR_URL", help="repository to clone")
    git.add_argument("--branch", default="HEAD", help="where to start (default HEAD)")
    git.add_argument("--commits", type=int, default=200, help="how many commits to look at (default 200)")
    git.set_defaults(make=_from_history)
    mutate = kinds.add_parser("mutate", help="inject bugs that the project's own tests notice")
    mutate.add_argument("path", metavar="PATH", help="a directory, or NAME==VERSION of the package index")
    mutate.add_argument("--code", action="append", default=[], help="only mutate below this path (may be repeated)")
    mutate.add_argument("--seed", type=int, default=0, help="which bugs (default 0)")
    mutate.add_argument("--operators", help="which kinds of bugs, separated by commas (default all)")
    mutate.set_defaults(make=_from_mutations)
    for kind in (pypi, git, mutate):
        _add_common(kind)
        kind.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file; rows are added as they are admitted")
    parser.add_argument("--count", type=int, default=20, help="tasks at most (default 20)")
    parser.add_argument("--tests", action="append", default=[], help="directory or file with tests (may be repeated)")
    parser.add_argument(
        "--packages", nargs="*", default=list(PYTEST), help="requirements of the tests (default pytest)"
    )
    parser.add_argument("--setup", action="append", default=[], help="shell command that prepares the environment")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of every session")
    parser.add_argument("--image", help="container image (default: the host's system directories)")
    parser.add_argument("--python", help="interpreter of the virtual environment, as 3.11")
    parser.add_argument(
        "--runner", choices=("pytest", "unittest"), default="pytest", help="what runs them (default pytest)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of the tests (default 120)")
    parser.add_argument("--runs", type=int, default=1, help="how often admission runs each patch (default 1)")
    parser.add_argument("--writer-url", help="let a model of this OpenAI-compatible server write the issue texts")
    parser.add_argument("--writer-model", default="", help="which of its models (default: its first)")
    parser.add_argument("--sandbox", help="URL of a node server (default: sandboxes of this process)")
    parser.add_argument("--token", help="token of that server")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace) -> int:
    """Status 0 when at least one task was made."""
    if arguments.count < 1 or arguments.runs < 1:
        raise ConfigError("--count and --runs must be at least 1")
    made, refused = anyio.run(_build, arguments)
    print_line(f"{made} tasks written to {arguments.out}, {refused} candidates refused")
    if arguments.json:
        print_line(json.dumps({"tasks": made, "refused": refused, "out": str(arguments.out)}))
    return 0 if made else 1


async def _build(arguments: argparse.Namespace) -> tuple[int, int]:
    from skyenv.envs.swe.making.candidates import Admission, Refusal
    from skyenv.envs.swe.records import records_path, write_records
    from skyenv.remote.client import connect

    made = refused = 0
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(connect(arguments.sandbox, arguments.token))
        write_problem = await stack.enter_async_context(_Writer(arguments.writer_url, arguments.writer_model))
        admission = Admission(provider, write_problem, arguments.runs)
        results = await stack.enter_async_context(aclosing(arguments.make(arguments, admission)))
        async for result in results:
            if isinstance(result, Refusal):
                refused += 1
                print_line(f"refused  {result.task_id}: {result.reason}")
            else:
                made += 1
                _append(arguments.out, result)
                write_records(records_path(arguments.out), [result.record])
                print_line(f"admitted {result['task_id']}: {len(result['fail_to_pass'])} tests to fix")
    return made, refused


def _known_ids(out: Path) -> frozenset[str]:
    """The ids in a file of an earlier run, which are not made again."""
    if not out.exists():
        return frozenset()
    from skyenv.envs.swe.loading import load_tasks

    return frozenset(task.task_id for task in load_tasks(out))


def _append(out: Path, row: Admitted) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


class _Writer:
    """Writes issue texts: from the template, or with a model's words."""

    def __init__(self, url: str | None, model: str) -> None:
        from skyenv.engines.openai import OpenAIEngine

        self._engine = OpenAIEngine(url, model, flavour="chat") if url else None

    async def __aenter__(self) -> WriteProblem:
        if self._engine is not None:
            await self._engine.__aenter__()
        return self._write

    async def __aexit__(self, *exception: Any) -> None:
        if self._engine is not None:
            await self._engine.__aexit__(*exception)

    async def _write(self, candidate: Any, symptoms: Any) -> str:
        from skyenv.envs.swe.making.problems import from_template, prompt_for
        from skyenv.types import Message, SamplingParams

        if self._engine is None:
            return from_template(candidate, symptoms)
        prompt = Message("user", prompt_for(candidate, symptoms))
        completion = await self._engine.generate((), SamplingParams(max_tokens=600), messages=[prompt])
        return completion.text.strip() or from_template(candidate, symptoms)


def _testing(arguments: argparse.Namespace) -> Testing:
    from skyenv.envs.swe.making.candidates import Testing

    environment: dict[str, Any] = {"packages": arguments.packages, "setup": arguments.setup}
    for pair in arguments.env:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--env {pair}: write NAME=VALUE")
        environment.setdefault("env", {})[name] = value
    environment |= {key: value for key in ("image", "python") if (value := getattr(arguments, key))}
    tests = tuple(path.strip("/") for path in arguments.tests)
    return Testing(tests, environment, arguments.runner, arguments.timeout)


async def _from_releases(arguments: argparse.Namespace, admission: Admission) -> Made:
    from skyenv.envs.swe.making.releases import ReleasePair, release_task

    pair = ReleasePair(arguments.name, arguments.old, arguments.new, _testing(arguments))
    if pair.task_id in _known_ids(arguments.out):
        raise ConfigError(f"--out {arguments.out} holds {pair.task_id} already")
    yield await release_task(pair, admission)


def _from_history(arguments: argparse.Namespace, admission: Admission) -> Made:
    from skyenv.envs.swe.making.history import HistoryPlan, history_tasks

    local = Path(arguments.url).exists()
    url = str(Path(arguments.url).resolve()) if local else arguments.url
    name = url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    plan = HistoryPlan(
        name,
        url,
        arguments.count,
        commits=arguments.commits,
        branch=arguments.branch,
        testing=_testing(arguments),
        known=_known_ids(arguments.out),
    )
    return history_tasks(plan, admission)


async def _from_mutations(arguments: argparse.Namespace, admission: Admission) -> Made:
    from skyenv.envs.swe.making.mutating import MutationPlan, mutation_tasks
    from skyenv.envs.swe.making.mutations import OPERATOR_NAMES

    operators = tuple(arguments.operators.split(",")) if arguments.operators else OPERATOR_NAMES
    if unknown := set(operators) - set(OPERATOR_NAMES):
        raise ConfigError(f"--operators {min(unknown)}: known are {', '.join(OPERATOR_NAMES)}")
    name, source = await anyio.to_thread.run_sync(_source_of, arguments.path)
    plan = MutationPlan(
        name,
        source,
        arguments.count,
        seed=arguments.seed,
        testing=_testing(arguments),
        code=tuple(arguments.code),
        operators=operators,
        known=_known_ids(arguments.out),
    )
    async with aclosing(mutation_tasks(plan, admission)) as results:
        async for result in results:
            yield result


def _source_of(path: str) -> tuple[str, dict[str, Any]]:
    from skyenv.envs.swe.sdists import sdist_digest

    name, separator, version = path.partition("==")
    if separator:
        return name, {"pypi": {"name": name, "version": version, "sha256": sdist_digest(name, version)}}
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{path}: is neither a directory nor NAME==VERSION")
    return folder.name, {"directory": str(folder)}
