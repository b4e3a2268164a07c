"""Texts as batches of token ids, and a vocabulary: `tf.data` on TensorFlow, arrays on JAX.

On JAX nothing here needs TensorFlow, where KerasHub's tokenizers do not (0.32 or newer).
"""

import functools
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

import kdpkit
from kdpkit import errors
from kdpkit._internal import atomic_files, checks, storage

Sequences: TypeAlias = Any  # of token ids: a `tf.data.Dataset`, or an array [sequences, length]

_MIN_BYTES = 100  # of a line: shorter ones, such as headings, are dropped
_LINES_AT_ONCE = 4096


class PairSplits(NamedTuple):
    """Pairs of a prompt and its answer, for training, validation and test."""

    train: Sequence[tuple[str, str]]
    validation: Sequence[tuple[str, str]]
    test: Sequence[tuple[str, str]]


def from_preset(kind: Any, preset: str, **settings: Any) -> Any:
    """Load a model or a tokenizer of KerasHub, `kind`, from a preset: a name or a directory.

    Raises:
        kdpkit.errors.FileInputError: There is no such preset, or it cannot be downloaded.
    """
    try:
        return kind.from_preset(preset, **settings)
    except (ValueError, OSError) as error:
        reason, *_ = checks.reason_of(error).split(". ")
        raise errors.FileInputError(
            f"The preset could not be loaded ({reason}). Received: preset={preset!r}. Give a "
            "directory that `save_to_preset` wrote, or, where there is a network, one of "
            f"{checks.listed(kind.presets)}."
        ) from error


def learned_vocabulary(
    lines: Sequence[str], size: int, cache_dir: str | os.PathLike[str]
) -> list[str]:
    """Learn a WordPiece vocabulary (`kdpkit.pipelines.learn_vocabulary`), once for the same lines.

    Where TensorFlow is not installed, the package `tokenizers` learns it, and finds other tokens.
    It is kept in `cache_dir`, as JSON. Where that cannot be written, a line reports it.
    """
    import keras_hub

    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    key = json.dumps([kdpkit.__version__, keras_hub.__version__, has_tensorflow, size, *lines])
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = storage.path(cache_dir) / f"vocabulary-{size}-{digest[:16]}.json"
    if path.exists():
        print(f"Vocabulary: read from {path}.")
        return list(json.loads(path.read_text(encoding="utf-8")))
    if has_tensorflow:
        from kdpkit import pipelines

        tokens = pipelines.learn_vocabulary(lines, size)
    else:
        tokens = _learned_without_tensorflow(lines, size)
    try:
        with atomic_files.replacing(path) as temporary:
            temporary.write_text(json.dumps(tokens), encoding="utf-8")
    except OSError as error:
        print(f"Vocabulary: not kept, as {path} cannot be written ({error.strerror}).")
    return tokens


