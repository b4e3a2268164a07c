"""The kit on a machine with a GPU or TPU: `python -m tools.accelerator`."""
