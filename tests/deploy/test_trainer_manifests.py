"""Manifests of training runs: current schemas agree, parts that belong together name each other, commands exist."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sky_trainer.cli import build_parser

TRAINER = Path(__file__).parents[2] / "deploy" / "trainer"
PLAIN = ("job.yaml", "ranks.yaml", "ray.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((TRAINER / name).read_text()))


def pod_specs(name: str) -> list[dict[str, Any]]:
    """The pods that the documents of a file make."""
    found = []
    for document in documents(name):
        spec = document["spec"]
        if document["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found += [group["template"]["spec"] for group in groups]
        elif "template" in spec:
            found.append(spec["template"]["spec"])
    return found


def validated(path: Path) -> str:
    program = Path(sys.executable).parent / "kubernetes-validate"
    done = subprocess.run([program, "--strict", path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", PLAIN)
def test_current_schemas_agree(name: str) -> None:
    assert validated(TRAINER / name) == ""


def test_the_pods_of_the_operator_s_resource_are_pods(tmp_path: Path) -> None:
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{n}"}, "spec": spec}
        for n, spec in enumerate(pod_specs("kuberay.yaml"))
    ]
    assert len(pods) == 3
    path = tmp_path / "pods.yaml"
    path.write_text(yaml.safe_dump_all(pods))
    assert validated(path) == ""
    pods[0]["spec"]["containers"][0]["imagee"] = "x"
    path.write_text(yaml.safe_dump_all(pods))
    assert "imagee" in validated(path)


@pytest.mark.parametrize("name", [*PLAIN, "kuberay.yaml"])
def test_pods_have_no_privilege_and_mount_what_they_declare(name: str) -> None:
    specs = pod_specs(name)
    assert specs
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


def test_services_select_pods_of_their_file() -> None:
    for name in PLAIN:
        found = documents(name)
        labels = [d["spec"]["template"]["metadata"]["labels"] for d in found if "template" in d["spec"]]
        jobs = [{"job-name": d["metadata"]["name"]} for d in found if d["kind"] == "Job"]
        for document in found:
            if document["kind"] == "Service":
                wanted = document["spec"]["selector"].items()
                assert any(wanted <= given.items() for given in [*labels, *jobs])


def words_after(words: list[str], program: str) -> list[list[str]]:
    return [words[place + 1 :] for place, word in enumerate(words) if word == program]


@pytest.mark.parametrize("name", [*PLAIN, "kuberay.yaml"])
def test_commands_are_those_that_exist(name: str) -> None:
    words: list[str] = []
    for spec in pod_specs(name):
        for container in spec["containers"]:
            given = [*container.get("command", []), *container.get("args", [])]
            words += shlex.split(" ".join(given)) if given[:1] == ["bash"] else given
    for document in documents(name):
        words += shlex.split(document["spec"].get("entrypoint", ""))
    calls = words_after(words, "sky_trainer") + words_after(words, "sky_trainer.cli")
    assert len(calls) == 1
    arguments, rest = build_parser().parse_known_args(calls[0])
    assert str(arguments.config) == "/etc/run/config.yaml"
    assert next(word for word in rest if word.startswith("--")) == "--out"
