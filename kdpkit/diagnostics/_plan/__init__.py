"""`kdpkit plan`: the numbers of a run on several replicas, worked out before it starts."""
