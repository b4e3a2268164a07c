"""The processes that train together, by address and role: `ClusterConfig`."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Self

from kdpkit._internal import checks
from kdpkit.cluster import _launchers
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
        role: Role of this process: `"chief"`, `"worker"` or `"ps"`.
        index: Index of this process within its role, from 0.
        processes: Number of processes, if `workers` has only the first one's address. JAX needs no
            other; on TensorFlow `select_strategy("multi_worker")` exchanges them.

    Raises:
        ValueError: An argument is invalid, or two processes have one address.

    >>> config = ClusterConfig(["a:9876", "b:9876"], role="worker", index=1)
    >>> config.coordinator, config.process_count, config.process_index
    ('a:9876', 2, 1)
    >>> config.to_tf_config()
    '{"cluster": {"worker": ["a:9876", "b:9876"]}, "task": {"type": "worker", "index": 1}}'
    >>> ClusterConfig.from_environment(config.to_environment()) == config
    True
    """

    workers: Sequence[str]
    _: dataclasses.KW_ONLY
    chief: str | None = None
    parameter_servers: Sequence[str] = ()
    role: str = "worker"
    index: int = 0
    processes: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "parameter_servers"):
            object.__setattr__(self, name, checks.strings(name, getattr(self, name)))
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
        self._check_processes()
        checks.one_of("role", self.role, ROLES)
        index = checks.integer("index", self.index, minimum=0)
        object.__setattr__(self, "index", index)
        count = self.processes or len(self._by_role().get(self.role, ()))
        if index >= count:
            checks.fail(
                "This process must be one of the cluster's, which are numbered from 0.",
                role=self.role,
                index=index,
                of_this_role=count,
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the cluster from the environment variables of this process.

        The first of these that is set is used: `TF_CONFIG`, Keras' `KERAS_DISTRIBUTION_*`, those of
        JAX and Kubeflow Trainer, `torchrun`, Open MPI, MPICH and other launchers of MPI, and
        SLURM's in tasks started by `srun`. `docs/how_to/cluster.md` lists the variables.

        Args:
            environ: The variables; None reads `os.environ`.

        Raises:
            ValueError: The environment describes no cluster, or an invalid one.

        >>> config = ClusterConfig.from_environment({
        ...     "SLURM_PROCID": "2",
        ...     "SLURM_STEP_NODELIST": "gpu[08-09]",
        ...     "SLURM_STEP_NUM_TASKS": "3",
        ...     "SLURM_JOB_ID": "4712",
        ... })
        >>> config.coordinator, config.process_count, config.process_index
        ('gpu08:25392', 3, 2)
        """
        return cls(**_launchers.read(os.environ if environ is None else environ))

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
        """`"host:port"` of this process, if it has one."""
        addresses = self._by_role().get(self.role, ())
        return addresses[self.index] if self.index < len(addresses) else None

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
            ValueError: This process is a parameter server.
        """
        if self.role == "ps":
            checks.fail(
                "Parameter servers are not among the processes that train.", index=self.index
            )
        return self.index + (self.role == "worker" and self.chief is not None)

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
        if not self.parameter_servers:
            chief = (self.chief,) if self.chief else ()
            variables[ADDRESSES] = ",".join((*chief, *self.workers))
            variables[COUNT] = str(self.process_count)
            variables[INDEX] = str(self.process_index)
        return variables

    def _by_role(self) -> dict[str, Sequence[str]]:
        chief = (self.chief,) if self.chief is not None else ()
        lists = zip(ROLES, (chief, self.workers, self.parameter_servers), strict=True)
        return {role: addresses for role, addresses in lists if addresses}

    def _check_processes(self) -> None:
        if not self.workers and (self.chief is None or self.parameter_servers):
            checks.fail("A cluster needs a worker.", workers=self.workers, chief=self.chief)
        if self.processes is None:
            return
        processes = checks.integer("processes", self.processes)
        addresses = len(self.workers) + (self.chief is not None)
        # The addresses already imply an equal number, so that equal clusters compare equal.
        object.__setattr__(self, "processes", None if processes == addresses else processes)
        is_first_only = len(self.workers) == 1 and not (self.chief or self.parameter_servers)
        if processes != addresses and not is_first_only:
            checks.fail(
                "There must be an address for every process, or only that of the first.",
                addresses=addresses,
                processes=processes,
            )


def source(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what describes a cluster in the environment; None for a single process.

    >>> source({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {}}'}), source({})
    ('TF_CONFIG', None)
    """
    launcher = _launchers.started_by(os.environ if environ is None else environ)
    return launcher.name if launcher else None
