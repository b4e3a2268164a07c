"""Threads for JAX's logical CPU devices: with as many as cores, training can hang."""

import os


def reserve(devices: int) -> None:
    """Have XLA start two threads for each CPU device, where the machine has fewer cores than that.

    Its CPU client runs the programs of all devices, and the launches of the next ones, on one pool
    of as many threads as there are cores (at least one for each device). Once a device has 32
    programs waiting, a launch keeps its thread until one of them ends. One thread held so, and the
    others in an all-reduce, leave a device of the same all-reduce without a thread: XLA ends the
    process after 40 seconds ("only 1 of 2 threads arrived"). A launch and a program at a time are
    what a device can hold: with two threads each, all of them get on.

    It must be called before JAX starts. `PJRT_NPROC` stays as it is where it is set.
    """
    if cores() < 2 * devices:
        os.environ.setdefault("PJRT_NPROC", str(2 * devices))


def split_for_jax(devices: int) -> None:
    """Have XLA split the CPU into devices, with enough threads, before JAX starts."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    reserve(devices)


def cores() -> int:
    """Count the cores that this process may use; a container's CPU quota is another matter."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows
