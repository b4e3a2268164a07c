"""`kdpkit bench`: how fast this machine trains, by replicas and batch sizes."""
