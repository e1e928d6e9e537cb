"""Rows of comma separated cells."""


def split_row(line):
    """Return the cells of a row.

    A cell in double quotes may hold commas; two quotes in a row inside of it stand for one. Everything else is taken
    as it is, blanks included.
    """
    cells = []
    for cell in line.split(","):
        if cell.startswith('"') and cell.endswith('"'):
            cell = cell.strip('"')
        cells.append(cell)
    return cells


def quote(cell):
    """Return cell in quotes if it needs them."""
    if "," in cell or '"' in cell:
        return '"' + cell.replace('"', '""') + '"'
    return cell


def join_row(cells):
    """Return the row that holds cells."""
    return ",".join(quote(cell) for cell in cells)
