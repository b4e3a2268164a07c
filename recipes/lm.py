"""Train GPT-2 as a causal language model on several replicas, and have it write some text.

    python recipes/lm.py --strategy mirrored --replicas 2

The architecture is KerasHub's GPT-2, small and from scratch, on the English documentation that
ships with Python, cut into sequences without padding. `--preset` continues from a KerasHub preset
with its own tokenizer, and `--lora RANK` trains small matrices next to its frozen weights. What
needs memory in larger models can be left out: the logits of all positions are never held, `--remat`
computes activations again in the backward pass, `--accumulation` cuts a batch into micro-batches,
and on JAX `--shard` cuts the optimizer's variables, or the weights too, over the devices. None of
them changes what is trained. `--data` is as in bert_mlm.py.

With KERAS_BACKEND=jax it trains on JAX.
"""

from kdpkit import experiment

with experiment.quick_imports():
    import keras
    import keras_hub
    import numpy as np
    import tensorflow as tf
    from keras import ops

    from kdpkit import callbacks, corpora, pipelines, schedules
    from kdpkit.training import TrainingLoop, linear_cross_entropy

MIN_BYTES = 100  # shorter lines, such as headings, are dropped
JIT = {"measure": "measure", "on": True, "off": False}


def parse(argv):
    parser = experiment.argument_parser(
        __doc__,
        epochs=4,
        per_replica_batch_size=16,
        base_learning_rate=1e-3,
        rule="sqrt",
        smoke={"epochs": 2, "steps_per_epoch": 4, "per_replica_batch_size": 4, "jit": "off"},
    )
    add, positive = parser.add_argument, experiment.positive_integer
    add("--preset", help="a KerasHub name such as gpt2_base_en, or a preset directory")
    add("--lora", type=positive, metavar="RANK", help="train matrices of this rank, and biases")
    add("--layers", type=positive, default=2, help="each of 4 attention heads (default: 2)")
    add("--width", type=positive, default=128, help="of the layers, a multiple of 4 (default: 128)")
    add("--vocabulary-size", type=positive, default=2000, help="to learn (default: 2000)")
    add("--sequence-length", type=positive, default=64, help="tokens in a sequence (default: 64)")
    add("--remat", action="store_true", help="keep only the inputs of layers for the backward pass")
    add("--accumulation", type=positive, default=1, metavar="K", help="micro-batches of a batch")
    add(
        "--shard",
        choices=("none", "optimizer", "weights"),
        default="none",
        help="on JAX: what is cut over the devices",
    )
    add(
        "--jit",
        choices=JIT,
        default="measure",
        help="compile with XLA, or not, or measure what "
        "is faster; JAX always does (default: measure)",
    )
    return parser.parse_args(argv)


def load_tokenizer(args, lines):
    """Return the preset's tokenizer, or one whose vocabulary is learned from the text."""
    if args.preset:
        return experiment.from_preset(keras_hub.models.GPT2Tokenizer, args.preset)
    learned = experiment.prepared(
        "Vocabulary",
        lambda: {"tokens": pipelines.learn_vocabulary(lines, args.vocabulary_size)},
        key=(lines, args.vocabulary_size, keras_hub.__version__),
        cache_dir=args.cache_dir,
    )
    return keras_hub.models.BertTokenizer(learned["tokens"], lowercase=True)


def load_sequences(args, splits, tokenizer):
    """Return sequences of one token more than the model sees, which is a label alone."""
    start, end, pad = (getattr(tokenizer, f"{role}_token_id") for role in ("start", "end", "pad"))
    packed = pipelines.chain(
        pipelines.tokenize(tokenizer),
        pipelines.pack_tokens(args.sequence_length + 1, start=start, end=end, pad=pad),
    )
    parts = {name: getattr(splits, name) for name in ("train", "validation", "test")}

    def sequences_of(name):
        lines = tf.data.Dataset.from_tensor_slices(list(parts[name]))
        sequences = lines.filter(pipelines.longer_than(MIN_BYTES)).apply(packed)
        collected = experiment.collect(sequences, f"Tokenizing, {name} sequences")
        return collected[:-1] if len(collected) > 1 else collected  # the last one has padding

    return experiment.prepared(
        "Sequences",
        lambda: {name: sequences_of(name) for name in parts},
        key=(parts, MIN_BYTES, args.sequence_length, tokenizer.get_vocabulary()),
        cache_dir=args.cache_dir,
    )


def next_tokens(sequences, seed=None):  # noqa: ARG001  # nothing is drawn
    """Return what the model sees of sequences, and the token that follows on each of these."""
    seen = sequences[..., :-1]
    return {"token_ids": seen, "padding_mask": tf.ones_like(seen)}, sequences[..., 1:]


