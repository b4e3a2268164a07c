"""The table of launchers: how each describes a cluster in the environment variables that it sets.

A reader takes these variables and what the caller expects, and returns the arguments of a
`ClusterConfig`. The first launcher in `LAUNCHERS` whose variables are set is used.
"""

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from kdpkit._internal import checks

ROLES = ("chief", "worker", "ps", "evaluator")  # as TF_CONFIG calls them

ADDRESSES, COUNT, INDEX = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)

Environ: TypeAlias = Mapping[str, str]
Arguments: TypeAlias = dict[str, Any]  # of a `ClusterConfig`

_PORT = 9876  # where every process has a network address of its own
_PORTS = range(10_000, 30_000, 16)  # of jobs; below those that Linux gives to connections
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NODE = rf"(?:[^,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the caller expects of the cluster."""

    processes: int | None = None
    parameter_servers: int | None = None
    base_port: int | None = None
    service: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("parameter_servers", 0), ("base_port", 1)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum=least)


@dataclasses.dataclass(frozen=True)
class Launcher:
    """What describes a cluster.

    Args:
        name: As messages call it.
        marks: Variables that are all set where it started this process; no other sets them all.
        read: Reads the cluster.
        is_set: `any` if one of `marks` is enough.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Environ, Wanted], Arguments]
    is_set: Callable[..., bool] = all

    def started(self, environ: Environ) -> bool:
        """Return whether it started this process."""
        return self.is_set(environ.get(name, "").strip() not in ("", "{}") for name in self.marks)


def of(environ: Environ) -> Launcher | None:
    """Return what describes a cluster; None for a single process."""
    return next((launcher for launcher in LAUNCHERS if launcher.started(environ)), None)


def read(environ: Environ, wanted: Wanted) -> Arguments:
    """Read whatever describes a cluster, or raise, with the likely reason why nothing does."""
    launcher = of(environ)
    if launcher is None:
        _fail_without_cluster(environ)
    return launcher.read(environ, wanted)


def _fail_without_cluster(environ: Environ) -> NoReturn:
    remedy = "Start with `kdpkit launch`, SLURM's `srun` or Kubernetes, or set TF_CONFIG."
    if environ.get("SLURM_JOB_ID"):
        remedy = "In a SLURM job, start the processes with `srun`."
    elif environ.get("KUBERNETES_SERVICE_HOST"):
        remedy = "On Kubernetes, set `completionMode: Indexed` on the Job."
    checks.fail(
        "No cluster is described in the environment: neither TF_CONFIG nor "
        f"{ADDRESSES} is set, nor what a launcher or a scheduler sets.",
        remedy=remedy,
    )


# Those that list all processes by role.


def _from_tf_config(environ: Environ, _wanted: Wanted) -> Arguments:
    # A chief was called master in TensorFlow 1, and is in some clouds.
    return _by_role("TF_CONFIG", environ, {role: role for role in ROLES} | {"master": "chief"})


def _from_vertex(environ: Environ, _wanted: Wanted) -> Arguments:
    pools = {f"workerpool{number}": role for number, role in enumerate(ROLES)}
    return _by_role("CLUSTER_SPEC", environ, pools)


def _by_role(name: str, environ: Environ, roles: Mapping[str, str]) -> Arguments:
    config = _json(name, environ, dict)
    cluster, task = config.get("cluster"), config.get("task")
    has_task = isinstance(task, dict) and {"type", "index"} <= task.keys()
    if not isinstance(cluster, dict) or not has_task:
        checks.fail(
            f'{name} must have a "cluster", lists of addresses by role, and a "task" with the '
            '"type" and "index" of this process.',
            **{name: config},
        )
    if unknown := sorted(cluster.keys() - roles.keys()):
        checks.fail(f"{name} has unknown roles; there are {', '.join(roles)}.", roles=unknown)
    listed: dict[str, list[str]] = {role: [] for role in ROLES}
    for given, addresses in cluster.items():
        listed[roles[given]] += checks.strings(given, addresses)
    if len(listed["chief"]) > 1:
        checks.fail(f"{name} may have at most one chief.", chief=listed["chief"])
    return {
        "workers": listed["worker"],
        "chief": next(iter(listed["chief"]), None),
        "parameter_servers": listed["ps"],
        "evaluators": listed["evaluator"],
        "role": roles.get(str(task["type"]), str(task["type"])),
        "index": _integer("index", task["index"]),
    }


def _from_keras(environ: Environ, wanted: Wanted) -> Arguments:
    text = _required(environ, ADDRESSES, remedy="On a cloud TPU nothing needs to be set.")
    addresses = [address.strip() for address in text.split(",")]
    count = _integer(COUNT, environ.get(COUNT) or len(addresses))
    return _numbered(_integer(INDEX, _required(environ, INDEX)), count, addresses, wanted)


def _from_sagemaker(environ: Environ, wanted: Wanted) -> Arguments:
    """Read SageMaker's hosts, one process on each."""
    names = checks.strings("SM_HOSTS", _json("SM_HOSTS", environ, list))
    current = checks.one_of("SM_CURRENT_HOST", environ.get("SM_CURRENT_HOST", ""), names)
    first = _port_of(environ.get("TRAINING_JOB_NAME", environ["SM_HOSTS"]), wanted)
    addresses = [f"{name}:{first}" for name in names]
    return _numbered(names.index(current), len(names), addresses, wanted)


