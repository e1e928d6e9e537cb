"""Pods as data: what a sandbox's pod looks like, how far one is, and why one ended. Nothing here talks to a cluster.

Pods travel as the plain objects of the API's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from skyenv.errors import ConfigError, did_you_mean
from skyenv.remote import portable
from skyenv.remote.protocol import Spec, State

Pod = dict[str, Any]

MANAGED, NODE, SANDBOX = "app.kubernetes.io/managed-by", "skyenv.dev/node", "skyenv.dev/sandbox"
RECORD, KEY, PATIENCE = "skyenv.dev/record", "skyenv.dev/key", "skyenv.dev/patience"
CONTAINER = "sandbox"
RUN_DIRECTORY = "/run/skyenv"
SHELLS = {"bash": ["/bin/bash", "/usr/bin/bash"], "sh": ["/bin/sh"]}
CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
]
NEVER = ("ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
PULL_TROUBLE = ("ErrImagePull", "ImagePullBackOff")
NO_IMAGE = ("not found", "manifest unknown", "denied", "unauthorized", "does not exist")


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """How the backend uses a cluster; the section `kubernetes` of a node's configuration.

    `init_image` holds the portable directory at `portable_dir` (the node image does). `network` is `none` (the pod's
    interfaces are taken down) or `cluster` (whatever the cluster gives; NetworkPolicies are the operator's). `requests`
    is what the scheduler sets aside for a sandbox, its spec is the limit. `lifetime` ends every pod, used or not.
    `pod` is merged into each pod's `spec`: nodeSelector, tolerations, imagePullSecrets, hostUsers and the like.
    `warm_pools` names, by image, agent-sandbox SandboxWarmPools to claim from.
    """

    namespace: str | None = None
    node: str = "skyenv"
    init_image: str = "skyenv-node:latest"
    portable_dir: str = "/opt/skyenv/portable"
    default_image: str | None = None
    pull_policy: str = "IfNotPresent"
    network: str = "none"
    runtime_class: str | None = None
    requests: Mapping[str, str] = field(default_factory=lambda: {"cpu": "50m", "memory": "64Mi"})
    start_timeout: float = 600.0
    adoption_timeout: float = 60.0
    lifetime: float = 86400.0
    pod: Mapping[str, Any] = field(default_factory=dict)
    warm_pools: Mapping[str, str] = field(default_factory=dict)
    state: str | None = None

    def __post_init__(self) -> None:
        if self.network not in ("none", "cluster"):
            raise ConfigError(f"kubernetes.network {self.network!r}: choose 'none' or 'cluster'")
        if self.pull_policy not in ("Always", "IfNotPresent", "Never"):
            raise ConfigError(f"kubernetes.pull_policy {self.pull_policy!r}: choose Always, IfNotPresent or Never")


def read_options(values: Mapping[str, Any]) -> KubernetesOptions:
    """Options from a configuration file. ConfigError naming a key that does not exist."""
    known = [each.name for each in fields(KubernetesOptions)]
    for key in values:
        if key not in known:
            raise ConfigError(f"kubernetes has no option {key!r}{did_you_mean(key, known)}")
    return KubernetesOptions(**values)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sandbox to make a pod for."""

    sandbox: str
    image: str
    spec: Spec
    patience: float
    annotations: Mapping[str, str]


def pod_name(sandbox: str) -> str:
    """The pod of a sandbox."""
    return f"skyenv-{sandbox}"


def make_pod(wanted: Wanted, options: KubernetesOptions) -> Pod:
    """The pod of a sandbox, ready to be created."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "activeDeadlineSeconds": int(options.lifetime),
        "hostname": "sandbox",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": _volumes(wanted.spec),
        "initContainers": [_init_container(options)],
        "containers": [_container(wanted, options)],
    }
    if options.network == "none":
        spec["dnsPolicy"], spec["dnsConfig"] = "None", {"nameservers": ["127.0.0.1"]}
    if options.runtime_class is not None:
        spec["runtimeClassName"] = options.runtime_class
    labels = {MANAGED: "skyenv", NODE: options.node, SANDBOX: wanted.sandbox}
    metadata = {"name": pod_name(wanted.sandbox), "labels": labels, "annotations": dict(wanted.annotations)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": merge(spec, options.pod)}


def merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`: objects are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in more.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _volumes(spec: Spec) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", "sizeLimit": str(spec.tmpfs_bytes)}
    return [
        {"name": "skyenv", "emptyDir": {}},
        {"name": "run", "emptyDir": memory},
        {"name": "shm", "emptyDir": memory},
    ]


def _init_container(options: KubernetesOptions) -> dict[str, Any]:
    add = {"add": ["NET_ADMIN"]} if options.network == "none" else {}
    return {
        "name": "prepare",
        "image": options.init_image,
        "imagePullPolicy": options.pull_policy,
        "command": portable.command("prepare", "/target", options.network, home=options.portable_dir),
        "volumeMounts": [{"name": "skyenv", "mountPath": "/target"}],
        "resources": {"requests": dict(options.requests), "limits": {"memory": "256Mi"}},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **add},
        },
    }


def _container(wanted: Wanted, options: KubernetesOptions) -> dict[str, Any]:
    spec = wanted.spec
    config = {
        "run_dir": RUN_DIRECTORY,
        "home": "/root",
        "shells": SHELLS[spec.shell],
        "file_bytes": spec.file_bytes,
        "patience": wanted.patience,
        "python": portable.python(),
    }
    return {
        "name": CONTAINER,
        "image": wanted.image,
        "imagePullPolicy": options.pull_policy,
        "command": portable.command("keeper", json.dumps(config)),
        "workingDir": "/",
        # The loader of the portable directory must not take up what an image says to its own.
        "env": [{"name": "LD_PRELOAD", "value": ""}, {"name": "LD_LIBRARY_PATH", "value": ""}],
        "volumeMounts": [
            {"name": "skyenv", "mountPath": portable.HOME, "readOnly": True},
            {"name": "run", "mountPath": RUN_DIRECTORY},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "resources": {"requests": _requests(spec, options), "limits": _limits(spec)},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
        },
    }


def _limits(spec: Spec) -> dict[str, str]:
    limits = {
        "memory": None if spec.memory_bytes is None else str(spec.memory_bytes),
        "cpu": None if spec.cpus is None else f"{max(1, round(spec.cpus * 1000))}m",
        "ephemeral-storage": None if spec.disk_bytes is None else str(spec.disk_bytes),
    }
    return {key: value for key, value in limits.items() if value is not None}


def _requests(spec: Spec, options: KubernetesOptions) -> dict[str, str]:
    """What is set aside, never more than the limit: a cluster refuses that."""
    requests = dict(options.requests)
    if spec.cpus is not None and spec.cpus < quantity(requests.get("cpu", "0")):
        requests["cpu"] = _limits(spec)["cpu"]
    if spec.memory_bytes is not None and spec.memory_bytes < quantity(requests.get("memory", "0")):
        requests["memory"] = str(spec.memory_bytes)
    if spec.disk_bytes is not None:
        requests["ephemeral-storage"] = "1Mi"
    return requests


_SUFFIXES = {
    **{"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    **{"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40},
}


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number. ConfigError when it is none."""
    number = text.rstrip("kKMGTim")
    try:
        return float(number) * (_SUFFIXES[text[len(number) :]] if number != text else 1.0)
    except (ValueError, KeyError):
        raise ConfigError(f"kubernetes.requests: {text!r} is no quantity such as 100m or 64Mi") from None


def _status(pod: Pod) -> dict[str, Any]:
    status: dict[str, Any] = pod.get("status") or {}
    return status


def containers(pod: Pod) -> list[dict[str, Any]]:
    """The statuses of its containers, those that prepare it first."""
    status = _status(pod)
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def is_running(pod: Pod) -> bool:
    """Whether the sandbox's own container runs and nobody is deleting it."""
    mine = [each for each in containers(pod) if each["name"] == CONTAINER]
    leaving = pod["metadata"].get("deletionTimestamp") is not None
    return bool(mine) and (mine[0].get("state") or {}).get("running") is not None and not leaving


def image_id(pod: Pod) -> str:
    """What exactly the sandbox's image is."""
    return next((str(each.get("imageID")) for each in containers(pod) if each["name"] == CONTAINER), "")


def progress(pod: Pod) -> State:
    """How far a pod is that does not run yet."""
    if is_running(pod):
        return "running"
    conditions = {each["type"]: each["status"] for each in _status(pod).get("conditions") or ()}
    if conditions.get("PodScheduled") != "True":
        return "queued"
    waiting = [(each.get("state") or {}).get("waiting") or {} for each in containers(pod)]
    return "pulling" if any(each.get("reason") in PULL_TROUBLE for each in waiting) else "starting"


def why_waiting(pod: Pod) -> str:
    """What a pod that does not run waits for, in the cluster's words."""
    for each in containers(pod):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in _status(pod).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return f"{condition.get('reason', 'not scheduled')}: {condition.get('message', '')}"
    return "its containers are being created"


def hopeless(pod: Pod) -> str | None:
    """Why waiting for this pod is of no use, though it has not failed: its image does not exist, or cannot run."""
    for each in containers(pod):
        waiting = (each.get("state") or {}).get("waiting") or {}
        message = str(waiting.get("message", ""))
        absent = any(words in message.lower() for words in NO_IMAGE)
        if waiting.get("reason") in NEVER or (waiting.get("reason") in PULL_TROUBLE and absent):
            return f"image {each.get('image')}: {waiting['reason']}: {message}"
    return None


def obituary(pod: Pod | None) -> str | None:
    """Why a sandbox is no more, for people; None while it lives."""
    if pod is None:
        return "the pod was deleted"
    status = _status(pod)
    for each in containers(pod):
        ended = (each.get("state") or {}).get("terminated")
        if ended and (each["name"] == CONTAINER or ended.get("exitCode")):
            return _ending(each["name"], ended)
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"the pod ended: {status.get('reason', status['phase'])}: {status.get('message', '')}".rstrip(": ")
    if pod["metadata"].get("deletionTimestamp") is not None:
        return "the pod is being deleted"
    return None


def _ending(name: str, ended: dict[str, Any]) -> str:
    if ended.get("reason") == "OOMKilled":
        return f"the pod's container {name!r} ran out of memory (OOMKilled)"
    detail = f"{ended.get('reason', '')} {ended.get('message', '')}".strip()
    return f"the pod's container {name!r} ended with status {ended.get('exitCode')}: {detail}".rstrip(": ")
