"""Who takes part in a training of several processes, and which of them this one is.

The environment says it in as many ways as there are schedulers. `ClusterConfig.from_environment()`
reads them all, refuses what cannot work before anything waits for it, and writes what TensorFlow
(TF_CONFIG) and Keras (KERAS_DISTRIBUTION_*) read. On JAX it goes with
`kdpkit.sharding.join_processes`:

    config = ClusterConfig.from_environment()
    sharding.join_processes(
        config.coordinator,
        process_count=config.process_count,
        process_index=config.process_index,
    )

Nothing here loads a framework.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Self

from kdpkit import _checks, _cluster_sources, _waiting
from kdpkit._cluster_sources import ADDRESSES, COUNT, INDEX, ROLES

__all__ = ["ROLES", "VARIABLES", "ClusterConfig", "source"]

VARIABLES = ("TF_CONFIG", ADDRESSES, COUNT, INDEX)  # what `to_environment` may set


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The processes that train together, by address, and the one that this is.

    Without parameter servers chief and workers train in step: they are `process_count` processes,
    the chief or else the first worker being number 0, which the others need and which writes
    files. With parameter servers the chief coordinates, and workers and servers wait for its calls.

    Args:
        workers: `"host:port"` of each.
        chief: `"host:port"` of a chief apart from the workers, if there is one.
        parameter_servers: `"host:port"` of each.
        evaluators: `"host:port"` of each; an evaluator need not be listed.
        role: What this process is: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: Which one of its role it is, from 0.
        processes: How many processes there are, where `workers` has the first one's address alone.
            Keras on JAX needs no other.

    Raises:
        ValueError: What `validate` refuses without asking the network.

    >>> config = ClusterConfig(["a:9876", "b:9876"], role="worker", index=1)
    >>> config.coordinator, config.process_count, config.process_index, config.is_chief
    ('a:9876', 2, 1, False)
    >>> config.to_tf_config()
    '{"cluster": {"worker": ["a:9876", "b:9876"]}, "task": {"type": "worker", "index": 1}}'
    >>> ClusterConfig.from_environment(config.to_environment()) == config
    True
    """

    workers: Sequence[str]
    _: dataclasses.KW_ONLY
    chief: str | None = None
    parameter_servers: Sequence[str] = ()
    evaluators: Sequence[str] = ()
    role: str = "worker"
    index: int = 0
    processes: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "parameter_servers", "evaluators"):
            object.__setattr__(self, name, _checks.strings(name, getattr(self, name)))
        self._check_addresses()
        self._check_processes()
        self._check_place()

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        processes: int | None = None,
        parameter_servers: int | None = None,
        base_port: int | None = None,
        service: str | None = None,
    ) -> Self:
        """Read the cluster from the environment variables of this process.

        The first of these that is there counts, so that what was set for the program goes before
        what a scheduler sets for all programs:

        1. `TF_CONFIG`, as TensorFlow, Kubeflow and `kdpkit launch` have it.
        2. `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `_NUM_PROCESSES` and `_PROCESS_ID`, as
           `keras.distribution.initialize` reads them.
        3. SLURM, in tasks that `srun` started: `SLURM_PROCID`, `SLURM_STEP_NODELIST` (or
           `SLURM_JOB_NODELIST`), `SLURM_STEP_NUM_TASKS` (or `SLURM_NTASKS`) and
           `SLURM_STEP_TASKS_PER_NODE` (or `SLURM_TASKS_PER_NODE`). Tasks are placed as
           `SLURM_DISTRIBUTION` says: "block", which is SLURM's default, or "cyclic".
        4. Kubernetes, in Jobs with `completionMode: Indexed`: `JOB_COMPLETION_INDEX` and
           `HOSTNAME`, which Kubernetes sets. In a JobSet, name its labels in the pod's `env`
           (`valueFrom: fieldRef`): `JOBSET_NAME`, `REPLICATED_JOB_NAME`, `JOB_INDEX` and, for
           several Jobs, `REPLICATED_JOB_REPLICAS`; pods are then reached as
           `<jobset>-<replicatedjob>-<job>-<pod>.<jobset>`.

        Args:
            environ: The variables; None reads `os.environ`.
            processes: How many processes there are, where the environment does not say it: on
                Kubernetes. Elsewhere it must agree.
            parameter_servers: How many of the processes are parameter servers, the last ones; the
                first is then the chief. TF_CONFIG says it itself, and must agree.
            base_port: First port on SLURM and Kubernetes, to which a task adds its number on its
                node. None derives it from the job's number on SLURM, so that jobs that share a node
                do not meet there, and is 9876 on Kubernetes.
            service: The headless service of a Kubernetes Job, its pods' `subdomain`; None takes
                the JobSet's name.

        Raises:
            ValueError: No cluster is described, or what is there cannot work.

        >>> config = ClusterConfig.from_environment({
        ...     "SLURM_PROCID": "2",
        ...     "SLURM_STEP_NODELIST": "gpu[08-09]",
        ...     "SLURM_STEP_NUM_TASKS": "3",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2,1",
        ... }, base_port=9000)
        >>> config.workers, config.index
        (('gpu08:9000', 'gpu08:9001', 'gpu09:9000'), 2)
        """
        environ = os.environ if environ is None else environ
        wanted = _cluster_sources.Wanted(processes, parameter_servers, base_port, service)
        config = cls(**_cluster_sources.read(environ, wanted))
        _check_wanted(config, wanted, environ)
        return config

    # Places.

    @property
    def tasks(self) -> tuple[tuple[str, int, str], ...]:
        """Role, index and address of every process that has an address."""
        return tuple(
            (role, index, address)
            for role, addresses in self._by_role().items()
            for index, address in enumerate(addresses)
        )

    @property
    def address(self) -> str | None:
        """This process's own `"host:port"`, if it has one."""
        places = {(role, index): address for role, index, address in self.tasks}
        return places.get((self.role, self.index))

    @property
    def coordinator(self) -> str:
        """`"host:port"` of the process that the others need first."""
        return self.chief or self.workers[0]

    @property
    def process_count(self) -> int:
        """How many processes train: workers, and the chief if it is none of them."""
        return self.processes or len(self.workers) + (self.chief is not None)

    @property
    def process_index(self) -> int:
        """Which of these this is; the chief, or else the first worker, is 0.

        Raises:
            ValueError: This process is a parameter server or an evaluator.
        """
        if self.role in ("ps", "evaluator"):
            _checks.refuse(
                "Parameter servers and evaluators are none of the processes that train.",
                role=self.role,
                index=self.index,
            )
        return self.index + (self.role == "worker" and self.chief is not None)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.role in ("chief", "worker") and self.process_index == 0

    def for_task(self, role: str, index: int) -> Self:
        """Give the same cluster as another of its processes sees it.

        >>> ClusterConfig(["a:1", "b:1"]).for_task("worker", 1).address
        'b:1'
        """
        return dataclasses.replace(self, role=role, index=index)

    # What others read.

    def to_tf_config(self) -> str:
        """Write TF_CONFIG, as TensorFlow's strategies and cluster resolvers read it.

        Raises:
            ValueError: The address of the first process alone is known.
        """
        if self.process_count != len(self.workers) + (self.chief is not None):
            _checks.refuse(
                "TF_CONFIG needs the address of every process.",
                workers=self.workers,
                processes=self.processes,
            )
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": self._by_role(), "task": task})

    def to_environment(self) -> dict[str, str]:
        """Give all variables to set for this process; `from_environment` reads them back.

        They are TF_CONFIG and, for processes that train in step, those of
        `keras.distribution.initialize`.
        """
        variables = {}
        if self.processes in (None, len(self.workers)):
            variables["TF_CONFIG"] = self.to_tf_config()
        if not self.parameter_servers and self.role != "evaluator":
            chief = (self.chief,) if self.chief else ()
            variables[ADDRESSES] = ",".join((*chief, *self.workers))
            variables[COUNT] = str(self.process_count)
            variables[INDEX] = str(self.process_index)
        return variables

    # Checks.

    def validate(self, *, reachable: bool = False, timeout_seconds: float = 10.0) -> Self:
        """Refuse a cluster that cannot work, in one sentence, and give one that can.

        Roles, the form of addresses, ports, addresses that come twice and this process's place
        are checked whenever a `ClusterConfig` is made. Here the network is asked too.

        Args:
            reachable: Whether to look every host up and knock at it. A host that answers that
                nothing listens at the port yet is reachable.
            timeout_seconds: How long hosts may take, all together; a machine that starts later
                may get its name and its network in that time.

        Raises:
            ValueError: It cannot work; for a host, its name does not resolve or it does not answer.

        >>> ClusterConfig(["localhost:1", "localhost:1"])
        Traceback (most recent call last):
        ...
        kdpkit._checks.InputError: ... Received: address='localhost:1', worker=(0, 1). ...
        """
        self._check_hosts()
        if reachable:
            _check_reachable(
                {address for _, _, address in self.tasks if address != self.address},
                _checks.number("timeout_seconds", timeout_seconds, above=0),
            )
        return self

    @property
    def fingerprint(self) -> int:
        """A number that is the same in all processes that see the same cluster."""
        cluster = json.dumps([self._by_role(), self.process_count])
        return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8]) >> 1

    def differences(self, other: "ClusterConfig") -> tuple[str, ...]:
        """Say where another process sees another cluster; nothing if they agree.

        >>> ClusterConfig(["a:1", "b:1"]).differences(ClusterConfig(["a:1", "c:1"], index=1))
        ("worker 1 is at 'b:1' here and at 'c:1' there",)
        """
        here, there = ({(r, i): a for r, i, a in config.tasks} for config in (self, other))
        said = [
            f"{role} {index} is {_at(here.get((role, index)))} here and "
            f"{_at(there.get((role, index)))} there"
            for role, index in sorted(here.keys() | there.keys())
            if here.get((role, index)) != there.get((role, index))
        ]
        if self.process_count != other.process_count:
            said.append(f"{self.process_count} processes here and {other.process_count} there")
        elif not said and (self.role, self.index) == (other.role, other.index):
            said.append(f"both are {self.role} {self.index}")
        return tuple(said)

    def _by_role(self) -> dict[str, Sequence[str]]:
        chief = (self.chief,) if self.chief is not None else ()
        of_roles = (chief, self.workers, self.parameter_servers, self.evaluators)
        return {role: of for role, of in zip(ROLES, of_roles, strict=True) if of}

    def _check_addresses(self) -> None:
        seen: dict[tuple[str, int], tuple[str, int]] = {}
        for role, index, address in self.tasks:
            place = _checks.address(f"{role} {index}", address)
            if place in seen:
                first, number = seen[place]
                both = {role: (number, index)} if first == role else {first: number, role: index}
                _checks.refuse(
                    "Every process needs an address of its own.",
                    address=address,
                    **both,
                    remedy="Give processes of one host different ports.",
                )
            seen[place] = (role, index)

    def _check_processes(self) -> None:
        if not self.workers and self.chief is None:
            _checks.refuse("A cluster needs a worker.", workers=self.workers, chief=self.chief)
        if self.parameter_servers and not self.workers:
            _checks.refuse(
                "Parameter servers need workers, which compute.",
                workers=self.workers,
                parameter_servers=self.parameter_servers,
            )
        if self.processes is None:
            return
        object.__setattr__(self, "processes", _checks.integer("processes", self.processes))
        addresses = len(self.workers) + (self.chief is not None)
        others = self.chief or self.parameter_servers or self.evaluators
        if self.processes == addresses:
            object.__setattr__(self, "processes", None)  # said by the addresses
        elif others or len(self.workers) != 1:
            _checks.refuse(
                "There must be an address for every process, or that of the first alone.",
                addresses=addresses,
                processes=self.processes,
            )

    def _check_place(self) -> None:
        _checks.one_of("role", self.role, ROLES)
        index = _checks.integer("index", self.index, minimum=0)
        object.__setattr__(self, "index", index)
        of_role = len(self._by_role().get(self.role, ()))
        if self.role == "worker" and self.processes:
            of_role = self.processes
        if self.role == "evaluator" and not self.evaluators:
            return
        if index >= of_role:
            _checks.refuse(
                f"This process must be one of the cluster's: it has {_counted(of_role, self.role)}"
                + (f", numbered from 0 to {of_role - 1}." if of_role else "."),
                role=self.role,
                index=index,
            )

    def _check_hosts(self) -> None:
        hosts = {_checks.address(role, address)[0] for role, _, address in self.tasks}
        local = {h for h in hosts if h in ("localhost", "::1") or h.startswith("127.")}
        if local and hosts - local:
            _checks.refuse(
                "Addresses that mean another machine on every machine stand beside those of "
                "others.",
                local=sorted(local),
                others=sorted(hosts - local),
                remedy="Name every host as the others reach it.",
            )