# Those that number the processes, and have the address of the first one at most.


def _numbering(
    name: str,
    *marks: str,
    here: str | None = None,
    first: Callable[[Environ, Wanted], str | None] = lambda *_: None,
) -> Launcher:
    """Return the launcher of processes that are on one machine, or of which the first is known.

    Args:
        name: Of the launcher.
        marks: Variables that it sets; the last two have the index of this process, from 0, and the
            number of all.
        here: The variable that has how many of them are on this machine, if the launcher says so.
        first: Returns the address of the first process, or None.
    """

    def read(environ: Environ, wanted: Wanted) -> Arguments:
        index, count = (_integer(mark, environ[mark]) for mark in marks[-2:])
        if here and environ.get(here) and _integer(here, environ[here]) == count:
            # Both differ between jobs on one machine.
            job = environ.get("MASTER_PORT") or environ.get("PMIX_NAMESPACE", "")
            port = _port_of(job, wanted)
            addresses = [f"localhost:{port + number}" for number in range(count)]
            return _numbered(index, count, addresses, wanted)
        address = first(environ, wanted)
        if address is None:
            checks.fail(
                f"The address of the first process is not among the variables of {name}.",
                **{marks[-1]: count},
                remedy="Set JAX_COORDINATOR_ADDRESS=HOST:PORT, an address of its machine, in all "
                f"of them, with JAX_NUM_PROCESSES and JAX_PROCESS_ID as "
                f"{marks[-1]} and {marks[-2]}.",
            )
        return _numbered(index, count, [address], wanted)

    return Launcher(name, marks, read)


def _first_of_torchrun(environ: Environ, wanted: Wanted) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not (wanted.base_port or port.isdecimal()):
        return None
    return f"{host}:{wanted.base_port or int(port) + 1}"  # torchrun itself listens at MASTER_PORT


