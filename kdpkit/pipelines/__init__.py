"""tf.data input pipelines for several replicas: two builders, and stages that tf.data lacks.

`train_pipeline` and `eval_pipeline` combine the stages in the order that gives every epoch a new
order and new augmentation: interleave files, filter, prepare, cache, shuffle, batch, augment,
prefetch. The other stages are functions from dataset to dataset, for `Dataset.apply`. `lint` finds
mistakes in any pipeline from its stages.
"""

from kdpkit.pipelines._builders import PipelineConfig, eval_pipeline, train_pipeline
from kdpkit.pipelines._lint import lint
from kdpkit.pipelines._padding import normalize_weights, pad_to_global_batch
from kdpkit.pipelines._text import mask_tokens, pack_tokens, tokenize

__all__ = [
    "PipelineConfig",
    "eval_pipeline",
    "lint",
    "mask_tokens",
    "normalize_weights",
    "pack_tokens",
    "pad_to_global_batch",
    "tokenize",
    "train_pipeline",
]
