"""`kdpkit doctor`: mistakes in a training's input; its other checks are in `_speed` and `_tpu`."""
