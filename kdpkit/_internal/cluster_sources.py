"""Where schedulers and frameworks describe a cluster: `kdpkit.cluster` reads it here.

Every reader takes the environment variables and returns the arguments of a `ClusterConfig`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, TypedDict

from kdpkit._internal import checks, process_launchers

ROLES = ("chief", "worker", "ps", "evaluator")  # as TF_CONFIG calls them

ADDRESSES, COUNT, INDEX = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)

_SCHEDULERS = {  # each with a variable that it sets
    "Vertex AI": "CLUSTER_SPEC",
    "SageMaker": "SM_HOSTS",
    "SLURM": "SLURM_PROCID",
    "Kubernetes": "JOB_COMPLETION_INDEX",
}
_PORT = 9876  # where every process has a network address of its own
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NODE = rf"(?:[^,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the caller expects of the cluster."""

    processes: int | None
    parameter_servers: int | None
    base_port: int | None
    service: str | None

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("parameter_servers", 0), ("base_port", 1)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), minimum=least)


class Arguments(TypedDict, total=False):
    """The arguments of a `ClusterConfig`."""

    workers: Required[Sequence[str]]
    chief: str | None
    parameter_servers: Sequence[str]
    evaluators: Sequence[str]
    role: str
    index: int
    processes: int


def source(environ: Mapping[str, str]) -> str | None:
    """What `kdpkit.cluster.source` returns."""
    if environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        return "TF_CONFIG"
    if any(environ.get(name) for name in (ADDRESSES, COUNT, INDEX)):
        return "KERAS_DISTRIBUTION"
    described = (name for name, variable in _SCHEDULERS.items() if environ.get(variable))
    return process_launchers.launcher_of(environ) or next(described, None)


def variable_of(name: str) -> str:
    """Return an environment variable without which a source describes no cluster."""
    launcher = process_launchers.LAUNCHERS.get(name)
    return launcher.index if launcher else _SCHEDULERS.get(name, f"{name}*")


