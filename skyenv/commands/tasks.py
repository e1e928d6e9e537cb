"""`skyenv tasks`: look at task sets, make them, admit them to training, grade a patch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.commands import build, images
from skyenv.commands.choosing import chosen_tasks, readable_tasks
from skyenv.commands.output import print_line
from skyenv.errors import ConfigError, SkyEnvError

if TYPE_CHECKING:
    from skyenv.envs.swe.tasks import SweTask

PLACE = "a set (builtin, pypi, mutated), a file, a folder, a data set of the hub (owner/name@split), or DATASET:PLACE"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv tasks list|show|validate|grade|build|images`."""
    tasks = commands.add_parser("tasks", help="look at, admit and grade repair tasks")
    verbs = tasks.add_subparsers(required=True, metavar="VERB")
    listing = verbs.add_parser("list", help="one line a task")
    showing = verbs.add_parser("show", help="one task: problem, source, tests")
    validating = verbs.add_parser("validate", help="prove that the empty patch fails and the reference resolves")
    grading = verbs.add_parser("grade", help="grade a patch from anywhere")
    for verb, run in ((listing, run_list), (showing, run_show), (validating, run_validate), (grading, run_grade)):
        verb.add_argument("tasks", metavar="TASKS", help=PLACE)
        verb.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        verb.set_defaults(run=run)
    for verb in (validating, grading):
        verb.add_argument("--sandbox", help="URL of a node server (default: sandboxes of this process)")
        verb.add_argument("--token", help="token of that server")
        verb.add_argument(
            "--image", default="{image}", help="where images are found, as 'docker-daemon:{image}' (default: {image})"
        )
    build.add(verbs)
    images.add(verbs)
    showing.add_argument("task_id", metavar="ID", help="the task to show")
    grading.add_argument("--id", required=True, help="the task that the patch is for")
    grading.add_argument("--patch", required=True, metavar="FILE", help="the patch; - reads standard input")
    validating.add_argument("--id", action="append", default=[], help="only this task (may be repeated)")
    validating.add_argument("--runs", type=int, default=1, help="how often to run each patch (default 1)")
    validating.add_argument("--concurrency", type=int, default=2, help="tasks at a time (default 2)")
    validating.add_argument("--out", type=Path, help="file for the records (default: beside the tasks)")


def run_list(arguments: argparse.Namespace) -> int:
    """One line a task."""
    tasks = chosen_tasks(arguments.tasks)
    for task in tasks:
        first_line = task.problem.strip().splitlines()[0]
        print_line(f"{task.task_id:40} level {task.level}  {len(task.fail_to_pass):3} to fix  {first_line[:70]}")
    if arguments.json:
        print_line(json.dumps({"tasks": [task.task_id for task in tasks]}))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Everything about one task that is not its solution."""
    (task,) = chosen_tasks(arguments.tasks, [arguments.task_id])
    shown: dict[str, Any] = {
        "task_id": task.task_id,
        "level": task.level,
        "source": str(task.source),
        "image": task.environment.image,
        "repo_path": task.repo_path,
        "runner": task.runner,
        "command": task.command,
        "parser": task.parser,
        "timeout": task.timeout,
        "admitted": task.record is not None,
        "fail_to_pass": list(task.fail_to_pass),
        "pass_to_pass": list(task.pass_to_pass),
    }
    for key, value in shown.items():
        print_line(f"{key}: {value}")
    print_line(f"\n{task.problem}")
    if arguments.json:
        print_line(json.dumps({**shown, "problem": task.problem}))
    return 0


def run_grade(arguments: argparse.Namespace) -> int:
    """Status 0 when the patch resolves the task; the verdict goes to stdout."""
    (task,) = chosen_tasks(arguments.tasks, [arguments.id])
    try:
        patch = sys.stdin.buffer.read() if arguments.patch == "-" else Path(arguments.patch).read_bytes()
    except OSError as error:
        raise ConfigError(f"--patch {arguments.patch}: {error.strerror}") from error
    verdict = anyio.run(grade_one, task, patch, arguments)
    print_line(f"{task.task_id}: {verdict['status']}, reward {verdict['reward']:g}, {verdict['seconds']:.1f} s")
    for test, outcome in verdict["tests"].items():
        if outcome != "passed":
            print_line(f"  {outcome:8} {test}")
    if arguments.json:
        print_line(json.dumps(verdict))
    return 0 if verdict["resolved"] else 1


async def grade_one(task: SweTask, patch: bytes, arguments: argparse.Namespace) -> dict[str, Any]:
    """The verdict on a patch, from a sandbox server of this process or elsewhere."""
    from skyenv.envs.swe.building import placed
    from skyenv.envs.swe.grading import grade_patch
    from skyenv.remote.client import connect

    async with connect(arguments.sandbox, arguments.token) as provider:
        return await grade_patch(placed(task, arguments.image), patch, provider)


def run_validate(arguments: argparse.Namespace) -> int:
    """Status 0 when every task is admitted. Writes the records of those that are, drops those that no longer are."""
    from skyenv.envs.swe.records import records_path, write_records
    from skyenv.envs.swe.validation import summary

    if arguments.runs < 1 or arguments.concurrency < 1:
        raise ConfigError("--runs and --concurrency must be at least 1")
    tasks, refused = readable_tasks(arguments.tasks, arguments.id)
    results = anyio.run(validate_all, tasks, arguments)
    path = arguments.out or records_path(arguments.tasks)
    records = [result["record"] for result in results if result["ok"]]
    write_records(path, records, gone=[result["task_id"] for result in results if not result["ok"]])
    report = summary(results, refused)
    print_line(f"{report['admitted']} of {report['tasks']} tasks are admitted, their records are in {path}")
    if arguments.json:
        print_line(json.dumps({**report, "records": str(path)}))
    return 0 if report["refused"] == 0 else 1


async def validate_all(tasks: Sequence[SweTask], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Validate tasks concurrently; a task that cannot be validated is a result too, never the end of the others."""
    from skyenv.envs.swe.building import placed
    from skyenv.envs.swe.validation import validate_task
    from skyenv.remote.client import connect

    results: dict[str, dict[str, Any]] = {}
    limiter = anyio.CapacityLimiter(arguments.concurrency)

    async with connect(arguments.sandbox, arguments.token) as provider, anyio.create_task_group() as group:

        async def one(task: SweTask) -> None:
            async with limiter:
                try:
                    result = await validate_task(placed(task, arguments.image), provider, runs=arguments.runs)
                    if result["ok"]:  # a record is of the task, wherever its images were
                        result["record"] = replace(result["record"], digest=task.digest)
                except SkyEnvError as error:
                    result = {"task_id": task.task_id, "ok": False, "problems": [f"{type(error).__name__}: {error}"]}
            results[task.task_id] = result
            verdict = "ok" if result["ok"] else "BAD: " + "; ".join(result["problems"])
            print_line(f"{len(results):3}/{len(tasks)} {task.task_id:40} {verdict}")

        for task in tasks:
            group.start_soon(one, task)
    return [results[task.task_id] for task in tasks]
