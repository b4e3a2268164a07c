"""The environment variables of launchers: `torchrun`, `mpirun`, Kubeflow, and those of clouds.

Most have no addresses. Processes that are all on one machine have its address; of several machines
only that of the first process is known.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from kdpkit._internal import checks

Environ = Mapping[str, str]
_PORTS = range(10_000, 30_000, 16)  # below those that Linux gives to connections
_JOBS = ("MASTER_PORT", "PMIX_NAMESPACE")  # differ between jobs on one machine


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The environment variables of a launcher.

    Args:
        mark: Is set by it, and by no other.
        index: Has the number of this process, from 0.
        count: Has the number of all processes.
        on_this_machine: Has how many of them are on this machine, if the launcher says so.
        first: Returns the address of the first process, or None; takes the variables, and the
            argument `base_port` of `ClusterConfig.from_environment`.
    """

    mark: str
    index: str
    count: str
    on_this_machine: str | None
    first: Callable[[Environ, int | None], str | None]

    def started(self, environ: Environ) -> bool:
        """Return whether it started this process."""
        return all(environ.get(name) for name in (self.mark, self.index, self.count))


@dataclasses.dataclass(frozen=True)
class Position:
    """This process among all, and the addresses of all, or of the first alone."""

    index: int
    count: int
    addresses: Sequence[str]


def port_of(job: str, base_port: int | None) -> int:
    """Return the first port of a job: jobs on one machine get different ones."""
    return base_port or _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _of_torchrun(environ: Environ, base_port: int | None) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not host or not (base_port or port.isdecimal()):
        return None
    return f"{host}:{base_port or int(port) + 1}"  # torchrun itself listens at MASTER_PORT


def _of_open_mpi(environ: Environ, base_port: int | None) -> str | None:
    """Return the address of `mpirun`, where the first process is, unless it is told otherwise."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # before Open MPI 5
    found = re.search(r"tcp6?://(?:\[([^],]+)|([^,:\]]+))", uri)
    if not found:
        return None
    host = f"[{found[1]}]" if found[1] else found[2]
    return f"{host}:{port_of(uri.partition('.')[0], base_port)}"


def _of_jax(environ: Environ, _base_port: int | None) -> str | None:
    return environ.get("JAX_COORDINATOR_ADDRESS")


def _of_jax_job(environ: Environ, _base_port: int | None) -> str | None:
    parts = [environ.get(f"COORDINATOR_{name}") for name in ("ADDRESS", "PORT")]
    return ":".join(part for part in parts if part) if all(parts) else None


# The first that started a process is the one: `mpirun` also runs in pods and under SLURM.
LAUNCHERS = {
    "JAX": Launcher(
        "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", None, _of_jax
    ),
    "JAXJob": Launcher("COORDINATOR_ADDRESS", "PROCESS_ID", "NUM_PROCESSES", None, _of_jax_job),
    "torchrun": Launcher("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", _of_torchrun),
    "Open MPI": Launcher(
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        _of_open_mpi,
    ),
    "MPICH": Launcher(
        "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", lambda *_: None
    ),
}


def launcher_of(environ: Environ) -> str | None:
    """Return which of `LAUNCHERS` started this process."""
    return next((name for name, of in LAUNCHERS.items() if of.started(environ)), None)


def position(name: str, environ: Environ, base_port: int | None) -> Position:
    """Read this process' position from the variables of a launcher.

    Raises:
        ValueError: It is damaged, or no process' address is known.
    """
    launcher = LAUNCHERS[name]
    index, count = (integer(key, environ[key]) for key in (launcher.index, launcher.count))
    here = launcher.on_this_machine
    if here and environ.get(here) and integer(here, environ[here]) == count:
        job = next(filter(None, map(environ.get, _JOBS)), "")
        first = port_of(job, base_port)
        return Position(index, count, [f"localhost:{first + i}" for i in range(count)])
    address = launcher.first(environ, base_port)
    if address is None:
        _reject_unknown_address(name, launcher, count)
    return Position(index, count, [address])


def _reject_unknown_address(name: str, launcher: Launcher, count: int) -> NoReturn:
    checks.fail(
        f"The address of the first process is not among the variables of {name}.",
        **{launcher.count: count},
        remedy="Set JAX_COORDINATOR_ADDRESS=HOST:PORT, an address of its machine, in all of them, "
        f"with JAX_NUM_PROCESSES and JAX_PROCESS_ID as {launcher.count} and {launcher.index}.",
    )


def vertex_roles(environ: Environ) -> dict[str, object]:
    """Translate Vertex AI's CLUSTER_SPEC to what TF_CONFIG has."""
    names = ("chief", "worker", "ps", "evaluator")
    roles = {f"workerpool{number}": role for number, role in enumerate(names)}
    spec = json_of("CLUSTER_SPEC", environ["CLUSTER_SPEC"])
    cluster, task = spec.get("cluster"), spec.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict) or cluster.keys() - roles.keys():
        checks.fail(
            "CLUSTER_SPEC must have a `cluster` of worker pools, and a `task`.", CLUSTER_SPEC=spec
        )
    return {
        "cluster": {roles[pool]: addresses for pool, addresses in cluster.items()},
        "task": {**task, "type": roles.get(str(task.get("type")), task.get("type"))},
    }


def sagemaker_position(environ: Environ, base_port: int | None) -> Position:
    """Read SageMaker's hosts, one process on each."""
    hosts = environ["SM_HOSTS"]
    try:
        names = checks.strings("SM_HOSTS", json.loads(hosts))
    except json.JSONDecodeError as error:
        checks.fail(f"SM_HOSTS is not valid JSON ({error.msg}).", SM_HOSTS=hosts)
    current = environ.get("SM_CURRENT_HOST")
    if current not in names:
        checks.fail("SM_CURRENT_HOST must be one of SM_HOSTS.", SM_CURRENT_HOST=current)
    job = environ.get("TRAINING_JOB_NAME", hosts)
    addresses = [f"{name}:{port_of(job, base_port)}" for name in names]
    return Position(names.index(current), len(names), addresses)


def json_of(name: str, text: str) -> dict[str, object]:
    """Return the object in a variable."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        checks.fail(f"{name} is not valid JSON ({error.msg}).", **{name: text})
    if not isinstance(found, dict):
        checks.fail(f"{name} must be a JSON object.", **{name: text})
    return found


def integer(name: str, text: str) -> int:
    """Accept the digits of a number from 0."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        checks.fail(f"{name} must be an integer of at least 0.", value=text)
    return int(text)
