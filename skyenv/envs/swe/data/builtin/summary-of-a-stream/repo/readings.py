"""Statistics of sensor readings."""


def parse(lines):
    """Yield the numbers in lines; blank lines and comments are skipped."""
    for line in lines:
        line = line.split("#")[0].strip()
        if line:
            yield float(line)


def summarize(values):
    """Return count, mean, lowest and highest of values, None in place of the last three when there are none."""
    count = len(list(values))
    if count == 0:
        return {"count": 0, "mean": None, "low": None, "high": None}
    return {"count": count, "mean": sum(values) / count, "low": min(values), "high": max(values)}


def normalize(values):
    """Return values scaled to the range from 0 to 1; all zeros when they are equal."""
    low, high = min(values), max(values)
    if low == high:
        return [0.0 for _ in values]
    return [(value - low) / (high - low) for value in values]
