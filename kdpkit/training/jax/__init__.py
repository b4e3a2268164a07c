"""Training on devices of JAX, where one program computes the global batch.

`_fit` is Keras' own `fit`; `_loop` has the steps of `TrainingLoop`, `_state` their variables and
`_batches` their data, `_memory` what a step needs; `_consistency_checks` compares the batches of
several processes.
"""
