"""The processes that train together, and which of them this one is.

Each scheduler describes a cluster in its own environment variables.
`ClusterConfig.from_environment()` reads them, raises for an invalid cluster before anything waits
for it, and writes what TensorFlow (TF_CONFIG) and Keras (KERAS_DISTRIBUTION_*) read. On JAX use it
with `kdpkit.sharding.join_processes`:

    config = ClusterConfig.from_environment()
    sharding.join_processes(
        config.coordinator,
        process_count=config.process_count,
        process_index=config.process_index,
    )

Nothing here loads a framework.
"""

from kdpkit.cluster._config import ClusterConfig, source

__all__ = ["ClusterConfig", "source"]
