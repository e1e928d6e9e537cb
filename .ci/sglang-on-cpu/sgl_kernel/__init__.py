"""SGLang's compiled kernels have no build for this processor; this is imported everywhere and never called."""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: object, **options: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} is not built for this processor")

    return kernel
