"""Pythons that have some of the packages of this one, made in a second."""

import importlib.metadata
import pathlib
import sysconfig
import venv

from packaging.requirements import Requirement

PACKAGES = pathlib.Path(sysconfig.get_paths()["purelib"])


def python_without(directory, *prefixes):
    """Make one without what begins so, and return the path of its program."""
    return _python(
        directory, {e.name for e in PACKAGES.iterdir() if not e.name.startswith(prefixes)}
    )


def python_with(directory, *requirements):
    """Make one with what `pip install` of some requirements would install, kdpkit's own aside."""
    waiting, seen, names = [*requirements], set(), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        key = requirement.name, *sorted(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        package = importlib.metadata.distribution(requirement.name)
        if requirement.name != "kdpkit":
            names |= {file.parts[0] for file in package.files}
        for text in package.requires or ():
            marker = Requirement(text).marker
            extras = requirement.extras or {""}
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(text)
    return _python(directory, names - {"..", "__pycache__"})


def _python(directory, names):
    venv.create(directory, with_pip=False)
    theirs = next(directory.glob("lib*/python*/site-packages"))
    for name in names:
        (theirs / name).symlink_to(PACKAGES / name)
    return directory / "bin" / "python"
