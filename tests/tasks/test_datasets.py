"""Every public data set in, from every place that holds it; every wrong row named with its reason."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from public_rows import (
    CLASSIC,
    EVAL_SCRIPT,
    FAILING,
    GOLD,
    MULTI_SWE,
    PASSING,
    PRO,
    R2E_GYM,
    REBENCH,
    REBENCH_V2,
    ROWS,
    SWE_BENCH_5,
    SWE_GYM,
    SWE_SMITH,
    TEST_CODE,
    TEST_PATCH,
    without,
    write_harbor,
    write_swebench_repository,
    write_terminal_bench,
)

from skyenv.envs.swe.loading import iter_tasks, load_tasks
from skyenv.envs.swe.sources import FilesSource, ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SolutionScript, SourceFiles, SweTask
from skyenv.errors import ConfigError

CONDA = "source /opt/miniconda3/bin/activate testbed"


def one(row: dict[str, Any], dataset: str = "") -> SweTask:
    (task,) = load_tasks([row])
    return task


def test_all_sets_are_told_apart_and_complete() -> None:
    """Rows of ten data sets in one list."""
    tasks = load_tasks([{**row, "instance_id": row.get("instance_id", name) + name} for name, row in ROWS.items()])
    assert len(tasks) == len(ROWS)
    for task in tasks:
        assert task.fail_to_pass
        assert task.reference is not None
        assert task.source == ImageSource(task.repo_path)
        assert task.environment.image
        assert task.timeout >= 900
        assert "FAIL_TO_PASS" not in task.problem


def test_swe_bench() -> None:
    task = one(CLASSIC)
    assert task.task_id == "acme__calc-7"
    assert task.problem == "add(2, 3) gives -1\r\nwith Windows line ends"
    assert (task.fail_to_pass, task.pass_to_pass) == ((FAILING,), (PASSING,))
    assert task.environment == Environment(image="swebench/sweb.eval.x86_64.acme_1776_calc-7:latest", activate=CONDA)
    assert (task.runner, task.command, task.parser) == ("pytest", "", "pytest")
    assert (task.tests, task.reference) == (PatchText(TEST_PATCH.encode()), PatchText(GOLD.encode()))
    assert (task.timeout, task.repo_path) == (1800.0, "/testbed")


REPOSITORIES = {
    "django/django": ("django", "django"),
    "sympy/sympy": ("sympy", "sympy"),
    "psf/requests": ("pytest", "pytest_options"),
    "astropy/astropy": ("pytest", "pytest_v2"),
    "matplotlib/matplotlib": ("pytest", "matplotlib"),
    "nobody/knows": ("pytest", "pytest"),
}


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_swe_bench_knows_how_repositories_run_their_tests(repo: str) -> None:
    task = one({**CLASSIC, "repo": repo})
    assert (task.runner, task.parser) == REPOSITORIES[repo]
    assert ("LC_ALL" in task.environment.env) == (repo == "django/django")


def test_swe_bench_5_says_what_runs() -> None:
    task = one(SWE_BENCH_5)
    assert task.environment.image == SWE_BENCH_5["image"]
    assert task.environment.env == {"LANG": "C.UTF-8"}
    assert (task.runner, task.command, task.parser) == ("pytest", "pytest -rA tests/test_calc.py", "pytest")
    assert task.accept == {}
    script = EVAL_SCRIPT.replace("pytest -rA tests/test_calc.py", "npm ci\nnpx jest --verbose")
    other = one({**SWE_BENCH_5, "eval_script": script, "log_parser": "jest", "eval_type": "fail_only"})
    assert (other.runner, other.command, other.parser) == ("command", "npm ci\nnpx jest --verbose", "jest")
    assert other.accept == {FAILING: "missing", PASSING: "missing"}


def test_swe_gym() -> None:
    task = one(SWE_GYM)
    assert task.environment.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7:latest"
    assert task.command == "pytest -n0 {files}"


def test_swe_rebench_and_its_forerunner() -> None:
    task = one(REBENCH)
    assert task.environment.image == REBENCH["docker_image"]
    assert (task.command, task.parser) == ("pytest --no-header -rA --tb=line {files}", "pytest")
    plain = one(ROWS["swe-bench-extra"])
    assert (plain.command, plain.parser, plain.runner) == ("", "pytest", "pytest")
    assert one({**REBENCH, "install_config": json.dumps(REBENCH["install_config"])}).command == task.command


def test_swe_rebench_v2() -> None:
    task = one(REBENCH_V2)
    assert (task.repo_path, task.environment.image) == ("/calc", REBENCH_V2["image_name"])
    assert (task.runner, task.command, task.parser) == ("command", "cd pkg\ngo test -v ./...", "go")
    config = {**REBENCH_V2["install_config"], "test_cmd": "pytest -rA", "log_parser": "parse_log_pytest_v2"}
    task = one({**REBENCH_V2, "install_config": config})
    assert (task.runner, task.command, task.parser) == ("pytest", "pytest -rA", "pytest_v2")


def test_swe_smith_puts_the_bug_in_and_hides_the_failing_tests() -> None:
    task = one(SWE_SMITH)
    bug = SWE_SMITH["patch"].encode()
    assert (task.source_patch, task.reference) == (PatchText(bug), PatchText(bug, reverse=True))
    assert task.hidden == ("/testbed/tests/test_calc.py",)
    assert task.tests == SourceFiles(ImageSource("/testbed"), ("tests/test_calc.py",))


def test_r2e_gym_reads_failing_tests_from_the_run_before() -> None:
    task = one(R2E_GYM)
    assert task.task_id == R2E_GYM["docker_image"]
    assert (task.fail_to_pass, task.pass_to_pass) == (("test_add",), ("test_zero", "test_broken"))
    assert task.accept == {"test_broken": "failed"}
    assert isinstance(task.tests, SourceFiles)
    assert task.test_files == ("r2e_tests/test_1.py",)
    assert task.reference == SourceFiles(FilesSource({"calc.py": b"def add(a, b):\n    return a + b\n"}), ("calc.py",))
    assert {"/r2e_tests", "/testbed/run_tests.sh", "/root/run_tests.sh"} <= set(task.hidden)


def test_multi_swe_bench() -> None:
    task = one(MULTI_SWE)
    assert (task.task_id, task.repo_path) == ("Acme__calc-7", "/home/calc")
    assert task.environment.image == "mswebench/acme_m_calc:pr-7"
    assert (task.fail_to_pass, task.pass_to_pass) == (("TestAdd", "TestNew"), ("TestZero",))
    assert task.problem == "add subtracts\n\nsee title"
    assert {"/home/fix.patch", "/home/test.patch"} <= set(task.hidden)
    assert one({**MULTI_SWE, "log_parser": "go"}).parser == "go"
    assert one({**MULTI_SWE, "resolved_issues": []}).problem == "Add adds\n\nFixes #6"


def test_swe_bench_pro(tmp_path: Path) -> None:
    task = one(PRO)
    assert (task.repo_path, task.runner, task.command) == ("/app", "script", "tests/test_calc.py")
    assert task.environment.image == f"jefzda/sweap-images:{PRO['dockerhub_tag']}"
    assert "Requirements:\n- add must add" in task.problem
    assert task.script["run_script.sh"] == PRO["run_script"].encode()
    scripts = tmp_path / "run_scripts" / PRO["instance_id"]
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text("run\n")
    (scripts / "parser.py").write_text("parse\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(without(PRO, "run_script", "parser_script")))
    (task,) = load_tasks(tmp_path / "rows.jsonl")
    assert task.script == {"run_script.sh": b"run\n", "parser.py": b"parse\n"}


def test_harbor(tmp_path: Path) -> None:
    write_harbor(tmp_path / "set" / "greet")
    (task,) = load_tasks(tmp_path / "set")
    assert (task.task_id, task.problem) == ("greet", "Write hello into greeting.txt\n")
    assert (task.runner, task.repo_path, task.timeout) == ("harbor", "/srv/greet", 90.0)
    assert task.environment == Environment(image="acme/greet:1", limits={"memory_bytes": 512 << 20, "cpus": 1.0})
    assert task.reference == SolutionScript("solution")
    assert (task.agent_timeout, task.verifier, task.files) == (600.0, None, "")
    assert task.whole_machine
    assert load_tasks(tmp_path / "set" / "greet")[0].task_id == "greet"
    write_harbor(tmp_path / "built" / "Greet", **{"task.toml": "[environment]\n"})
    (made,) = load_tasks(tmp_path / "built")
    assert re.fullmatch("hb__greet:[0-9a-f]{16}", made.environment.image or "")
    assert made.environment.context == "environment"


def test_harbor_with_a_verifier_of_its_own(tmp_path: Path) -> None:
    toml = """artifacts = ["/srv/greet/out/", {source = "/srv/result.txt"}]
