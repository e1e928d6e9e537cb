"""Rows of public data sets from end to end: image, agent's view, empty patch, reference, admission."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envs.conftest import Sandboxes
from envs.images import Build, image_shelf, install_pytest, make_repository, put, run
from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.env import SWEEnv
from skyenv.envs.swe.environment import Environments, start_repository
from skyenv.envs.swe.grading import grade_patch
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.swe.validation import reference_patch, validate_task
from skyenv.errors import ConfigError
from skyenv.types import ToolCall
from tests.tasks import public_rows as rows

pytestmark = pytest.mark.network

CODE = "def add(a, b):\n    return a - b\n"
FIXED = CODE.replace("a - b", "a + b")
SCRIPT = """\
import importlib.util
spec = importlib.util.find_spec("cases")
print("ok  \\tpkg/other\\t0.01s")
if spec is not None:
    import cases
    for name, test in cases.CASES.items():
        print("=== RUN   " + name)
        print("--- %s: %s (0.00s)" % ("PASS" if test() else "FAIL", name))
    raise SystemExit(not all(test() for test in cases.CASES.values()))
"""
CASES_PATCH = """\
diff --git a/cases.py b/cases.py
new file mode 100644
--- /dev/null
+++ b/cases.py
@@ -0,0 +1,4 @@
+import calc
+CASES = {"TestAdd": lambda: calc.add(2, 3) == 5}
+CASES["TestNew"] = lambda: calc.add(1, 1) == 2
+CASES["TestZero"] = lambda: calc.add(0, 0) == 0
"""
FILES = {"calc.py": CODE, "README.md": "A calculator\n", ".gitignore": "*.so\n"}
FUTURE = {"calc.py": FIXED, "tests/test_calc.py": rows.TEST_CODE}


async def conda_image(box: Sandbox) -> None:
    await make_repository(box, "/testbed", FILES, FUTURE)
    await install_pytest(box, "/opt/miniconda3/envs/testbed")
    activate = 'export PATH="/opt/miniconda3/envs/testbed/bin:$PATH" CONDA_DEFAULT_ENV=testbed\n'
    await put(box, "/opt/miniconda3/bin", {"activate": activate})
    await put(box, "/testbed", {"built.so": "made when the image was built"})


async def smith_image(box: Sandbox) -> None:
    await conda_image(box)
    await put(box, "/testbed", FUTURE)


async def r2e_image(box: Sandbox) -> None:
    await make_repository(box, "/testbed", FILES, FUTURE)
    await install_pytest(box, "/testbed/.venv")
    await put(box, "/r2e_tests", {"test_1.py": rows.TEST_CODE})
    await put(box, "/testbed", {"run_tests.sh": ".venv/bin/python -m pytest -rA r2e_tests\n"})


async def go_image(path: str, box: Sandbox) -> None:
    await make_repository(box, path, {**FILES, "run.py": SCRIPT}, FUTURE)
    if path == "/home/calc":
        await put(
            box, "/home", {"fix.patch": rows.GOLD, "test.patch": CASES_PATCH, "fix-run.sh": "", "test-run.sh": ""}
        )
        await put(box, "/home", {"run.sh": "cd /home/calc && python3 run.py\n"})


async def pro_image(box: Sandbox) -> None:
    await make_repository(box, "/app", FILES, FUTURE)
    await install_pytest(box, "/opt/env")


PRO_SCRIPT = 'export PYTHONPATH=. PATH=/opt/env/bin:$PATH\nIFS=, read -ra files <<< "$1"\npytest -rA "${files[@]}"\n'
PRO_PARSER = """\
import json, sys
words = [line.split() for line in open(sys.argv[1]) if line.startswith(("PASSED", "FAILED"))]
json.dump({"tests": [{"name": word[1], "status": word[0]} for word in words]}, open(sys.argv[3], "w"))
"""
V2_CONFIG = {**rows.REBENCH_V2["install_config"], "test_cmd": ["cd /calc", "python3 run.py"]}
KINDS: dict[str, tuple[dict[str, Any], Build]] = {
    "swe-bench": (rows.CLASSIC, conda_image),
    "swe-bench 5": (rows.SWE_BENCH_5, conda_image),
    "swe-rebench": (rows.REBENCH, conda_image),
    "swe-smith": (rows.SWE_SMITH, smith_image),
    "r2e-gym": (rows.R2E_GYM, r2e_image),
    "swe-rebench-v2": (
        {**rows.REBENCH_V2, "test_patch": CASES_PATCH, "install_config": V2_CONFIG}, partial(go_image, "/calc"),
    ),
    "multi-swe-bench": ({**rows.MULTI_SWE, "test_patch": CASES_PATCH}, partial(go_image, "/home/calc")),
    "swe-bench-pro": ({**rows.PRO, "run_script": PRO_SCRIPT, "parser_script": PRO_PARSER}, pro_image),
}  # fmt: skip


def task_of(kind: str) -> SweTask:
    (task,) = load_tasks([KINDS[kind][0]])
    return task


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_admitted_and_graded(sandboxes: Sandboxes, kind: str) -> None:
    """Empty fails, the reference resolves, a wrong patch does not, what the agent sees holds no trace of the fix."""
    task = task_of(kind)

    async def play(provider: SandboxProvider) -> None:
        async with image_shelf(provider, {str(task.environment.image): KINDS[kind][1]}) as shelf:
            result = await validate_task(task, shelf)
            assert result["ok"], result["problems"]
            admitted = task.admitted(result["record"])
            assert admitted.timeout == 60.0
            gold = await reference_patch(task, shelf)
            verdict = await grade_patch(admitted, gold, shelf)
            assert (verdict["status"], verdict["resolution"]) == ("resolved", "FULL"), verdict
            assert set(verdict["tests"]) == set(task.expected)
            wrong = await grade_patch(admitted, gold.replace(b"+    return a + b", b"+    return b - a"), shelf)
            assert (wrong["status"], wrong["reward"]) == ("unresolved", 0.0), wrong
            broken = await grade_patch(admitted, gold.replace(b"+    return a + b", b"+    return ("), shelf)
            assert (broken["status"], broken["reward"]) == ("unresolved", 0.0), broken
            await look_for_leaks(shelf, admitted)
            await Environments.of(shelf).aclose()

    sandboxes.run(play)


async def look_for_leaks(shelf: SandboxProvider, task: SweTask) -> None:
    async with Environments.of(shelf).open(task) as box:
        await start_repository(box, task.repo_path)
        assert await run(box, "git rev-list --all --count") == "1\n"
        assert await run(box, "git tag; git remote; git stash list; git reflog; git fsck --unreachable") == ""
        assert await run(box, "git status --porcelain") == ""
        assert await run(box, "ls .git/packed-refs .git/objects/info/alternates 2>/dev/null || true") == ""
        places = f"{task.repo_path}* /home /tmp /srv /r2e_tests /run_tests.sh /.skyenv*"
        for secret in ("return a + b", "def test_add", "TestNew", "the fix"):
            search = f"grep -rIl --exclude-dir=.venv '{secret}' {places}"
            assert await run(box, f"{search} 2>/dev/null || true") == "", secret
            assert secret not in await run(box, "env; set | grep -v ^search")


@pytest.mark.oci
def test_a_row_with_a_real_container_image(containers: Sandboxes) -> None:
    """The image is started by the node's own backend; nothing but the row says what is in it."""
    row = {**KINDS["swe-rebench-v2"][0], "image_name": containers.image}
    (task,) = load_tasks([row])

    async def play(provider: SandboxProvider) -> None:
        result = await validate_task(task, provider, runs=2)
        assert result["ok"], result["problems"]
        async with SWEEnv([task.admitted(result["record"])], provider) as env:
            await env.areset()
            step = await env.astep(bash("git log --all --oneline | cat; git tag; cat calc.py"))
            assert "Initial commit" in step.observation
            assert "the fix" not in step.observation
            assert "v2" not in step.observation
            await env.astep(bash("sed -i 's/a - b/a + b/' calc.py"))
            assert (await env.aevaluate())[0] == 1.0

    containers.run(play)


