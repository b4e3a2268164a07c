"""KerasHub presets, with one sentence when there is none to be had."""

from pathlib import Path
from typing import Any

from kdpkit import errors


def from_preset(kind: Any, preset: str, **arguments: Any) -> Any:
    """Load a KerasHub class from a preset's name or from a directory of `save_to_preset`.

    Args:
        kind: The class, such as `keras_hub.models.BertMaskedLM`.
        preset: A name such as `"bert_tiny_en_uncased"`, which is downloaded, or a directory.
        arguments: Passed to `kind.from_preset`.

    Raises:
        ValueError: The preset is unknown, lacks what `kind` needs, or cannot be downloaded.
    """
    wanted = f"preset {preset!r} for {kind.__name__}"
    try:
        return kind.from_preset(preset, **arguments)
    except FileNotFoundError as error:
        raise errors.InputError(
            f"The {wanted} is incomplete ({error}). Save it there with "
            f"`{kind.__name__}.save_to_preset`, or pass the missing part by its own flag."
        ) from error
    except OSError as error:
        if Path(preset).is_dir():
            raise errors.InputError(
                f"The {wanted} cannot be read ({error}). Copy or save it there again."
            ) from error
        raise errors.InputError(
            f"The {wanted} cannot be downloaded ({type(error).__name__}). Connect to the network, "
            "or pass a directory that `save_to_preset` wrote."
        ) from error
    except ValueError as error:
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise errors.InputError(
            f"The {wanted} cannot be loaded ({reason}). Pass a name from KerasHub's list, or a "
            "directory that `save_to_preset` wrote."
        ) from error
