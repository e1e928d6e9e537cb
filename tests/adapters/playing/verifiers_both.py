"""What test_verifiers.py looks at: limits, failures, wrong settings, and a program of another's in our sandbox."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import anyio
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import skyenv
from skyenv.adapters.verifiers import SkyEnv, SkyHarness
from skyenv.adapters.verifiers_renderer import SkyRenderer, SkyRendererConfig
from skyenv.errors import ConfigError
from skyenv.remote import backends
from skyenv.remote.node import create_app
from skyenv.types import Message, ToolCall, Trajectory
from tests.adapters import policies
from tests.adapters.playing.serving import running
from tests.adapters.playing.verifiers import environment, play, with_model

CALL = policies.renderer(policies.tokenizer()).format.render_call
AGENT = """
import json, os, subprocess, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "What should I run?"}]}
headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
asked = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
print(subprocess.run(answer, shell=True, capture_output=True, text=True).stdout)
print("bad news", file=__import__("sys").stderr)
"""


class Program(vf.Harness[vf.HarnessConfig]):
    """A harness that is none of ours: it puts a program into the sandbox and runs it."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        await runtime.write("/tmp/agent.py", AGENT.encode())
        await runtime.run_background(["sh", "-c", "echo started"], {}, "/tmp/background.log")
        result = await runtime.run_program(["python3", "/tmp/agent.py"], {"URL": endpoint, "KEY": secret})
        missing = await told(runtime.read("no-such-file"))
        trace.info["program"] = {
            "endpoint": endpoint,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "head": (await runtime.read("/tmp/agent.py", max_bytes=1 << 16)).decode()[:7],
            "missing": missing,
            "alive": await runtime.alive(),
        }
        return result


class Chat:
    """A server of chat completions: says one thing, or fails, or with status 0 never answers."""

    def __init__(self, text: str, *, status: int = 200) -> None:
        self.text, self.status = text, status
        self.asked: list[Any] = []
        self.was_asked = Event()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.was_asked.set()
        if not self.status:
            await anyio.sleep_forever()
        if self.status != 200:
            return JSONResponse({"error": {"message": "out of order"}}, self.status)
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return JSONResponse(answer)


