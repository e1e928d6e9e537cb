"""The `skyenv` command: serve sandboxes, look at and validate tasks. Wiring only; a user's mistake is one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.errors import ConfigError, SkyEnvError

if TYPE_CHECKING:
    from skyenv.envs.swe.tasks import SweTask


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 fine, 1 a check failed, 2 the input is wrong, 130 interrupted)."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SkyEnvError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="skyenv", description="Sandboxes and tasks for training tool-using models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve(commands)
    add_tasks(commands)
    return parser


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv serve`."""
    serve = commands.add_parser("serve", help="run a sandbox node server until interrupted")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    serve.add_argument("--port", type=int, default=8765, help="port to bind; 0 picks a free one (default 8765)")
    serve.add_argument("--token", help="clients must send this token; required for any host but loopback")
    serve.add_argument("--token-file", type=Path, help="read the token from this file instead")
    serve.add_argument("--backend", choices=("local", "process"), default="local", help="process isolates nothing")
    serve.set_defaults(run=run_serve)


def add_tasks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    showing.add_argument("task_id", metavar="ID")
    validating.add_argument("--id", action="append", default=[], help="only this task (may be repeated)")
    validating.add_argument("--runs", type=int, default=1, help="how often to run each patch (default 1)")
    validating.add_argument("--sandbox", help="URL of a node server (default: sandboxes of this process)")
    validating.add_argument("--token", help="token of that server")
    validating.add_argument("--concurrency", type=int, default=2, help="tasks at a time (default 2)")


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from skyenv.remote.node import ServeOptions, serve

    token = arguments.token
    if arguments.token_file:
        try:
            token = arguments.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--token-file {arguments.token_file}: {error.strerror}") from error
    options = ServeOptions(host=arguments.host, port=arguments.port, token=token, backend=arguments.backend)
    serve(options, on_ready=lambda url: print_line(f"serving sandboxes at {url} (backend {arguments.backend})"))
    return 0


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


def print_line(text: str) -> None:
    """Print for the user at once, so that progress shows in a pipe too."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"skyenv: {text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
