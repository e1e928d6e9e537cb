"""The values that travel between the parts: immutable, without behaviour beyond their own invariants.

Central invariant: a trajectory is a list of segments, each three arrays of equal length (`token_ids`, `loss_mask`,
`logprobs`) that grow only at their end. Mask 1 stands only on ids that the engine sampled, byte for byte as it
returned them; logprobs are the sampler's, and 0.0 where the mask is 0. Rewriting history closes a segment and opens
the next; all segments of a trajectory share its reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the model meant it. `arguments` are JSON values.

    `id` links a result to its call in formats that have ids; it says nothing about what is called.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One call as a server reported it beside the text, not yet checked: `arguments` is JSON text or a value."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a model is told of a tool. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `name` is the tool's name on a message of role `tool`.

    The last three are for servers that take calls beside text: an assistant's `calls`, the `call_id` that a tool
    message answers, and on the first message the `tools` that may be called.
    """

    role: Role
    content: str
    name: str | None = None
    calls: tuple[NativeCall, ...] = ()
    call_id: str = ""
    tools: tuple[ToolSpec, ...] = ()


class Step(NamedTuple):
    """What an environment answers to an action, in Gymnasium's order."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion. Logprobs are comparable with the trainer's only at top_p 1 and top_k 0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt.

    `token_ids` and `logprobs` have equal length and are exactly what was sampled; both are empty when the server
    returns text only, and then `text` is all there is and the trajectory is not exact. `calls` are those that such a
    server reports beside its text. `cached_tokens` of the prompt were in the server's prefix cache (None: not told).
    `policy_version` is the oldest that sampled any of the ids; where weights changed in between, `versions` says which
    sampled which, as pairs of how many ids and the version, in order.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason = "stop"
    policy_version: int = 0
    seconds: float = 0.0
    calls: tuple[NativeCall, ...] = ()
    cached_tokens: int | None = None
    versions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} logprobs")
        if self.versions and sum(count for count, _version in self.versions) != len(self.token_ids):
            raise ValueError(f"the versions of {len(self.token_ids)} token ids are {self.versions}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command in a sandbox came to. A non-zero exit or a timeout is a result, never an exception.

    `exit_code` is the shell's (128 + n for signal n), 124 when `timed_out`, -1 while `running`. `output` is stdout
    and stderr in order, decoded as UTF-8 with replacement, head and tail kept when `truncated`; `output_bytes` counts
    all that was printed. `cwd_missing`: the directory that the shell stands in was removed.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    truncated: bool = False
    oom: bool = False
    session_restarted: bool = False
    seconds: float = 0.0
    running: bool = False
    cwd: str = ""
    output_bytes: int = 0
    cwd_missing: bool = False

    @property
    def outcome(self) -> Literal["running", "exit", "timeout", "oom", "killed"]:
        """How it went; a sandbox that is gone is no result but `SandboxLost`.

        "oom": something inside was killed for want of memory while it ran; "killed": the session's shell was.
        """
        if self.running:
            return "running"
        if self.timed_out:
            return "timeout"
        if self.oom:
            return "oom"
        return "killed" if self.session_restarted and self.exit_code > 128 else "exit"


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """What a sandbox uses now; None where its machine does not count it.

    `memory_bytes` without file cache that would be dropped at once; `cpu_seconds` since its start; `pids` processes and
    threads that exist; `oom_kills` since its start; `disk_bytes` written, where they are limited. `frozen`: nothing in
    it runs until the next request.
    """

    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    pids: int | None = None
    oom_kills: int | None = None
    disk_bytes: int | None = None
    frozen: bool = False


class FileInfo(NamedTuple):
    """One entry of a directory inside a sandbox. `kind` is file, dir, link or other; `size` in bytes."""

    path: str
    kind: Literal["file", "dir", "link", "other"]
    size: int
    mode: int


class StopReason(StrEnum):
    """Why a trajectory ended. The last five say nothing about the policy: failures, or no longer needed."""

    FINISH = "finish"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    WALL_CLOCK = "wall_clock"
    STUCK = "stuck"
    NO_TOOL_CALL = "no_tool_call"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    TOOL_BUG = "tool_bug"
    EVAL_ERROR = "eval_error"
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """Whether the trajectory says nothing about the policy."""
        return self in _FAILURES


_FAILURES = frozenset(
    {
        StopReason.SANDBOX_ERROR,
        StopReason.ENGINE_ERROR,
        StopReason.TOOL_BUG,
        StopReason.EVAL_ERROR,
        StopReason.CANCELLED,
    }
)

StopPolicy = Literal["keep", "mask", "zero", "penalty"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one trajectory. Seconds and tokens; the agent's clock starts with the run stage.

    `wall_clock` running out is a valid sample of a slow policy; the `*_timeout` deadlines guard infrastructure and
    end in a masked failure: `admission_timeout` bounds the wait for a place among the living environments,
    `queue_timeout` that for a stage's slot, `trajectory_timeout` everything from admission to the verdict, all attempts
    together.
    """

    max_turns: int = 50
    max_tokens_per_turn: int = 2048
    max_context: int = 32768
    wall_clock: float = 1800.0
    init_timeout: float = 600.0
    turn_timeout: float = 900.0
    eval_timeout: float = 1900.0
    admission_timeout: float = 43200.0
    queue_timeout: float = 7200.0
    trajectory_timeout: float = 43200.0
    max_nudges: int = 3


