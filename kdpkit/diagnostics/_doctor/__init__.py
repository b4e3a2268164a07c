"""`kdpkit doctor`: mistakes in a training's input; `--tpu` is in `_tpu`."""
