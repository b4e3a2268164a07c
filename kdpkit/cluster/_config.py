"""The processes that train together, by address and role: `ClusterConfig`."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Self

from kdpkit._internal import checks
from kdpkit.cluster import _launchers, _network
from kdpkit.cluster._launchers import ADDRESSES, COUNT, INDEX, ROLES

VARIABLES = ("TF_CONFIG", ADDRESSES, COUNT, INDEX)  # what `to_environment` may set


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The processes that train together, by address, and the role of this one.

    Without parameter servers the chief and the workers train synchronously; the chief, or else the
    first worker, is process 0, which coordinates the others and writes files. With parameter
    servers the chief coordinates, and workers and servers wait for its calls.

    Args:
        workers: `"host:port"` of each.
        chief: `"host:port"` of a chief apart from the workers, if there is one.
        parameter_servers: `"host:port"` of each.
        evaluators: `"host:port"` of each; an evaluator need not be listed.
        role: Role of this process: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: Index of this process within its role, from 0.
        processes: Number of processes, if `workers` has only the first one's address. JAX needs no
            other; on TensorFlow `select_strategy("multi_worker")` exchanges them.

    Raises:
        ValueError: An argument is invalid; `validate` lists what is checked.

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
            object.__setattr__(self, name, checks.strings(name, getattr(self, name)))
        self._check_addresses()
        self._check_processes()
        self._check_position()

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

        The first of these that is set is used: `TF_CONFIG`, Keras' `KERAS_DISTRIBUTION_*`, those of
        JAX, Kubeflow, `torchrun`, Open MPI and MPICH, Vertex AI's, SageMaker's, SLURM's in tasks
        started by `srun`, and Kubernetes' in indexed Jobs and JobSets. `docs/how_to/cluster.md`
        lists the variables.

        Args:
            environ: The variables; None reads `os.environ`.
            processes: Number of processes. Needed on Kubernetes, where the environment does not
                have it; elsewhere it must agree.
            parameter_servers: How many of the processes, counted from the last, are parameter
                servers; the first is then the chief. Must agree with TF_CONFIG, if that is set.
            base_port: First port where only hosts are known, to which a task adds its index on its
                node. None derives it from the job, so jobs on the same node use different ports,
                and is 9876 on Kubernetes.
            service: The headless service of a Kubernetes Job, its pods' `subdomain`; None uses the
                JobSet's name.

        Raises:
            ValueError: The environment describes no cluster, or an invalid one.

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
        wanted = _launchers.Wanted(processes, parameter_servers, base_port, service)
        config = cls(**_launchers.read(environ, wanted))
        _check_wanted(config, wanted, environ)
        return config

    # Positions.

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
        addresses = {(role, index): address for role, index, address in self.tasks}
        return addresses.get((self.role, self.index))

    @property
    def coordinator(self) -> str:
        """`"host:port"` of the process that the others connect to first."""
        return self.chief or self.workers[0]

    @property
    def process_count(self) -> int:
        """Number of processes that train: the workers, and the chief if it is not one of them."""
        return self.processes or len(self.workers) + (self.chief is not None)

    @property
    def process_index(self) -> int:
        """Index of this process among those; the chief, or else the first worker, is 0.

        Raises:
            ValueError: This process is a parameter server or an evaluator.
        """
        if self.role in ("ps", "evaluator"):
            checks.fail(
                "Parameter servers and evaluators are not among the processes that train.",
                role=self.role,
                index=self.index,
            )
        return self.index + (self.role == "worker" and self.chief is not None)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files."""
        return self.role in ("chief", "worker") and self.process_index == 0

    def for_task(self, role: str, index: int) -> Self:
        """Return the same cluster as seen by another of its processes.

        >>> ClusterConfig(["a:1", "b:1"]).for_task("worker", 1).address
        'b:1'
        """
        return dataclasses.replace(self, role=role, index=index)

    # For other libraries.

    def to_tf_config(self) -> str:
        """Return TF_CONFIG, as TensorFlow's strategies and cluster resolvers read it.

        Raises:
            ValueError: Only the address of the first process is known.
        """
        if self.processes is not None:
            checks.fail(
                "TF_CONFIG needs the address of every process.",
                workers=self.workers,
                processes=self.processes,
                remedy='`select_strategy("multi_worker")` exchanges them.',
            )
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": self._by_role(), "task": task})

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables for this process; `from_environment` reads them back.

        These are TF_CONFIG and, for processes that train synchronously, those of
        `keras.distribution.initialize`.
        """
        variables = {}
        if self.processes is None:
            variables["TF_CONFIG"] = self.to_tf_config()
        if not self.parameter_servers and self.role != "evaluator":
            chief = (self.chief,) if self.chief else ()
            variables[ADDRESSES] = ",".join((*chief, *self.workers))
            variables[COUNT] = str(self.process_count)
            variables[INDEX] = str(self.process_index)
        return variables

    # Checks.

    def validate(self, *, reachable: bool = False, timeout_seconds: float = 10.0) -> Self:
        """Raise if the cluster cannot work, with the reason; return it otherwise.

        Roles, addresses, ports and this process's role and index are already checked when a
        `ClusterConfig` is created. This method also checks the network.

        Args:
            reachable: Whether to resolve every host and connect to it. A host that refuses the
                connection, because nothing listens at the port yet, is reachable.
            timeout_seconds: Time limit for all hosts together, for example until a machine that
                starts later has its name and network.

        Raises:
            ValueError: The cluster is invalid, or a host cannot be resolved or does not answer.

        >>> ClusterConfig(["localhost:1", "localhost:1"])
        Traceback (most recent call last):
        ...
        kdpkit.errors.InputError: ... address='localhost:1', processes=['worker 0', 'worker 1']. ...
        """
        hosts = {checks.address(role, address)[0] for role, _, address in self.tasks}
        local = {h for h in hosts if h in ("localhost", "::1") or h.startswith("127.")}
        if local and hosts - local:
            checks.fail(
                "Addresses of the local machine are mixed with those of others.",
                local=sorted(local),
                others=sorted(hosts - local),
                remedy="Name every host as the others reach it.",
            )
        if reachable:
            self._check_reachable(checks.number("timeout_seconds", timeout_seconds, above=0))
        return self

    def _check_reachable(self, timeout_seconds: float) -> None:
        problems = _network.problems(
            sorted({address for _, _, address in self.tasks if address != self.address}),
            timeout_seconds,
            accepted=(_network.NOTHING_LISTENS,),
        )
        for address, problem in problems.items():
            checks.fail(
                f"A process of the cluster cannot be reached: its host {problem}.",
                address=address,
                timeout_seconds=timeout_seconds,
                remedy="Check the name, the network and the firewall between the machines.",
            )

    def _by_role(self) -> dict[str, Sequence[str]]:
        chief = (self.chief,) if self.chief is not None else ()
        of_roles = (chief, self.workers, self.parameter_servers, self.evaluators)
        return {role: of for role, of in zip(ROLES, of_roles, strict=True) if of}

    def _check_addresses(self) -> None:
        seen: dict[tuple[str, int], str] = {}
        for role, index, address in self.tasks:
            name = f"{role} {index}"
            other = seen.setdefault(checks.address(name, address), name)
            if other != name:
                checks.fail(
                    "Every process needs an address of its own.",
                    address=address,
                    processes=[other, name],
                    remedy="Set different ports for the processes of one host.",
                )

    def _check_processes(self) -> None:
        if not self.workers and self.chief is None:
            checks.fail("A cluster needs a worker.", workers=self.workers, chief=self.chief)
        if self.parameter_servers and not self.workers:
            checks.fail(
                "Parameter servers need workers, which compute.",
                workers=self.workers,
                parameter_servers=self.parameter_servers,
            )
        if self.processes is None:
            return
        object.__setattr__(self, "processes", checks.integer("processes", self.processes))
        addresses = len(self.workers) + (self.chief is not None)
        others = self.chief or self.parameter_servers or self.evaluators
        if self.processes == addresses:
            object.__setattr__(self, "processes", None)  # implied by the addresses
        elif others or len(self.workers) != 1:
            checks.fail(
                "There must be an address for every process, or only that of the first.",
                addresses=addresses,
                processes=self.processes,
            )

    def _check_position(self) -> None:
        checks.one_of("role", self.role, ROLES)
        index = checks.integer("index", self.index, minimum=0)
        object.__setattr__(self, "index", index)
        in_cluster = self.processes or len(self._by_role().get(self.role, ()))
        is_unlisted = self.role == "evaluator" and not self.evaluators
        if index >= in_cluster and not is_unlisted:
            checks.fail(
                "This process must be one of the cluster's, which are numbered from 0.",
                role=self.role,
                index=index,
                of_this_role=in_cluster,
            )


def source(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what describes a cluster in the environment; None for a single process.

    >>> source({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {}}'}), source({})
    ('TF_CONFIG', None)
    """
    launcher = _launchers.of(os.environ if environ is None else environ)
    return launcher.name if launcher else None


def _check_wanted(
    config: ClusterConfig, wanted: _launchers.Wanted, environ: Mapping[str, str]
) -> None:
    """Raise if the environment contradicts the caller or itself."""
    servers = len(config.parameter_servers)
    found = {"processes": config.process_count + servers, "parameter_servers": servers}
    for name, count in found.items():
        if getattr(wanted, name) not in (None, count):
            checks.fail(
                f"The environment ({source(environ)}) describes another cluster.",
                **{name: getattr(wanted, name)},
                found=count,
            )
    trains = not servers and config.role != "evaluator"
    if source(environ) == "TF_CONFIG" and environ.get(INDEX) and environ.get(COUNT) and trains:
        left = {name: environ[name] for name in (COUNT, INDEX)}
        if [*left.values()] != [str(config.process_count), str(config.process_index)]:
            checks.fail(
                f"TF_CONFIG makes this process {config.process_index} of {config.process_count}, "
                "and Keras' variables another.",
                **left,
                remedy="Unset the variables left over from another run.",
            )
