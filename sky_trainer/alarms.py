"""Early warnings: what the numbers of a step say is about to go wrong, and what to do about it.

Pure: numbers in, warnings out; what is remembered of earlier steps is in the object. A missing number warns of nothing.
Thresholds are meant to be silent in a healthy run and to speak before the reward shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

FIRST_STEPS = 3
LASTING = 3


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning: its name in the metrics, and a sentence that says what was seen and what to do."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When to warn. Shares are of 1; `entropy_share` of the entropy of the first steps, `kl_factor` of its median."""

    entropy_share: float = 0.1
    zero_groups: float = 0.9
    kl_factor: float = 10.0
    kl_least: float = 0.02
    clipped: float = 0.3
    gap: float = 0.02
    stale_gap: float = 0.5
    failed: float = 0.3


NAMES = ("entropy", "zero_groups", "kl", "drift", "clip_ratio", "logprob_gap", "failures")


class Alarms:
    """Looks at one step after the other."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._limits = thresholds or Thresholds()
        self._first_entropies: list[float] = []
        self._kls: deque[float] = deque(maxlen=20)
        self._times: dict[str, int] = {}

    def look(self, numbers: Mapping[str, Any]) -> list[Warned]:
        """The warnings of a step, whose numbers have TRL's and the rollouts' names."""
        known = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        checks = (self._entropy, self._zero_groups, self._kl, self._drift, self._clipped, self._gap, self._failures)
        return [warned for check in checks for warned in check(known)]

    def _lasts(self, name: str, is_so: bool, steps: int = LASTING) -> bool:
        """Whether it has been so for this many steps in a row."""
        self._times[name] = self._times.get(name, 0) + 1 if is_so else 0
        return self._times[name] >= steps

    def _entropy(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        entropy = numbers.get("entropy")
        if entropy is None:
            return
        if len(self._first_entropies) < FIRST_STEPS:
            self._first_entropies.append(entropy)
            return
        start = sum(self._first_entropies) / FIRST_STEPS
        solved = numbers.get("rollout/resolved", 0.0) > 0.9
        if self._lasts("entropy", entropy < self._limits.entropy_share * start and not solved):
            yield Warned(
                "entropy",
                f"entropy fell to {entropy:.3g} from {start:.3g} at the start while tasks are left unsolved: the policy"
                " stops exploring. Lower grpo.learning_rate, raise grpo.epsilon_high (clip-higher) or"
                " grpo.entropy_coef, and go back to a checkpoint from before",
            )

    def _zero_groups(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        share = numbers.get("frac_reward_zero_std", 0.0)
        if not self._lasts("zero_groups", share >= self._limits.zero_groups):
            return
        if numbers.get("rollout/resolved", 0.0) > 0.5:
            advice = "they are too easy: go on to harder ones (`sky_trainer select`), or stop here"
        else:
            advice = (
                "they are too hard: choose tasks that the policy solves sometimes (`sky_trainer select`), raise"
                " rollout.group_size, or warm-start it"
            )
        yield Warned(
            "zero_groups",
            f"in {share:.0%} of the groups all samples have the same reward, so they teach nothing; {advice}",
        )

    def _kl(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        kl = numbers.get("kl")
        if kl is None:
            return
        usual = median(self._kls) if len(self._kls) >= FIRST_STEPS else None
        self._kls.append(kl)
        if usual is not None and kl > max(self._limits.kl_factor * usual, self._limits.kl_least):
            yield Warned(
                "kl",
                f"KL to the reference jumped to {kl:.3g} from about {usual:.3g}: one update went too far. Lower"
                " grpo.learning_rate or grpo.max_grad_norm, or raise grpo.beta",
            )

    def _drift(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        drift = numbers.get("count/drift", 0.0)
        if drift > 0:
            yield Warned(
                "drift",
                f"{drift:.3g} trajectories hold ids that differ from what the policy saw: their tokens train wrongly."
                " Stop, and look at them with `sky_trainer show`; the chat template or rollout.format does not fit the"
                " model",
            )

    def _clipped(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        share = numbers.get("clip_ratio/region_mean", 0.0)
        if self._lasts("clip_ratio", share > self._limits.clipped):
            yield Warned(
                "clip_ratio",
                f"{share:.0%} of the tokens are clipped and learn nothing: updates on one batch go too far. Lower"
                " grpo.learning_rate or grpo.num_iterations",
            )

    def _gap(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        gap = numbers.get("sampling/sampling_logp_difference/mean", 0.0)
        stale = numbers.get("staleness/max", 0.0) > 0
        if gap > (self._limits.stale_gap if stale else self._limits.gap):
            advice = (
                "rollouts are too stale for this learning rate: lower staleness or grpo.learning_rate"
                if stale
                else "the engine samples from other weights, or at another temperature or precision, than the trainer:"
                " check that its weights are updated and that it returns processed logprobs"
            )
            yield Warned("logprob_gap", f"engine and trainer differ by {gap:.3g} nats a token; {advice}")

    def _failures(self, numbers: Mapping[str, float]) -> Iterator[Warned]:
        share = numbers.get("rollout/failed", 0.0)
        if share > self._limits.failed:
            yield Warned(
                "failures",
                f"infrastructure spoiled {share:.0%} of the rollouts, which train nothing; `skyenv top` shows the"
                " sandboxes, and `sky_trainer show RUN --failed` says why each failed",
            )
