"""TRL: our rollouts under anyone's own `AsyncGRPOTrainer`, as its rollout worker and its way to the servers' weights.

`TRLAsyncRollouts` plays groups without end while the trainer steps, and puts rows with exact ids, the sampler's
logprobs and advantages into the queue that the trainer empties; a full queue holds it up. Every row carries the oldest
version that sampled any of its trajectory, so TRL's own limit on staleness holds. A failed trajectory is left out, and
one whose history was rewritten is several rows. `WeightFiles` brings new weights to servers that see a directory.

Ownership: everything asynchronous lives on the thread that `with` makes. TRL calls `start` and `stop` inside of it.
"""

from __future__ import annotations

import queue
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import anyio
from anyio import to_thread

from skyenv.adapters.opening import BlockingRollouts, Rollouts, row_rules
from skyenv.core import Engine
from skyenv.engines.control import EngineControl, PauseMode, control_of
from skyenv.engines.openai import OpenAIEngine
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.portal import Actor, Portal
from skyenv.samples import Row, rows_from
from skyenv.types import Completion, Message, SamplingParams, Trajectory, TrajectoryGroup
from skyenv.vector.pipeline import RolloutPipeline, Stages
from skyenv.vector.stopping import FailureThreshold

if TYPE_CHECKING:
    import torch

PUT_SECONDS = 0.5
EPSILON = 1e-8


