"""Training on replicas of TensorFlow: what a batch meets on its way, in this order.

1. `_workers` spreads the batches of a dataset over replicas and processes, and cuts uneven ones.
2. `_verification` tries the step on the first examples, before anything is trained; `_shards` cuts
   them, `_verification_report` says what depends on the cut, and `_branches` finds in the step's
   graph what depends on it for other examples.
3. `_fit` (Keras' own `fit`) or `_loop` (`TrainingLoop`; `_parameter_server` where workers train
   each on their own) run the step. What a replica knows of the whole batch in it, above all its
   share, by which uneven batches are made exact, is the `ReplicaStep` in `_step`.
4. Inside of it, random numbers are drawn by position (`_random`), batch statistics are the global
   batch's (`_batch_norm`), what layers assign is averaged (`_layer_state`), and losses are divided
   by the whole batch's divisor (`_keras_internals`; `_gradients` in the loop). A step that needs
   the whole batch gets it (`_whole_batch`); what replicas compute together is in `_collectives`.
5. `_attachments` adds up the gradients, and has optimizers and metrics work once on the whole.

XLA compiles parts of this in `_xla_call` and `_loop`; `_xla_trial` measures whether that is faster.
All that is private in Keras and TensorFlow is in `_keras_internals`, `_random` and `_xla_call`.
"""
