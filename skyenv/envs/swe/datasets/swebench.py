"""SWE-bench in its classic form (also Lite and Verified) and the rows of its release 5, which bring image and script.

The container's repository is `/testbed`, its environment the conda environment `testbed`. What release 5 says in
`eval_script` and `log_parser` wins over what is known of the repository.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from skyenv.envs.swe.datasets.specs import CONDA, SWE_BENCH, Spec, variables
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.runners.ids import NORMALISERS, parser_name
from skyenv.envs.swe.sources import ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SweTask
from skyenv.errors import ConfigError

TIMEOUT = 1800.0
_BETWEEN = re.compile(r"Start Test Output[^\n]*\n(.*?)\n[^\n]*End Test Output", re.DOTALL)
_EXPORT = re.compile(r"^export ([A-Za-z_]\w*)=([\w.,:@%+/-]*)$", re.MULTILINE)
_SHELL = re.compile(r"[;&|<>$`(){}\n]")


def matches(row: Row) -> bool:
    """Whether a row has the columns that all descendants of SWE-bench share."""
    return row.has("instance_id", "problem_statement") and (row.has("base_commit") or row.has("test_patch"))


def parse(row: Row) -> SweTask:
    """Read a row."""
    repo = row.text("repo", default="")
    image = row.text("image", "docker_image", "image_name", default="") or image_name(row, "swebench", "_1776_")
    script = row.text("eval_script", default="")
    spec = from_script(row, script) if script else known_spec(row, repo)
    task = container_task(row, image, spec, {**variables(repo), **dict(_EXPORT.findall(script.split("Start Test")[0]))})
    if row.text("eval_type", default="pass_and_fail") != "fail_only":
        return task
    return dataclasses.replace(task, accept=dict.fromkeys(task.expected, "missing"))


def image_name(row: Row, namespace: str, separator: str) -> str:
    """The name that an image has by convention: lower case, without the underscores that no registry takes."""
    instance = row.text("instance_id").replace("__", separator)
    return f"{namespace}/sweb.eval.x86_64.{instance}:latest".lower()


def known_spec(row: Row, repo: str) -> Spec:
    """How the tests of a repository are run: pytest for one that is not known otherwise."""
    return SWE_BENCH.get(repo, Spec())


def from_script(row: Row, script: str) -> Spec:
    """Read the test command between the markers of an evaluation script. ConfigError when there is none."""
    found = _BETWEEN.search(script)
    lines = [] if found is None else [line for line in found[1].split("\n") if line.strip()]
    lines = [line for line in lines if not re.match(r"\s*(?:set [-+]|:\s)", line)]
    if not lines:
        raise ConfigError(f"{row.at('eval_script')}: has no test command between its markers")
    parser = parser_name(row.text("log_parser", default="pytest"), row.at("log_parser"))
    return command_spec("\n".join(lines), parser)


def command_spec(command: str, parser: str) -> Spec:
    """How to run a test command: through our own plugin when it is one call of pytest, else by its output."""
    if parser in NORMALISERS and is_pytest(command):
        return Spec("pytest", command, parser)
    return Spec("command", command, parser)


def is_pytest(command: str) -> bool:
    """Whether a command is one plain call of pytest, to which options can be added."""
    if _SHELL.search(command.strip().replace("{files}", "")):
        return False
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words.pop(0)
    if not words:
        return False
    return words[0].rpartition("/")[2] in ("pytest", "py.test") or ("-m" in words and "pytest" in words)


def container_task(row: Row, image: str, spec: Spec, env: dict[str, str]) -> SweTask:
    """A task of the shape that SWE-bench's descendants share."""
    return SweTask(
        task_id=row.text("instance_id"),
        problem=row.text("problem_statement"),
        source=ImageSource("/testbed"),
        tests=PatchText(row.patch("test_patch")),
        fail_to_pass=(failing := row.failing("FAIL_TO_PASS")),
        pass_to_pass=tuple(test for test in row.ids("PASS_TO_PASS") if test not in set(failing)),
        runner=spec.runner,
        environment=Environment(env=env, image=image, activate=CONDA),
        reference=PatchText(row.patch("patch")),
        timeout=TIMEOUT,
        repo_path="/testbed",
        base=row.base,
        command=spec.command,
        parser=spec.parser,
    )
