"""Text as token ids in NumPy, for the recipes' language models; nothing here needs TensorFlow.

KerasHub's tokenizers work without TensorFlow in 0.32 and newer.
"""

import collections
import re
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np

from kdpkit import corpora, errors
from kdpkit._internal import checks, processes

_LINES_AT_ONCE = 4096
_COMMON_WORDS = 100
_MOST_SENTENCES = 200  # in which words are guessed


def from_preset(kind: Any, preset: str, **settings: Any) -> Any:
    """Load a model or a tokenizer of KerasHub, `kind`, from a preset: a name or a directory.

    Raises:
        ValueError: There is no such preset, or it cannot be downloaded.
    """
    try:
        return kind.from_preset(preset, **settings)
    except (ValueError, OSError) as error:
        reason, *_ = checks.reason_of(error).split(". ")
        raise errors.FileInputError(
            f"The preset could not be loaded ({reason}). Received: preset={preset!r}. Use a "
            "directory that `save_to_preset` wrote, or, where there is a network, one of "
            f"{checks.listed(kind.presets)}."
        ) from error


def tokenizer(preset: str | None, lines: Sequence[str], vocabulary_size: int) -> Any:
    """Return a preset's tokenizer; without a preset BERT's, with words learned from lines."""
    from keras_hub import models

    if preset:
        return from_preset(models.Tokenizer, preset)
    return models.BertTokenizer(corpora.learn_vocabulary(lines, vocabulary_size), lowercase=True)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Return what begins, ends and pads a text; some tokenizers, as Qwen's, have only an end."""
    end = tokenizer.end_token_id
    start, pad = (getattr(tokenizer, f"{role}_token_id", None) for role in ("start", "pad"))
    return {"start": end if start is None else start, "end": end, "pad": pad or 0}


def sequences(lines: Sequence[str], tokenizer: Any, length: int) -> np.ndarray:
    """Return the token ids of texts that follow each other, int32 `[sequences, length]`.

    They are packed as by `kdpkit.pipelines.pack_tokens`; what is left over at the end, and would
    need padding, is left out.

    Raises:
        ValueError: The text is shorter than a sequence.
    """
    special, documents = special_ids(tokenizer), _token_ids(lines, tokenizer)
    stream = [token for document in documents for token in (*document, special["end"])][:-1]
    body = checks.integer("length", length, minimum=3) - 2  # without the ends of a sequence
    count = len(stream) // body
    if not count:
        checks.fail("The text is shorter than a sequence.", lines=len(lines), length=length)
    packed = np.empty((count, length), np.int32)
    packed[:, 0], packed[:, -1] = special["start"], special["end"]
    packed[:, 1:-1] = np.reshape(stream[: count * body], (count, body))
    return packed


