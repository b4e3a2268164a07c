"""The table of launchers: how each describes a cluster in the environment variables that it sets.

A reader takes these variables, and returns the arguments of a `ClusterConfig`. The first launcher
in `LAUNCHERS` whose variables are set is used.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kdpkit._internal import checks

ROLES = ("chief", "worker", "ps")  # as TF_CONFIG calls them

ADDRESSES, COUNT, INDEX = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)

Environ: TypeAlias = Mapping[str, str]
Arguments: TypeAlias = dict[str, Any]  # of a `ClusterConfig`

# Variables that differ between jobs on one machine, so that their ports do, too.
_JOBS = ("MASTER_PORT", "PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "HOROVOD_GLOO_RENDEZVOUS_PORT")
# The first ports of jobs, below those from which Linux chooses for connections.
_PORTS = range(10_000, 30_000, 16)
_FIRST_NODE = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+(?=,|$)")  # in SLURM's lists


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher or a format of variables that describes a cluster."""

    name: str  # in messages
    marks: tuple[str, ...]  # variables that it sets, and no other sets all of them
    read: Callable[[Environ], Arguments]
    is_set: Callable[..., bool] = all  # `any` if one of `marks` is enough

    def started(self, environ: Environ) -> bool:
        """Return whether it started this process."""
        return self.is_set(environ.get(name, "").strip() not in ("", "{}") for name in self.marks)


def started_by(environ: Environ) -> Launcher | None:
    """Return the launcher that describes a cluster; None for a single process."""
    return next((launcher for launcher in LAUNCHERS if launcher.started(environ)), None)


def read(environ: Environ) -> Arguments:
    """Read the cluster, or raise with the likely reason why the environment describes none."""
    launcher = started_by(environ)
    if launcher is None:
        in_slurm = "In a SLURM job, start the processes with `srun`."
        elsewhere = "Start with `kdpkit launch` or SLURM's `srun`, or set TF_CONFIG."
        checks.fail(
            "No cluster is described in the environment: neither TF_CONFIG nor "
            f"{ADDRESSES} is set, nor what a launcher or a scheduler sets.",
            remedy=in_slurm if environ.get("SLURM_JOB_ID") else elsewhere,
        )
    return launcher.read(environ)


def _from_tf_config(environ: Environ) -> Arguments:
    text = environ["TF_CONFIG"]
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        checks.fail(f"TF_CONFIG is not valid JSON ({error.msg}).", TF_CONFIG=text)
    parts: Any = config if isinstance(config, dict) else {}
    cluster, task = parts.get("cluster"), parts.get("task")
    has_task = isinstance(task, dict) and {"type", "index"} <= task.keys()
    if not isinstance(cluster, dict) or not has_task:
        checks.fail(
            'TF_CONFIG must have a "cluster", lists of addresses by role, and a "task" with the '
            '"type" and "index" of this process.',
            TF_CONFIG=config,
        )
    listed = {role: checks.strings(role, cluster.get(role, ())) for role in ROLES}
    if unknown := cluster.keys() - {*ROLES, "evaluator"}:  # an evaluator does not train
        checks.fail(f"TF_CONFIG may have the roles {checks.listed(ROLES)}.", roles=sorted(unknown))
    if len(listed["chief"]) > 1:
        checks.fail("TF_CONFIG may have at most one chief.", chief=listed["chief"])
    return {
        "workers": listed["worker"],
        "chief": next(iter(listed["chief"]), None),
        "parameter_servers": listed["ps"],
        "role": task["type"],
        "index": _integer("index", task["index"]),
    }


def _from_keras(environ: Environ) -> Arguments:
    text = _required(environ, ADDRESSES, remedy="On a cloud TPU nothing needs to be set.")
    addresses = [address.strip() for address in text.split(",")]
    count = _integer(COUNT, environ.get(COUNT) or len(addresses))
    index = _integer(INDEX, _required(environ, INDEX))
    return {"workers": addresses, "index": index, "processes": count}


def _numbering(
    name: str,
    marks: tuple[str, ...],
    *,
    first: Callable[[Environ], str | None] = lambda environ: None,  # noqa: ARG005 it is unknown
    local_count: str = "",
) -> Launcher:
    """Return a launcher that numbers the processes, and knows the first one's address at most.

    The last two of its variables have the index of this process, from 0, and the number of all;
    `local_count` is the one that has the number on this machine, if there is one.
    """

    def read(environ: Environ) -> Arguments:
        index, count = (_integer(mark, environ[mark]) for mark in marks[-2:])
        local, address = environ.get(local_count), first(environ)
        is_only = count == 1 and address is None
        if is_only or (local and _integer(local_count, local) == count):
            port = _port_of(next(filter(None, map(environ.get, _JOBS)), ""))
            addresses = [f"localhost:{port + number}" for number in range(count)]
            return {"workers": addresses, "index": index}
        if address is None:
            checks.fail(
                f"The address of the first process is not among the variables of {name}.",
                **{marks[-1]: count},
                remedy="Set JAX_COORDINATOR_ADDRESS=HOST:PORT, an address of its machine, in all "
                f"of them, with JAX_NUM_PROCESSES and JAX_PROCESS_ID as "
                f"{marks[-1]} and {marks[-2]}.",
            )
        return {"workers": [address], "index": index, "processes": count}

    return Launcher(name, marks, read)


