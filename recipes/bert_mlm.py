"""Train BERT as a masked language model on several replicas, from text to results.

    python recipes/bert_mlm.py --strategy mirrored --replicas 2

This is the workload of the Keras guide to data-parallel training with KerasHub, with its mistakes
fixed: the learning-rate decay reaches the optimizer, masks are new in each epoch, validation is not
shuffled, the replicas divide every batch, and no token of a long line is lost. It is also several
times as fast per real token: training sequences are full, the loss only uses the masked positions
and never holds all their logits, and XLA compiles the step if that helps. `--data` takes "builtin"
(the English documentation that ships with Python), a directory with the WikiText files, or a text
file.

The defaults are for a small text and a few minutes: short sequences, a small vocabulary and many
steps, so that you see the model learn; in the end it fills in some words of held-out sentences.
`--published` has the guide's hyperparameters instead, with which the same text teaches it no more
than which words are frequent. With KERAS_BACKEND=jax it trains on JAX. recipes/README.md has
measured results.
"""

from kdpkit import experiment

with experiment.quick_imports():
    import keras
    import keras_hub
    import numpy as np
    import tensorflow as tf

    from kdpkit import callbacks, corpora, pipelines, schedules, training

MIN_BYTES = 100  # shorter lines, such as headings, are dropped
PUBLISHED = {
    "epochs": 3,
    "per_replica_batch_size": 32,
    "base_learning_rate": 1e-4,
    "rule": "linear",
    "vocabulary_size": 8000,
    "sequence_length": 128,
    "warmup_steps": 0,
    "clip_norm": None,
}
JIT = {"measure": "measure", "on": True, "off": False}


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=12,
        per_replica_batch_size=16,
        base_learning_rate=1e-3,
        rule="sqrt",
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 8, "jit": "off"},
        published=PUBLISHED,
    )
    add, positive = parser.add_argument, experiment.positive_integer
    add("--preset", help="a KerasHub name such as bert_tiny_en_uncased, or a preset directory")
    add("--vocabulary", metavar="FILE", help="WordPiece tokens, one per line (default: learned)")
    add("--vocabulary-size", type=positive, default=2000, help="if learned (default: 2000)")
    add("--sequence-length", type=positive, default=32, help="tokens in a sequence (default: 32)")
    add(
        "--warmup-steps",
        type=experiment.count,
        help="steps of linear warmup (default: a twentieth of all steps)",
    )
    add(
        "--clip-norm",
        type=experiment.positive_number,
        default=1.0,
        metavar="NORM",
        help="the largest norm of all gradients together (default: 1.0)",
    )
    add(
        "--jit",
        choices=JIT,
        default="measure",
        help="compile the forward and backward pass with XLA, or not, or measure what is faster "
        "(default: measure)",
    )
    add(
        "--precision",
        choices=experiment.PRECISIONS,
        default="auto",
        help="numerical precision; auto is half precision on GPUs and TPUs (default: auto)",
    )
    add(
        "--steps-per-loop",
        type=positive,
        default=1,
        help="steps per compiled call, such as 16 if a step takes milliseconds (default: 1)",
    )
    add("--accumulation", type=positive, default=1, metavar="K", help="micro-batches of a batch")
    add("--remat", action="store_true", help="keep only the inputs of layers for the backward pass")
    return parser.parse_args(argv)


def load_tokenizer(args, splits):
    """Return the preset's tokenizer, or one with the given or a learned vocabulary."""
    if args.preset and not args.vocabulary:
        return experiment.from_preset(keras_hub.models.BertTokenizer, args.preset)
    if args.vocabulary:
        vocabulary = pipelines.read_vocabulary(args.vocabulary)
    else:
        vocabulary = experiment.prepared(
            "Vocabulary",
            lambda: {"tokens": pipelines.learn_vocabulary(splits.train, args.vocabulary_size)},
            key=(splits.train, args.vocabulary_size, keras_hub.__version__),
            cache_dir=args.cache_dir,
        )["tokens"]
    return keras_hub.models.BertTokenizer(vocabulary, lowercase=True)


def load_sequences(args, splits, tokenizer):
    """Return token sequences: packed for training, single lines for validation and test.

    Short lines are dropped, and long ones continue in the next sequence.
    """
    start, end, pad = (getattr(tokenizer, f"{role}_token_id") for role in ("start", "end", "pad"))
    packed = pipelines.chain(
        pipelines.tokenize(tokenizer),
        pipelines.pack_tokens(args.sequence_length, start=start, end=end, pad=pad),
    )
    by_line = pipelines.tokenize(tokenizer, sequence_length=args.sequence_length)
    parts = {
        "train": (splits.train, packed),
        "validation": (splits.validation, by_line),
        "test": (splits.test, by_line),
    }

    def sequences_of(name):
        lines, tokenized = parts[name]
        sequences = (
            tf.data.Dataset.from_tensor_slices(list(lines))
            .filter(pipelines.longer_than(MIN_BYTES))
            .apply(tokenized)
        )
        return experiment.collect(
            sequences, f"Tokenizing lines over {MIN_BYTES} bytes, {name} sequences"
        )

    return experiment.prepared(
        "Tokens",
        lambda: {name: sequences_of(name) for name in parts},
        key={
            "lines": {name: lines for name, (lines, _) in parts.items()},
            "minimum": MIN_BYTES,
            "length": args.sequence_length,
            "vocabulary": tokenizer.get_vocabulary(),
            "lowercase": tokenizer.lowercase,
            "strip_accents": tokenizer.strip_accents,
            "keras_hub": keras_hub.__version__,
        },
        cache_dir=args.cache_dir,
    )


