"""Train GPT-2 as a causal language model on several replicas, and have it write some text.

    python recipes/lm.py --strategy mirrored --replicas 2

It is KerasHub's GPT-2, small and from scratch, or `--preset`, of which `--lora RANK` trains small
matrices next to the frozen weights. What needs memory in larger models can be left out without
changing what is trained: the logits of all positions are never held, `--remat` computes activations
again in the backward pass, `--accumulation` splits a batch into micro-batches, and on JAX, with
KERAS_BACKEND=jax, `--shard` shards the optimizer's variables or all. `--data` is as in bert_mlm.py.
"""

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=4, per_replica_batch_size=16, base_learning_rate=1e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--preset", help="a KerasHub name such as gpt2_base_en, or a preset directory")
add("--lora", type=positive, metavar="RANK", help="train matrices of this rank, and biases")
add("--layers", type=positive, default=2, help="each of 4 attention heads")
add("--width", type=positive, default=128, help="of the layers, a multiple of 4")
add("--vocabulary-size", type=positive, default=2000, help="tokens to learn")
add("--sequence-length", type=positive, default=64, help="tokens in a sequence")
add("--remat", action="store_true", help="keep only the inputs of layers for the backward pass")
add("--accumulation", type=positive, default=1, metavar="K", help="micro-batches of a batch")
add("--shard", choices=("none", "optimizer", "weights"), default="none", help="what JAX shards")
add("--jit", choices=("measure", "on", "off"), default="measure", help="compile steps with XLA")

with experiment.program(parser, __name__):
    import keras
    import numpy as np
    from keras import ops
    from keras_hub import models

    from kdpkit import corpora, schedules
    from kdpkit.experiment import text
    from kdpkit.training import TrainingLoop, linear_cross_entropy


def build_model(args, lines):
    """Build a small GPT-2, or the preset's, up to its hidden states, and its tokenizer."""
    if args.preset:
        tokenizer = text.from_preset(models.GPT2Tokenizer, args.preset)
        model = text.from_preset(models.GPT2Backbone, args.preset)
    else:
        words = text.learned_vocabulary(lines, args.vocabulary_size, args.cache_dir)
        tokenizer = models.BertTokenizer(words, lowercase=True)
        size = {"num_layers": args.layers, "num_heads": 4, "intermediate_dim": 4 * args.width}
        size |= {"hidden_dim": args.width, "max_sequence_length": args.sequence_length}
        model = models.GPT2Backbone(vocabulary_size=len(words), **size)
    if args.lora:
        model.enable_lora(args.lora)
    return tokenizer, model


class CausalLMLoop(TrainingLoop):
    """The loss of each next token, in chunks of the vocabulary: no position has all its logits."""

    def per_example_loss(self, x, y, *, training):  # noqa: D102
        hidden = self.model(x, training=training)
        kernel = ops.cast(self.model.token_embedding.embeddings, hidden.dtype)
        return linear_cross_entropy(hidden, kernel, y)


def next_tokens(sequences, seed=None):  # noqa: ARG001  # nothing is drawn
    """Return what the model sees, without the last token, and the token that follows on each."""
    seen = sequences[..., :-1]
    return {"token_ids": seen, "padding_mask": 0 * seen + 1}, sequences[..., 1:]


def print_continued(model, tokenizer, tokens, seed, known=12):
    """Continue held-out texts; each token is drawn among the ten most probable."""
    random, kernel = np.random.default_rng(seed), ops.transpose(model.token_embedding.embeddings)
    for position in range(known, tokens.shape[1]):
        tokens[:, position:] = 0  # which causal attention does not see
        hidden = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        logits = ops.convert_to_numpy(ops.matmul(hidden[:, position - 1], kernel))
        drawn = np.where(logits < np.sort(logits)[:, -10:-9], -np.inf, logits)
        tokens[:, position] = np.argmax(drawn + random.gumbel(size=drawn.shape), axis=1)
    print("Held-out text | and what the model makes of it:")
    for ids in tokens:
        print(f"  {tokenizer.detokenize(ids[1:known])} | {tokenizer.detokenize(ids[known:])}")


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    plan = experiment.plan_from(args, strategy)
    length = args.sequence_length

    splits = corpora.load_text(args.data)
    with strategy.scope():
        tokenizer, model = build_model(args, splits.train)

    def sequences(lines):  # without the last one, which has padding
        return text.sequences(lines, tokenizer, length + 1, full=True)

    sizes = {"global_batch_size": plan.global_batch_size, "steps_per_epoch": args.steps_per_epoch}
    seeded = {"augment": next_tokens, "seed": args.seed}
    train = text.train_batches(sequences(splits.train), **seeded, **sizes)
    held_out = {"prepare": next_tokens, "remainder": "keep"}
    held_out["global_batch_size"] = plan.global_batch_size
    validation = text.eval_batches(sequences(splits.validation), **held_out)
    test = text.eval_batches(sequences(splits.test), **held_out)
    steps = len(train) * args.epochs
    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=steps, warmup_steps=steps // 20)
    loop = CausalLMLoop(
        model,
        optimizer=keras.optimizers.AdamW(rate, global_clipnorm=1.0),
        strategy=strategy,
        accumulation=args.accumulation,
        remat=args.remat,
        jit={"on": True, "off": False}.get(args.jit, "measure"),
    )
    record = experiment.Recorder(args, model, strategy, plan, tokens_per_example=length)
    loop.fit(record.resumed(train), validation, epochs=args.epochs, callbacks=record.callbacks)
    loss = loop.evaluate(test, verbose=0)["loss"]
    results = record.results(test={"loss": loss, "perplexity": np.exp(loss)})
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    print(f"Test: {results['test']}")
    print_continued(model, tokenizer, np.array(next(iter(test))[0]["token_ids"][:4]), args.seed)
    return results


if __name__ == "__main__":
    experiment.run(main)
