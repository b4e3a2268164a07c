"""Which strategies a program can use here, told without starting one."""

import dataclasses

from kdpkit import _checks, _tpu, cluster
from kdpkit.diagnostics import _packages

_LAUNCH = "`kdpkit launch --workers 2 -- python train.py` starts one on this machine."
_LAUNCH_SERVERS = (
    "`kdpkit launch --workers 2 --parameter-servers 1 -- python train.py` starts such processes "
    "on this machine."
)
_SPLIT = "`kdpkit.strategies.split_device` makes more of one device."


@dataclasses.dataclass(frozen=True)
class Framework:
    """What TensorFlow or JAX said of itself.

    Attributes:
        name: `"tensorflow"` or `"jax"`.
        version: None if it is not installed.
        devices: By kind, `{"CPU": 1, "GPU": 2}`; None if it was not asked, or does not start.
        is_built_with_cuda: TensorFlow's word; None where there is none.
        problem: Why it does not start.
    """

    name: str
    version: str | None
    devices: dict[str, int] | None = None
    is_built_with_cuda: bool | None = None
    problem: str | None = None

    @property
    def title(self) -> str:
        """Its name as it writes itself."""
        return {"tensorflow": "TensorFlow", "jax": "JAX"}[self.name]

    @property
    def obstacle(self) -> str | None:
        """Why nothing can be trained with it."""
        if self.version is None:
            return f"{self.title} is not installed. {_packages.way_to(self.name)}"
        return self.problem and f"{self.title} does not start: {self.problem}"

    def count(self, *kinds: str) -> int:
        """Count its devices of some kinds."""
        return sum((self.devices or {}).get(kind, 0) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class Usable:
    """A strategy, whether it can be used here as things are, and with how many replicas.

    Attributes:
        strategy: As `kdpkit.strategies.select_strategy` calls it; `"mesh"` is JAX's.
        framework: `"tensorflow"` or `"jax"`.
        usable: Whether a program could start it now.
        replicas: How many it would have; None where that is not known.
        detail: What it has, or why it cannot be used and the way out.
    """

    strategy: str
    framework: str
    usable: bool
    replicas: int | None
    detail: str


def strategies(tensorflow: Framework, jax: Framework, *, tpu_chips: int) -> tuple[Usable, ...]:
    """Give all strategies."""
    found = [
        Usable("one", "tensorflow", True, 1, ""),
        _mirrored(tensorflow),
        _multi_worker(),
        _parameter_server(),
        _tensorflow_tpu(tensorflow, tpu_chips),
        _mesh(jax),
    ]
    obstacles = {"tensorflow": tensorflow.obstacle, "jax": jax.obstacle}
    return tuple(_unless(obstacles[usable.framework], usable) for usable in found)


def _unless(obstacle: str | None, usable: Usable) -> Usable:
    if obstacle is None:
        return usable
    return dataclasses.replace(usable, usable=False, replicas=None, detail=obstacle)


def _mirrored(tensorflow: Framework) -> Usable:
    replicas = tensorflow.count("GPU") or tensorflow.count("CPU") or None
    detail = _SPLIT if replicas == 1 else ""
    return Usable("mirrored", "tensorflow", True, replicas, detail)


def _mesh(jax: Framework) -> Usable:
    count = jax.count(*(jax.devices or {})) or None
    more = "" if count != 1 else "`kdpkit.testing.use_logical_cpus` makes more of the CPU."
    return Usable("mesh", "jax", True, count, more if jax.count("CPU") else "")


def _multi_worker() -> Usable:
    described, problem = _described()
    if described is None:
        detail = problem or f"No cluster is described. {_LAUNCH}"
    elif described.parameter_servers:
        detail = "The cluster has parameter servers, which belong to 'parameter_server'."
    else:
        said = f"{described.process_count} processes, described by {cluster.source()}"
        return Usable("multi_worker", "tensorflow", True, None, said)
    return Usable("multi_worker", "tensorflow", False, None, detail)


def _parameter_server() -> Usable:
    described, problem = _described()
    if described is None:
        detail = problem or f"No cluster is described. {_LAUNCH_SERVERS}"
    elif not described.parameter_servers or described.chief is None:
        lacking = "parameter server" if not described.parameter_servers else "chief"
        detail = f"The cluster has no {lacking}. {_LAUNCH_SERVERS}"
    else:
        said = f"{len(described.workers)} workers, {len(described.parameter_servers)} servers"
        return Usable("parameter_server", "tensorflow", True, None, said)
    return Usable("parameter_server", "tensorflow", False, None, detail)


def _described() -> tuple[cluster.ClusterConfig | None, str]:
    """Give the cluster of the environment, or what is wrong with it; its hosts are not named."""
    source = cluster.source()
    if source is None:
        return None, ""
    try:
        return cluster.ClusterConfig.from_environment(), ""
    except _checks.InputError:
        return None, (
            f"What {source} describes is no cluster that can work; "
            "`kdpkit.cluster.ClusterConfig.from_environment()` says why."
        )


def _tensorflow_tpu(tensorflow: Framework, chips: int) -> Usable:
    named = _tpu.named_by_environment()
    drives = tensorflow.devices is None or tensorflow.count("TPU_SYSTEM")
    if named:
        return Usable("tpu", "tensorflow", True, None, f"one on the network, which {named} names")
    if chips and drives:
        return Usable("tpu", "tensorflow", True, None, f"{_tpu.counted(chips)} of this machine")
    detail = f"TensorFlow cannot drive it; {_tpu.THROUGH_JAX}." if chips else _tpu.nowhere()
    return Usable("tpu", "tensorflow", False, None, detail)
