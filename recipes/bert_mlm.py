"""Train BERT as a masked language model on several replicas, from text to results.

    python recipes/bert_mlm.py --strategy mirrored --replicas 2

This is the workload of the Keras guide to data-parallel training with KerasHub, with its mistakes
fixed: the learning-rate decay reaches the optimizer, masks are new in each epoch, validation is not
shuffled, the replicas divide every batch, and no token of a long line is lost. It is also several
times as fast per real token: training sequences are full, and the loss only uses the masked
positions and never holds all their logits; `--jit on` compiles the step with XLA. `--data` takes
"builtin" (the English documentation that ships with Python), a directory with the WikiText files,
or a text file. With KERAS_BACKEND=jax it trains on JAX. recipes/README.md has measured results.
"""

import collections
import re

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=12, per_replica_batch_size=16, base_learning_rate=2e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--preset", help="a KerasHub name such as bert_tiny_en_uncased, or a preset directory")
add("--vocabulary-size", type=positive, default=2000, help="tokens to learn")
add("--sequence-length", type=positive, default=32, help="tokens in a sequence")
add("--warmup-steps", type=int, help="(default: a twentieth of all steps)")
add("--clip-norm", type=float, default=1.0, help="largest norm of all gradients; 0 for any")
add("--jit", choices=("auto", "on", "off"), default="auto", help="compile steps with XLA")
add("--precision", choices=("float32", "mixed_bfloat16", "mixed_float16"), default="float32")
add("--steps-per-loop", type=positive, default=1, help="steps per compiled call, such as 16")
experiment.start(parser, __name__)  # checks the flags, before the imports take seconds

import keras
import numpy as np
import tensorflow as tf
from keras_hub import models

from kdpkit import corpora, pipelines, schedules, training
from kdpkit.experiment import text


def build_model(args, lines):
    """Build BERT tiny (2 layers, 128 wide, 2 heads) for words of the text, or load a preset."""
    if args.preset:
        tokenizer = text.from_preset(models.BertTokenizer, args.preset)
        model = text.from_preset(models.BertMaskedLM, args.preset, preprocessor=None)
    else:
        words = corpora.learn_vocabulary(lines, args.vocabulary_size)
        tokenizer, length = models.BertTokenizer(words, lowercase=True), args.sequence_length
        size = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
        backbone = models.BertBackbone(len(words), max_sequence_length=max(512, length), **size)
        model = models.BertMaskedLM(backbone)
    model.backbone.get_layer("pooled_dense").trainable = False  # unused by the masked-word task
    return tokenizer, model


def print_guesses(model, tokenizer, splits):
    """Leave one frequent word out of each held-out sentence, and print the model's best guesses."""
    words = collections.Counter(re.findall("[a-z]+", " ".join(splits.train).lower()))
    frequent = {word for word, _ in words.most_common(100)} & {*tokenizer.get_vocabulary()}
    pattern = r"(?:^|(?<=[.!?] ))[A-Z][a-z]*(?:,? [\w'-]+){5,12}\.(?= |$)"
    sentences = re.findall(pattern, "\n".join(splits.test), re.MULTILINE)
    places = [[*re.finditer(r"(?<= )[a-z]+(?= )", sentence)] for sentence in sentences]
    places = [[place for place in row if place[0] in frequent] for row in places]
    chosen = [row[len(row) // 2] for row in places if row]  # the one in the middle
    mask, end = tokenizer.mask_token_id, tokenizer.end_token_id
    ids = np.full((len(chosen), 64), tokenizer.pad_token_id)
    for row, place in zip(ids, chosen, strict=True):
        before, after = map(tokenizer, (place.string[: place.start()], place.string[place.end() :]))
        tokens = [tokenizer.start_token_id, *before, mask, *after][: len(row) - 1]
        row[: len(tokens) + 1] = *tokens, end
    masked = {"mask_positions": np.argmax(ids == mask, axis=1)[:, np.newaxis]}
    features = {"token_ids": ids, "padding_mask": ids != 0, "segment_ids": 0 * ids, **masked}
    logits = keras.ops.cast(model(features)[:, 0], "float32")
    odds = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
    best = np.argsort(-odds)[:, :4]
    right = best == [[tokenizer.token_to_id(place[0])] for place in chosen]
    first, among_four = right[:, 0].mean(), right.any(axis=1).mean()
    print(f"A word left out of {len(chosen)} sentences that training has not seen: the first guess")
    print(
        f"is right for {first:.0%} of them, one of four for {among_four:.0%}. The surest guesses:"
    )
    for row in np.argsort(-odds.max(axis=1))[:4]:
        place = chosen[row]
        sentence = place.string[: place.start()] + "____" + place.string[place.end() :]
        guesses = ", ".join(f"{tokenizer.id_to_token(i)} {odds[row, i]:.0%}" for i in best[row])
        print(f"  {sentence}\n    {guesses}; it was: {place[0]}")


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    keras.config.set_dtype_policy(args.precision)
    plan = experiment.plan_from(args, strategy)
    size, length = plan.global_batch_size, args.sequence_length

    splits = corpora.load_text(args.data, longer_than=100)  # without headings
    print(f"{len(splits.train):,} lines to train on")
    with strategy.scope():
        tokenizer, model = build_model(args, splits.train)
    mask = pipelines.mask_tokens(tokenizer)

    def tokens(lines, **settings):
        dataset = tf.data.Dataset.from_tensor_slices(list(lines))
        return dataset.apply(pipelines.tokenize(tokenizer, **settings))

    def held_out(lines):
        examples = tokens(lines, sequence_length=length)  # each line begins a sequence
        batches = pipelines.eval_pipeline(examples, prepare=mask, global_batch_size=size)
        return batches.apply(pipelines.normalize_weights)

    packed = pipelines.pack_tokens(length, **text.special_ids(tokenizer))  # without padding
    train = pipelines.train_pipeline(
        tokens(splits.train).apply(packed),
        pipelines.PipelineConfig(seed=args.seed),
        augment=mask,  # new masks in each epoch
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    steps = len(train) * args.epochs
    warmup = steps // 20 if args.warmup_steps is None else args.warmup_steps
    rate = schedules.warmup_polynomial(plan.learning_rate, total_steps=steps, warmup_steps=warmup)
    loop = training.MaskedLMLoop(
        model,
        optimizer=keras.optimizers.AdamW(rate, global_clipnorm=args.clip_norm or None),
        weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
        jit_compile={"on": True, "off": False}.get(args.jit, "auto"),
    )
    record = experiment.Recorder(args, model, strategy, plan, tokens_per_example=length)
    loop.fit(
        record.resumed(train),
        held_out(splits.validation),
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
    )
    results = record.results(test=loop.evaluate(held_out(splits.test), verbose=0))
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    print_guesses(model, tokenizer, splits)
    return results


if __name__ == "__main__":
    experiment.run(main)
