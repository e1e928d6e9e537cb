"""The cluster of the tests, and kubectl for it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TestCluster:
    """The cluster, and what the tests' images are called there."""

    __test__ = False
    prefix: str
    pull_policy: str

    def image(self, name: str) -> str:
        return f"{self.prefix}{name}:v3"

    def options(self, namespace: str, **more: Any) -> dict[str, Any]:
        """Options of a kubernetes backend."""
        return {
            "namespace": namespace, "init_image": self.image("node"), "image": self.image("debian"),
            "pull_policy": self.pull_policy, "start_timeout": 300.0, **more,
        }  # fmt: skip


def kubectl(*arguments: str, text: str | None = None) -> str:
    """What kubectl prints. CalledProcessError, with its complaint, when it fails."""
    answer = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"kubectl {' '.join(arguments)}: {answer.stderr}"
    return answer.stdout


def pods_of(namespace: str, *selectors: str) -> list[dict[str, Any]]:
    chosen = [f"--selector={','.join(selectors)}"] if selectors else []
    listing: dict[str, Any] = json.loads(kubectl("get", "pods", "-n", namespace, "-o", "json", *chosen))
    return list(listing["items"])