def _first_of_open_mpi(environ: Environ, wanted: Wanted) -> str | None:
    """Return the address of `mpirun`, where the first process is by default."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # before Open MPI 5
    found = re.search(r"tcp6?://(\[[^],]+|[^,:\]]+)", uri)
    if not found:
        return None
    host = f"{found[1]}]" if found[1].startswith("[") else found[1]
    return f"{host}:{_port_of(uri.partition('.')[0], wanted)}"


def _first_of_jax_job(environ: Environ, _wanted: Wanted) -> str | None:
    port = environ.get("COORDINATOR_PORT")
    return f"{environ['COORDINATOR_ADDRESS']}:{port}" if port else None


# SLURM.


def _from_slurm(environ: Environ, wanted: Wanted) -> Arguments:
    index = _integer("SLURM_PROCID", environ["SLURM_PROCID"])
    nodes = _nodes(_required(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    count = _integer(
        "SLURM_NTASKS", _required(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    )
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH"
    if count > 1 and in_batch_script and "SLURM_STEP_NODELIST" not in environ:
        checks.fail(
            "This is the batch script itself, not one of the job's tasks.",
            SLURM_NTASKS=count,
            remedy="Start the program in it with `srun`.",
        )
    tasks = _tasks(environ, len(nodes), count)
    here = tasks[index] if index < count else ()  # `ClusterConfig` reports such an index
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), here, strict=False):
        if environ.get(name) and _integer(name, environ[name]) != expected:
            checks.fail(
                f"Task {index} is not where its number puts it.",
                **{name: environ[name]},
                expected=expected,
                remedy="Start the tasks with `srun --distribution=block`.",
            )
    first = _port_of(environ.get("SLURM_JOB_ID", ""), wanted)
    addresses = [f"{nodes[node]}:{first + local}" for node, local in tasks]
    return _with_roles(addresses, index, wanted)


def _nodes(text: str) -> list[str]:
    """Expand SLURM's list of nodes.

    >>> _nodes("gpu[01-03,07],login1,r[1-2]n[8-9]")[2:8]
    ['gpu03', 'gpu07', 'login1', 'r1n8', 'r1n9', 'r2n8']
    """
    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", text):
        checks.fail("SLURM's list of nodes must look like 'gpu[01-03,07],login1'.", nodes=text)
    nodes: list[str] = []
    for name in re.findall(_NODE, text):
        parts = re.split(r"\[(.*?)\]", name)  # alternately between brackets and within
        choices = [[*_numbers(part)] if i % 2 else [part] for i, part in enumerate(parts)]
        nodes += map("".join, itertools.product(*choices))
    if len(set(nodes)) != len(nodes):
        checks.fail("A node appears twice in SLURM's list of nodes.", nodes=text)
    return nodes


def _numbers(ranges: str) -> Iterator[str]:
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _tasks(environ: Environ, nodes: int, count: int) -> list[tuple[int, int]]:
    """Return every task's node, and its number there, as in `2(x3),1` and SLURM_DISTRIBUTION."""
    text = _required(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    parts = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part) for part in text.split(",")]
    per_node = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if not all(parts) or len(per_node) != nodes or sum(per_node) != count:
        checks.fail(
            "SLURM's tasks per node must look like '2(x3),1', for as many nodes and tasks as it "
            "has.",
            SLURM_TASKS_PER_NODE=text,
            nodes=nodes,
            tasks=count,
            remedy="Set none by hand; `srun` sets all.",
        )
    tasks = [(node, local) for node, of_node in enumerate(per_node) for local in range(of_node)]
    way = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if way == "cyclic":
        tasks.sort(key=lambda task: (task[1], task[0]))
    elif way not in ("block", "", "*") and nodes > 1 and max(per_node) > 1:
        checks.fail(
            "Tasks must be spread over nodes by block or cyclic.",
            SLURM_DISTRIBUTION=environ["SLURM_DISTRIBUTION"],
            remedy="Start them with `srun --distribution=block`.",
        )
    return tasks


# Kubernetes.


