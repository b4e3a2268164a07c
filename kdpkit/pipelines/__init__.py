"""tf.data input pipelines for several replicas: single stages, and two builders.

A `Transform` is a function from dataset to dataset, for `Dataset.apply`. `train_pipeline` and
`eval_pipeline` combine the stages in the order that gives every epoch a new order and new
augmentation: filter, prepare, cache, shuffle, batch, augment, prefetch. `lint` finds mistakes in
any pipeline from its stages.
"""

from kdpkit.pipelines._builders import PipelineConfig, eval_pipeline, train_pipeline
from kdpkit.pipelines._lint import lint
from kdpkit.pipelines._padding import normalize_weights, pad_to_global_batch
from kdpkit.pipelines._sources import interleave_files
from kdpkit.pipelines._text import learn_vocabulary, mask_tokens, pack_tokens, tokenize
from kdpkit.pipelines._transforms import (
    Transform,
    auto_shard,
    batch_for,
    cache,
    count_batches,
    filter_by,
    longer_than,
    prefetch,
    shuffle,
)

__all__ = [
    "PipelineConfig",
    "Transform",
    "auto_shard",
    "batch_for",
    "cache",
    "count_batches",
    "eval_pipeline",
    "filter_by",
    "interleave_files",
    "learn_vocabulary",
    "lint",
    "longer_than",
    "mask_tokens",
    "normalize_weights",
    "pack_tokens",
    "pad_to_global_batch",
    "prefetch",
    "shuffle",
    "tokenize",
    "train_pipeline",
]
