"""One completion out of several answers: what a server broke off to take new weights goes on from where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from skyenv.engines.dialects import Request
from skyenv.types import Completion


def remaining(request: Request, parts: Sequence[Completion], request_id: str) -> Request:
    """What is left to ask for after `parts`: the ids so far are the prompt, the budget is smaller."""
    sampled = tuple(token for part in parts for token in part.token_ids)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(sampled))
    return replace(request, prompt_ids=request.prompt_ids + sampled, sampling=sampling, request_id=request_id)


def joined(parts: Sequence[Completion]) -> Completion:
    """The parts as one completion that knows which version sampled which ids."""
    if len(parts) == 1:
        return parts[0]
    spans = _merged([span for part in parts for span in part.versions or ((len(part.token_ids), part.policy_version),)])
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        policy_version=min((version for _count, version in spans), default=parts[-1].policy_version),
        versions=spans if len(spans) > 1 else (),
        cached_tokens=parts[0].cached_tokens,
    )


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours of one version as one; none that is empty."""
    filled = [(count, version) for count, version in spans if count]
    groups = groupby(filled, key=lambda span: span[1])
    return tuple((sum(count for count, _version in group), version) for version, group in groups)