def answers(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of pairs of a prompt and its answer, and 1 where they are the answer's.

    A prompt and its answer follow each other, then the token that ends a text; both arrays are
    int32 `[pairs, length]`. A longer pair loses the prompt's first tokens, then the answer's last
    ones, but never the token that ends it; a line reports how many do.
    """
    special = special_ids(tokenizer)
    ids = np.full((len(pairs), length), special["pad"], np.int32)
    is_answer = np.zeros_like(ids)
    cut_prompts = cut_answers = 0
    for row, pair in enumerate(pairs):
        prompt, answer = _token_ids(pair, tokenizer)
        cut_prompts += len(prompt) + len(answer) + 2 > length
        cut_answers += len(answer) + 2 > length
        answer = [*answer[: length - 2], special["end"]]
        prompt = [special["start"], *prompt][len(answer) - length :]
        end = len(prompt) + len(answer)
        ids[row, :end] = prompt + answer
        is_answer[row, len(prompt) : end] = 1
    if cut_prompts and processes.index() == 0:
        print(
            f"Of {len(pairs)} pairs {cut_prompts} have more than {length} tokens: they lose the "
            f"beginning of the prompt, and {cut_answers} also the end of the answer."
        )
    return ids, is_answer


def load(data: str) -> corpora.TextSplits:
    """Load a text, or a file of JSON lines with pairs of a prompt and its answer."""
    if data.endswith(".jsonl"):
        return corpora.load_pairs(data)
    return corpora.load_text(data, longer_than=100)  # bytes, as headings are shorter


def examples(splits: corpora.TextSplits, tokenizer: Any, length: int) -> list[tuple[Any, ...]]:
    """Return what a causal model trains on, is validated and tested on: `next_tokens` of each."""
    found = []
    for documents in (splits.train, splits.validation, splits.test):
        if _are_pairs(documents):
            found.append(next_tokens(*answers(documents, tokenizer, length + 1)))
        else:
            found.append(next_tokens(sequences(documents, tokenizer, length + 1)))
    return found


def next_tokens(ids: np.ndarray, is_answer: np.ndarray | None = None) -> tuple[Any, ...]:
    """Return what a causal model sees, without the last token, and the token that follows on each.

    With `is_answer` there are weights too, which average 1: only the answers' tokens count.
    """
    features = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])}
    if is_answer is None:
        return features, ids[:, 1:]
    weights = is_answer[:, 1:].astype("float32")
    return features, ids[:, 1:], weights / weights.mean()


def lines_of(documents: Sequence[Any]) -> Sequence[str]:
    """Return all texts, of pairs both."""
    return [text for pair in documents for text in pair] if _are_pairs(documents) else documents


def _are_pairs(documents: Sequence[Any]) -> bool:
    return not all(isinstance(document, str) for document in documents[:1])


def attention(model: Any, dataset: Any) -> str:
    """Return in one line how a compiled model computes attention: fused, or all scores, and why."""
    from kdpkit.diagnostics._doctor import batches, slow_steps

    return slow_steps.attention_of(model, batches.batches_of(dataset).first)


def print_guesses(model: Any, tokenizer: Any, splits: Any, tested: Any, accuracy: float) -> None:
    """Print a masked language model's accuracy beside a constant guess's, and words it fills in.

    Each is left out of a sentence of the test text, and is none of the hundred commonest words, nor
    are the guesses.

    Args:
        model: A masked language model of KerasHub.
        tokenizer: Its tokenizer.
        splits: The text that it was trained and tested on.
        tested: The batches that it was tested on.
        accuracy: Its accuracy on them.
    """
    commonest, share = _commonest_label(tested)
    print(
        f"Of the masked tokens of the test text {accuracy:.1%} are right; guessing the commonest\n"
        f'one each time, "{tokenizer.id_to_token(commonest)}", gets {share:.1%}.'
    )
    counts = collections.Counter(re.findall("[a-z]+", " ".join(splits.train).lower()))
    common = {word for word, _ in counts.most_common(_COMMON_WORDS)}
    vocabulary = tokenizer.get_vocabulary()
    is_rarer = np.array([token.isalpha() and token not in common for token in vocabulary])
    rarer = {token for token, is_one in zip(vocabulary, is_rarer, strict=True) if is_one}
    gaps = _gaps(splits.test, rarer)
    if not gaps:
        return
    probabilities = _probabilities(model, tokenizer, gaps) * is_rarer
    guesses = np.argsort(-probabilities, axis=1)[:, :4]
    is_right = guesses == [[tokenizer.token_to_id(word)] for _, word, _ in gaps]
    first, among_four = is_right[:, 0].mean(), is_right.any(axis=1).mean()
    print(
        f"Of {len(gaps)} words beyond the {_COMMON_WORDS} commonest, each left out of a test "
        f"sentence, the first\nguess is right for {first:.0%}, one of four for {among_four:.0%}. "
        "The surest guesses, of different words:"
    )
    surest = np.argsort(-probabilities.max(axis=1))
    different = {guesses[row, 0]: row for row in surest[::-1]}  # the surest sentence of each word
    for row in sorted(different.values(), key=[*surest].index)[:4]:
        before, word, after = gaps[row]
        best = (f"{tokenizer.id_to_token(i)} {probabilities[row, i]:.0%}" for i in guesses[row])
        print(f"  {before}____{after}\n    {', '.join(best)}; it was: {word}")


def _commonest_label(batches: Any) -> tuple[int, float]:
    """Return the commonest label of weighted batches, and its share of the weights."""
    totals: collections.Counter[int] = collections.Counter()
    for batch in batches:
        _, labels, weights = keras.tree.map_structure(np.asarray, batch)
        counts = np.bincount(labels.ravel(), weights.ravel())
        totals.update({int(label): float(counts[label]) for label in np.flatnonzero(counts)})
    ((label, weight),) = totals.most_common(1)
    return label, weight / totals.total()


def _gaps(lines: Sequence[str], words: Collection[str]) -> list[tuple[str, str, str]]:
    """Return what is before each of the words in short sentences, the word, and the rest."""
    sentence_of_6_to_13_words = r"(?:^|(?<=[.!?] ))[A-Z][a-z]*(?:,? [\w'-]+){5,12}\.(?= |$)"
    sentences = re.findall(sentence_of_6_to_13_words, "\n".join(lines), re.MULTILINE)
    return [
        (sentence[: found.start()], found[0], sentence[found.end() :])
        for sentence in [*dict.fromkeys(sentences)][:_MOST_SENTENCES]
        for found in re.finditer(r"(?<![\w'-])[a-z]+(?![\w'-])", sentence)
        if found[0] in words
    ]


def _probabilities(model: Any, tokenizer: Any, gaps: Sequence[tuple[str, str, str]]) -> np.ndarray:
    """Return the probability of each token in the gaps of sentences."""
    start, mask, end = (getattr(tokenizer, f"{name}_token_id") for name in ("start", "mask", "end"))
    ids = np.full((len(gaps), 64), tokenizer.pad_token_id)
    for row, (before, _, after) in zip(ids, gaps, strict=True):
        tokens = [start, *tokenizer(before), mask, *tokenizer(after), end][: len(row)]
        row[: len(tokens)] = tokens
    features = {"token_ids": ids, "segment_ids": np.zeros_like(ids)}
    features["padding_mask"] = ids != tokenizer.pad_token_id
    features["mask_positions"] = np.argmax(ids == mask, axis=1)[:, np.newaxis]
    logits = keras.ops.cast(model(features)[:, 0], "float32")
    return keras.ops.convert_to_numpy(keras.ops.softmax(logits))


def print_continued(
    model: Any, tokenizer: Any, tokens: np.ndarray, seed: int, known: int = 12
) -> None:
    """Continue held-out texts; each token is drawn among the ten most probable."""
    random = np.random.default_rng(seed)
    for position in range(known, tokens.shape[1]):
        tokens[:, position:] = 0  # which causal attention does not see
        hidden = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        logits = model.token_embedding(hidden[:, position - 1], reverse=True)
        logits = keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))
        drawn = np.where(logits < np.sort(logits)[:, -10:-9], -np.inf, logits)
        tokens[:, position] = np.argmax(drawn + random.gumbel(size=drawn.shape), axis=1)
    print("Held-out text | and what the model makes of it:")
    for ids in tokens:
        print(f"  {tokenizer.detokenize(ids[1:known])} | {tokenizer.detokenize(ids[known:])}")


def _token_ids(lines: Sequence[str], tokenizer: Any) -> list[list[int]]:
    documents: list[list[int]] = []
    for first in range(0, len(lines), _LINES_AT_ONCE):
        tokens = tokenizer(list(lines[first : first + _LINES_AT_ONCE]))
        rows = tokens.to_list() if hasattr(tokens, "to_list") else tokens  # ragged in older ones
        documents += ([int(token) for token in row] for row in rows)
    return documents
