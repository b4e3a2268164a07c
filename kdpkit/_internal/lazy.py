"""Names of a package that are imported when they are first used (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping


def names(package: str, homes: Mapping[str, str]) -> tuple[Callable, Callable]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: Its `__name__`.
        homes: The module inside of it that each public name comes from.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 the package's own
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:  # noqa: N807 the package's own
        return sorted(homes)

    return __getattr__, __dir__