@dataclass(slots=True)
class Segment:
    """Three arrays of equal length that grow only at the end; `prompt_length` leads before the first sampled id."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append_context(self, ids: Sequence[int]) -> None:
        """Append ids that the model did not sample: mask 0, logprob 0.0."""
        self.token_ids.extend(ids)
        self.loss_mask.extend([0] * len(ids))
        self.logprobs.extend([0.0] * len(ids))

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append ids exactly as sampled: mask 1 and the sampler's logprobs. ValueError on unequal lengths."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} token ids but {len(logprobs)} logprobs")
        self.token_ids.extend(ids)
        self.loss_mask.extend([1] * len(ids))
        self.logprobs.extend(logprobs)

    @property
    def prompt_length(self) -> int:
        """How many ids stand before the first sampled one (all of them when none was sampled)."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)

    def check(self, vocab_size: int | None = None) -> None:
        """ValueError naming the first broken invariant: lengths, mask values, finite logprobs, ids in range."""
        if not len(self.token_ids) == len(self.loss_mask) == len(self.logprobs):
            raise ValueError(
                f"unequal lengths: {len(self.token_ids)} ids, {len(self.loss_mask)} mask, {len(self.logprobs)} logprobs"
            )
        for i, (token, mask, logprob) in enumerate(zip(self.token_ids, self.loss_mask, self.logprobs, strict=True)):
            if mask not in (0, 1):
                raise ValueError(f"loss_mask[{i}] is {mask!r}, not 0 or 1")
            if mask and not (math.isfinite(logprob) and logprob <= 1e-4):
                raise ValueError(f"logprobs[{i}] is {logprob!r}, not a finite log probability")
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"token_ids[{i}] is {token}, outside [0, {vocab_size})")


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and what it led to: readable record beside the exact ids in the segments.

    `reward` is the sum of what the environment's steps gave; the reward of its evaluation is the trajectory's.
    `policy_version` and `versions` are the completion's: which weights sampled it, and which of its ids.
    """

    text: str
    calls: tuple[ToolCall, ...]
    observation: str
    finish_reason: FinishReason
    policy_version: int
    generate_seconds: float
    step_seconds: float
    error: str | None = None
    reward: float = 0.0
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed failure: the stage it happened in, its kind (an error's class name) and its message."""

    stage: Literal["init", "run", "eval"]
    kind: str
    message: str


@dataclass(slots=True)
class Trajectory:
    """One episode of one task: exact ids for the trainer, turns for a reader, a reward or a typed failure.

    `reward` is None exactly when `failure` is set or the verdict is not valid for training; such a trajectory never
    trains and never shifts a baseline. `exact` is False when some text had to be tokenised by us.
    """

    task_id: str
    group_id: int = 0
    sample_index: int = 0
    prompt: tuple[Message, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    verdict: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    exact: bool = True
    attempts: int = 1
    seconds: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    prompt_hash: str = ""

    @property
    def trainable(self) -> bool:
        """Whether it may reach the trainer: it has a reward, sampled ids, and none of them was re-tokenised."""
        return self.reward is not None and self.exact and any(1 in s.loss_mask for s in self.segments)

    @property
    def sampled_tokens(self) -> int:
        """How many ids the model sampled in all."""
        return sum(sum(s.loss_mask) for s in self.segments)


@dataclass(slots=True)
class TrajectoryGroup:
    """The G siblings of one task, in the order of `sample_index`."""

    task_id: str
    group_id: int
    trajectories: list[Trajectory]

    @property
    def rewards_G(self) -> list[float | None]:
        """Reward of each sibling; None where it failed."""
        return [t.reward for t in self.trajectories]
