"""Public data sets of repair tasks: one module each says how its rows are recognised and read.

A row is read without fetching anything. Rows in skyenv's own form are read by `rows`. To add a data set, write such a
module and name it in `DATASETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, did_you_mean


class Dataset(NamedTuple):
    """`matches` tells a row of this data set by its fields, `parse` reads it and raises ConfigError."""

    name: str
    matches: Callable[[Row], bool]
    parse: Callable[[Row], SweTask]


def _native(row: Row) -> SweTask:
    return parse_task(row.fields, row.where, row.base)


def _datasets() -> Mapping[str, Dataset]:
    """By name, in the order in which rows are tried: the most particular first, skyenv's own form last."""
    from skyenv.envs.swe.datasets import (
        harbor,
        multi_swe,
        r2e_gym,
        rebench,
        rebench_v2,
        swe_gym,
        swe_smith,
        swebench,
        swebench_pro,
        terminal_bench,
    )

    known = (
        Dataset("harbor", harbor.matches, harbor.parse),
        Dataset("terminal-bench", terminal_bench.matches, terminal_bench.parse),
        Dataset("r2e-gym", r2e_gym.matches, r2e_gym.parse),
        Dataset("multi-swe-bench", multi_swe.matches, multi_swe.parse),
        Dataset("swe-bench-pro", swebench_pro.matches, swebench_pro.parse),
        Dataset("swe-rebench-v2", rebench_v2.matches, rebench_v2.parse),
        Dataset("swe-rebench", rebench.matches, rebench.parse),
        Dataset("swe-bench-extra", rebench.matches_extra, rebench.parse_extra),
        Dataset("swe-smith", swe_smith.matches, swe_smith.parse),
        Dataset("swe-gym", swe_gym.matches, swe_gym.parse),
        Dataset("swe-bench", swebench.matches, swebench.parse),
        Dataset("skyenv", lambda row: True, _native),
    )
    return MappingProxyType({dataset.name: dataset for dataset in known})


DATASETS = _datasets()


def find_dataset(name: str) -> Dataset:
    """The data set of that name. ConfigError naming the known ones."""
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise ConfigError(f"tasks: unknown data set {name!r}{hint}; the known ones are {', '.join(DATASETS)}")
    return DATASETS[name]


def parse_row(row: Row, dataset: str | None = None) -> SweTask:
    """Read a row, of the data set that is named or that it looks like. ConfigError naming row and field."""
    if dataset is not None:
        return find_dataset(dataset).parse(row)
    return next(known for known in DATASETS.values() if known.matches(row)).parse(row)
