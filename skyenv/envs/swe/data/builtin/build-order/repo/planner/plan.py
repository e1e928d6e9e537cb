"""What to build, and when."""

from planner.graph import topological
from planner.parse import BuildError, parse


def plan(text, goals=()):
    """Return the targets to build in order: those that goals need, or all of them without goals."""
    needs = parse(text)
    try:
        order = topological(needs)
    except ValueError as error:
        raise BuildError("cycle: " + " -> ".join(error.args[0])) from error
    if not goals:
        return order
    wanted = set()
    pending = list(goals)
    while pending:
        target = pending.pop()
        if target not in needs:
            raise BuildError("unknown target: " + target)
        if target not in wanted:
            wanted.add(target)
            pending.extend(needs[target])
    return [target for target in order if target in wanted]