def read(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
    """Read whatever describes a cluster, or raise, with the likely reason why nothing does."""
    name = source(environ)
    if name is None:
        remedy = "Start with `kdpkit launch`, SLURM's `srun` or Kubernetes, or set TF_CONFIG."
        if environ.get("SLURM_JOB_ID"):
            remedy = "In a SLURM job, start the processes with `srun`."
        elif environ.get("KUBERNETES_SERVICE_HOST"):
            remedy = "On Kubernetes, set `completionMode: Indexed` on the Job."
        checks.fail(
            "No cluster is described in the environment: neither TF_CONFIG nor "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES is set, nor what a launcher or a scheduler sets.",
            remedy=remedy,
        )
    readers = {
        "TF_CONFIG": _from_tf_config,
        "KERAS_DISTRIBUTION": _from_keras,
        "Vertex AI": _from_vertex,
        "SageMaker": _from_sagemaker,
        "SLURM": _from_slurm,
        "Kubernetes": _from_kubernetes,
    }
    return readers.get(name, _from_launcher)(environ, wanted)


# TF_CONFIG, what is alike, and Keras' variables.


def _from_tf_config(environ: Mapping[str, str], _wanted: Wanted) -> Arguments:
    return _by_role(process_launchers.json_of("TF_CONFIG", environ["TF_CONFIG"]))


def _from_vertex(environ: Mapping[str, str], _wanted: Wanted) -> Arguments:
    return _by_role(process_launchers.vertex_roles(environ))


def _by_role(config: Mapping[str, Any]) -> Arguments:
    cluster, task = config.get("cluster"), config.get("task")
    if not isinstance(cluster, dict):
        checks.fail(
            'TF_CONFIG must have a "cluster" of lists of addresses by role.', TF_CONFIG=config
        )
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        checks.fail(
            'TF_CONFIG must have a "task" with the "type" and "index" of this process.', task=task
        )
    if {"chief", "master"} <= cluster.keys():
        checks.fail("TF_CONFIG may have at most one chief.", cluster=cluster)
    cluster = {_role(name): addresses for name, addresses in cluster.items()}
    unknown = sorted(cluster.keys() - set(ROLES))
    if unknown:
        checks.fail(
            f"TF_CONFIG has unknown roles; they must be among {', '.join(ROLES)}.", roles=unknown
        )
    of_role = {role: checks.strings(role, cluster.get(role, ())) for role in ROLES}
    if len(of_role["chief"]) > 1:
        checks.fail("TF_CONFIG may have at most one chief.", chief=of_role["chief"])
    return {
        "workers": of_role["worker"],
        "chief": next(iter(of_role["chief"]), None),
        "parameter_servers": of_role["ps"],
        "evaluators": of_role["evaluator"],
        "role": _role(str(task["type"])),
        "index": _integer("The index of the task", task["index"]),
    }


def _role(name: str) -> str:
    return "chief" if name == "master" else name  # its name in TensorFlow 1, and in some clouds


def _from_keras(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
    text = _required(environ, ADDRESSES, remedy="On a cloud TPU nothing needs to be set.")
    addresses = [address.strip() for address in text.split(",")]
    index = _integer(INDEX, _required(environ, INDEX))
    processes = _integer(COUNT, environ.get(COUNT) or len(addresses))
    return _of_position(process_launchers.Position(index, processes, addresses), wanted)


# Launchers that number the processes.


def _from_launcher(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
    name = process_launchers.launcher_of(environ) or ""
    return _of_position(process_launchers.position(name, environ, wanted.base_port), wanted)


def _from_sagemaker(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
    return _of_position(process_launchers.sagemaker_position(environ, wanted.base_port), wanted)


def _of_position(position: process_launchers.Position, wanted: Wanted) -> Arguments:
    index, count, addresses = position.index, position.count, position.addresses
    if not wanted.parameter_servers:
        return {"workers": addresses, "index": index, "processes": count}
    if len(addresses) != count:
        checks.fail("With parameter servers all addresses are needed.", addresses=addresses)
    return _with_roles(addresses, index, wanted)


# SLURM.


def _from_slurm(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
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
    positions = _positions(_tasks_per_node(environ, len(nodes), count), environ)
    if index < count:
        _check_position(environ, index, positions[index])
    job = environ.get("SLURM_JOB_ID", "")
    # Jobs in a row get different ports, below those that Linux gives to connections.
    first = wanted.base_port or (10_000 + 16 * (int(job) % 1250) if job.isdecimal() else _PORT)
    addresses = [f"{nodes[node]}:{first + local}" for node, local in positions]
    return _with_roles(addresses, index, wanted)


def _nodes(text: str) -> list[str]:
    """Expand SLURM's list of nodes.

    >>> _nodes("gpu[01-03,07],login1,r[1-2]n[8-9]")[2:8]
    ['gpu03', 'gpu07', 'login1', 'r1n8', 'r1n9', 'r2n8']
    """
    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", text):
        checks.fail("SLURM's list of nodes must look like 'gpu[01-03,07],login1'.", nodes=text)
    nodes = [node for name in re.findall(_NODE, text) for node in _expanded(name)]
    if len(set(nodes)) != len(nodes):
        checks.fail("A node appears twice in SLURM's list of nodes.", nodes=text)
    return nodes


def _expanded(name: str) -> Iterator[str]:
    """Expand the brackets of a name, each with each."""
    parts = re.split(r"\[(.*?)\]", name)  # alternately between brackets and within
    choices = [
        [number for item in part.split(",") for number in _numbers(item)] if i % 2 else [part]
        for i, part in enumerate(parts)
    ]
    return map("".join, itertools.product(*choices))


def _numbers(item: str) -> Iterator[str]:
    first, _, last = item.partition("-")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def _tasks_per_node(environ: Mapping[str, str], nodes: int, tasks: int) -> list[int]:
    """Expand `2(x3),1`."""
    text = _required(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", part)
        if not found:
            checks.fail(
                "SLURM's tasks per node must look like '2(x3),1'.", SLURM_TASKS_PER_NODE=text
            )
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) != nodes or sum(counts) != tasks:
        checks.fail(
            "SLURM's tasks per node must be for as many nodes and tasks as it has.",
            SLURM_TASKS_PER_NODE=text,
            nodes=nodes,
            tasks=tasks,
            remedy="Set none by hand; `srun` sets all.",
        )
    return counts


def _positions(per_node: Sequence[int], environ: Mapping[str, str]) -> list[tuple[int, int]]:
    """Return every task's node, and its number there."""
    block = [(node, local) for node, tasks in enumerate(per_node) for local in range(tasks)]
    way = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if way == "cyclic":
        return sorted(block, key=lambda position: (position[1], position[0]))
    if way not in ("block", "", "*") and len(per_node) > 1 and max(per_node) > 1:
        checks.fail(
            "Tasks must be spread over nodes by block or cyclic.",
            SLURM_DISTRIBUTION=environ["SLURM_DISTRIBUTION"],
            remedy="Start them with `srun --distribution=block`.",
        )
    return block


def _check_position(environ: Mapping[str, str], index: int, position: tuple[int, int]) -> None:
    """Raise for a placement that is not the one the tasks were started with."""
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), position, strict=True):
        if environ.get(name) and _integer(name, environ[name]) != expected:
            checks.fail(
                f"Task {index} is not where its number puts it.",
                **{name: environ[name]},
                expected=expected,
                remedy="Start the tasks with `srun --distribution=block`.",
            )


# Kubernetes.


def _from_kubernetes(environ: Mapping[str, str], wanted: Wanted) -> Arguments:
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
    environ: Mapping[str, str], pod: int, processes: int, service: str | None
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
    environ: Mapping[str, str], pod: int, processes: int, service: str | None
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


def _required(environ: Mapping[str, str], *names: str, remedy: str = "") -> str:
    """Return the first of these variables that is set."""
    value = next((environ[name] for name in names if environ.get(name)), None)
    if value is None:
        checks.fail(f"{' or '.join(names)} must be set too.", remedy=remedy)
    return value


def _integer(name: str, value: str | int) -> int:
    """Accept a number from 0, or its digits."""
    if isinstance(value, str):
        return process_launchers.integer(name, value)
    return checks.integer(name, value, minimum=0)
