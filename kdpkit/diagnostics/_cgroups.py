"""What a container may use of its machine: the limits of control groups, on Linux."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED_AT = Path("/sys/fs/cgroup")


class Limits(NamedTuple):
    """The processor time, in cores, and the bytes of memory; None where there is no limit."""

    cores: float | None
    memory_bytes: int | None


def limits(membership: Path = _MEMBERSHIP, mounted_at: Path = _MOUNTED_AT) -> Limits:
    """Read the tightest limits of this process's groups and of those around them.

    Args:
        membership: The file that names the groups, of version 1 and 2.
        mounted_at: Where they are found. A container may see its own group there, as the root.
    """
    cores: list[float] = []
    memory: list[int] = []
    for group in _groups(membership, mounted_at):
        cores += _cores(group)
        memory += _numbers(group, "memory.max") + _numbers(group, "memory.limit_in_bytes")
    return Limits(min(cores, default=None), min(memory, default=None))


def _groups(membership: Path, mounted_at: Path) -> Iterator[Path]:
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = mounted_at / controllers  # version 2 has no controllers here, nor a directory more
        group = root / path.strip("/")
        yield group
        yield from (outer for outer in group.parents if outer.is_relative_to(root))


def _cores(group: Path) -> list[float]:
    quota = _numbers(group, "cpu.cfs_quota_us") + _numbers(group, "cpu.cfs_period_us")
    quota = _numbers(group, "cpu.max") or quota
    return [quota[0] / quota[1]] if len(quota) == 2 and quota[0] > 0 else []


def _numbers(group: Path, name: str) -> list[int]:
    """Give the numbers of a file; none where it says "max" or is not there."""
    try:
        words = (group / name).read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if "max" not in words else []
