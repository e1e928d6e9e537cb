"""`skyenv tasks`: look at and validate task sets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.commands import build
from skyenv.commands.output import print_line
from skyenv.errors import ConfigError, SkyEnvError

if TYPE_CHECKING:
    from skyenv.envs.swe.tasks import SweTask


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv tasks list|show|validate`."""
    tasks = commands.add_parser("tasks", help="look at and validate task sets")
    verbs = tasks.add_subparsers(required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="one line a task")
    showing = verbs.add_parser("show", help="one task: problem, source, tests")
    validating = verbs.add_parser("validate", help="prove that the empty patch fails and the reference resolves")
    for verb, run in ((listing, run_list), (showing, run_show), (validating, run_validate)):
        verb.add_argument("tasks", metavar="TASKS", help="a set's name (builtin, pypi), a file or a folder")
        verb.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        verb.set_defaults(run=run)
    build.add(verbs)
    showing.add_argument("task_id", metavar="ID")
    validating.add_argument("--id", action="append", default=[], help="only this task (may be repeated)")
    validating.add_argument("--runs", type=int, default=1, help="how often to run each patch (default 1)")
    validating.add_argument("--sandbox", help="URL of a node server (default: sandboxes of this process)")
    validating.add_argument("--token", help="token of that server")
    validating.add_argument("--concurrency", type=int, default=2, help="tasks at a time (default 2)")


def chosen_tasks(arguments: argparse.Namespace, ids: Sequence[str] = ()) -> list[SweTask]:
    """Load the task set and keep `ids` (all when empty). ConfigError for an id that is not there."""
    from skyenv.envs.swe.tasks import load_tasks

    tasks = load_tasks(arguments.tasks)
    known = {task.task_id: task for task in tasks}
    for task_id in ids:
        if task_id not in known:
            raise ConfigError(
                f"{arguments.tasks} has no task {task_id!r}; `skyenv tasks list {arguments.tasks}` names all"
            )
    return [known[task_id] for task_id in ids] if ids else tasks


def run_list(arguments: argparse.Namespace) -> int:
    """One line a task."""
    tasks = chosen_tasks(arguments)
    for task in tasks:
        first_line = task.problem.strip().splitlines()[0]
        print_line(f"{task.task_id:40} level {task.level}  {len(task.fail_to_pass):3} to fix  {first_line[:70]}")
    if arguments.json:
        print_line(json.dumps({"tasks": [task.task_id for task in tasks]}))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Everything about one task that is not its solution."""
    (task,) = chosen_tasks(arguments, [arguments.task_id])
    shown: dict[str, Any] = {
        "task_id": task.task_id,
        "level": task.level,
        "source": str(task.source),
        "runner": task.runner,
        "fail_to_pass": list(task.fail_to_pass),
        "pass_to_pass": list(task.pass_to_pass),
    }
    for key, value in shown.items():
        print_line(f"{key}: {value}")
    print_line(f"\n{task.problem}")
    if arguments.json:
        print_line(json.dumps({**shown, "problem": task.problem}))
    return 0


def run_validate(arguments: argparse.Namespace) -> int:
    """Status 0 when every task is sound."""
    if arguments.runs < 1 or arguments.concurrency < 1:
        raise ConfigError("--runs and --concurrency must be at least 1")
    records = anyio.run(validate_all, chosen_tasks(arguments, arguments.id), arguments)
    sound = [record for record in records if record["ok"]]
    print_line(f"{len(sound)} of {len(records)} tasks are sound")
    if arguments.json:
        print_line(json.dumps({"tasks": len(records), "ok": len(sound), "records": records}))
    return 0 if len(sound) == len(records) else 1


async def validate_all(tasks: Sequence[SweTask], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Validate tasks concurrently; a task that cannot be validated is a record too, never the end of the others."""
    from skyenv.envs.swe.validation import validate_task
    from skyenv.remote.client import connect

    records: dict[str, dict[str, Any]] = {}
    limiter = anyio.CapacityLimiter(arguments.concurrency)

    async with connect(arguments.sandbox, arguments.token) as provider, anyio.create_task_group() as group:

        async def one(task: SweTask) -> None:
            async with limiter:
                try:
                    record = await validate_task(task, provider, runs=arguments.runs)
                except SkyEnvError as error:
                    record = {"task_id": task.task_id, "ok": False, "problems": [f"{type(error).__name__}: {error}"]}
            records[task.task_id] = record
            verdict = "ok" if record["ok"] else "BAD: " + "; ".join(record["problems"])
            print_line(f"{len(records):3}/{len(tasks)} {task.task_id:40} {verdict}")

        for task in tasks:
            group.start_soon(one, task)
    return [records[task.task_id] for task in tasks]
