"""Train a causal language model on several replicas, and have it write some text.

    python recipes/lm.py --strategy mirrored --replicas 2

It is KerasHub's GPT-2, small and from scratch, or any such model by `--preset` (Gemma3, Llama3,
Qwen3, Mistral, ...), of which `--lora RANK` trains small matrices beside the frozen weights. What
takes memory can be left out without changing what is trained: the logits of all positions are not
held, `--remat` computes activations again in the backward pass, `--accumulation` splits a batch,
and on JAX (KERAS_BACKEND=jax) `--shard` shards the optimizer's variables or all, and devices share
the model by `--model-parallel`. A line before the first epoch says which attention runs: a GPU has
one that is fused on JAX, with `--precision mixed_bfloat16` and without `--dropout`. `--data` is as
in bert_mlm.py, or a file of JSON lines like {"prompt": "...", "answer": "..."}: then the loss is
that of the answers alone.
"""

from kdpkit import experiment

parser = experiment.argument_parser(
    __doc__, epochs=4, per_replica_batch_size=16, base_learning_rate=1e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--preset", help="a KerasHub name such as gemma3_1b, or a preset directory")
add("--lora", type=positive, metavar="RANK", help="train matrices of this rank, and biases")
add("--layers", type=positive, default=2, help="each of 4 attention heads")
add("--width", type=positive, default=128, help="of the layers, a multiple of 4")
add("--dropout", type=float, choices=(0.0, 0.1, 0.2), default=0.0, help="from scratch")
add("--precision", choices=("float32", "mixed_bfloat16", "mixed_float16"), default="float32")
add("--vocabulary-size", type=positive, default=2000, help="tokens to learn")
add("--sequence-length", type=positive, default=64, help="tokens in a sequence")
add("--remat", action="store_true", help="keep only the inputs of layers for the backward pass")
add("--accumulation", type=positive, default=1, metavar="K", help="micro-batches of a batch")
add("--shard", choices=("none", "optimizer", "weights"), default="none", help="what JAX shards")
add("--model-parallel", type=positive, default=1, metavar="N", help="JAX devices of each replica")
add("--jit", choices=("auto", "on", "off"), default="auto", help="compile steps with XLA")
directory = {"type": experiment.writable_directory, "metavar": "DIRECTORY"}
add("--save", **directory, help="what `from_preset` loads then")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import numpy as np
from keras import ops
from keras_hub import models

from kdpkit import batches, corpora, schedules
from kdpkit.experiment import text
from kdpkit.training import TrainingLoop, linear_cross_entropy


def build_model(args, lines):
    """Build a small GPT-2, or the preset's model, up to its hidden states, and its tokenizer."""
    if args.preset:
        tokenizer = text.from_preset(models.Tokenizer, args.preset)
        model = text.from_preset(models.Backbone, args.preset)
    else:
        words = corpora.learn_vocabulary(lines, args.vocabulary_size)
        tokenizer = models.BertTokenizer(words, lowercase=True)
        size = {"num_layers": args.layers, "num_heads": 4, "intermediate_dim": 4 * args.width}
        size |= {"hidden_dim": args.width, "max_sequence_length": args.sequence_length}
        size["dropout"] = args.dropout
        model = models.GPT2Backbone(vocabulary_size=len(words), **size)
    if args.lora:
        model.enable_lora(args.lora)
    return tokenizer, model


class CausalLMLoop(TrainingLoop):
    """The loss of each next token, in chunks of the vocabulary: no position has all its logits."""

    def per_example_loss(self, x, y, *, training):  # noqa: D102
        hidden, table = self.model(x, training=training), self.model.token_embedding
        if table.logit_soft_cap:
            logits = table(hidden, reverse=True)
            return ops.sparse_categorical_crossentropy(y, logits, from_logits=True), logits
        kernel = table.embeddings if table.tie_weights else ops.transpose(table.reverse_embeddings)
        return linear_cross_entropy(hidden, ops.cast(kernel, hidden.dtype), y)


def print_continued(model, tokenizer, tokens, seed, known=12):
    """Continue held-out texts; each token is drawn among the ten most probable."""
    random = np.random.default_rng(seed)
    for position in range(known, tokens.shape[1]):
        tokens[:, position:] = 0  # which causal attention does not see
        hidden = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        logits = model.token_embedding(hidden[:, position - 1], reverse=True)
        logits = ops.convert_to_numpy(ops.cast(logits, "float32"))
        drawn = np.where(logits < np.sort(logits)[:, -10:-9], -np.inf, logits)
        tokens[:, position] = np.argmax(drawn + random.gumbel(size=drawn.shape), axis=1)
    print("Held-out text | and what the model makes of it:")
    for ids in tokens:
        print(f"  {tokenizer.detokenize(ids[1:known])} | {tokenizer.detokenize(ids[known:])}")


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    keras.config.set_dtype_policy(args.precision)
    plan = experiment.plan_from(args, strategy)
    length = args.sequence_length
    is_pairs = args.data.endswith(".jsonl")
    splits = (
        corpora.load_pairs(args.data) if is_pairs else corpora.load_text(args.data, longer_than=100)
    )
    lines = [text for pair in splits.train for text in pair] if is_pairs else splits.train
    with strategy.scope():
        tokenizer, model = build_model(args, lines)

    def examples(split):
        if is_pairs:
            return text.next_tokens(*text.answers(split, tokenizer, length + 1))
        return text.next_tokens(text.sequences(split, tokenizer, length + 1))

    size = plan.global_batch_size
    train = batches.ArrayBatches(
        examples(splits.train),
        seed=args.seed,
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    validation, test = (
        batches.ArrayBatches(examples(split), mode="eval", global_batch_size=size)
        for split in (splits.validation, splits.test)
    )
    steps = len(train) * args.epochs
    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=steps, warmup_steps=steps // 20)
    loop = CausalLMLoop(
        model,
        optimizer=keras.optimizers.AdamW(rate, global_clipnorm=1.0),
        strategy=strategy,
        accumulation=args.accumulation,
        remat=args.remat,
        jit_compile={"on": True, "off": False}.get(args.jit, "auto"),
    )
    print(text.attention(loop, train))
    record = experiment.Recorder(args, model, strategy, plan, tokens_per_example=length)
    loop.fit(
        record.resumed(train),
        validation,
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
    )
    loss = loop.evaluate(test, verbose=0)["loss"]
    results = record.results(test={"loss": loss, "perplexity": np.exp(loss)})
    if args.log_dir:
        experiment.save_model(model, args.log_dir / "model.keras")
    for part in (model, tokenizer) if args.save else ():
        part.save_to_preset(str(args.save))
    if not is_pairs:
        print_continued(model, tokenizer, np.array(test[0][0]["token_ids"][:4]), args.seed)
    return results


if __name__ == "__main__":
    experiment.run(main)
