"""The `engine:` section: what is refused, with which words, and what is opened from it."""

from __future__ import annotations

import copy
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from sky_trainer.config import from_mapping, load, to_mapping, write
from sky_trainer.engines import HFEngine
from sky_trainer.opening import make_delivery, opened_engine
from sky_trainer.sections.engine import EngineConfig
from sky_trainer.sections.lora import LoraConfig, with_adapters
from sky_trainer.sync.delivery import BroadcastDelivery, DiskDelivery
from sky_trainer.weights import CopiedWeights, SharedWeights
from skyenv import formats
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.sglang import SGLangControl
from skyenv.errors import ConfigError, EngineUnavailable
from skyenv.renderer import Renderer
from skyenv.types import SamplingParams

ONE = {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "vllm"}, "engine.urls is empty"),
        ({"urls": ["http://a"]}, "engine.kind is embedded"),
        ({"sync": "disk"}, "engine.sync is disk, which needs servers"),
        ({**ONE, "urls": ["localhost:8000"]}, "must start with http"),
        ({**ONE, "urls": ["http://a", "http://a"]}, "names a server twice"),
        ({**ONE, "sync": "shared"}, "needs engine.kind embedded"),
        ({**ONE, "sync": "gloo"}, "which vLLM does not know"),
        ({**ONE, "kind": "sglang", "pause": "wait"}, "which SGLang does not know"),
        ({**ONE, "sync_timeout": 0}, "engine.sync_timeout is 0"),
        ({"kind": "trt"}, "engine.kind is 'trt'"),
    ],
)
def test_what_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"engine": section})


def test_a_token_is_not_written(tmp_path: Path) -> None:
    config = from_mapping({"engine": {**ONE, "token": "secret"}})
    write(config, tmp_path / "config.yaml")
    assert "secret" not in (tmp_path / "config.yaml").read_text()
    assert load(tmp_path / "config.yaml", ["--engine.token", "secret"]) == config
    assert from_mapping(to_mapping(config)) == config


@pytest.mark.parametrize(("sync", "kind"), [("auto", SharedWeights), ("copy", CopiedWeights)])
def test_an_embedded_engine(portal: Any, model: Any, tokenizer: Any, tmp_path: Path, sync: str, kind: type) -> None:
    config = from_mapping({"out": str(tmp_path), "engine": {"sync": sync}})
    renderer = Renderer(tokenizer, formats.get("hermes"))
    with opened_engine(config, portal, model, renderer) as (engine, weights):
        assert isinstance(engine, HFEngine)
        assert isinstance(weights, kind)
        weights.push(1)
        answer = portal.call(engine.generate, [5, 6], SamplingParams(max_tokens=2))
        assert (answer.policy_version, weights.version) == (1, 1)


def test_servers_that_do_not_answer(portal: Any, model: Any, tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, formats.get("hermes"))
    with (
        pytest.raises(EngineUnavailable, match=r"http://127\.0\.0\.1:1"),
        opened_engine(from_mapping({"engine": ONE}), portal, model, renderer),
    ):
        pass


def test_ways_of_delivery(model: Any, tmp_path: Path) -> None:
    assert isinstance(make_delivery(EngineConfig(), tmp_path, model), DiskDelivery)
    assert isinstance(make_delivery(EngineConfig(sync="gloo"), tmp_path, model), BroadcastDelivery)
    with pytest.raises(ConfigError, match="the policy has no adapter"):
        make_delivery(EngineConfig(sync="lora"), tmp_path, model)
    policy = with_adapters(copy.deepcopy(model), LoraConfig(rank=2, whole=("lm_head",)))
    with pytest.raises(ConfigError, match=r"lora\.whole is set"):
        make_delivery(EngineConfig(sync="lora"), tmp_path, policy)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"engine\.directory"):
        make_delivery(EngineConfig(directory=str(tmp_path / "file")), tmp_path, model)


def test_a_served_engine_is_a_process(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """`sky_trainer serve-engine` answers, takes weights from disk, and ends on a signal."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "sky_trainer.cli", "serve-engine", str(tmp_path / "model"), "--port", "0"]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"serving at (http://\S+)", process.stdout.readline())
            assert found is not None

            async def use() -> int:
                async with OpenAIEngine(found[1]) as engine, SGLangControl(engine) as control:
                    assert engine.flavour == "sglang"
                    await control.load_from_disk(str(tmp_path / "model"), 6)
                    return (await engine.generate([5, 6], SamplingParams(max_tokens=2))).policy_version

            assert anyio.run(use) == 6
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(found[1])