class TRLAsyncRollouts(BlockingRollouts):
    """Pass it as `rollout_worker` and `dataset()` as `train_dataset`, inside `with`.

    `group_size` takes the place of TRL's `num_generations`. `groups_ahead` groups are played at a time, and `queued`
    rows wait for the trainer at most. Tasks are shuffled by `seed` anew for each pass. `scale` divides advantages by
    the deviation of the group's rewards, as TRL does, or not at all; rewards of failed siblings count nowhere. When
    most trajectories fail, `check_health` tells why, which ends training.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        engine: Engine,
        tokenizer: Any,
        *,
        group_size: int = 8,
        groups_ahead: int = 4,
        queued: int = 256,
        scale: Literal["group", "none"] = "group",
        seed: int = 0,
    ) -> None:
        super().__init__(rollouts, engine, tokenizer)
        for name, value in (("group_size", group_size - 1), ("groups_ahead", groups_ahead), ("queued", queued)):
            if value < 1:
                raise ConfigError(f"{name}: is too small; a group has at least 2, the others 1")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queued)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._group_size, self._ahead, self._scale, self._seed = group_size, groups_ahead, scale, seed
        self._rules = row_rules(tokenizer, "segment")
        self._clock = _Clock()
        self._player: Actor | None = None
        self._playing: Any = None
        self._done = self._failed = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        super().__exit__(kind, error, trace)

    def dataset(self) -> Any:
        """One row a task, for `train_dataset`; TRL counts its epochs by it."""
        from datasets import Dataset

        return Dataset.from_list([{"prompt": task_id} for task_id in self.tasks])

    def weights(
        self,
        directory: str | Path,
        *,
        seen_as: str = "",
        engines: Sequence[OpenAIEngine] | None = None,
        pause: PauseMode = "abort",
    ) -> WeightFiles:
        """For `weight_transfer`: weights as files below `directory`, which the servers call `seen_as`.

        `engines`: the servers' engines, where the engine of the rollouts is a pool of them.
        """
        chosen = [self._engine] if engines is None else list(engines)
        if any(not isinstance(engine, OpenAIEngine) for engine in chosen):
            raise ConfigError("engines: name the servers' own engines, which take weights")
        return WeightFiles(self.portal, chosen, Path(directory), seen_as, pause)  # type: ignore[arg-type]

    @property
    def portal(self) -> Portal:
        """The thread that everything runs on. ConfigError outside of `with`."""
        if self._portal is None:
            raise ConfigError("the rollouts are not open; use them inside `with`")
        return self._portal

    def start(self) -> None:
        """Begin to play; TRL calls it when it begins to train."""
        if self._player is not None:
            raise ConfigError("the rollouts are being played already")
        self._player = self.portal.actor()
        self._clock.beat()
        self._done = self._failed = 0
        self._playing = self._player.submit(self._play)

    def stop(self) -> None:
        """End what is being played and free its sandboxes; idempotent."""
        player, self._player = self._player, None
        if player is not None:
            player.cancel()
            player.close()

    def update_model_version(self, model_version: int) -> None:
        """Requests from now on are answered by this version."""
        self._clock.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the rollouts, and SkyEnvError when nothing moved for so many seconds."""
        playing = self._playing
        if playing is not None and playing.done():
            try:
                playing.result()
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors
            raise SkyEnvError("the rollouts have ended")
        silent = self._clock.silent()
        if playing is not None and silent > stale_after_s:
            raise SkyEnvError(f"no generation and no group ended for {silent:.0f} s")

    async def _play(self) -> None:
        """Groups without end, so many at a time."""
        opened = self._pipeline
        assert opened is not None
        stages = opened.stages or Stages(opened.widths)
        pipeline = replace(opened, engine=_Stamped(opened.engine, self._clock), stages=stages)
        free, turn = anyio.Semaphore(self._ahead), anyio.Lock()
        async with anyio.create_task_group() as group:
            for number, task in enumerate(_endless(list(self.tasks.values()), self._seed)):
                await free.acquire()
                group.start_soon(self._play_one, pipeline, task, number, turn, free.release)

    async def _play_one(
        self, pipeline: RolloutPipeline, task: SweTask, number: int, turn: anyio.Lock, done: Callable[[], None]
    ) -> None:
        """One group; its rows go into the queue side by side, so that TRL forwards what they share once."""
        async with pipeline.run([task], self._group_size, first_group=number) as run:
            found = [trajectory async for trajectory in run]
        found.sort(key=lambda trajectory: trajectory.sample_index)
        group = TrajectoryGroup(task.task_id, number, found)
        self._clock.beat()
        self._count(group, pipeline.failures)
        async with turn:
            for sample in self._samples(group):
                await self._put(sample)
        done()

    def _count(self, group: TrajectoryGroup, threshold: FailureThreshold) -> None:
        """End everything when too large a share of trajectories fails, as within one run."""
        failures = [trajectory.failure for trajectory in group.trajectories if trajectory.failure is not None]
        self._done += len(group.trajectories)
        self._failed += len(failures)
        if failures and threshold.exceeded(self._done, self._failed):
            last = failures[-1]
            raise SkyEnvError(
                f"{self._failed} of {self._done} trajectories failed, the last: {last.kind}: {last.message}"
            )

    async def _put(self, sample: Any) -> None:
        """Wait for room; a trainer that takes its time is no silence of ours."""
        while True:
            sample.enqueued_at = time.time()
            try:
                await to_thread.run_sync(partial(self.rollout_buffer.put, sample, timeout=PUT_SECONDS))
            except queue.Full:
                self._clock.beat()
            else:
                return

    def _samples(self, group: TrajectoryGroup) -> list[Any]:
        """The group's rows as TRL has them; none for a sibling that may not train."""
        rewards = [t.reward for t in group.trajectories if t.trainable and t.reward is not None]
        failed = len(group.trajectories) - len(rewards)
        self.metrics_queue.put({"rollout/failed_frac": (float(failed), float(len(group.trajectories)))})
        mean, spread = (fmean(rewards), pstdev(rewards)) if rewards else (0.0, 0.0)
        samples = []
        for row in rows_from([group], self._rules):
            if row.reward is None:
                continue
            trajectory = group.trajectories[row.trajectory]
            advantage = (row.reward - mean) / (spread + EPSILON if self._scale == "group" else 1.0)
            metrics = {"reward": row.reward, "reward_std": spread, "rollout/turns": float(len(trajectory.turns))}
            samples.append(sample_of(row, trajectory, advantage, metrics))
        return samples


