"""How the repositories of SWE-bench and SWE-Gym run their tests: runner, command and the parser of their test ids.

Rows name a repository only; the commands are in no row. Options that only change what is printed are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from skyenv.envs.swe.tasks import RunnerName

CONDA = "source /opt/miniconda3/bin/activate testbed"


class Spec(NamedTuple):
    """`command` empty: the runner's own."""

    runner: RunnerName = "pytest"
    command: str = ""
    parser: str = "pytest"


_UTF8 = {"LANG": "en_US.UTF-8", "LC_ALL": "en_US.UTF-8", "PYTHONIOENCODING": "utf8", "LANGUAGE": "en_US:en"}
_NO_XDIST = "pytest -n0 {files}"

SWE_BENCH: Mapping[str, Spec] = MappingProxyType(
    {
        "astropy/astropy": Spec(command="pytest -o console_output_style=classic {files}", parser="pytest_v2"),
        "django/django": Spec("django", parser="django"),
        "marshmallow-code/marshmallow": Spec(),
        "matplotlib/matplotlib": Spec(parser="matplotlib"),
        "mwaskom/seaborn": Spec(command="pytest --no-header {files}", parser="seaborn"),
        "pallets/flask": Spec(),
        "psf/requests": Spec(parser="pytest_options"),
        "pvlib/pvlib-python": Spec(),
        "pydata/xarray": Spec(),
        "pydicom/pydicom": Spec(parser="pytest_options"),
        "pylint-dev/astroid": Spec(),
        "pylint-dev/pylint": Spec(parser="pytest_options"),
        "pytest-dev/pytest": Spec(),
        "pyvista/pyvista": Spec(),
        "scikit-learn/scikit-learn": Spec(parser="pytest_v2"),
        "sphinx-doc/sphinx": Spec(command="pytest --durations 25 {files}", parser="pytest_v2"),
        "sqlfluff/sqlfluff": Spec(),
        "swe-bench/humaneval": Spec(),
        "sympy/sympy": Spec("sympy", parser="sympy"),
    }
)
SWE_GYM: Mapping[str, Spec] = MappingProxyType(
    {
        "Project-MONAI/MONAI": Spec(),
        "bokeh/bokeh": Spec(command=_NO_XDIST),
        "conan-io/conan": Spec(command=_NO_XDIST),
        "dask/dask": Spec(command=_NO_XDIST),
        "facebookresearch/hydra": Spec(),
        "getmoto/moto": Spec(command=_NO_XDIST),
        "iterative/dvc": Spec(),
        "modin-project/modin": Spec(command=_NO_XDIST),
        "pandas-dev/pandas": Spec(),
        "pydantic/pydantic": Spec(parser="pydantic"),
        "python/mypy": Spec(command="pytest -n0 {files}"),
    }
)


def variables(repo: str) -> Mapping[str, str]:
    """Environment variables that the tests of a repository need."""
    return _UTF8 if repo == "django/django" else {}
