"""A league table."""


def ranking(points):
    """Return (place, name, points) rows, best first.

    Equal points share a place, the places after them are skipped, and players within a place are sorted by name.
    """
    ordered = sorted(points.items(), key=lambda item: (item[1], item[0]), reverse=True)
    return [(place, name, score) for place, (name, score) in enumerate(ordered, 1)]


def podium(points):
    """Return the names on the first three places."""
    return [name for place, name, _ in ranking(points) if place <= 3]


def award(points, name, extra):
    """Return new points in which name has extra ones."""
    return {**points, name: points.get(name, 0) + extra}