[environment]
memory = "2G"
allow_internet = true
[environment.env]
MODE = "${MODE:-quiet}"
[verifier]
environment_mode = "separate"
[verifier.env]
NAME = "it's"
"""
    files = {"task.toml": toml, "tests__Dockerfile": "FROM debian\nCOPY . /tests/\n"}
    (task,) = load_tasks(write_harbor(tmp_path / "Greet", **files))
    assert task.artifacts == ("/srv/greet/out", "/srv/result.txt")
    assert (task.environment.image or "").startswith("hb__greet:")
    assert task.environment == Environment(
        image=task.environment.image,
        env={"MODE": "quiet"},
        limits={"memory_bytes": 2 << 30},
        network=True,
        context="environment",
    )
    assert task.environment.spec == {"memory_bytes": 2 << 30, "network": "host"}
    assert task.verifier is not None
    assert (task.verifier.image or "").startswith("hb__greet__verifier:")
    assert task.verifier == dataclasses.replace(task.environment, image=task.verifier.image, context="tests")
    assert task.command == """export NAME='it'"'"'s' && chmod +x /tests/test.sh && /tests/test.sh"""
    (task,) = load_tasks(write_harbor(tmp_path / "greet", **{**files, "tests__Dockerfile": None}))
    assert task.verifier == task.environment
    own = toml + '[verifier.environment]\ndocker_image = "acme/judge"\nmemory_mb = 512\n'
    (task,) = load_tasks(write_harbor(tmp_path / "greet", **{"task.toml": own}))
    assert task.verifier == Environment(image="acme/judge", limits={"memory_bytes": 512 << 20}, network=True)


def test_harbor_without_an_image(tmp_path: Path) -> None:
    files = {"task.toml": "", "environment__Dockerfile": None, "environment__data.csv": "1\n"}
    (task,) = load_tasks(write_harbor(tmp_path / "greet", **files))
    assert (task.environment.image, task.repo_path, task.files) == (None, "/app", "environment")
    assert (task.timeout, task.agent_timeout) == (600.0, None)


def test_terminal_bench(tmp_path: Path) -> None:
    write_terminal_bench(tmp_path / "set" / "greet")
    (task,) = load_tasks(tmp_path / "set")
    assert (task.task_id, task.runner, task.parser) == ("greet", "harbor", "pytest")
    assert (task.timeout, task.repo_path) == (60.0, "/app")
    assert re.fullmatch("tb__greet:[0-9a-f]{16}", task.environment.image or "")
    assert task.environment.context == "."
    assert "it'\\''s run" in task.command
    assert task.reference == SolutionScript(".", "solution.sh", place="/oracle")
    assert task.agent_timeout == 360.0


def test_task_repository_of_swe_bench_5(tmp_path: Path) -> None:
    write_swebench_repository(tmp_path)
    (task,) = load_tasks(tmp_path)
    assert (task.task_id, task.fail_to_pass) == ("acme__calc-7", (FAILING,))
    assert task.problem == "add subtracts\n"
    assert (task.tests, task.reference) == (PatchText(TEST_PATCH.encode()), PatchText(GOLD.encode()))
    assert task.command == "pytest -rA tests/test_calc.py"


def _jsonl(rows: list[dict[str, Any]], path: Path) -> Path:
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path / "rows.jsonl"


def _json(rows: list[dict[str, Any]], path: Path) -> Path:
    (path / "rows.json").write_text(json.dumps(rows))
    return path / "rows.json"


def _parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    import datasets

    writable = [{name: value for name, value in row.items() if value != {}} for row in rows]  # no empty structs there
    datasets.Dataset.from_list(writable).to_parquet(path / "rows.parquet")
    return path / "rows.parquet"


def _folder(rows: list[dict[str, Any]], path: Path) -> Path:
    (path / "set" / "data").mkdir(parents=True)
    _parquet(rows, path / "set" / "data")
    return path / "set"


PLACES: dict[str, Callable[[list[dict[str, Any]], Path], Path]] = {
    "jsonl": _jsonl, "json": _json, "parquet": _parquet, "folder": _folder,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ROWS)
def test_every_set_from_every_place(tmp_path: Path, name: str, place: str) -> None:
    """What is read is the same from everywhere; line ends inside of values are kept."""
    path = PLACES[place]([ROWS[name]], tmp_path)
    (task,) = load_tasks(path)
    assert task.digest == one(ROWS[name]).digest
    assert task.problem == one(ROWS[name]).problem


def test_data_sets_of_the_hub_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a local folder for a hub name, so the same path is walked as online."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "acme" / "calc"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{**CLASSIC, "instance_id": f"acme__calc-{split}"}]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [task.task_id for task in load_tasks(f"hf:{folder}@test")] == ["acme__calc-test"]
    with pytest.raises(ConfigError, match="has the splits train, test; choose one with"):
        load_tasks(f"hf:{folder}")
    with pytest.raises(ConfigError, match="no such data set or split"):
        load_tasks(f"hf:{folder}@absent")


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A broken row is an error when it is reached, not before."""
    path = _jsonl([CLASSIC, {**CLASSIC, "FAIL_TO_PASS": "[]"}], tmp_path)
    tasks = iter_tasks(path)
    assert next(tasks).task_id == "acme__calc-7"
    with pytest.raises(ConfigError, match="row 2"):
        next(tasks)


