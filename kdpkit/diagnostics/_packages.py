"""Which packages are installed and in which versions, read from their metadata, not imported."""

import dataclasses
import importlib.metadata
import platform
import re
import textwrap
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kdpkit import _findings

_MAIN = ("kdpkit", "numpy", "keras", "tensorflow", "tensorflow-text", "keras-hub", "jax", "jaxlib")
_OWN_USE = ("test", "all")  # extras for kdpkit's own development; the second is all the others
# Distributions of another name that bring the package of the same one.
_TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "tensorflow-rocm",
    "tensorflow-macos",
    "tf-nightly",
)


@dataclasses.dataclass(frozen=True)
class Extra:
    """One of kdpkit's extras: its name, the requirements that are not met, and what mends it."""

    name: str
    missing: tuple[str, ...]

    @property
    def command(self) -> str | None:
        """What to run for it; None if nothing is missing."""
        return install_command(self.missing) if self.missing else None


def versions() -> dict[str, str | None]:
    """Give the version of Python and of each package that matters; None where it is missing."""
    names = [*_MAIN, *sorted({*_wanted()} - {*_MAIN}), *installed_tensorflows()]
    found = {name: version(name) for name in names}
    return {"python": platform.python_version()} | found


def version(package: str) -> str | None:
    """Give the version that is installed, of TensorFlow that of any of its distributions."""
    names = _TENSORFLOWS if canonicalize_name(package) == "tensorflow" else (package,)
    return next((found for name in names if (found := _version(name))), None)


def installed_tensorflows() -> tuple[str, ...]:
    """Name the distributions that bring the package `tensorflow`; there should be one."""
    return tuple(name for name in _TENSORFLOWS if _version(name))


def extras() -> tuple[Extra, ...]:
    """Give what each extra of kdpkit lacks; nothing at all where kdpkit is not installed."""
    return tuple(
        Extra(name, tuple(dict.fromkeys(map(_text, _unmet(_of_kdpkit(name))))))
        for name in _extras(own_use=True)
    )


def install_command(requirements: Iterable[str]) -> str:
    """Say how to install something, for any shell.

    >>> print(install_command(["jax>=0.5.3"]))
    python -m pip install "jax>=0.5.3"
    """
    return " ".join(["python -m pip install", *(f'"{text}"' for text in requirements)])


def wrapped_command(command: str, *, indent: str, width: int = 80) -> str:
    """Break a command into lines that a shell takes as one."""
    lines = textwrap.wrap(
        command,
        width - 2,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines)


def way_to(package: str) -> str:
    """Say how to install a framework, in the version that kdpkit wants."""
    return f"Run `{install_command([_wanted().get(package, package)])}`."


def findings() -> Iterator[_findings.Finding]:
    """Give what does not fit: versions below kdpkit's minimum, and packages among each other."""
    if not _version("kdpkit"):
        yield _findings.Finding(
            "not-installed",
            "note",
            "kdpkit",
            "It is imported from a directory and not installed, so what it needs is not known.",
            'Run `python -m pip install -e ".[all]"` in that directory.',
        )
    for package, text in _wanted().items():
        if (installed := version(package)) and not _is_met(Requirement(text)):
            yield _findings.Finding(
                "untested-version" if _is_newer(installed, text) else "old-version",
                "refused",
                package,
                f"Version {installed} is installed, and kdpkit works with {text}.",
                f"Run `{install_command([text])}`.",
            )
    yield from map(_misfit, _misfits())
    if len(installed_tensorflows()) > 1:
        names = ", ".join(installed_tensorflows())
        yield _findings.Finding(
            "two-tensorflows",
            "refused",
            "tensorflow",
            f"Several distributions overwrite each other's files: {names}.",
            "Uninstall all of them, then install one.",
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras(*, own_use: bool = False) -> list[str]:
    if not _version("kdpkit"):
        return []
    names = importlib.metadata.metadata("kdpkit").get_all("Provides-Extra") or []
    return [name for name in names if own_use or name not in _OWN_USE]


def _of_kdpkit(extra: str = "") -> list[Requirement]:
    """Give what an extra asks for, those within it among them; without one what kdpkit needs."""
    found: list[Requirement] = []
    for requirement in _requirements("kdpkit", extra):
        if requirement.name == "kdpkit":
            found += [inner for name in sorted(requirement.extras) for inner in _of_kdpkit(name)]
        else:
            found.append(requirement)
    return found


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """Read what a package, or one of its extras alone, needs on this machine."""
    try:
        texts = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    of_extra = [
        requirement
        for requirement in map(Requirement, texts)
        if bool(extra) == _names_an_extra(requirement)
    ]
    return [
        requirement
        for requirement in of_extra
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]


def _names_an_extra(requirement: Requirement) -> bool:
    return bool(re.search(r"\bextra\b", str(requirement.marker or "")))


def _unmet(requirements: Iterable[Requirement]) -> list[Requirement]:
    return [requirement for requirement in requirements if not _is_met(requirement)]


def _is_met(requirement: Requirement) -> bool:
    """Tell whether a package is installed in a version that does, and so are its extras."""
    installed = version(requirement.name)
    if not installed or not requirement.specifier.contains(installed, prereleases=True):
        return False
    return not any(_unmet(_requirements(requirement.name, name)) for name in requirement.extras)


def _is_newer(installed: str, text: str) -> bool:
    bounds = Requirement(text).specifier
    return any(bound.operator == "<" and not bound.contains(installed) for bound in bounds)


def _text(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()


def _wanted() -> dict[str, str]:
    """Give the version that kdpkit wants of each package, without those of its own tests."""
    requirements = [inner for name in ("", *_extras()) for inner in _of_kdpkit(name)]
    return {
        requirement.name: f"{requirement.name}{requirement.specifier}"
        for requirement in requirements
    }


def _misfits() -> Iterator[tuple[str, Requirement]]:
    """Find packages that are installed, in another version than a second one of them needs."""
    for package in (*_MAIN[1:], *installed_tensorflows()[1:]):
        for requirement in _requirements(package):
            is_main = canonicalize_name(requirement.name) in _MAIN
            if is_main and version(requirement.name) and not _is_met(requirement):
                yield package, requirement


def _misfit(misfit: tuple[str, Requirement]) -> _findings.Finding:
    package, requirement = misfit
    return _findings.Finding(
        "misfit",
        "refused",
        package,
        f"{package} {version(package)} needs {_text(requirement)}, and "
        f"{version(requirement.name)} is installed.",
        f"Run `{install_command([package, _text(requirement)])}`.",
    )
