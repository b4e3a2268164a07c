"""`kdpkit doctor --tpu`: what a TPU does not support, or does slowly."""
