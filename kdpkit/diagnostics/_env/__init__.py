"""`kdpkit env`: what this machine and its Python offer for training."""
