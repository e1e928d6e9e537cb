"""The table of the catalogue names tests that exist, and every row is somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import catalogue

HERE = Path(__file__).parent
NUMBERS = {
    "A": (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 17, 19, 20, 22, 23, 25, 26, 28),
    "B": (1, 2, 4, 5),
    "C": (1, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14),
    "D": (1, 3, 5, 6, 8, 10),
    "E": (1, 2, 4, 5, 6, 7, 9, 10, 12),
    "F": (1, 2, 3, 5, 6, 7, 9, 10, 12, 13),
    "G": (1, 2, 4, 6, 8, 9, 10, 11, 13, 16),
}


def entries() -> list[tuple[str, str]]:
    """Each row id with the module, or module and test, that the table names for it."""
    found = []
    for line in (catalogue.__doc__ or "").splitlines():
        match = re.fullmatch(r"((?:[A-G]\d+ +)+)(test_\S+)", line)
        if match:
            found += [(row, match[2]) for row in match[1].split()]
    return found


def test_every_row_is_somewhere() -> None:
    assert {row for row, _place in entries()} == {
        f"{letter}{number}" for letter, all_of in NUMBERS.items() for number in all_of
    }


@pytest.mark.parametrize(("row", "place"), entries())
def test_what_the_table_names_exists(row: str, place: str) -> None:
    module, _colons, name = place.partition("::")
    text = ((HERE.parent if name else HERE) / f"{module}.py").read_text()
    if name:
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)
    else:
        assert re.search(rf'^    "{row} |def test_(\w+_)?{row.lower()}_', text, re.MULTILINE)