def build_model(args, tokenizer):
    """Build BERT tiny (2 layers, 128 wide, 2 heads) from scratch, or the preset's model."""
    if args.preset:
        kind = keras_hub.models.BertMaskedLM
        model = experiment.from_preset(kind, args.preset, preprocessor=None)
    else:
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=tokenizer.vocabulary_size(),
            num_layers=2,
            num_heads=2,
            hidden_dim=128,
            intermediate_dim=512,
            max_sequence_length=max(512, args.sequence_length),
        )
        model = keras_hub.models.BertMaskedLM(backbone)
    if model.backbone.vocabulary_size != tokenizer.vocabulary_size():
        raise experiment.InputError(
            f"The vocabulary has {tokenizer.vocabulary_size()} tokens, the preset's model "
            f"{model.backbone.vocabulary_size}. Pass the preset's vocabulary by --vocabulary."
        )
    if args.sequence_length > model.backbone.max_sequence_length:
        raise experiment.InputError(
            f"The preset's model takes {model.backbone.max_sequence_length} tokens at most. "
            f"Received: --sequence-length {args.sequence_length}."
        )
    model.backbone.get_layer("pooled_dense").trainable = False  # unused by the masked-word task
    return model


def print_guesses(model, tokenizer, sequences, count=4):
    """Mask a whole word in a few held-out sequences, and print the model's best guesses."""
    vocabulary = np.array(tokenizer.get_vocabulary())
    print("Held-out sentences with a word left out, and the model's guesses:")
    begins_a_word = np.array([not token.startswith("##") for token in vocabulary])
    full = sequences[begins_a_word[sequences[:, 1]] & (sequences[:, -1] != tokenizer.pad_token_id)]
    sequences = full if len(full) else sequences
    for tokens in sequences[:: max(1, len(sequences) // count)][:count]:
        pieces = vocabulary[tokens[tokens != tokenizer.pad_token_id]]
        starts = [i for i, piece in enumerate(pieces) if not piece.startswith("##")]
        words = [i for i in starts if i + 1 in starts and pieces[i].isalpha()]
        if not words:
            continue
        place = words[len(words) // 2]  # in the middle
        wanted, pieces[place] = pieces[place], "____"
        masked = np.where(np.arange(len(tokens)) == place, tokenizer.mask_token_id, tokens)[None]
        features = {
            "token_ids": masked,
            "padding_mask": masked != tokenizer.pad_token_id,
            "segment_ids": np.zeros_like(masked),
            "mask_positions": np.array([[place]]),
        }
        logits = keras.ops.convert_to_numpy(model(features, training=False))[0, 0]
        odds = keras.ops.convert_to_numpy(keras.ops.softmax(logits.astype("float32")))
        best = ", ".join(f"{vocabulary[i]} {odds[i]:.0%}" for i in np.argsort(-odds)[:4])
        print(f"  {' '.join(pieces[1:-1]).replace(' ##', '')}\n    {best}; it was: {wanted}")


def main(argv=None):
    args = parse(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    print(experiment.describe(strategy))
    experiment.set_precision(args.precision)
    plan = experiment.plan_from(args, strategy)

    splits = corpora.load_text(args.data)
    print(f"{len(splits.train):,} lines to train on")
    tokenizer = load_tokenizer(args, splits)
    with strategy.scope():
        model = build_model(args, tokenizer)
    sequences = load_sequences(args, splits, tokenizer)
    mask = pipelines.mask_tokens(tokenizer)
    batches = {
        "global_batch_size": plan.global_batch_size,
        "replicas": strategy.num_replicas_in_sync,
    }
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(sequences["train"]),
        pipelines.PipelineConfig(cache=None, seed=args.seed),
        augment=mask,
        steps_per_epoch=args.steps_per_epoch,
        **batches,
    )

    def held_out(split):
        examples = tf.data.Dataset.from_tensor_slices(sequences[split])
        masked = pipelines.eval_pipeline(examples, prepare=mask, **batches)
        return masked.apply(pipelines.normalize_weights)

    steps = len(train) * args.epochs
    warmup = steps // 20 if args.warmup_steps is None else args.warmup_steps
    schedule = schedules.warmup_polynomial(
        plan.learning_rate, total_steps=steps, warmup_steps=warmup
    )

    with strategy.scope():
        optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=args.clip_norm)
    loop = training.MaskedLMLoop(
        model,
        optimizer=optimizer,
        weighted_metrics=[keras.metrics.Accuracy(name="masked_accuracy")],
        strategy=strategy,
        steps_per_loop=args.steps_per_loop,
        accumulation=args.accumulation,
        remat=args.remat,
        jit=JIT[args.jit],
    )
    watching = callbacks.training_callbacks(
        args.log_dir,
        tokens_per_example=float((sequences["train"] != tokenizer.pad_token_id).sum(axis=1).mean()),
        hyperparameters={"plan": plan, "epochs": args.epochs},
        **batches,
    )
    train, watching = experiment.resuming(args.resume, train, watching)
    with experiment.saving_on_interrupt(model, args.log_dir) as stop:
        history = loop.fit(
            train, held_out("validation"), epochs=args.epochs, callbacks=[*watching, stop]
        )
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    results = experiment.results_of(
        model, history, strategy=strategy, global_batch_size=plan.global_batch_size
    )
    experiment.write_results(args.results, results)  # in case the test is interrupted
    results["test"] = loop.evaluate(held_out("test"), verbose=0)
    experiment.write_results(args.results, results)
    print("Test: " + ", ".join(f"{name} {value:.4f}" for name, value in results["test"].items()))
    print_guesses(model, tokenizer, sequences["test"])
    return results


if __name__ == "__main__":
    experiment.run(main)
