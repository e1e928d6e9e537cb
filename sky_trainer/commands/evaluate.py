"""`sky_trainer eval`: a policy on a task set, with the real tools, sandboxes and grader."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from sky_trainer.assembly import choose_tasks
from sky_trainer.commands.output import make_console, print_json, print_line
from sky_trainer.config import SandboxConfig, from_mapping
from sky_trainer.evaluated import write_predictions
from sky_trainer.evaluation import POLICIES, EvalPlan, Policy, evaluate, kept_samples
from sky_trainer.metering import Metering
from sky_trainer.readings import one_line, stage_table
from sky_trainer.scores import scores
from sky_trainer.sections.metrics import MetricsConfig
from sky_trainer.sections.tasks import TasksConfig
from sky_trainer.settings import with_overrides
from skyenv import formats
from skyenv.errors import ConfigError
from skyenv.types import Trajectory

EPILOG = """\
Keys of `rollout` and `env` can be given as to `train`: --rollout.history strip, --rollout.condenser forget_half,
--rollout.remind_turns 5, --rollout.template_options '{enable_thinking: false}', --env.options.tools openhands.
They win over the options above.
"""
TRAINING_ONLY = ("group_size", "groups_per_step", "segments")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_parser(commands, "eval", "evaluate a policy on a task set")
    parser.add_argument("--predictions", type=Path, help="also write the patches in SWE-bench's format to this file")
    parser.set_defaults(run=run)


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    """A command that rolls a policy out on a task set, with all options that this takes."""
    parser = commands.add_parser(
        name, help=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tasks", default="builtin", help="a set, a file or a folder (default builtin)")
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
    parser.add_argument(
        "--format",
        default="hermes",
        help=f"tool-call format: {', '.join(formats.names())} or package.module:Name (default hermes)",
    )
    parser.add_argument("--prompt", default="codeact", help="prompt preset: codeact or brief (default codeact)")
    parser.add_argument(
        "--describe-tools", choices=("full", "names"), default="full", help="names: for models made by the demo"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling with hf (default 0)")
    parser.add_argument("--max-turns", type=int, default=50, help="turns an episode (default 50)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens a turn (default 1024)")
    parser.add_argument("--max-context", "--context", type=int, default=32768, help="tokens an episode (default 32768)")
    parser.add_argument(
        "--out", type=Path, help="file for the transcripts, one JSON object a line; the same evaluation goes on from it"
    )
    parser.add_argument("--fresh", action="store_true", help="run every sample again, whatever --out holds")
    parser.add_argument(
        "--metrics", type=Path, metavar="DIR", help="keep metrics.jsonl and timeline.jsonl there, see `timeline`"
    )
    parser.add_argument("--tensorboard", action="store_true", help="also write the numbers there for TensorBoard")
    parser.add_argument("--prometheus-port", type=int, metavar="PORT", help="serve the numbers there, on loopback")
    parser.add_argument(
        "--engine-slots", type=int, metavar="N", help="requests that the engine serves at once, if known"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; status 1 when infrastructure spoiled a sample."""
    plan, trajectories = roll_out(arguments)
    if arguments.predictions is not None:
        for file in write_predictions(arguments.predictions, trajectories, plan.policy.model or plan.policy.name):
            print_line(f"predictions: {file}")
    report(scores(trajectories, plan.samples), len(plan.tasks) * plan.samples, arguments.json)
    return 1 if any(trajectory.failure is not None for trajectory in trajectories) else 0


def roll_out(arguments: argparse.Namespace) -> tuple[EvalPlan, list[Trajectory]]:
    """Play the plan of the options, a line for each sample. Raises ConfigError for options that cannot work."""
    for name in ("k", "concurrency", "max_turns", "max_tokens", "max_context"):
        if vars(arguments)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {vars(arguments)[name]}: must be at least 1")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    plan = make_plan(arguments)
    total = len(plan.tasks) * plan.samples
    ended = len(kept_samples(plan))
    if ended:
        print_line(f"{ended:4}/{total} samples are in {plan.out} already")

    metering = make_metering(arguments)

    def on_trajectory(trajectory: Trajectory) -> None:
        nonlocal ended
        ended += 1
        print_line(f"{ended:4}/{total} {trajectory.task_id:40} {describe(trajectory)}")

    async def play() -> tuple[list[Trajectory], dict[str, float]]:
        return await evaluate(plan, on_trajectory, metering), metering.meter.numbers()

    trajectories, numbers = anyio.run(play)
    if numbers:
        tell(numbers)
    return plan, trajectories