def test_refused_rows_can_be_left_out(tmp_path: Path) -> None:
    path = _jsonl([{**CLASSIC, "FAIL_TO_PASS": "[]"}, CLASSIC, CLASSIC], tmp_path)
    refused: list[str] = []
    tasks = load_tasks(path, refused=lambda error: refused.append(str(error)))
    assert [task.task_id for task in tasks] == ["acme__calc-7"]
    assert "row 1 (acme__calc-7): FAIL_TO_PASS: names no failing test" in refused[0]
    assert "occurs twice" in refused[1]


def test_a_data_set_can_be_named(tmp_path: Path) -> None:
    path = _jsonl([CLASSIC], tmp_path)
    (task,) = load_tasks(f"swe-gym:{path}")
    assert task.environment.image == "xingyaoww/sweb.eval.x86_64.acme_s_calc-7:latest"
    with pytest.raises(ConfigError, match="unknown data set 'swe-gim'; did you mean 'swe-gym'"):
        load_tasks(f"swe-gim:{path}")


@pytest.mark.parametrize("text", [json.dumps([FAILING]), repr([FAILING]), repr((FAILING,)), [FAILING]])
def test_ids_as_lists_json_and_python(text: object) -> None:
    assert one({**CLASSIC, "FAIL_TO_PASS": text}).fail_to_pass == (FAILING,)
    assert one({**without(CLASSIC, "FAIL_TO_PASS"), "fail_to_pass": text}).fail_to_pass == (FAILING,)


