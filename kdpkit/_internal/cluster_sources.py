"""How schedulers and frameworks tell a process who takes part: `kdpkit.cluster` reads it here.

Every reader takes the environment variables and gives the arguments of a `ClusterConfig`.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from kdpkit import _checks

ROLES = ("chief", "worker", "ps", "evaluator")  # as TF_CONFIG calls them

ADDRESSES, COUNT, INDEX = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)

_PORT = 9876  # where every process has a network address of its own
_MOST_NODES = 1 << 16  # of a SLURM cluster


def source(environ: Mapping[str, str]) -> str | None:
    """Do what `kdpkit.cluster.source` says."""
    if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return "TF_CONFIG"
    if any(environ.get(name) for name in (ADDRESSES, COUNT, INDEX)):
        return "KERAS_DISTRIBUTION"
    if environ.get("SLURM_PROCID"):
        return "SLURM"
    return "Kubernetes" if environ.get("JOB_COMPLETION_INDEX") else None


def read(environ: Mapping[str, str], wanted: "Wanted") -> dict[str, Any]:
    """Read whatever describes a cluster."""
    name = source(environ)
    if name is None:
        _refuse_nothing(environ)
    return _READERS[name](environ, wanted)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the caller says of the cluster."""

    processes: int | None
    parameter_servers: int | None
    base_port: int | None
    service: str | None

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("parameter_servers", 0), ("base_port", 1)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _checks.integer(name, value, minimum=least))

    def port(self, default: int) -> int:
        """Give the first port of a node."""
        return self.base_port or default


def _refuse_nothing(environ: Mapping[str, str]) -> NoReturn:
    """Refuse an environment without a cluster, with the likely reason."""
    if environ.get("SLURM_JOB_ID"):
        hint = "In a SLURM job, start the processes with `srun`."
    elif environ.get("KUBERNETES_SERVICE_HOST"):
        hint = "On Kubernetes, give the Job `completionMode: Indexed`."
    else:
        hint = "Start with `kdpkit launch`, SLURM's `srun` or Kubernetes, or set TF_CONFIG."
    _checks.refuse(
        "No cluster is described in the environment: neither TF_CONFIG nor "
        "KERAS_DISTRIBUTION_JOB_ADDRESSES, SLURM_PROCID or JOB_COMPLETION_INDEX is set.",
        remedy=hint,
    )


# TF_CONFIG.


def _from_tf_config(environ: Mapping[str, str], _wanted: Wanted) -> dict[str, Any]:
    text = environ["TF_CONFIG"]
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        _checks.refuse(f"TF_CONFIG is no JSON ({error.msg}).", TF_CONFIG=text)
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict):
        _checks.refuse(
            'TF_CONFIG must have a "cluster" of lists of addresses by role.', TF_CONFIG=text
        )
    unknown = cluster.keys() - set(ROLES)
    if unknown:
        _checks.refuse(
            f"TF_CONFIG has roles that are none of {', '.join(ROLES)}.", roles=sorted(unknown)
        )
    of_role = {role: _checks.strings(role, of) for role, of in cluster.items()}
    if len(of_role.get("chief", ())) > 1:
        _checks.refuse("TF_CONFIG may have one chief.", chief=cluster["chief"])
    role, index = _task(config.get("task"))
    return {
        "workers": of_role.get("worker", ()),
        "chief": next(iter(of_role.get("chief", ())), None),
        "parameter_servers": of_role.get("ps", ()),
        "evaluators": of_role.get("evaluator", ()),
        "role": role,
        "index": index,
    }


def _task(task: Any) -> tuple[str, int]:
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        _checks.refuse(
            'TF_CONFIG must have a "task" with the "type" and "index" of this process.', task=task
        )
    return str(task["type"]), _whole("The index of the task", task["index"])


# Keras.


def _from_keras(environ: Mapping[str, str], wanted: Wanted) -> dict[str, Any]:
    text = _required(environ, ADDRESSES, remedy="On a cloud TPU nothing needs to be set.")
    addresses = [address.strip() for address in text.split(",")]
    count = environ.get(COUNT)
    index = _whole(INDEX, _required(environ, INDEX))
    processes = len(addresses) if count is None else _whole(COUNT, count)
    if len(addresses) not in (1, processes):
        _checks.refuse(
            f"{ADDRESSES} must have an address for every process, or that of the first alone.",
            addresses=len(addresses),
            processes=processes,
        )
    if len(addresses) == processes:
        return _roles(addresses, index, wanted)
    if wanted.parameter_servers:
        _checks.refuse("With parameter servers all addresses are needed.", addresses=addresses)
    return {"workers": addresses, "index": index, "processes": processes}


# SLURM.