def test_an_episode_in_an_image(sandboxes: Sandboxes) -> None:
    """The environment is active, what was built lies there, and work is graded from a fresh copy."""
    task = task_of("swe-bench")

    async def play(provider: SandboxProvider) -> None:
        async with image_shelf(provider, {str(task.environment.image): conda_image}) as shelf:
            async with SWEEnv([task], shelf) as env:
                await env.areset()
                step = await env.astep(bash("echo $CONDA_DEFAULT_ENV; pwd; which pytest; ls built.so"))
                assert step.observation.startswith(
                    "testbed\n/testbed\n/opt/miniconda3/envs/testbed/bin/pytest\nbuilt.so"
                )
                await env.astep(bash("sed -i 's/a - b/a + b/' calc.py; rm -rf /opt/miniconda3; git commit -qam fix"))
                reward, verdict = await env.aevaluate()
                assert (reward, verdict["status"]) == (1.0, "resolved"), verdict
                assert verdict["patch"].count("+++") == 1
            await Environments.of(shelf).aclose()

    sandboxes.run(play)


def bash(command: str) -> ToolCall:
    return ToolCall("execute_bash", {"command": command})


def test_an_image_without_the_repository_is_a_clear_error(sandboxes: Sandboxes) -> None:
    async def nothing(box: Sandbox) -> None:
        await run(box, "true")

    async def play(provider: SandboxProvider) -> None:
        async with image_shelf(provider, {str(task_of("swe-bench").environment.image): nothing}) as shelf:
            with pytest.raises(ConfigError, match="acme__calc-7: repo_path: the image has no /testbed"):
                await validate_task(task_of("swe-bench"), shelf)

    sandboxes.run(play)