IDS = {"swe-bench-pro": "fail_to_pass"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name}: no failing tests": ({**row, field: "[]"}, f"{field}: names no failing test")
        for name, row in ROWS.items()
        for field in (IDS.get(name, "FAIL_TO_PASS"),)
        if field in row
    },
    **{
        f"{name}: ids are no list": ({**row, field: "tests/a.py"}, f"{field}: 'tests/a.py' is not a list")
        for name, row in ROWS.items()
        for field in (IDS.get(name, "FAIL_TO_PASS"),)
        if field in row
    },
    **{
        f"{name}: no problem": (without(row, "problem_statement"), "problem_statement: is missing|unknown field")
        for name, row in ROWS.items()
        if "problem_statement" in row
    },
    **{
        f"{name}: no patch": ({**row, "patch": None}, "patch: is missing")
        for name, row in ROWS.items()
        if "patch" in row
    },
    **{
        f"{name}: no tests": ({**row, "test_patch": ""}, "test_patch: is missing")
        for name, row in ROWS.items()
        if "test_patch" in row
    },
    "ids are numbers": ({**CLASSIC, "FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: must be a list of texts"),
    "ids are code": ({**CLASSIC, "FAIL_TO_PASS": "__import__('os').getcwd()"}, "FAIL_TO_PASS: .* is not a list"),
    "script without command": ({**SWE_BENCH_5, "eval_script": "pytest"}, "eval_script: has no test command"),
    "unknown parser": ({**SWE_BENCH_5, "log_parser": "abacus"}, "log_parser: no parser 'abacus'"),
    "rebench: config is text": ({**REBENCH, "install_config": "{"}, "install_config: not valid JSON"),
    "rebench: config is a list": ({**REBENCH, "install_config": [1]}, "install_config: must be a mapping"),
    "rebench v2: no command": (
        {**REBENCH_V2, "install_config": without(REBENCH_V2["install_config"], "test_cmd")},
        r"install_config\.test_cmd: is missing",
    ),
    "rebench v2: unknown parser": (
        {**REBENCH_V2, "install_config": {**REBENCH_V2["install_config"], "log_parser": "parse_log_abacus"}},
        r"install_config\.log_parser: no parser 'parse_log_abacus'",
    ),
    "smith: ids without files": ({**SWE_SMITH, "FAIL_TO_PASS": ["test_add"]}, "'test_add' names no file"),
    "r2e: no runs": (without(R2E_GYM, "execution_result_content"), "execution_result_content: is missing"),
    "r2e: unknown outcome": ({**R2E_GYM, "expected_output_json": '{"a": "GOOD"}'}, "unknown outcome 'GOOD'"),
    "r2e: nothing fails": ({**R2E_GYM, "expected_output_json": '{"test_zero": "PASSED"}'}, "names no failing test"),
    "r2e: no test files": (
        {**R2E_GYM, "execution_result_content": json.dumps({"test_file_names": ["a.py"], "test_file_codes": []})},
        "test_file_codes: must be a list of texts",
    ),
    "multi: nothing fixed": (
        {**without(MULTI_SWE, "f2p_tests", "n2p_tests"), "fixed_tests": {}},
        "fixed_tests: names no failing test",
    ),
    "multi: tests are a list": ({**MULTI_SWE, "f2p_tests": ["TestAdd"]}, "f2p_tests: must map test names"),
    "multi: number": ({**MULTI_SWE, "number": "seven"}, "number: must be a number"),
    "multi: issues": ({**MULTI_SWE, "resolved_issues": ["add subtracts"]}, "resolved_issues: must be a list of issues"),
    "multi: no fix": ({**MULTI_SWE, "fix_patch": ""}, "fix_patch: is missing"),
    "pro: no scripts": (without(PRO, "run_script"), "run_script: is missing, and so is .*run_script.sh"),
    "pro: no files": ({**PRO, "selected_test_files_to_run": "[]"}, "selected_test_files_to_run: names no test file"),
    "pro: no image": (without(PRO, "dockerhub_tag"), "dockerhub_tag: is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_names_file_row_and_reason(tmp_path: Path, name: str) -> None:
    row, message = WRONG[name]
    path = _jsonl([row], tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tasks(path)
    assert f"{path}: row 1" in str(caught.value)


FOLDERS: dict[str, tuple[Callable[..., Path], dict[str, str | None], str]] = {
    "harbor: no instruction": (write_harbor, {"instruction.md": None}, r"instruction\.md: is missing"),
    "harbor: no verifier": (write_harbor, {"tests__test.sh": None}, r"tests/test\.sh: is missing"),
    "harbor: not TOML": (write_harbor, {"task.toml": "= 1"}, "not valid TOML"),
    **{
        f"harbor: {message}": (write_harbor, {"task.toml": toml}, message)
        for message, toml in {
            r"environment\.network_mode: 'allowlist'": '[environment]\nnetwork_mode = "allowlist"\n',
            r"verifier\.network_mode": '[verifier]\nnetwork_mode = "public"\n',
            r"steps: several": '[[steps]]\nname = "one"\n',
            r"environment\.os: ": '[environment]\nos = "windows"\n',
            r"environment\.gpus: ": "[environment]\ngpus = 1\n",
            r"environment\.mcp_servers: ": '[[environment.mcp_servers]]\nname = "x"\n',
            r"environment\.healthcheck: ": '[environment.healthcheck]\ncommand = "true"\n',
            r"environment\.env: \$\{HOME\}": '[environment.env]\nWHERE = "${HOME}"\n',
            r"environment\.docker_image: must be a text": "[environment]\ndocker_image = 3\n",
            r"agent\.timeout_sec: must be a number": "[agent]\ntimeout_sec = 0\n",
            r"agent\.user: ": '[agent]\nuser = "dev"\n',
            r"verifier\.collect: ": '[[verifier.collect]]\ncommand = "true"\n',
            r"verifier\.environment_mode: ": '[verifier]\nenvironment_mode = "shared"\nenvironment = {cpus = 1}\n',
            r"artifacts: must be a list": 'artifacts = "/app"\n',
            r"artifacts\[1\]\.source: ": 'artifacts = ["/app", "out"]\n',
            r"artifacts\[0\]\.exclude: ": 'artifacts = [{source = "/app", exclude = ["*.o"]}]\n',
            r"artifacts\[0\]: paths: unknown field": 'artifacts = [{paths = "/app"}]\n',
            r"solution: must be a table": "solution = 1\n",
            r"verifier\.env: must be a table": "[verifier]\nenv = 1\n",
        }.items()
    },
    "harbor: services": (write_harbor, {"environment__docker-compose.yaml": "services:\n"}, r"docker-compose\.yaml: "),
    "harbor: timeout": (write_harbor, {"task.toml": "[verifier]\ntimeout_sec = 'long'\n"}, r"verifier\.timeout_sec"),
    "harbor: memory": (write_harbor, {"task.toml": "[environment]\nmemory_mb = 1\n"}, r"environment\.memory_mb"),
    "terminal-bench: no tests": (write_terminal_bench, {"tests__test_outputs.py": None}, "tests: is missing"),
    "terminal-bench: no runner": (write_terminal_bench, {"run-tests.sh": None}, r"run-tests\.sh: is missing"),
    "terminal-bench: parser": (
        write_terminal_bench, {"task.yaml": "instruction: x\nparser_name: abacus\n"}, "parser_name: no parser 'abacus'",
    ),
    "task repository: no tests": (
        write_swebench_repository, {"tasks__acme__calc-7__tests.json": "{}"}, "FAIL_TO_PASS: names no failing test",
    ),
    "task repository: not JSON": (
        write_swebench_repository, {"tasks__acme__calc-7__tests.json": "{"}, r"tests\.json: not valid JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wrong_folder_names_file_and_reason(tmp_path: Path, name: str) -> None:
    write, files, message = FOLDERS[name]
    write(tmp_path / "set" / ("" if write is write_swebench_repository else "task"), **files)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tasks(tmp_path / "set")
    assert str(tmp_path) in str(caught.value)


def test_columns_that_other_rows_filled_are_no_tests() -> None:
    """A table gives every row the keys of all rows, with nothing in them."""
    task = one({**MULTI_SWE, "p2p_tests": {**MULTI_SWE["p2p_tests"], "TestOther": None}})
    assert task.pass_to_pass == ("TestZero",)


def test_the_tests_of_r2e_are_whole() -> None:
    task = one(R2E_GYM)
    assert isinstance(task.tests, SourceFiles)
    assert isinstance(task.tests.source, FilesSource)
    assert task.tests.source.files["r2e_tests/test_1.py"].startswith(TEST_CODE.encode())
