"""Training on devices of JAX, where one program computes the whole batch.

`_fit` is Keras' own `fit`, `_loop` the steps of `TrainingLoop`; `_agreement` compares the batches
of several processes.
"""
