"""What several parts of kdpkit share and users never import: here, lazy names and `Tensor`."""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import tensorflow as tf

    Tensor: TypeAlias = tf.Tensor | jax.Array  # the backend's
else:
    Tensor = Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable, Callable]:
    """Return a package's `__getattr__` and `__dir__`, which import a name on first use (PEP 562).

    `homes` has, for each public name, the module of the package that has it, or that it is.
    """

    def __getattr__(name: str) -> object:  # noqa: N807 the package's own
        if name in homes:
            try:
                module = importlib.import_module(f"{package}.{homes[name]}")
            except ModuleNotFoundError as error:
                if error.name not in ("tensorflow", "jax"):
                    raise
                from kdpkit import errors
                from kdpkit._internal import checks

                raise errors.PackageInputError(
                    f"`{package}.{name}` needs `{error.name}` (KERAS_BACKEND={error.name}), which "
                    f"is not installed. Run `{checks.install_command(error.name)}`."
                ) from error
            return module if homes[name] == name else getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:  # noqa: N807 the package's own
        return sorted(homes)

    return __getattr__, __dir__