def build_model(args, tokenizer):
    """Build a small GPT-2, or the preset's, up to its hidden states."""
    if args.preset:
        model = experiment.from_preset(keras_hub.models.GPT2Backbone, args.preset)
    elif args.width % 4:
        raise experiment.InputError(
            f"The layers have 4 attention heads of equal width. Received: --width {args.width}. "
            "Pass a multiple of 4."
        )
    else:
        model = keras_hub.models.GPT2Backbone(
            vocabulary_size=tokenizer.vocabulary_size(),
            num_layers=args.layers,
            num_heads=4,
            hidden_dim=args.width,
            intermediate_dim=4 * args.width,
            max_sequence_length=args.sequence_length,
        )
    if args.sequence_length > model.max_sequence_length:
        raise experiment.InputError(
            f"The preset's model takes {model.max_sequence_length} tokens at most. Received: "
            f"--sequence-length {args.sequence_length}."
        )
    if args.lora:
        model.enable_lora(args.lora)
    return model


class CausalLMLoop(TrainingLoop):
    """The loss of each next token, in chunks of the vocabulary: no position has all its logits."""

    def per_example_loss(self, x, y, *, training):  # noqa: D102
        hidden = self.model(x, training=training)
        kernel = ops.cast(self.model.token_embedding.embeddings, hidden.dtype)
        return linear_cross_entropy(hidden, kernel, y)


def print_continued(model, tokenizer, sequences, seed, known=12, count=30):
    """Continue a few held-out texts; each token is drawn among the ten most probable."""
    random = np.random.default_rng(seed)
    tokens = np.array(sequences[:: max(1, len(sequences) // 4)][:4, :-1])
    kernel = ops.transpose(model.token_embedding.embeddings)
    stop = min(known + count, tokens.shape[1])
    for position in range(known, stop):
        tokens[:, position:] = 0  # which causal attention does not see
        hidden = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, training=False)
        logits = ops.matmul(ops.cast(hidden[:, position - 1], kernel.dtype), kernel)
        logits = ops.convert_to_numpy(logits)
        drawn = np.where(logits < np.sort(logits)[:, -10:-9], -np.inf, logits)
        tokens[:, position] = np.argmax(drawn + random.gumbel(size=drawn.shape), axis=1)

    def text(tokens):
        lines = tokenizer.detokenize(tokens).replace(tokenizer.start_token, "")
        return lines.replace(tokenizer.end_token, "/")

    print("Held-out text, and what the model makes of it (a new line is /):")
    for given, written in zip(tokens[:, 1:known], tokens[:, known:stop], strict=True):
        print(f"  {text(given)} | {text(written)}")


def main(argv=None):
    args = parse(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    print(experiment.describe(strategy))
    plan = experiment.plan_from(args, strategy)
    splits = corpora.load_text(args.data)
    print(f"{len(splits.train):,} lines to train on")
    tokenizer = load_tokenizer(args, splits.train)
    sequences = load_sequences(args, splits, tokenizer)
    batches = {
        "global_batch_size": plan.global_batch_size,
        "replicas": strategy.num_replicas_in_sync,
    }
    train = pipelines.train_pipeline(
        tf.data.Dataset.from_tensor_slices(sequences["train"]),
        pipelines.PipelineConfig(cache=None, seed=args.seed),
        augment=next_tokens,
        steps_per_epoch=args.steps_per_epoch,
        **batches,
    )

    def held_out(split):
        examples = tf.data.Dataset.from_tensor_slices(sequences[split])
        return pipelines.eval_pipeline(examples, prepare=next_tokens, remainder="keep", **batches)

    steps = len(train) * args.epochs
    schedule = schedules.warmup_cosine(
        plan.learning_rate, total_steps=steps, warmup_steps=steps // 20
    )
    with strategy.scope():
        model = build_model(args, tokenizer)
        optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=1.0)
    loop = CausalLMLoop(
        model,
        optimizer=optimizer,
        strategy=strategy,
        accumulation=args.accumulation,
        remat=args.remat,
        jit=JIT[args.jit],
    )
    watching = callbacks.training_callbacks(
        args.log_dir,
        tokens_per_example=args.sequence_length,
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
    results["test"] = loop.evaluate(held_out("test"), verbose=0)
    results["test"]["perplexity"] = float(np.exp(results["test"]["loss"]))
    experiment.write_results(args.results, results)
    of_epochs = np.exp(history.history["val_loss"])
    print("Perplexity after each epoch: " + ", ".join(f"{value:.1f}" for value in of_epochs))
    print("Test: " + ", ".join(f"{name} {value:.4f}" for name, value in results["test"].items()))
    print_continued(model, tokenizer, sequences["test"], args.seed)
    return results


if __name__ == "__main__":
    experiment.run(main)