def make_metering(arguments: argparse.Namespace) -> Metering:
    """Where the numbers go, by the options. Raises ConfigError."""
    if arguments.tensorboard and arguments.metrics is None:
        raise ConfigError("--tensorboard needs --metrics, the directory to write to")
    config = MetricsConfig(arguments.prometheus_port, engine_slots=arguments.engine_slots)
    return Metering(arguments.metrics, config, rows=True, board=arguments.tensorboard)


def tell(numbers: Mapping[str, float]) -> None:
    """The pipeline's numbers: a table on a terminal, else a line."""
    console = make_console()
    if console.is_terminal:
        console.print(stage_table(numbers))
    else:
        print_line(one_line(numbers))


def report(result: dict[str, Any], total: int, as_json: bool) -> None:
    """Print what the evaluation came to."""
    low, high = result["interval"]
    print_line(
        f"resolved {result['resolved']} of {total}, {result['resolved_rate']:.1%} (95 %: {low:.1%} to {high:.1%})"
    )
    for name in ("statuses", "stop_reasons"):
        print_line(f"{name.replace('_', ' ')}: " + ", ".join(f"{key} {n}" for key, n in result[name].items()))
    passes = {key: value for key, value in result.items() if key.startswith("pass@")}
    if passes:
        print_line(", ".join(f"{key} {value:.1%}" for key, value in passes.items()))
    costs = {"turns": result["turns"], "tokens": result["sampled_tokens"]}
    costs |= {f"seconds {stage}": spread for stage, spread in result["seconds"].items()}
    print_line("mean a sample: " + ", ".join(f"{key} {spread['mean']:.4g}" for key, spread in costs.items()))
    if as_json:
        print_json(result)


def make_plan(arguments: argparse.Namespace) -> EvalPlan:
    """The plan that the options describe. Raises ConfigError."""
    ids = tuple(word for word in arguments.ids.split(",") if word)
    tasks = choose_tasks(TasksConfig(arguments.tasks, ids, arguments.level, arguments.limit))
    config = from_mapping(with_overrides(_given(arguments), _checked(arguments.overrides)), training=False)
    return EvalPlan(
        tasks,
        Policy(arguments.policy, arguments.model, arguments.url, arguments.script),
        arguments.k,
        config.env,
        SandboxConfig(arguments.sandbox, arguments.token),
        config.rollout,
        arguments.seed,
        arguments.out,
        arguments.fresh,
    )


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the options say, as a configuration."""
    rollout = {
        "format": arguments.format,
        "describe_tools": arguments.describe_tools,
        "temperature": arguments.temperature,
        "max_turns": arguments.max_turns,
        "max_tokens_per_turn": arguments.max_tokens,
        "max_context": arguments.max_context,
        "concurrency": arguments.concurrency,
    }
    return {"rollout": rollout, "env": {"options": {"prompt": arguments.prompt}}}


def _checked(words: list[str]) -> list[str]:
    """The words as given; ConfigError when they set something that an evaluation does not have."""
    given = with_overrides({}, words)
    for name in given:
        if name not in ("rollout", "env"):
            raise ConfigError(f"unknown argument '--{name}'; see sky_trainer eval --help")
    rollout = given.get("rollout")
    for name in TRAINING_ONLY:
        if isinstance(rollout, dict) and name in rollout:
            raise ConfigError(f"--rollout.{name} is for training alone; --k says how many samples a task gets")
    return words


def describe(trajectory: Trajectory) -> str:
    """How one sample ended."""
    if trajectory.failure is not None:
        failure = trajectory.failure
        return f"{failure.kind} in {failure.stage}: {' '.join(failure.message.split())[:160]}"
    seconds = sum(trajectory.seconds.get(stage, 0.0) for stage in ("init", "run", "eval"))
    turns = f"{len(trajectory.turns)} turn{'s' if len(trajectory.turns) != 1 else ''}"
    return f"{trajectory.verdict.get('status')}  ({trajectory.stop_reason}, {turns}, {seconds:.1f} s)"
