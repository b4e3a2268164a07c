"""Start the processes of a cluster on this machine, watch, stop and restart them together.

    kdpkit launch --workers 2 --max-restarts 3 -- python train.py

Every process runs the same command and finds its role in its environment:

    config = kdpkit.cluster.ClusterConfig.from_environment()
"""

from kdpkit.launch._cluster import launch

__all__ = ["launch"]
