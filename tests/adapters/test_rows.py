"""Every adapter, in its library's own environment, comes to the rewards and the token rows of our own pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from skyenv.samples import Row
from tests.adapters import policies
from tests.adapters.libraries import PLAYED, run

GROUP_SIZE = 2
FIELDS = ("task_id", "prompt_ids", "completion_ids", "loss_mask", "logprobs", "reward")


@pytest.fixture(scope="module")
def own() -> list[dict[str, Any]]:
    rows: list[Row] = anyio.run(policies.own_rows, policies.tokenizer(), GROUP_SIZE)
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0, 0.0]
    return [{name: getattr(row, name) for name in FIELDS} for row in rows]


@pytest.mark.adapter
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", PLAYED)
def test_adapter_rows_are_our_own(library: str, own: list[dict[str, Any]], tmp_path: Path) -> None:
    assert run(library, f"tests.adapters.playing.{library}", tmp_path) == own