def source(environ: Mapping[str, str] | None = None) -> str | None:
    """Name what describes a cluster in the environment; None if this process is alone.

    >>> source({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {}}'}), source({})
    ('TF_CONFIG', None)
    """
    return _cluster_sources.source(os.environ if environ is None else environ)


def _check_wanted(
    config: ClusterConfig, wanted: _cluster_sources.Wanted, environ: Mapping[str, str]
) -> None:
    """Refuse an environment that says something else than the caller, or than itself."""
    found = {
        "processes": config.process_count + len(config.parameter_servers),
        "parameter_servers": len(config.parameter_servers),
    }
    for name, count in found.items():
        if getattr(wanted, name) not in (None, count):
            _checks.refuse(
                f"The environment ({source(environ)}) describes another cluster.",
                **{name: getattr(wanted, name)},
                found=count,
            )
    if source(environ) == "TF_CONFIG" and environ.get(INDEX) and environ.get(COUNT):
        _check_agreement(config, environ)


def _check_agreement(config: ClusterConfig, environ: Mapping[str, str]) -> None:
    """Refuse KERAS_DISTRIBUTION_* that were left from another cluster."""
    if config.parameter_servers or config.role == "evaluator":
        return
    places = {name: environ[name] for name in (COUNT, INDEX)}
    if [*places.values()] != [str(config.process_count), str(config.process_index)]:
        _checks.refuse(
            f"TF_CONFIG makes this process {config.process_index} of {config.process_count}, and "
            "Keras' variables another.",
            **places,
            remedy="Unset those that are left from another run.",
        )


def _counted(number: int, role: str) -> str:
    return f"{number or 'no'} {role}{'' if number == 1 or role == 'ps' else 's'}"


def _at(address: str | None) -> str:
    return f"at {address!r}" if address else "missing"


# The network.


def _check_reachable(addresses: set[str], timeout_seconds: float) -> None:
    """Knock at all addresses, of which it is enough that the host answers."""
    problems = _waiting.problems(
        sorted(addresses), timeout_seconds, accepted=(_waiting.NOTHING_LISTENS,)
    )
    for address, problem in problems.items():
        _checks.refuse(
            f"A process of the cluster cannot be reached: its host {problem}.",
            address=address,
            timeout_seconds=timeout_seconds,
            remedy="Check the name, the network and the firewall between the machines.",
        )
