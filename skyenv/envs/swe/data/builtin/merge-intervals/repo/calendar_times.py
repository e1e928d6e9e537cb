"""Busy and free times of a day, as (start, end) pairs with start < end."""


def merge(intervals):
    """Return the times covered by intervals as few, ordered, separate pairs."""
    merged = []
    for start, end in intervals:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def free(intervals, opens, closes):
    """Return the gaps between opens and closes that intervals leave."""
    gaps = []
    for start, end in merge(intervals):
        if start > opens:
            gaps.append((opens, min(start, closes)))
        opens = max(opens, end)
        if opens >= closes:
            return gaps
    gaps.append((opens, closes))
    return gaps


def total(intervals):
    """Return how much time intervals cover."""
    return sum(end - start for start, end in merge(intervals))
