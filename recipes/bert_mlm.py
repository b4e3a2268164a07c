"""Train BERT as a masked language model on several replicas, from text to results.

    python recipes/bert_mlm.py --strategy mirrored --replicas 2

This is the workload of the Keras guide to data-parallel training with KerasHub, with its mistakes
fixed: the learning-rate decay reaches the optimizer, masks are new in each epoch, validation is not
shuffled, the replicas divide every batch, and no token of a long line is lost. It is also several
times as fast per real token: training sequences are full, the loss only uses the masked positions
and never holds all their logits; `--jit on` compiles the step with XLA. `--data` takes "builtin"
(the English documentation that ships with Python), a directory with the WikiText files, or a text
file. The defaults are for a few minutes, in which you see the model learn. With KERAS_BACKEND=jax
it trains on JAX, without TensorFlow. recipes/README.md has measured results.
"""

import re

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=12, per_replica_batch_size=16, base_learning_rate=1e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--preset", help="a KerasHub name such as bert_tiny_en_uncased, or a preset directory")
add("--vocabulary-size", type=positive, default=2000, help="tokens to learn")
add("--sequence-length", type=positive, default=32, help="tokens in a sequence")
add("--warmup-steps", type=experiment.count, help="(default: a twentieth of all steps)")
add("--clip-norm", type=float, default=1.0, help="largest norm of all gradients; 0 for any")
add("--jit", choices=("auto", "on", "off"), default="auto", help="compile steps with XLA")
add("--precision", choices=("float32", "mixed_bfloat16", "mixed_float16"), default="float32")
add("--steps-per-loop", type=positive, default=1, help="steps per compiled call, such as 16")

with experiment.program(parser, __name__):
    import keras
    import numpy as np
    from keras_hub import models

    from kdpkit import corpora, schedules, training
    from kdpkit.experiment import text


def build_model(args, lines):
    """Build BERT tiny (2 layers, 128 wide, 2 heads) for words of the text, or load a preset."""
    if args.preset:
        tokenizer = text.from_preset(models.BertTokenizer, args.preset)
        model = text.from_preset(models.BertMaskedLM, args.preset, preprocessor=None)
    else:
        words = text.learned_vocabulary(lines, args.vocabulary_size, args.cache_dir)
        tokenizer, length = models.BertTokenizer(words, lowercase=True), args.sequence_length
        size = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
        backbone = models.BertBackbone(len(words), max_sequence_length=max(512, length), **size)
        model = models.BertMaskedLM(backbone)
    model.backbone.get_layer("pooled_dense").trainable = False  # unused by the masked-word task
    return tokenizer, model


def print_guesses(model, tokenizer, lines):
    """Leave a word out of four sentences that training has not seen, and print the best guesses."""
    tokens, chosen = tokenizer.get_vocabulary(), []
    sentences = r"(?:^|(?<=[.!?] ))[A-Z][a-z]*(?:,? [\w'-]+){5,12}\.(?= |$)"
    for sentence in re.findall(sentences, "\n".join(lines), re.MULTILINE):
        words = [word for word in re.findall(" ([a-z]{4,})(?= )", sentence) if word in tokens]
        chosen += [(sentence, word) for word in words[len(words) // 2 :][:1]]
    start, mask, end = map(tokens.index, ("[CLS]", "[MASK]", "[SEP]"))
    print("Sentences with a word left out, and the model's guesses:")
    for sentence, word in chosen[:: max(1, len(chosen) // 4)][:4]:
        before, after = map(tokenizer, sentence.split(f" {word} ", 1))
        ids = np.array([[start, *before, mask, *after, end]])
        features = {"token_ids": ids, "padding_mask": ids >= 0, "segment_ids": 0 * ids}
        logits = model(features | {"mask_positions": np.argwhere(ids == mask)[:, 1:]})[0, 0]
        odds = keras.ops.convert_to_numpy(keras.ops.softmax(keras.ops.cast(logits, "float32")))
        best = ", ".join(f"{tokens[i]} {odds[i]:.0%}" for i in np.argsort(-odds)[:4])
        print(f"  {sentence.replace(f' {word} ', ' ____ ', 1)}\n    {best}; it was: {word}")


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    keras.config.set_dtype_policy(args.precision)
    plan = experiment.plan_from(args, strategy)
    size, length = plan.global_batch_size, args.sequence_length

    splits = corpora.load_text(args.data)
    print(f"{len(splits.train):,} lines to train on")
    with strategy.scope():
        tokenizer, model = build_model(args, splits.train)
    mask = text.mask_tokens(tokenizer)

    def held_out(lines):
        examples = text.sequences(lines, tokenizer, length, by_line=True)
        return text.eval_batches(examples, prepare=mask, global_batch_size=size)

    train = text.train_batches(
        text.sequences(splits.train, tokenizer, length),  # full, without padding
        augment=mask,  # new masks in each epoch
        seed=args.seed,
        global_batch_size=size,
        steps_per_epoch=args.steps_per_epoch,
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
    validation = held_out(splits.validation)
    record = experiment.Recorder(args, model, strategy, plan, tokens_per_example=length)
    loop.fit(record.resumed(train), validation, epochs=args.epochs, callbacks=record.callbacks)
    results = record.results(test=loop.evaluate(held_out(splits.test), verbose=0))
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    print(f"Test: {results['test']}")
    print_guesses(model, tokenizer, splits.test)
    return results


if __name__ == "__main__":
    experiment.run(main)
