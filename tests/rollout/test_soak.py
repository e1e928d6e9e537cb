"""Sandboxes, the node server and engines are killed while trajectories run: none is lost, none done twice, none left.

`make soak` runs the same for as long as it is asked to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_sample_comes_back_once_whatever_dies(tmp_path: Path) -> None:
    result = await soak(tmp_path, 0, count=20, calm=6)
    assert result["trajectories"] == 80
    assert result["rewarded"] >= 70
    assert set(result["kills"]) == {"engine", "node", "sandbox"}
    assert result["requests_lost_by_engines"] > 0