def _of_mpi(name: str, prefix: str, **settings: Any) -> Launcher:
    """Return a launcher whose variables have a prefix, and end as those of MPI libraries do."""
    marks = tuple(f"{prefix}_{end}" for end in ("LOCAL_SIZE", "RANK", "SIZE"))
    return _numbering(name, marks, local_count=marks[0], **settings)


def _first_of_torchrun(environ: Environ) -> str | None:
    port = environ.get("MASTER_PORT", "")  # at which torchrun itself listens
    return f"{environ['MASTER_ADDR']}:{int(port) + 1}" if port.isdecimal() else None


def _first_of_open_mpi(environ: Environ) -> str | None:
    """Return the address of `mpirun`, where the first process is by default."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # which Open MPI 5 does not set
    match = re.search(r"tcp6?://(\[[^],]+|[^,:\]]+)", uri)
    if not match:
        return None
    host = f"{match[1]}]" if match[1].startswith("[") else match[1]
    return f"{host}:{_port_of(uri.partition('.')[0])}"


def _first_of_hydra(environ: Environ) -> str | None:
    """Return the first node of the list that Hydra reads in a SLURM job; None elsewhere."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    return _first_of_slurm({**environ, "SLURM_STEP_NODELIST": nodes}) if nodes else None


def _first_of_slurm(environ: Environ) -> str:
    """Return the address of the first node of a list, where `srun` starts the first process.

    >>> _first_of_slurm({"SLURM_STEP_NODELIST": "gpu[08-10,12]n1,login1", "SLURM_JOB_ID": "4712"})
    'gpu08n1:25392'
    """
    nodes = environ["SLURM_STEP_NODELIST"]
    first = _FIRST_NODE.match(nodes)
    if not first:
        checks.fail("SLURM's list of nodes must look like 'gpu[01-03,07],login1'.", nodes=nodes)
    host = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", first[0])
    return f"{host}:{_port_of(environ.get('SLURM_JOB_ID', ''))}"


def _port_of(job: str) -> int:
    """Return the first port of a job; jobs on one machine with consecutive numbers differ."""
    number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return _PORTS[number % len(_PORTS)]


def _required(environ: Environ, name: str, remedy: str = "") -> str:
    if not environ.get(name):
        checks.fail(f"{name} must be set too.", remedy=remedy)
    return environ[name]


def _integer(name: str, value: str | int) -> int:
    """Accept a number from 0, or its digits."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    return checks.integer(name, value, minimum=0)


LAUNCHERS = (
    # Variables that were set for this program come before those that are set for every program.
    Launcher("TF_CONFIG", ("TF_CONFIG",), _from_tf_config),
    Launcher("KERAS_DISTRIBUTION", (ADDRESSES, COUNT, INDEX), _from_keras, is_set=any),
    # Launchers come before SLURM, under which they also run, and which sets PMI's variables itself.
    _numbering(
        "JAX",
        ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        first=lambda environ: environ["JAX_COORDINATOR_ADDRESS"],
    ),
    _numbering(
        "torchrun",
        ("MASTER_ADDR", "RANK", "WORLD_SIZE"),
        first=_first_of_torchrun,
        local_count="LOCAL_WORLD_SIZE",
    ),
    _of_mpi("Open MPI", "OMPI_COMM_WORLD", first=_first_of_open_mpi),
    _of_mpi("MVAPICH", "MV2_COMM_WORLD"),
    _of_mpi("jsrun", "JSM_NAMESPACE"),
    _of_mpi("horovodrun", "HOROVOD"),
    _numbering(
        "MPICH or Intel MPI",  # whose `mpiexec` is Hydra
        ("MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"),
        first=_first_of_hydra,
        local_count="MPI_LOCALNRANKS",
    ),
    _numbering(
        "SLURM",
        ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        first=_first_of_slurm,
    ),
    _numbering("PMI (PALS, Flux)", ("PMI_RANK", "PMI_SIZE"), local_count="PMI_LOCAL_SIZE"),
)
