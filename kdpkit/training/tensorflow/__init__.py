"""Training on replicas of TensorFlow: what a batch meets on its way, in this order.

1. `_workers` spreads the batches of a dataset over replicas and processes, and cuts uneven ones.
2. `_verification` tries the step on the first examples, before anything is trained; `_shards` cuts
   them, `_verification_report` names what depends on the split, and `_step_graph` reads the step's
   graph for what depends on it with other examples (a rule for each operation: `_graph_axes`).
3. `_fit` (Keras' own `fit`) or `_loop` (`TrainingLoop`; `_parameter_server` where workers train
   each on their own) run the step. What a replica knows of the global batch in it, above all its
   share, by which uneven batches are made exact, is the `ReplicaStep` in `_step`.
4. Inside of it, random numbers are drawn by position (`_random`), batch statistics are the global
   batch's (`_batch_norm`), what layers assign is averaged (`_layer_state`), and losses are divided
   by the global batch's divisor (`_step_patches`; `_gradients` in the loop). A step that needs
   the global batch gets it (`_global_batch`); what replicas compute together is in `_collectives`.
5. `_optimizer_patches` adds up the gradients and has optimizers work once, on their sums;
   `_metric_patches` has metrics count the global batch.

XLA compiles parts of this in `_xla_call` and `_loop`; `_xla_trial` measures whether that is faster.
What is private in Keras and TensorFlow is in `_keras_internals`, and what is replaced in it during
a step in `_step_patches`, `_random` and `_xla_call`.
"""
