"""Tasks by injected bugs: code that passes its own tests, one small edit that breaks some of them, the edit undone.

The agent's repository is the edited source without the test files that tell; the tests and the reference are files of
the unedited source, so a row for a package of an index ships metadata only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skyenv.envs.swe.making.candidates import (
    MAX_BROKEN_SHARE,
    Admission,
    Admitted,
    Candidate,
    Observation,
    Refusal,
    Row,
    Testing,
    observe,
    probe,
    steady_passes,
    test_files_of,
    test_roots,
)
from skyenv.envs.swe.making.mutations import OPERATOR_NAMES, SEVERAL, Mutation, choose
from skyenv.envs.swe.sources import Tree, default_cache, fetch_tree, parse_source
from skyenv.errors import ConfigError

_NOT_CODE = ("test", "tests", "testing", "docs", "doc", "examples", "example", "benchmarks", "scripts", "tools")
_NOT_CODE_FILES = ("setup.py", "conftest.py", "noxfile.py", "conf.py", "_version.py", "version.py", "__main__.py")


@dataclass(frozen=True, slots=True)
class MutationPlan:
    """What to mutate and how much of it.

    `source` is a source as a task row has it, a relative path of it below `base`; `code` are directories or files of
    it (empty: found by convention). No more than `per_function` tasks are made of one function. Ids in
    `known` count as made and are not made again.
    """

    name: str
    source: Mapping[str, Any]
    count: int
    seed: int = 0
    testing: Testing = field(default_factory=Testing)
    code: tuple[str, ...] = ()
    operators: tuple[str, ...] = OPERATOR_NAMES
    per_function: int = 2
    known: frozenset[str] = frozenset()
    base: Path = field(default_factory=Path)


async def mutation_tasks(plan: MutationPlan, admission: Admission) -> AsyncGenerator[Admitted | Refusal, None]:
    """Rows that passed admission, `plan.count` at most, and refusals between them, in the order of the seed.

    ConfigError when the source, its tests or its code cannot be found or its tests do not pass as they are.
    """
    source = parse_source(plan.source, "source")
    tree = await fetch_tree(source, base=plan.base, cache=default_cache())
    tests = test_files_of(tree, plan.testing.tests)
    if not tests:
        raise ConfigError("tests: the source has no test files there; pass --tests with their directory")
    code = code_files(tree, tests, plan.code)
    if not code:
        raise ConfigError("code: the source has no Python files there; pass --code with their directory")
    testing = replace(plan.testing, tests=tuple(plan.testing.tests or test_roots(tests)))
    plan = replace(plan, testing=testing)
    after = await steady_passes(probe(_row(plan, "original", (), ()), tests, plan.base), admission.provider)
    if not after:
        raise ConfigError("tests: none of the source's own tests passes; check --packages, --setup and --tests")
    made, used = 0, dict[str, int]()
    for mutation in choose(code, plan.seed, plan.operators):
        if made == plan.count:
            return
        if used.get(mutation.function, 0) >= plan.per_function:
            continue
        task_id = f"{plan.name}-{mutation.digest}"
        if task_id not in plan.known:
            candidate = Candidate(_row(plan, task_id, (mutation,), ()), _facts(mutation))
            before = await observe(probe(candidate.row, tests, plan.base), admission.provider)
            row = await _judge(plan, candidate, mutation, before, after, admission)
            yield row
            if isinstance(row, Refusal):
                continue
        made += 1
        used[mutation.function] = used.get(mutation.function, 0) + 1


async def _judge(
    plan: MutationPlan,
    candidate: Candidate,
    mutation: Mutation,
    before: Observation,
    after: frozenset[str],
    admission: Admission,
) -> Admitted | Refusal:
    """Refuse what breaks nothing or nearly all; what the telling test files are is known only now."""
    where = f"{mutation.path} {mutation.function} ({mutation.operator})"
    broken = after - before.passed
    if not before.problem and after and len(broken) > MAX_BROKEN_SHARE * len(after):
        return Refusal(where, f"breaks {len(broken)} of {len(after)} tests")
    telling = sorted({test.split("::")[0] for test in broken})
    row = _row(plan, candidate.row["task_id"], (mutation,), telling)
    result = await admission.admit(Candidate(row, candidate.facts), before, after, plan.base)
    return Refusal(where, result.reason) if isinstance(result, Refusal) else result


def code_files(tree: Tree, tests: Sequence[str], roots: Sequence[str]) -> dict[str, bytes]:
    """Python files that are the project's own code, by path."""
    found = {}
    for path, file in sorted(tree.items()):
        folders, _, name = path.rpartition("/")
        wanted = any(path == root or path.startswith(f"{root}/") for root in roots)
        usual = not set(folders.split("/")) & set(_NOT_CODE) and name not in _NOT_CODE_FILES
        if path.endswith(".py") and path not in tests and (wanted if roots else usual):
            found[path] = file.data
    return found


def _row(plan: MutationPlan, task_id: str, mutations: Sequence[Mutation], telling: Sequence[str]) -> Row:
    edits = [
        {"path": edit.path, "at": edit.at, "old": edit.old.decode(), "new": edit.new.decode()}
        for mutation in mutations
        for edit in mutation.edits
    ]
    original = dict(plan.source)
    source = {"edited": {"base": original, "edits": edits, "remove": list(telling)}}
    tests = {"edited": {"base": original, "paths": list(plan.testing.tests)}}
    level = 3 if any(m.operator == SEVERAL for m in mutations) else 2
    row = plan.testing.row(task_id, source, tests, level)
    if mutations:
        row["reference"] = {"edited": {"base": original, "paths": sorted({m.path for m in mutations})}}
    return row


def _facts(mutation: Mutation) -> dict[str, str]:
    module = mutation.path.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").replace("/", ".")
    names = " and ".join(f"`{name}`" for name in mutation.function.split(", "))
    return {"title": f"Something is wrong with {names} of `{module}`.", "documentation": mutation.docstring}