async def told(call: Awaitable[Any]) -> str:
    try:
        return f"no error: {await call}"
    except (ConfigError, vf.RolloutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def summary(episode: vf.Episode) -> dict[str, Any]:
    (trace,) = episode.traces or (None,)
    return {
        "ok": episode.ok,
        "errors": [(error.type, error.message) for error in [*episode.errors, *(trace.errors if trace else [])]],
        "reward": trace and trace.reward,
        "stop": trace and trace.stop_condition,
        "verdict": trace and trace.info.get("verdict", {}).get("status"),
        "info": trace and {name: trace.info.get(name) for name in ("program", "stop_reason")},
        "turns": trace and trace.num_turns,
        "record": trace and bool(trace.to_record()),
    }


async def episode(env: vf.Env[Any], chat: Chat, **sampling: Any) -> dict[str, Any]:
    with running(chat.app()) as url:
        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NONE")
        model = vf.ModelContext("policy", client, vf.Sampling(**sampling))
        async with env.serving():
            (task,) = env.taskset.include(ids=policies.TASKS[:1])
            (slot,) = env.slots(task)
            return {**summary(await env.run_slot(slot, model)), "asked": chat.asked[:1]}


def ungraded(trajectory: Trajectory) -> None:
    """A reward that leaves every sample out."""


def with_agent(reward: str = "outcome", sandbox: str | None = None, **agent: Any) -> vf.Env[Any]:
    taskset = {"id": "skyenv_verifiers", "sandbox": sandbox, "env_options": {"prompt": "brief", "reward": reward}}
    config = vf.env_config_type("skyenv_verifiers").model_validate({"taskset": taskset, "agent": agent})
    return vf.load_environment(config)


async def program() -> Any:
    plugin = ModuleType("sandboxed_program")  # a top-level module, as verifiers finds plugins
    vars(plugin).update(__all__=["Program"], Program=Program)
    sys.modules[plugin.__name__] = plugin
    env = with_agent(harness={"id": plugin.__name__})
    return await episode(env, Chat(f"git apply - <<'END'\n{policies.patch(policies.TASKS[0])}\nEND"))


async def failures() -> Any:
    look = CALL(ToolCall("execute_bash", {"command": "sleep 300"}))
    return {
        "provider": await episode(environment(), Chat("", status=400)),
        "limit": await episode(with_agent(max_turns=1), Chat(CALL(ToolCall("execute_bash", {"command": "ls"})))),
        "timeout": await episode(with_agent(timeout={"rollout": 8.0}), Chat(look)),
        "finished": await episode(environment(), Chat(CALL(ToolCall("finish", {}))), max_tokens=64),
        "ungraded": await episode(with_agent(f"{__spec__.name}:ungraded"), Chat(CALL(ToolCall("finish", {})))),
    }


async def cancelled() -> Any:
    """What a node holds while a model is asked, and once the episode was cancelled."""
    chat, held = Chat("", status=0), []
    with running(create_app(backends.get("local"))) as node:
        env = with_agent(sandbox=node)
        async with skyenv.connect(node) as client, anyio.create_task_group() as group:
            group.start_soon(episode, env, chat)
            await anyio.to_thread.run_sync(chat.was_asked.wait)
            held.append(len((await client.overview())["sandboxes"]))
            group.cancel_scope.cancel()
        async with skyenv.connect(node) as client:
            held.append(len((await client.overview())["sandboxes"]))
    return held


async def misused() -> Any:
    env = with_agent()
    model = vf.ModelContext("policy", vf.TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="NONE"))
    async with env.serving():
        (task,) = env.taskset.include(ids=policies.TASKS[:1])
        unset = summary(await env.run_slot(env.slots(task)[0], model))
        prompted = summary(await env.run_slot(env.slots(task.with_system_prompt("Be kind."))[0], model))
        unknown = summary(await env.run_slot(env.slots(task.with_data(id="no-such-task"))[0], model))
    return {"unset": unset["errors"], "prompted": prompted["errors"], "unknown": unknown["errors"]}


def renderer() -> Any:
    """A conversation rendered whole is the one that grew turn by turn, wherever the text lets that be."""
    tokenizer = policies.tokenizer()
    ours = SkyRenderer(tokenizer, SkyRendererConfig())
    plain = policies.renderer(tokenizer)
    head = [{"role": "system", "content": "s<|im_end|>"}, {"role": "user", "content": "u"}]
    results = [{"role": "tool", "content": "r<|im_start|>", "name": "execute_bash"}, {"role": "user", "content": "n"}]
    prompt = ours.render(head, add_generation_prompt=True)
    answer = [*plain.encode("answer"), plain.stop_token_ids[0]]
    grown = ours.bridge_to_next_turn(prompt.token_ids, answer, results)
    whole = ours.render([*head, {"role": "assistant", "content": "answer"}, *results], add_generation_prompt=True)
    assert grown is not None
    return {
        "same": grown.token_ids == whole.token_ids,
        "ours": prompt.token_ids == plain.prompt([Message("system", "s<|im_end|>"), Message("user", "u")], ()),
        "owners": [sorted(set(whole.message_indices)), sorted(set(grown.message_indices))],
        "answers": ours.bridge_to_next_turn(prompt.token_ids, answer, [{"role": "assistant", "content": "x"}]),
        "text": ours.parse_response(answer).content,
    }


async def main(out: Path) -> None:
    assert vf.environment_class("skyenv_verifiers") is SkyEnv
    assert vf.default_harness_id("skyenv_verifiers") == "skyenv_verifiers"
    found = {
        "rows": await with_model(play),
        "renderer": renderer(),
        "program": await program(),
        "failures": await failures(),
        "cancelled": await cancelled(),
        "misused": await misused(),
        "harness": vf.load_harness(vf.harness_config_type("skyenv_verifiers")()).__class__ is SkyHarness,
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
