"""What is left out of reports that people paste into issues: paths, names, secrets."""

import getpass
import os
import re
import socket
from pathlib import Path

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 4  # of what is searched for: "root" is a user, and "a" a letter
_PART = r"[^\s/\\'\":;,()]+"
_DIRECTORIES = re.compile(rf"(?<![\w./\\])(?:~|[A-Za-z]:)?(?:[/\\]{_PART})+[/\\](?={_PART})|~[/\\]")


def without(text: str) -> str:
    """Return a text without directories, names of machine and user, and values of secrets.

    >>> without("No such file: /home/ann/data/x.txt")
    'No such file: x.txt'
    """
    home = str(Path.home())
    if len(home) >= _SHORTEST:
        text = text.replace(home, "~")
    text = _DIRECTORIES.sub("", text)
    secrets = [value for name, value in os.environ.items() if _SECRET.search(name)]
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, "...")
    for name in (socket.gethostname(), _user()):
        if len(name) >= _SHORTEST:
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container that does not know its user
        return ""
