"""`Resume`: the exact continuation of a training run that was interrupted."""
