"""tf.data without its tuning thread."""

import tensorflow as tf


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Fix the parallelism of maps at one call per core, in place of tuning it.

    Dropping an iterator waits for TensorFlow's tuning thread, which can miss its wake-up call and
    sleep on for up to a minute: training then stalls between two epochs.
    """
    # Not reported, and no small program shows it: docs/upstream/README.md
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
