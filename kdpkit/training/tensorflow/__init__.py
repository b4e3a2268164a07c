"""Training on replicas of TensorFlow: what a batch meets on its way, in this order.

1. `_workers` spreads the batches of a dataset over replicas and processes, and splits uneven ones.
2. `_fit` (Keras' own `fit`) or `_loop` (`TrainingLoop`; `_parameter_server` where workers train
   each on their own) run the step, with what `_patches` replaces in Keras and TensorFlow. What a
   replica knows of the global batch is the `ReplicaStep` in `_step`: above all its share.
3. `_whose_code` tells whether all of the step is of libraries. Then each replica computes its shard
   of the batch. Else `_global_batch` gives the step the global batch, and divides only the layers
   of libraries, and those that compute each example by itself: `_per_example_law` tries that.
4. In both, random numbers are drawn by position (`_random`), batch statistics are the global
   batch's (`_batch_norm`), what layers assign is averaged (`_layer_state`), and losses are divided
   by the global batch's divisor (`_patches`; `_gradients` in the loop). What replicas compute
   together is in `_collectives`.
5. `_optimizer_patches` adds up the gradients and has optimizers work once, on their sums;
   `_metric_patches` has metrics count the global batch.

XLA compiles parts of this in `_xla` and `_loop`, and `_xla` measures whether that is faster.
The scope that a model was made in, and its datasets, are checked in `_checks`.
What is private in Keras and TensorFlow is in `_keras_internals`.
"""