def _learned_without_tensorflow(lines: Sequence[str], size: int) -> list[str]:
    import tokenizers

    learner = tokenizers.BertWordPieceTokenizer(strip_accents=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    learner.train_from_iterator(lines, size, special_tokens=special, show_progress=False)
    ids = learner.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def sequences(
    lines: Iterable[str], tokenizer: Any, length: int, *, by_line: bool = False, full: bool = False
) -> Sequences:
    """Return the token ids of texts in sequences of one length, without lines under 100 bytes.

    Args:
        lines: Texts.
        tokenizer: A KerasHub tokenizer.
        length: Tokens in a sequence, those at its start and end included.
        by_line: Whether each line begins a sequence of its own, which is padded. Otherwise lines
            follow each other, as `kdpkit.pipelines.pack_tokens` packs them.
        full: Whether sequences with padding are left out.

    Raises:
        ValueError: No line is left.
    """
    ids = _special_ids(tokenizer)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from kdpkit import pipelines

        text = tf.data.Dataset.from_tensor_slices(list(lines))
        text = text.filter(lambda line: tf.strings.length(line) > _MIN_BYTES)
        found = text.apply(
            pipelines.tokenize(tokenizer, sequence_length=length if by_line else None)
        )
        found = found if by_line else found.apply(pipelines.pack_tokens(length, **ids))
        return found.filter(lambda tokens: tokens[-1] != ids["pad"]) if full else found
    long = [line for line in lines if len(line.encode()) > _MIN_BYTES]
    if not long:
        checks.fail(f"No example is left: all lines have {_MIN_BYTES} bytes or less.")
    documents = [
        np.asarray(tokens, np.int32)
        for first in range(0, len(long), _LINES_AT_ONCE)
        for tokens in tokenizer(long[first : first + _LINES_AT_ONCE])
    ]
    parts = [[document] for document in documents] if by_line else [documents]
    found = np.concatenate([_packed(part, length, **ids) for part in parts if any(map(len, part))])
    return found[found[:, -1] != ids["pad"]] if full else found


def _packed(
    documents: Sequence[np.ndarray], length: int, *, start: int, end: int, pad: int
) -> np.ndarray:
    """Do what `kdpkit.pipelines.pack_tokens` does, in NumPy."""
    stream = np.concatenate([part for document in documents for part in (document, [end])])[:-1]
    count, room = math.ceil(len(stream) / (length - 2)), length - 2
    packed = np.full((count, length), pad, np.int32)
    for number, row in enumerate(packed):
        body = stream[number * room :][:room]
        row[: len(body) + 2] = start, *body, end
    return packed


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """Return what begins, ends and pads a text; some tokenizers, as Qwen's, have only an end."""
    end = tokenizer.end_token_id
    start, pad = (getattr(tokenizer, f"{role}_token_id", None) for role in ("start", "pad"))
    return {"start": end if start is None else start, "end": end, "pad": pad or 0}


def load_texts_or_pairs(data: str) -> Any:
    """Load texts, as `kdpkit.corpora.load_text` does, or pairs of a prompt and its answer.

    Args:
        data: As for `load_text`, or a file of JSON lines (`.jsonl`), each an object with a
            "prompt" and an "answer". Of these every tenth is held out, in turn for validation and
            test.

    Returns:
        What has lines of text, or pairs, as `train`, `validation` and `test`.

    Raises:
        ValueError: A line is no such object, or there are fewer than twenty.
    """
    if not data.endswith(".jsonl"):
        from kdpkit import corpora

        return corpora.load_text(data)
    pairs, file = [], storage.path(data)
    if not file.is_file():
        checks.fail_for_file("There is no such file of pairs", data)
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            pairs.append((str(found["prompt"]), str(found["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            raise errors.FileInputError(
                f'Line {number} of {data} is no JSON object with a "prompt" and an "answer". '
                f"Received: {line[:60]!r}."
            ) from error
    held_out = pairs[::10]
    if len(held_out) < 2:
        checks.fail("Pairs are held out for validation and test, of twenty at least.", pairs=data)
    train = [pair for number, pair in enumerate(pairs) if number % 10]
    return PairSplits(train=train, validation=held_out[::2], test=held_out[1::2])


def sequences_or_pairs(texts: Sequence[Any], tokenizer: Any, length: int) -> Any:
    """Return full `sequences` of texts; of pairs their token ids, and which are of the answer.

    A prompt and its answer follow each other, with what ends a text, in a row of this length; of a
    longer one the prompt's first tokens are left out.
    """
    if isinstance(texts[0], str):
        return sequences(texts, tokenizer, length, full=True)
    special = _special_ids(tokenizer)
    ids, answers = np.zeros((2, len(texts), length), np.int32)
    ids += special["pad"]
    for row, pair in enumerate(texts):
        prompt, answer = ([*map(int, part)] for part in tokenizer([*pair]))
        answer = [*answer, special["end"]][: length - 1]
        prompt = [special["start"], *prompt][len(answer) - length :]
        end = len(prompt) + len(answer)
        ids[row, :end] = prompt + answer
        answers[row, len(prompt) : end] = 1
    if keras.backend.backend() == "jax":
        return ids, answers
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((ids, answers))


def next_tokens(examples: Any, seed: Any = None) -> tuple[Any, ...]:  # noqa: ARG001  # draws nothing
    """Return what a causal model sees, without the last token, and the token that follows on each.

    Of pairs there are weights too, which average 1: the answers' tokens count, and nothing else.
    """
    pairs = isinstance(examples, tuple | list)
    tokens, answers = examples if pairs else (examples, None)
    seen = tokens[..., :-1]
    features = {"token_ids": seen, "padding_mask": 0 * seen + 1}
    if answers is None:
        return features, tokens[..., 1:]
    weights = keras.ops.cast(answers[..., 1:], "float32")
    return features, tokens[..., 1:], weights / keras.ops.maximum(keras.ops.mean(weights), 1e-6)


def mask_tokens(tokenizer: Any, *, rate: float = 0.15) -> Callable[..., Any]:
    """Return BERT's masking, `kdpkit.pipelines.mask_tokens`, for `train_batches`.

    On JAX it draws from the generator of NumPy that `kdpkit.batches.ArrayBatches` makes for each
    batch. Without one, for `eval_batches`, masks are the same in every epoch.
    """
    if keras.backend.backend() == "tensorflow":
        from kdpkit import pipelines

        return pipelines.mask_tokens(tokenizer, rate=rate)
    return functools.partial(_masked, tokenizer=tokenizer, rate=rate)


def _masked(
    tokens: np.ndarray,
    random: np.random.Generator | None = None,
    *,
    tokenizer: Any,
    rate: float,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    random = random or np.random.default_rng(0)
    ordinary = ~np.isin(tokens, tokenizer.special_token_ids)
    room = max(math.ceil(rate * (tokens.shape[1] - 2)), 1)  # for a full sequence
    # In float32, as 0.15 of 20 tokens are 3, and not a rounding error more.
    wanted = np.ceil(np.float32(rate) * ordinary.sum(axis=1, dtype=np.float32))
    chosen = np.arange(room) < wanted[:, np.newaxis]
    order = np.where(ordinary, random.random(tokens.shape), 1)
    positions = np.where(chosen, np.argsort(order, axis=1)[:, :room], 0).astype("int32")
    originals = np.take_along_axis(tokens, positions, axis=1)
    fate = random.random(positions.shape)
    drawn = random.integers(tokenizer.vocabulary_size(), size=positions.shape)
    replaced = np.select([fate < 0.8, fate < 0.9], [tokenizer.mask_token_id, drawn], originals)
    masked = tokens.copy()
    masked[np.nonzero(chosen)[0], positions[chosen]] = replaced[chosen]
    features = {
        "token_ids": masked,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": (tokens != tokenizer.pad_token_id).astype("int32"),
        "mask_positions": positions,
    }
    weights = chosen * np.float32(chosen.size / max(chosen.sum(), 1))
    return features, np.where(chosen, originals, 0), weights


def train_batches(
    examples: Sequences,
    *,
    global_batch_size: int,
    augment: Callable[..., Any],
    seed: int,
    steps_per_epoch: int | None = None,
) -> Any:
    """Return what to train on: a new order in each epoch, and what `augment` draws for each batch.

    It is a `kdpkit.pipelines.train_pipeline`, or on JAX a `kdpkit.batches.ArrayBatches`.

    Raises:
        ValueError: There are fewer examples than a batch, or than `steps_per_epoch` batches.
    """
    sizes: Any = {"global_batch_size": global_batch_size, "steps_per_epoch": steps_per_epoch}
    if keras.backend.backend() == "tensorflow":
        from kdpkit import pipelines

        seeded = pipelines.PipelineConfig(seed=seed)
        return pipelines.train_pipeline(examples, seeded, augment=augment, **sizes)
    from kdpkit import batches

    return batches.ArrayBatches(examples, seed=seed, augment=augment, **sizes)


def eval_batches(
    examples: Sequences,
    *,
    global_batch_size: int,
    prepare: Callable[..., Any],
    remainder: str = "pad",
) -> Any:
    """Return held-out batches, in order; weights, where `prepare` returns some, average 1."""
    if keras.backend.backend() == "tensorflow":
        from kdpkit import pipelines

        found = pipelines.eval_pipeline(
            examples, prepare=prepare, remainder=remainder, global_batch_size=global_batch_size
        )
        has_weights = len(found.element_spec) == 3
        return found.apply(pipelines.normalize_weights) if has_weights else found
    from kdpkit import batches

    sizes: Any = {"global_batch_size": global_batch_size, "remainder": remainder}
    return batches.ArrayBatches(prepare(examples), mode="eval", **sizes)