def greet_image(workdir: str, box: Sandbox) -> Any:
    return run(box, f"mkdir -p {workdir} /logs/verifier && echo 1 > /logs/verifier/reward.txt")


MACHINES: Mapping[str, tuple[str, str]] = {
    "nothing": ("true", "unresolved"),
    "done": ("echo hello > greeting.txt", "resolved"),
    "reward written ahead": ("echo 1 > /logs/verifier/reward.txt; chmod 400 /logs/*", "unresolved"),
    "tests put there ahead": ("mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh", "unresolved"),
    "reward written again and again": (
        "(while sleep 0.01; do echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &", "unresolved",
    ),
    "no place for a reward": ("rm -rf /logs; touch /logs", "unresolved"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_harbor(sandboxes: Sandboxes, tmp_path: Path, name: str) -> None:
    """The whole machine counts, and nothing that was laid out for the verifier beforehand."""
    script, status = MACHINES[name]
    (task,) = load_tasks(rows.write_harbor(tmp_path / "greet"))

    async def play(provider: SandboxProvider) -> None:
        async with image_shelf(provider, {"acme/greet:1": partial(greet_image, "/srv/greet")}) as shelf:
            async with SWEEnv([task], shelf) as env:
                observation, _ = await env.areset()
                assert "Write hello" in observation
                await env.astep(bash(script))
                reward, verdict = await env.aevaluate()
                assert (verdict["status"], reward) == (status, float(status == "resolved")), verdict
            await Environments.of(shelf).aclose()

    sandboxes.run(play)


@pytest.mark.parametrize("kind", ["harbor", "terminal-bench"])
def test_machines_are_admitted_by_their_solution(sandboxes: Sandboxes, tmp_path: Path, kind: str) -> None:
    write = rows.write_harbor if kind == "harbor" else rows.write_terminal_bench
    (task,) = load_tasks(write(tmp_path / "greet"))

    async def image(box: Sandbox) -> None:
        await greet_image(task.repo_path, box)
        await install_pytest(box, "/opt/env")

    async def play(provider: SandboxProvider) -> dict[str, Any]:
        async with image_shelf(provider, {str(task.environment.image): image}) as shelf:
            result = await validate_task(task, shelf, runs=2)
            await Environments.of(shelf).aclose()
            return result

    result = sandboxes.run(play)
    assert result["ok"], result["problems"]
    assert result["runs"] == 2


REWARDS = {
    "0.5": 0.5,
    '{"reward": 1}': 1.0,
    '{"a": 1, "b": 0}': 0.5,
    "nan": None,
    "one": None,
    "": None,
    "[true]": None,
}


@pytest.mark.parametrize("text", REWARDS)
def test_reward_files(sandboxes: Sandboxes, tmp_path: Path, text: str) -> None:
    """Only finite numbers are rewards; without one the task is at fault, for a fresh machine has none either."""
    name = "reward.json" if text[:1] in "{[" and text else "reward.txt"
    test = f"printf %s '{text}' > /logs/verifier/{name}\n"
    (task,) = load_tasks(rows.write_harbor(tmp_path / "greet", **{"tests__test.sh": test}))

    async def play(provider: SandboxProvider) -> dict[str, Any]:
        async with image_shelf(provider, {"acme/greet:1": partial(greet_image, "/srv/greet")}) as shelf:
            async with SWEEnv([task], shelf) as env:
                await env.areset()
                verdict = (await env.aevaluate())[1]
            await Environments.of(shelf).aclose()
            return verdict

    verdict = sandboxes.run(play)
    if REWARDS[text] is None:
        assert (verdict["status"], verdict["valid_for_training"]) == ("instance_error", False)
    else:
        assert verdict["reward"] == REWARDS[text]
