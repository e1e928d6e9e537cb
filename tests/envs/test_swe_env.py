"""The SWE environment in real sandboxes: what the agent sees, what it cannot see, how its work is graded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyenv
from envs.conftest import Sandboxes
from envs.repair import FIX, GOLD, SOURCE, row, task
from skyenv.core import SandboxProvider
from skyenv.envs.swe.env import SWEEnv
from skyenv.envs.swe.environment import Environments, start_repository
from skyenv.envs.swe.grading import grade_patch
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.validation import validate_task
from skyenv.errors import ConfigError, EnvError, ResetNeeded
from skyenv.testing.env import check_env
from skyenv.types import ToolCall, Trajectory


def bash(command: str) -> ToolCall:
    return ToolCall("execute_bash", {"command": command})


def test_conforms(sandboxes: Sandboxes) -> None:
    async def check(provider: SandboxProvider) -> None:
        await check_env(lambda: SWEEnv([row(), row("pytest", environment={})], provider), action=bash("ls"))

    sandboxes.run(check)


def test_an_episode(sandboxes: Sandboxes) -> None:
    async def play(provider: SandboxProvider) -> None:
        async with skyenv.make("SkyRL/SWE-v0", tasks=[row()], sandbox=provider, max_turns=5) as env:
            observation, info = await env.areset(seed=0)
            assert "add subtracts" in observation
            assert "/testbed" in observation
            assert info == {"task_id": "calc-unittest"}
            assert [message.role for message in env.prompt] == ["system", "user"]
            step = await env.astep(bash("pwd; git status --short; ls"))
            assert step.observation.startswith("/testbed\nREADME.md\n")
            await env.astep(
                {
                    "name": "str_replace_editor",
                    "arguments": {
                        "command": "str_replace",
                        "path": "/testbed/calc.py",
                        "old_str": "a - b",
                        "new_str": "a + b",
                    },
                }
            )
            step = await env.astep(ToolCall("finish", {"message": "done"}))
            assert (step.terminated, step.reward) == (True, 0.0)
            reward, verdict = await env.aevaluate()
            assert (reward, verdict["status"], verdict["resolved"]) == (1.0, "resolved", True)
            assert verdict["patch"].startswith("diff --git a/calc.py b/calc.py\n")
            assert await env.aevaluate() == (reward, verdict)

    sandboxes.run(play)


def test_a_budget_ends_an_episode_and_it_is_graded_all_the_same(sandboxes: Sandboxes) -> None:
    async def play(provider: SandboxProvider) -> None:
        async with SWEEnv([row()], provider, max_turns=1) as env:
            await env.areset()
            step = await env.astep(bash(FIX))
            assert (step.terminated, step.truncated, step.info["stop_reason"]) == (False, True, "max_turns")
            assert (await env.aevaluate())[0] == 1.0
            with pytest.raises(ResetNeeded):
                await env.astep(bash("ls"))
            await env.areset()
            assert (await env.aevaluate())[1]["status"] == "empty_patch"

    sandboxes.run(play)


def test_one_root_commit_and_no_trace_of_the_solution(sandboxes: Sandboxes) -> None:
    hidden = task()

    async def look(provider: SandboxProvider) -> None:
        environments = Environments.of(provider)
        async with environments.open(hidden) as box, environments.open(hidden) as sibling:
            for twin in (box, sibling):
                await start_repository(twin, hidden.repo_path)

            async def shell(command: str) -> str:
                result = await box.exec(command)
                return result.output.strip()

            assert await shell("git rev-list --all --count") == "1"
            assert await shell("git log --format=%P | tr -d '\\n'") == ""
            assert await shell("git tag; git remote; git stash list; git reflog; git fsck --unreachable") == ""
            assert await shell("ls .git/packed-refs .git/logs .git/objects/info/alternates 2>/dev/null") == ""
            assert await shell("git status --porcelain") == ""
            head = await shell("git rev-parse HEAD")
            assert (await sibling.exec("git rev-parse HEAD")).output.strip() == head
            assert set((await shell("git ls-files")).split()) == set(SOURCE)
            places = "/testbed* /tmp /root /home /run /srv /opt /var/tmp /dev/shm"
            for secret in ("test_add_negative", "calc-unittest"):
                search = f"env; set; cat /proc/*/environ /proc/*/cmdline; find {places}; grep -rI {secret[1:]} {places}"
                assert secret not in await shell(f"({search}) 2>/dev/null")

    sandboxes.run(look)


PATCHES = {
    "gold": (GOLD.encode(), "resolved"),
    "with a preamble": (b"From someone\nSubject: fix\n\n" + GOLD.encode(), "resolved"),
    "blank context at the end": (
        b"--- a/README.md\n+++ b/README.md\n@@ -1,3 +1,3 @@\n-A calculator\n+The calculator\n \n \n" + GOLD.encode(),
        "resolved",
    ),
    "crlf file": (
        b"--- a/crlf.txt\n+++ b/crlf.txt\n@@ -1,2 +1,2 @@\n one\r\n-two\r\n+zwei\r\n" + GOLD.encode(),
        "resolved",
    ),
    "test edits": (
        GOLD.encode() + b"--- a/tests/test_old.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-def test_nothing():\n-    pass\n",
        "resolved",
    ),
    "gitlink": (
        GOLD.encode()
        + b"diff --git a/sub b/sub\nnew file mode 160000\nindex 0000000..1111111\n--- /dev/null\n+++ b/sub\n"
        b"@@ -0,0 +1 @@\n+Subproject commit 1111111111111111111111111111111111111111\n",
        "resolved",
    ),
    "empty": (b"", "empty_patch"),
    "blank": (b" \n\n", "empty_patch"),
    "only test edits": (
        b"--- a/tests/helper.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-def check(left, right):\n"
        b"-    assert left == right, (left, right)\n",
        "empty_patch",
    ),
    "not a patch": (b"I fixed it.\n", "patch_apply_failed"),
    "missing file": (GOLD.replace("calc.py", "calx.py").encode(), "patch_apply_failed"),
    "other content": (GOLD.replace("a - b", "a / b").encode(), "patch_apply_failed"),
    "corrupt": (GOLD.encode()[:-20], "patch_apply_failed"),
    "traversal": (b"--- /dev/null\n+++ b/../../etc/x\n@@ -0,0 +1 @@\n+x\n", "patch_rejected"),
    "absolute": (b"--- /dev/null\n+++ b//etc/x\n@@ -0,0 +1 @@\n+x\n", "patch_rejected"),
    "git directory": (b"--- /dev/null\n+++ b/.git/hooks/pre-commit\n@@ -0,0 +1 @@\n+x\n", "patch_rejected"),
    "through a link": (
        b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
        b"\\ No newline at end of file\n"
        b"diff --git a/l/x b/l/x\nnew file mode 100644\n--- /dev/null\n+++ b/l/x\n@@ -0,0 +1 @@\n+x\n",
        "patch_rejected",
    ),
    "too large": (b"x" * (5 << 20), "patch_too_large"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches_from_anywhere(sandboxes: Sandboxes, name: str) -> None:
    patch, status = PATCHES[name]
    verdict = sandboxes.run(partial(grade_patch, task(), patch))
    assert verdict["status"] == status, verdict
    assert verdict["reward"] == float(status == "resolved")
    assert verdict["valid_for_training"]


def test_the_patch_of_a_verdict_grades_alike(sandboxes: Sandboxes) -> None:
    async def twice(provider: SandboxProvider) -> None:
        async with SWEEnv([row()], provider) as env:
            await env.areset()
            await env.astep(
                bash(FIX + "printf '\\000\\377' > blob; printf 'x\\r\\n\\r\\n' >> crlf.txt; printf '\\351' > e")
            )
            _, verdict = await env.aevaluate()
        again = await grade_patch(env_task, verdict["patch"].encode("utf-8", "surrogateescape"), provider)
        assert verdict["status"] == again["status"] == "resolved"
        assert verdict["patch"] == again["patch"]

    env_task = task()
    sandboxes.run(twice)


def test_rewards(sandboxes: Sandboxes) -> None:
    def size(trajectory: Trajectory) -> float:
        return float(len(trajectory.verdict["patch"]))

    async def play(provider: SandboxProvider) -> list[float | None]:
        rewards = []
        for reward in ("shaped", size):
            async with SWEEnv([row()], provider, reward=reward) as env:
                await env.areset()
                await env.astep(bash("sed -i 's/a - b/abs(a) + abs(b)/' calc.py"))
                rewards.append((await env.aevaluate())[0])
        return rewards

    shaped, length = sandboxes.run(play)
    assert shaped == 0.25
    assert length > 100


def test_milestones_are_seen_and_told_by_name(sandboxes: Sandboxes) -> None:
    """Looking, reproducing, a half fix; then the same without having looked first."""
    half = "sed -i 's/a - b/abs(a) + abs(b)/' calc.py"
    scripts = {
        ("cat calc.py", "python3 -c 'import calc; assert calc.add(2, 3) == 5'", half): {
            "outcome": 0.0, "viewed": 0.05, "reproduced": 0.05, "edited": 0.1, "imports": 0.1, "fixed": 0.15,
        },
        ("ls", half): {
            "outcome": 0.0, "viewed": 0.05, "reproduced": 0.0, "edited": 0.0, "imports": 0.0, "fixed": 0.0,
        },
        (FIX,): {"outcome": 1.0, "viewed": 0.0, "reproduced": 0.0, "edited": 0.0, "imports": 0.0, "fixed": 0.0},
    }  # fmt: skip

    async def play(provider: SandboxProvider) -> None:
        for commands, terms in scripts.items():
            async with SWEEnv([row()], provider, reward="milestones") as env:
                await env.areset()
                for command in commands:
                    await env.astep(bash(command))
                reward, verdict = await env.aevaluate()
                assert verdict["reward_terms"] == terms
                assert reward == pytest.approx(sum(terms.values()))

    sandboxes.run(play)


def test_environments_are_prepared_once_and_shared(sandboxes: Sandboxes) -> None:
    setup = ["mkdir -p /opt/made && date +%N > /opt/made/at && export IGNORED=1"]
    tasks = [task(task_id=f"t{n}", environment={"setup": setup, "env": {"GIVEN": "yes"}}) for n in range(3)]

    async def look(provider: SandboxProvider) -> set[str]:
        seen = set()
        environments = Environments.of(provider)
        for each in tasks:
            async with environments.open(each) as box:
                seen.add((await box.exec("cat /opt/made/at; echo $GIVEN $IGNORED")).output)
        return seen

    (seen,) = sandboxes.run(look)
    assert seen.endswith("\nyes\n")


def test_a_setup_that_fails_is_a_clear_error_and_not_tried_again(sandboxes: Sandboxes) -> None:
    broken = row(environment={"setup": ["true", "echo no compiler; exit 3"]})

    async def start(provider: SandboxProvider) -> None:
        for _ in range(2):
            async with SWEEnv([broken], provider) as env:
                with pytest.raises(ConfigError, match=r"environment\.setup.*status 3: no compiler"):
                    await env.areset()

    sandboxes.run(start)


def test_missing_files_are_a_clear_error(sandboxes: Sandboxes, tmp_path: Path) -> None:
    async def start(provider: SandboxProvider) -> None:
        async with SWEEnv([row(source={"directory": str(tmp_path / "absent")})], provider) as env:
            with pytest.raises(ConfigError, match="absent is not a directory"):
                await env.areset()

    sandboxes.run(start)


async def test_wrong_settings() -> None:
    for options, named in (({"prompt": "long"}, "prompt"), ({"reward": "luck"}, "reward"), ({"tasks": "no"}, "tasks")):
        with pytest.raises(ConfigError, match=named):
            SWEEnv(**options)
    with pytest.raises(EnvError, match="needs a sandbox provider"):
        await SWEEnv([row()]).areset()


VALIDATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "sound": ({}, ""),
    "passes already": (
        {"fail_to_pass": ["tests/test_calc.py::Calc::test_mul"], "pass_to_pass": []},
        "passes without a change: tests/test_calc.py::Calc::test_mul",
    ),
    "fails already": (
        {
            "fail_to_pass": ["tests/test_calc.py::Calc::test_add"],
            "pass_to_pass": ["tests/test_calc.py::Calc::test_add_negative"],
        },
        "fails without a change: tests/test_calc.py::Calc::test_add_negative failed",
    ),
    "no such test": ({"fail_to_pass": ["tests/test_calc.py::Calc::test_new"]}, "test_new missing"),
    "reference does not apply": (
        {"reference": {"patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}},
        "patch_apply_failed",
    ),
    "reference edits tests": (
        {"reference": {"patch": GOLD.replace("calc.py", "tests/test_old.py")}},
        "patch_apply_failed",
    ),
    "tests cannot run": ({"fail_to_pass": ["tests/absent.py::A::test_b"]}, "no_test_file:tests/absent.py"),
}


@pytest.mark.parametrize("name", VALIDATIONS)
def test_validation(sandboxes: Sandboxes, name: str) -> None:
    changes, problem = VALIDATIONS[name]
    record = sandboxes.run(lambda provider: validate_task(task(**changes), provider, runs=2 if not changes else 1))
    assert record["ok"] is not bool(problem)
    assert any(problem in text for text in record["problems"]) or not problem
    assert record["task_id"] == "calc-unittest"


def test_a_task_without_reference_cannot_be_validated(sandboxes: Sandboxes) -> None:
    given = row()
    del given["reference"]
    with pytest.raises(ConfigError, match="reference: is missing"):
        sandboxes.run(lambda provider: validate_task(parse_task(given, "row", Path()), provider))
