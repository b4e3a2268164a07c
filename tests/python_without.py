"""A Python that has all packages of this one but some, made in a second and without a network."""

import pathlib
import sysconfig
import venv


def python_without(directory, *prefixes):
    """Make it, without what begins so, and return the path of its program."""
    venv.create(directory, with_pip=False)
    theirs = next(directory.glob("lib*/python*/site-packages"))
    for entry in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(prefixes):
            (theirs / entry.name).symlink_to(entry)
    return directory / "bin" / "python"
