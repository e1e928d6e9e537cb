"""`sky_trainer eval`: a policy on a task set, with the real tools, sandboxes and grader."""

from __future__ import annotations

import argparse
from pathlib import Path

import anyio

from sky_trainer.assembly import choose_tasks
from sky_trainer.commands.output import print_json, print_line
from sky_trainer.config import EnvConfig, RolloutConfig, SandboxConfig, TasksConfig
from sky_trainer.evaluation import POLICIES, EvalPlan, Policy, evaluate
from skyenv.errors import ConfigError
from skyenv.types import Trajectory


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("eval", help="evaluate a policy on a task set")
    parser.add_argument("--tasks", default="builtin", help="builtin, pypi, a file or a folder (default builtin)")
    parser.add_argument("--ids", default="", help="only these task ids, separated by commas")
    parser.add_argument("--level", type=int, help="only tasks of this level")
    parser.add_argument("--limit", type=int, help="at most so many tasks")
    parser.add_argument("--policy", choices=POLICIES, required=True, help="gold plays the known fix, empty finishes")
    parser.add_argument("--k", type=int, default=1, help="samples a task (default 1)")
    parser.add_argument("--model", default="", help="hf: directory or hub name; openai: name or directory of the model")
    parser.add_argument("--url", default="", help="openai: URL of the server; the key comes from OPENAI_API_KEY")
    parser.add_argument("--script", type=Path, help="scripted: YAML list of turns, or a mapping from task id to lists")
    parser.add_argument("--sandbox", help="URL of a sandbox server (default: sandboxes of this process)")
    parser.add_argument("--token", help="token of that server")
    parser.add_argument("--concurrency", type=int, default=8, help="live sandboxes (default 8)")
    parser.add_argument("--format", default="hermes", help="tool-call format: hermes or codeact (default hermes)")
    parser.add_argument("--prompt", default="codeact", help="prompt preset: codeact or brief (default codeact)")
    parser.add_argument(
        "--describe-tools", choices=("full", "names"), default="full", help="names: for models made by the demo"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default 1.0)")
    parser.add_argument("--max-turns", type=int, default=30, help="turns an episode (default 30)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens a turn (default 1024)")
    parser.add_argument("--max-context", type=int, default=16384, help="tokens an episode (default 16384)")
    parser.add_argument("--out", type=Path, help="file for the transcripts, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; status 1 when infrastructure spoiled a sample."""
    for name in ("k", "concurrency", "max_turns", "max_tokens", "max_context"):
        if vars(arguments)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {vars(arguments)[name]}: must be at least 1")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    plan = make_plan(arguments)
    total = len(plan.tasks) * plan.samples
    ended = 0
    failed = 0

    def on_trajectory(trajectory: Trajectory) -> None:
        nonlocal ended, failed
        ended += 1
        failed += trajectory.failure is not None
        print_line(f"{ended:4}/{total} {trajectory.task_id:40} {describe(trajectory)}")

    result = anyio.run(evaluate, plan, on_trajectory)
    print_line(f"resolved {result['resolved']} of {total}, {result['resolved_rate']:.1%}")
    if arguments.json:
        print_json(result)
    return 1 if failed else 0


def make_plan(arguments: argparse.Namespace) -> EvalPlan:
    """The plan that the options describe. Raises ConfigError."""
    ids = tuple(word for word in arguments.ids.split(",") if word)
    tasks = choose_tasks(TasksConfig(arguments.tasks, ids, arguments.level, arguments.limit))
    rollout = RolloutConfig(
        format=arguments.format,
        describe_tools=arguments.describe_tools,
        temperature=arguments.temperature,
        max_turns=arguments.max_turns,
        max_tokens_per_turn=arguments.max_tokens,
        max_context=arguments.max_context,
        concurrency=arguments.concurrency,
    )
    return EvalPlan(
        tasks,
        Policy(arguments.policy, arguments.model, arguments.url, arguments.script),
        arguments.k,
        EnvConfig(options={"prompt": arguments.prompt}),
        SandboxConfig(arguments.sandbox, arguments.token),
        rollout,
        arguments.out,
    )


def describe(trajectory: Trajectory) -> str:
    """How one sample ended."""
    if trajectory.failure is not None:
        failure = trajectory.failure
        return f"{failure.kind} in {failure.stage}: {' '.join(failure.message.split())[:160]}"
    seconds = sum(trajectory.seconds.get(stage, 0.0) for stage in ("init", "run", "eval"))
    turns = f"{len(trajectory.turns)} turn{'s' if len(trajectory.turns) != 1 else ''}"
    return f"{trajectory.verdict.get('status')}  ({trajectory.stop_reason}, {turns}, {seconds:.1f} s)"
