"""Tables as lists of rows."""


def width(rows):
    """Return how many columns there are."""
    return len(rows[0]) if rows else 0


def transpose(rows):
    """Return the columns of rows as rows."""
    return [[row[i] for row in rows] for i in range(len(rows))]


def column(rows, index):
    """Return one column."""
    return [row[index] for row in rows]
