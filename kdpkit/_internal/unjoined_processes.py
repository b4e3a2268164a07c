"""Processes that a launcher started together, and that would each train a copy."""

from kdpkit import cluster, errors
from kdpkit._internal import checks, cluster_sources, processes


def reject(remedy: str) -> None:
    """Raise if this process was started with others and has not joined them.

    Each would train the same model from the same data, and write to the same files.

    Args:
        remedy: How to join them.
    """
    described_by = cluster.source()
    # Indices of Kubernetes may also be of other work than training.
    if processes.count() > 1 or described_by is None or described_by == "Kubernetes":
        return
    try:
        here = cluster.ClusterConfig.from_environment()
    except errors.InputError:  # as in a batch script, which is one process
        return
    if here.role in ("chief", "worker") and here.process_count > 1 and not here.parameter_servers:
        checks.fail(
            f"{described_by} started this process with others, and each would train a copy.",
            process=here.process_index,
            processes=here.process_count,
            remedy=f"{remedy} If each is to train a model of its own, unset "
            f"{cluster_sources.variable_of(described_by)} in the environment.",
        )
