"""The house rules that a machine can check: who imports whom, what an import costs, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import skyenv

ROOT = Path(__file__).resolve().parent.parent
CORE = {"skyenv.types", "skyenv.errors", "skyenv.core"}

# Longest matching prefix of the importing module decides; values are prefixes of what it may import of ours.
LAYERS: dict[str, set[str]] = {
    "skyenv.types": set(),
    "skyenv.errors": set(),
    "skyenv.core": {"skyenv.types", "skyenv.errors"},
    "skyenv.plugins": {"skyenv.errors"},
    "skyenv.formats": CORE | {"skyenv.formats", "skyenv.tools", "skyenv.plugins"},
    "skyenv.tokenizer": CORE,
    "skyenv.encoding": CORE | {"skyenv.tokenizer"},
    "skyenv.renderer": CORE | {"skyenv.formats", "skyenv.tokenizer", "skyenv.encoding"},
    "skyenv.history": CORE | {"skyenv.plugins"},
    "skyenv.context": CORE | {"skyenv.renderer", "skyenv.formats", "skyenv.history"},
    "skyenv.tools": CORE | {"skyenv.tools", "skyenv.plugins"},
    "skyenv.rewards": CORE,
    "skyenv.samples": CORE,
    "skyenv.stuck": CORE,
    "skyenv.engines": CORE | {"skyenv.engines", "skyenv.renderer"},
    "skyenv.trajectory_io": CORE,
    "skyenv.remote.protocol": CORE,
    "skyenv.remote": CORE | {"skyenv.remote"},
    "skyenv.portal": CORE,
    "skyenv.spaces": CORE,
    "skyenv.envs": CORE
    | {"skyenv.envs", "skyenv.tools", "skyenv.formats", "skyenv.portal", "skyenv.spaces", "skyenv.rewards"},
    "skyenv.sampling": CORE | {"skyenv.renderer"},
    "skyenv.rollout": CORE
    | {"skyenv.sampling", "skyenv.renderer", "skyenv.formats", "skyenv.stuck", "skyenv.context", "skyenv.history"},
    "skyenv.vector": CORE
    | {
        "skyenv.vector",
        "skyenv.rollout",
        "skyenv.renderer",
        "skyenv.rewards",
        "skyenv.portal",
        "skyenv.stuck",
        "skyenv.plugins",
        "skyenv.trajectory_io",
    },
    "skyenv.adapters": {"skyenv"},
    "skyenv.envs.agent": CORE | {"skyenv.envs", "skyenv.recorder", "skyenv.renderer"},
    "skyenv.recorder": CORE
    | {"skyenv.sampling", "skyenv.recorder", "skyenv.renderer", "skyenv.formats", "skyenv.remote.listen"},
    "skyenv": {"skyenv"},
    "sky_trainer": {"skyenv", "sky_trainer"},
}


def modules(package: str) -> list[tuple[str, Path]]:
    """Every module of `package` with its file; data folders hold other people's code and are left out."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if "data" in path.parts:
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path) -> set[str]:
    """Absolute names imported anywhere in a file, type-checking blocks and lazy imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "skyenv")
    return names


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize(
    ("module", "path"), modules("skyenv") + modules("sky_trainer"), ids=lambda value: str(value)[-40:]
)
def test_layers(module: str, path: Path) -> None:
    layer = max((prefix for prefix in LAYERS if under(module, prefix)), key=len)
    ours = {name for name in imports_of(path) if name.split(".")[0] in ("skyenv", "sky_trainer") and name != "skyenv"}
    allowed = LAYERS[layer]
    wrong = sorted(name for name in ours if not any(under(name, prefix) for prefix in allowed))
    assert not wrong, f"{module} (layer {layer}) imports {wrong}"


def test_client_and_node_share_only_the_protocol() -> None:
    for module, path in modules("skyenv/remote"):
        names = imports_of(path)
        if module == "skyenv.remote.protocol":
            continue
        if module != "skyenv.remote.client":
            assert not any(under(name, "skyenv.remote.client") for name in names), module


def test_trl_is_imported_in_one_file_a_trainer() -> None:
    """Two trainers of TRL that we subclass, and the rows that a third takes; what it may change stands there alone."""
    users = [
        module
        for module, path in modules("skyenv") + modules("sky_trainer")
        if any(under(n, "trl") for n in imports_of(path))
    ]
    assert users == ["skyenv.adapters.trl_async", "sky_trainer.grpo", "sky_trainer.sft"]


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "trl", "docker", "datasets", "numpy", "gymnasium", "httpx", "pydantic")
    code = f"import skyenv, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("order", ["import skyenv, gymnasium", "import gymnasium, skyenv"])
def test_gymnasium_knows_the_environments_in_any_import_order(order: str) -> None:
    code = f"{order}; print(gymnasium.spec('SkyRL/SWE-v0').id)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "SkyRL/SWE-v0"


def test_public_names_exist_and_are_few() -> None:
    assert len(skyenv.__all__) <= 24
    assert skyenv.__all__ == sorted(skyenv.__all__)
    for name in skyenv.__all__:
        assert getattr(skyenv, name) is not None


BROAD = {"Exception", "BaseException"}


@pytest.mark.parametrize(
    ("module", "path"), modules("skyenv") + modules("sky_trainer"), ids=lambda value: str(value)[-40:]
)
def test_exceptions_are_caught_by_name(module: str, path: Path) -> None:
    """Only the boundary turns foreign exceptions into ours."""
    caught = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or getattr(node.type, "id", "") in BROAD)
    ]
    assert module == "skyenv.errors" or not caught
