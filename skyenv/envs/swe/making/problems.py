"""Issue texts: from a template, or by a language model that sees symptoms and documentation but never the change."""

from __future__ import annotations

import re

from skyenv.envs.swe.making.candidates import Candidate, Symptoms

MAX_EXCERPT = 1200
_HEADING = re.compile(r"^_{3,} .+? _{3,}$")

PROMPT = """Write the issue that a user of this Python project would file. Say what goes wrong and what should happen \
instead, with a short example. Do not name tests, do not guess at the cause, do not propose a fix. At most 150 words, \
plain text.

What is known to fail: {what}
Documentation: {documentation}
Observed:
{excerpt}
"""


def excerpt(symptoms: Symptoms) -> str:
    """The first failure as the runner printed it: the failing line and what was wrong about it, no more."""
    blocks: list[list[str]] = []
    for line in symptoms.output.splitlines():
        if _HEADING.match(line):
            blocks.append([])
        elif blocks and (line.startswith(("=", "FAILED ", "ERROR ")) or "short test summary" in line):
            break
        elif blocks:
            blocks[-1].append(line)
    first = next((block for block in blocks if block), None)
    if first is None:
        return "\n".join(line for line in symptoms.output.splitlines() if "Error" in line)[:MAX_EXCERPT]
    code = [line for line in first if line.startswith("    ") and line.strip()][:1]
    errors = [line for line in first if line.startswith("E ")]
    return "\n".join([*code, *errors])[:MAX_EXCERPT]


def from_template(candidate: Candidate, symptoms: Symptoms) -> str:
    """An issue text that names what misbehaves, what its documentation promises, and what was observed."""
    facts = candidate.facts
    parts = [facts.get("title", "Something is wrong.")]
    if documentation := facts.get("documentation"):
        parts.append(f"It is documented like this: {documentation}")
    if changes := facts.get("changes"):
        parts.append(changes)
    if observed := excerpt(symptoms):
        parts.append(f"What was observed:\n\n{observed}")
    return "\n\n".join(parts)


def prompt_for(candidate: Candidate, symptoms: Symptoms) -> str:
    """What a language model is asked; the edit itself is not in it."""
    facts = candidate.facts
    return PROMPT.format(
        what=facts.get("title", "something"),
        documentation=facts.get("documentation") or facts.get("changes") or "none",
        excerpt=excerpt(symptoms),
    )