def _from_slurm(environ: Mapping[str, str], wanted: Wanted) -> dict[str, Any]:
    index = _whole("SLURM_PROCID", environ["SLURM_PROCID"])
    nodes = _nodes(_required(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    count = _whole(
        "SLURM_NTASKS", _required(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    )
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH"
    if count > 1 and in_batch_script and "SLURM_STEP_NODELIST" not in environ:
        _checks.refuse(
            "This is the batch script itself and none of the job's tasks.",
            SLURM_NTASKS=count,
            remedy="Start the program in it with `srun`.",
        )
    places = _places(_tasks_per_node(environ, len(nodes), count), environ)
    if len(places) != count:
        _checks.refuse(
            "SLURM's tasks per node must add up to its tasks.", per_node=len(places), tasks=count
        )
    if index < count:
        _check_local_id(environ, index, places[index])
    first = wanted.port(_slurm_port(environ))
    addresses = [f"{nodes[node]}:{first + local}" for node, local in places]
    return _roles(addresses, index, wanted)


def _nodes(text: str) -> list[str]:
    """Expand SLURM's list of nodes.

    >>> _nodes("gpu[01-03,07],login1,r[1-2]n[8-9]")[2:8]
    ['gpu03', 'gpu07', 'login1', 'r1n8', 'r1n9', 'r2n8']
    """
    names = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(names) != text:
        _refuse_nodes(text)
    nodes = [node for name in names for node in _expanded(name, text)]
    if len(set(nodes)) != len(nodes):
        _checks.refuse("A node stands twice in SLURM's list of nodes.", nodes=text)
    return nodes


def _expanded(name: str, text: str) -> list[str]:
    """Expand the brackets of a name, each with each."""
    pieces = re.split(r"\[([^\[\]]*)\]", name)  # between brackets and within, in turn
    choices = [
        [number for part in piece.split(",") for number in _range(part, text)] if i % 2 else [piece]
        for i, piece in enumerate(pieces)
    ]
    if sum(map(len, choices)) > _MOST_NODES:
        _refuse_nodes(text)
    return ["".join(choice) for choice in itertools.product(*choices)]


def _range(part: str, text: str) -> Iterator[str]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
    if not found:
        _refuse_nodes(text)
    first, last = found[1], found[2] or found[1]
    if not 0 <= int(last) - int(first) < _MOST_NODES:
        _refuse_nodes(text)
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _refuse_nodes(text: str) -> NoReturn:
    _checks.refuse("SLURM's list of nodes must be one such as 'gpu[01-03,07],login1'.", nodes=text)


def _tasks_per_node(environ: Mapping[str, str], nodes: int, tasks: int) -> list[int]:
    """Expand `2(x3),1`; without it, tasks that fit evenly."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = _first(environ, names)
    if text is None:
        if tasks % nodes:
            _checks.refuse(
                f"{names[1]} is not set, and the tasks do not spread evenly.",
                tasks=tasks,
                nodes=nodes,
            )
        return [tasks // nodes] * nodes
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part.strip())
        if not found:
            _checks.refuse("SLURM's tasks per node must be such as '2(x3),1'.", **{names[1]: text})
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) != nodes:
        _checks.refuse(
            "SLURM's tasks per node must be for as many nodes as it lists.",
            **{names[1]: text},
            nodes=nodes,
            remedy="Set neither by hand; `srun` sets both.",
        )
    return counts


def _places(per_node: Sequence[int], environ: Mapping[str, str]) -> list[tuple[int, int]]:
    """Give every task's node, and its number there."""
    block = [(node, local) for node, tasks in enumerate(per_node) for local in range(tasks)]
    way = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if way == "cyclic":
        return sorted(block, key=lambda place: (place[1], place[0]))
    if way not in ("block", "", "*") and len(per_node) > 1 and max(per_node) > 1:
        _checks.refuse(
            "Tasks must be spread over nodes by block or cyclic.",
            SLURM_DISTRIBUTION=environ["SLURM_DISTRIBUTION"],
            remedy="Start them with `srun --distribution=block`.",
        )
    return block


def _check_local_id(environ: Mapping[str, str], index: int, place: tuple[int, int]) -> None:
    """Refuse a placement that is not the one the tasks were started with."""
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), place, strict=True):
        if environ.get(name) and _whole(name, environ[name]) != expected:
            _checks.refuse(
                f"Task {index} is not where its number puts it.",
                **{name: environ[name]},
                expected=expected,
                remedy="Start the tasks with `srun --distribution=block`.",
            )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Give jobs that follow each other ports that differ, below those that Linux gives away."""
    job = environ.get("SLURM_JOB_ID", "")
    return 10_000 + 16 * (int(job) % 1250) if job.isdecimal() else _PORT


# Kubernetes.


def _from_kubernetes(environ: Mapping[str, str], wanted: Wanted) -> dict[str, Any]:
    pod = _whole("JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    if wanted.processes is None:
        _checks.refuse(
            "Kubernetes does not tell a pod how many there are.",
            JOB_COMPLETION_INDEX=pod,
            remedy="Give `processes`, the pods in all.",
        )
    in_jobset = bool(environ.get("JOBSET_NAME"))
    names, index = (_jobset if in_jobset else _indexed_job)(environ, pod, wanted)
    port = wanted.port(_PORT)
    return _roles([f"{name}:{port}" for name in names], index, wanted)


def _indexed_job(environ: Mapping[str, str], pod: int, wanted: Wanted) -> tuple[list[str], int]:
    """Name the pods `<job>-<index>.<service>`."""
    host = _required(environ, "HOSTNAME").partition(".")[0]
    job, _, number = host.rpartition("-")
    if not job or number != str(pod):
        _checks.refuse(
            "In an indexed Job, a pod's host name ends with its index.",
            HOSTNAME=host,
            JOB_COMPLETION_INDEX=pod,
            remedy="Leave both as Kubernetes sets them.",
        )
    if not wanted.service:
        _checks.refuse(
            "The pods of a Job reach each other through a headless service.",
            service=wanted.service,
            remedy="Give its name, the pods' `subdomain`, as `service`.",
        )
    return [f"{job}-{i}.{wanted.service}" for i in range(wanted.processes or 0)], pod


def _jobset(environ: Mapping[str, str], pod: int, wanted: Wanted) -> tuple[list[str], int]:
    """Name the pods `<jobset>-<replicatedjob>-<job>-<pod>.<subdomain>`."""
    label = "Set it in the pod's `env` from the JobSet's label."
    jobset = environ["JOBSET_NAME"]
    name = _required(environ, "REPLICATED_JOB_NAME", remedy=label)
    job = _whole("JOB_INDEX", _required(environ, "JOB_INDEX", remedy=label))
    replicas = environ.get("REPLICATED_JOB_REPLICAS", "1" if job == 0 else None)
    if replicas is None:
        _required(environ, "REPLICATED_JOB_REPLICAS", remedy=label)
    jobs, processes = _whole("REPLICATED_JOB_REPLICAS", replicas), wanted.processes or 0
    if jobs == 0 or processes % jobs or job >= jobs or pod >= processes // jobs:
        _checks.refuse(
            "The pods of a JobSet must be spread evenly over its Jobs, this one among them.",
            processes=processes,
            REPLICATED_JOB_REPLICAS=replicas,
            JOB_INDEX=job,
            JOB_COMPLETION_INDEX=pod,
        )
    pods, domain = processes // jobs, wanted.service or jobset
    names = [f"{jobset}-{name}-{j}-{p}.{domain}" for j in range(jobs) for p in range(pods)]
    return names, job * pods + pod


_READERS: dict[str, Callable[[Mapping[str, str], Wanted], dict[str, Any]]] = {
    "TF_CONFIG": _from_tf_config,
    "KERAS_DISTRIBUTION": _from_keras,
    "SLURM": _from_slurm,
    "Kubernetes": _from_kubernetes,
}


# What they share.


def _roles(addresses: Sequence[str], index: int, wanted: Wanted) -> dict[str, Any]:
    """Make the first process the chief and the last ones servers, if there are servers."""
    count, servers = len(addresses), wanted.parameter_servers or 0
    if index >= count:
        _checks.refuse(
            "This process's number must be less than the number of processes.",
            process=index,
            processes=count,
        )
    if not servers:
        return {"workers": addresses, "index": index}
    workers = count - servers - 1
    if workers < 1:
        _checks.refuse(
            "Beside the parameter servers there must be a chief and a worker.",
            processes=count,
            parameter_servers=servers,
        )
    tasks = [("chief", 0), *(("worker", i) for i in range(workers))]
    tasks += [("ps", i) for i in range(servers)]
    role, number = tasks[index]
    return {
        "chief": addresses[0],
        "workers": addresses[1 : workers + 1],
        "parameter_servers": addresses[workers + 1 :],
        "role": role,
        "index": number,
    }


def _required(environ: Mapping[str, str], *names: str, remedy: str = "") -> str:
    """Give the first of these variables that is set."""
    value = _first(environ, names)
    if value is None:
        _checks.refuse(f"{' or '.join(names)} must be set too.", remedy=remedy)
    return value


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _whole(name: str, value: Any) -> int:
    """Read a number from 0."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return int(value)
    if isinstance(value, str):
        _checks.refuse(f"{name} must be a number from 0.", value=value)
    return _checks.integer(name, value, minimum=0)
