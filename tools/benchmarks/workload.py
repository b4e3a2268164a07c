"""The BERT workload of the benchmarks: the published recipe, ours, and what both train on."""

import functools
import itertools
from pathlib import Path

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from kdpkit import corpora, pipelines, training

MIN_BYTES = 100
BATCH = 32  # lines of the published recipe, full rows of ours
LENGTH = 128  # of our rows
PUBLISHED_LENGTH, PUBLISHED_SLOTS = 512, 96  # what the preset's preprocessor makes
PIECES = 30_522
RATE = 1e-4


@functools.cache
def lines(path):
    """Return the lines that are long enough."""
    text = path.read_text().splitlines() if path else corpora.load_text().train
    return [line for line in text if len(line.encode()) > MIN_BYTES]


@functools.cache
def tokenizer(path, vocabulary):
    """Return BERT's tokenizer, with a vocabulary of its size."""
    if vocabulary:
        pieces = Path(vocabulary).read_text(encoding="utf-8").splitlines()
    else:
        learned = corpora.learn_vocabulary(lines(path), PIECES)
        pieces = learned + [f"[unused{number}]" for number in range(PIECES - len(learned))]
    return keras_hub.models.BertTokenizer(pieces, lowercase=True)


def backbone(vocabulary_size, seed=0):
    """BERT tiny, from scratch."""
    keras.utils.set_random_seed(seed)
    return keras_hub.models.BertBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=2,
        num_heads=2,
        hidden_dim=128,
        intermediate_dim=512,
    )


def masked_lm(vocabulary_size, preprocessor=None, seed=0):
    """The model, on its own or with the published preprocessing of text in it."""
    model = keras_hub.models.BertMaskedLM(
        backbone(vocabulary_size, seed), preprocessor=preprocessor
    )
    model.backbone.get_layer("pooled_dense").trainable = False
    return model


def compiled(model, **settings):
    """Compile as the published recipe does."""
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.AdamW(RATE),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        **settings,
    )
    return model


def published(args):
    """The published recipe: a model that takes text, line by line, and its batches of lines."""
    tokens = tokenizer(args.text, args.vocabulary)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        tokens, sequence_length=PUBLISHED_LENGTH, mask_selection_length=PUBLISHED_SLOTS
    )
    model = compiled(masked_lm(tokens.vocabulary_size(), preprocessor), jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(lines(args.text)).shuffle(500, seed=0)
    return model, data.batch(BATCH, drop_remainder=True).cache().prefetch(tf.data.AUTOTUNE)


def rows(args):
    """Return the packed rows."""
    tokens = tokenizer(args.text, args.vocabulary)
    ids = (getattr(tokens, f"{role}_token_id") for role in ("start", "end", "pad"))
    pack = pipelines.pack_tokens(LENGTH, **dict(zip(("start", "end", "pad"), ids, strict=True)))
    text = tf.data.Dataset.from_tensor_slices(lines(args.text))
    packed = text.apply(pipelines.tokenize(tokens)).apply(pack)
    return np.stack(list(packed.as_numpy_iterator()))


def packed(args, array, steps=None, replicas=1, batch=BATCH):
    """Return our batches, masked afresh in every epoch."""
    return pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(array),
        pipelines.PipelineConfig(cache=False),
        global_batch_size=batch,
        replicas=replicas,
        augment=pipelines.mask_tokens(tokenizer(args.text, args.vocabulary)),
        steps_per_epoch=steps,
    )


def exact(args, **settings):
    """Our model, compiled as the published one, whose loss goes over the vocabulary in chunks."""
    tokens = tokenizer(args.text, args.vocabulary)
    model = training.without_logits(masked_lm(tokens.vocabulary_size()))
    return compiled(training.replica_exact(model), **settings)


def real_tokens(args, batches):
    """Count the ordinary tokens in batches of ids, or of lines."""
    tokens = tokenizer(args.text, args.vocabulary)
    count = 0
    for batch in batches:
        if batch.dtype == tf.string:
            count += sum(min(len(ids), PUBLISHED_LENGTH - 2) for ids in tokens(batch))
        else:
            count += int(np.isin(batch, tokens.special_token_ids, invert=True).sum())
    return count


def cycle(items, count):
    """Return the items over and over, `count` at a time."""
    endless = itertools.cycle(items)
    while True:
        yield list(itertools.islice(endless, count))
