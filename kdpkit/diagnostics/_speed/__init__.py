"""`kdpkit doctor --measure`: where the time of a training step goes."""
