"""One graph: a step that is traced as on one device is written again for several.

The examples of a batch are divided. `_traced_step` traces, `_inference` finds each tensor's axis of
examples, `_labels` and the rules say what devices can compute in parts, and `_writing` writes it.
"""