def _from_kubernetes(environ: Environ, wanted: Wanted) -> Arguments:
    pod = _integer("JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    if wanted.processes is None:
        checks.fail(
            "A Kubernetes pod cannot see how many pods there are.",
            JOB_COMPLETION_INDEX=pod,
            remedy="Pass `processes`, their total number.",
        )
    read_names = _jobset if environ.get("JOBSET_NAME") else _indexed_job
    names, index = read_names(environ, pod, wanted.processes, wanted.service)
    return _with_roles([f"{name}:{wanted.base_port or _PORT}" for name in names], index, wanted)


def _indexed_job(
    environ: Environ, pod: int, processes: int, service: str | None
) -> tuple[list[str], int]:
    """Name the pods `<job>-<index>.<service>`."""
    host = _required(environ, "HOSTNAME").partition(".")[0]
    job, _, number = host.rpartition("-")
    if not job or number != str(pod):
        checks.fail(
            "In an indexed Job, a pod's host name ends with its index.",
            HOSTNAME=host,
            JOB_COMPLETION_INDEX=pod,
            remedy="Leave both as Kubernetes sets them.",
        )
    if not service:
        checks.fail(
            "The pods of a Job reach each other through a headless service.",
            service=service,
            remedy="Pass its name, the pods' `subdomain`, as `service`.",
        )
    return [f"{job}-{index}.{service}" for index in range(processes)], pod


def _jobset(
    environ: Environ, pod: int, processes: int, service: str | None
) -> tuple[list[str], int]:
    """Name the pods `<jobset>-<replicatedjob>-<job>-<pod>.<subdomain>`."""
    label = "Set it in the pod's `env` from the JobSet's label."
    jobset = environ["JOBSET_NAME"]
    name = _required(environ, "REPLICATED_JOB_NAME", remedy=label)
    job = _integer("JOB_INDEX", _required(environ, "JOB_INDEX", remedy=label))
    replicas = "REPLICATED_JOB_REPLICAS"  # not needed for the first Job, if it is the only one
    jobs = 1 if job == 0 and not environ.get(replicas) else None
    jobs = jobs or _integer(replicas, _required(environ, replicas, remedy=label))
    pods, left = divmod(processes, max(jobs, 1))
    if left or job >= jobs or pod >= pods:
        checks.fail(
            "The pods of a JobSet must be spread evenly over its Jobs, this one among them.",
            processes=processes,
            REPLICATED_JOB_REPLICAS=jobs,
            JOB_INDEX=job,
            JOB_COMPLETION_INDEX=pod,
        )
    domain = service or jobset
    names = [f"{jobset}-{name}-{j}-{p}.{domain}" for j in range(jobs) for p in range(pods)]
    return names, job * pods + pod


# What they have in common.


def _numbered(index: int, count: int, addresses: Sequence[str], wanted: Wanted) -> Arguments:
    """Return the arguments for processes of which all, or only the first, have an address."""
    if not wanted.parameter_servers:
        return {"workers": addresses, "index": index, "processes": count}
    if len(addresses) != count:
        checks.fail("With parameter servers all addresses are needed.", addresses=addresses)
    return _with_roles(addresses, index, wanted)


def _with_roles(addresses: Sequence[str], index: int, wanted: Wanted) -> Arguments:
    """Make the first process the chief and the last ones servers, if there are servers."""
    servers = wanted.parameter_servers
    if not servers:
        return {"workers": addresses, "index": index}
    workers = len(addresses) - servers - 1
    if workers < 1:
        checks.fail(
            "Besides the parameter servers there must be a chief and a worker.",
            processes=len(addresses),
            parameter_servers=servers,
        )
    role, number = ("worker", index - 1) if index <= workers else ("ps", index - 1 - workers)
    return {
        "chief": addresses[0],
        "workers": addresses[1 : workers + 1],
        "parameter_servers": addresses[workers + 1 :],
        "role": role if index else "chief",
        "index": number if index else 0,
    }


def _port_of(job: str, wanted: Wanted) -> int:
    """Return the first port of a job: those on one machine, and in a row, get different ones."""
    number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return wanted.base_port or _PORTS[number % len(_PORTS)]


def _required(environ: Environ, *names: str, remedy: str = "") -> str:
    """Return the first of these variables that is set."""
    value = next((environ[name] for name in names if environ.get(name)), None)
    if value is None:
        checks.fail(f"{' or '.join(names)} must be set too.", remedy=remedy)
    return value


def _json(name: str, environ: Environ, kind: type) -> Any:
    """Return what a variable holds, an object or a list."""
    try:
        found = json.loads(environ[name])
    except json.JSONDecodeError as error:
        checks.fail(f"{name} is not valid JSON ({error.msg}).", **{name: environ[name]})
    if not isinstance(found, kind):
        checks.fail(f"{name} must be a JSON {kind.__name__}.", **{name: environ[name]})
    return found


def _integer(name: str, value: str | int) -> int:
    """Accept a number from 0, or its digits."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    return checks.integer(name, value, minimum=0)


LAUNCHERS = (
    # What was set for this program goes before what is set for all programs.
    Launcher("TF_CONFIG", ("TF_CONFIG",), _from_tf_config),
    Launcher("KERAS_DISTRIBUTION", (ADDRESSES, COUNT, INDEX), _from_keras, is_set=any),
    # `mpirun` also runs in pods and under SLURM.
    _numbering(
        "JAX",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_PROCESS_ID",
        "JAX_NUM_PROCESSES",
        first=lambda environ, _: environ["JAX_COORDINATOR_ADDRESS"],
    ),
    _numbering(
        "JAXJob", "COORDINATOR_ADDRESS", "PROCESS_ID", "NUM_PROCESSES", first=_first_of_jax_job
    ),
    _numbering(
        "torchrun",
        "MASTER_ADDR",
        "RANK",
        "WORLD_SIZE",
        here="LOCAL_WORLD_SIZE",
        first=_first_of_torchrun,
    ),
    _numbering(
        "Open MPI",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        first=_first_of_open_mpi,
    ),
    _numbering("MPICH", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", here="MPI_LOCALNRANKS"),
    Launcher("Vertex AI", ("CLUSTER_SPEC",), _from_vertex),
    Launcher("SageMaker", ("SM_HOSTS",), _from_sagemaker),
    Launcher("SLURM", ("SLURM_PROCID",), _from_slurm),
    Launcher("Kubernetes", ("JOB_COMPLETION_INDEX",), _from_kubernetes),
)