def sample_of(row: Row, trajectory: Trajectory, advantage: float, metrics: dict[str, float]) -> Any:
    """A row as TRL's `RolloutSample`; its messages are for reading, only its ids train."""
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    before = len(row.prompt_ids)
    said = [
        ({"role": "assistant", "content": t.text}, {"role": "tool", "content": t.observation}) for t in trajectory.turns
    ]
    return RolloutSample(
        prompt=[{"role": "user", "content": trajectory.task_id}],
        completion=[message for turn in said for message in turn],
        input_ids=numpy.asarray([*row.prompt_ids, *row.completion_ids], dtype=numpy.int64),
        completion_mask=numpy.asarray([0] * before + row.loss_mask, dtype=numpy.int64),
        old_log_probs=numpy.asarray([0.0] * before + row.logprobs, dtype=numpy.float32),
        advantage=advantage,
        model_version=min(turn.policy_version for turn in trajectory.turns),
        group_id=trajectory.group_id,
        metrics=metrics,
    )


class _Clock:
    """What threads tell each other: the version that answers, and when something last moved."""

    def __init__(self) -> None:
        self.version = 0
        self._moved = time.monotonic()

    def beat(self) -> None:
        self._moved = time.monotonic()

    def silent(self) -> float:
        return time.monotonic() - self._moved


class _Stamped:
    """An engine whose completions carry the trainer's version as it was when they were asked for."""

    def __init__(self, engine: Engine, clock: _Clock) -> None:
        self._engine, self._clock = engine, clock

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        version = self._clock.version
        completion = await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)
        self._clock.beat()
        return replace(completion, policy_version=version, versions=())


def _endless(tasks: Sequence[SweTask], seed: int) -> Iterator[SweTask]:
    """Pass after pass over the tasks, each in an order of its own."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(tasks, len(tasks))


class WeightFiles:
    """TRL's `WeightTransferProtocol` through a directory: safetensors that vLLM and SGLang servers load from disk.

    Made by `TRLAsyncRollouts.weights`. Servers hold generation between `pause` and `resume`. The newest version alone
    is kept. A server that does not take one is an EngineError, which ends training; it stays paused then.
    """

    def __init__(
        self, portal: Portal, engines: Sequence[OpenAIEngine], directory: Path, seen_as: str, pause: PauseMode
    ) -> None:
        self._portal, self._engines, self._pause = portal, engines, pause
        self._directory = directory.absolute()
        self._seen_as = seen_as.rstrip("/") or str(self._directory)
        self._controls: list[EngineControl] = []
        self._open = ExitStack()
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Connect to the servers. ConfigError for one that takes no weights, or a directory that cannot be written."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"directory: cannot write to {self._directory}: {error.strerror}") from error
        with ExitStack() as stack:
            for engine in self._engines:
                control = control_of(engine)
                stack.enter_context(self._portal.enter(control))
                self._controls.append(control)
            self._open = stack.pop_all()

    def pause(self) -> None:
        """Hold generation on every server."""
        self._each(lambda control: control.pause(self._pause))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the tensors and let every server load them."""
        from huggingface_hub import save_torch_state_dict

        version = self._version + 1
        path = self._directory / f"v{version:08d}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        save_torch_state_dict({name: tensor.detach().to("cpu") for name, tensor in iterator}, path)
        self._each(lambda control: control.load_from_disk(f"{self._seen_as}/{path.name}", version))
        shutil.rmtree(self._directory / f"v{self._version:08d}", ignore_errors=True)
        self._version = version

    def resume(self) -> None:
        """Go on generating."""
        self._each(lambda control: control.resume())

    def destroy(self) -> None:
        """Leave the servers; idempotent."""
        self._controls = []
        self._open.close()

    def _each(self, call: Callable[[EngineControl], Any]) -> None:
        """Call every control at the same time, on the thread where engines live."""
        controls = tuple(self._controls)

        async def all_of_them() -> None:
            async with anyio.create_task_group() as group:
                for control in controls:
                    group.start_soon(call, control)

        actor = self._portal.actor()
        try:
            actor.call(all_of_them)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            actor.close()
