"""Train a causal language model on several replicas, and have it write some text.

    python recipes/lm.py --strategy mirrored --replicas 2

It is KerasHub's GPT-2, small and from scratch, or any such model by `--preset` (Gemma3, Llama3,
Qwen3, Mistral, ...), of which `--lora RANK` trains small matrices beside the frozen weights. What
takes memory can be left out without changing what is trained: the logits of all positions are not
held, `--remat` computes activations again in the backward pass, `--accumulation` updates the
weights after several batches, and on JAX (KERAS_BACKEND=jax) `--shard` shards the optimizer's
variables or all, and devices share the model by `--model-parallel`. A line before the first epoch
says which attention runs: a GPU has one that is fused on JAX, with `--precision mixed_bfloat16` and
without `--dropout`. `--data` is as in bert_mlm.py, or a file of JSON lines like {"prompt": "...",
"answer": "..."}: then the loss is that of the answers alone.
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
add("--accumulation", type=positive, default=1, metavar="K", help="parts that make a global batch")
add("--shard", choices=("none", "optimizer", "weights"), default="none", help="what JAX shards")
add("--model-parallel", type=positive, default=1, metavar="N", help="JAX devices of each replica")
add("--jit", choices=("auto", "on", "off"), default="auto", help="compile steps with XLA")
add("--save", type=experiment.writable_directory, metavar="DIRECTORY", help="for a preset")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import numpy as np
from keras_hub import models

from kdpkit import batches, schedules, training
from kdpkit.experiment import text


def build_model(args, documents):
    """Build a small GPT-2, or the preset's model, and its tokenizer."""
    tokenizer = text.tokenizer(args.preset, text.lines_of(documents), args.vocabulary_size)
    if args.preset:
        backbone = text.from_preset(models.Backbone, args.preset)
    else:
        size = {"num_layers": args.layers, "num_heads": 4, "intermediate_dim": 4 * args.width}
        size |= {"hidden_dim": args.width, "max_sequence_length": args.sequence_length}
        backbone = models.GPT2Backbone(tokenizer.vocabulary_size(), dropout=args.dropout, **size)
    if args.lora:
        backbone.enable_lora(args.lora)
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = training.replica_exact(keras.Model(backbone.input, logits))
    if not backbone.token_embedding.logit_soft_cap:
        training.without_logits(model)
    if args.remat:
        training.remat(model)
    return tokenizer, backbone, model


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    keras.config.set_dtype_policy(args.precision)
    plan = experiment.plan_from(args, strategy)
    length = args.sequence_length
    splits = text.load(args.data)
    with strategy.scope():
        tokenizer, backbone, model = build_model(args, splits.train)
    train, *held_out = text.examples(splits, tokenizer, length)
    count, size = args.accumulation, plan.global_batch_size
    if size % count:
        parser.error(f"--accumulation must divide the global batch of {size} examples")
    train = batches.ArrayBatches(
        train,
        seed=args.seed,
        steps_per_epoch=args.steps_per_epoch and args.steps_per_epoch * count,
        global_batch_size=size // count,
    )
    evaluated = {"mode": "eval", "global_batch_size": size}
    validation, test = (batches.ArrayBatches(part, **evaluated) for part in held_out)
    steps = len(train) * args.epochs  # batches, by which Keras' optimizers read a schedule
    rate = schedules.warmup_cosine(plan.learning_rate, total_steps=steps, warmup_steps=steps // 20)
    accumulation = {"gradient_accumulation_steps": count} if count > 1 else {}
    with strategy.scope():
        optimizer = keras.optimizers.AdamW(rate, global_clipnorm=1.0, **accumulation)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile={"on": True, "off": False}.get(args.jit, "auto"))
    print(text.attention(model, train))
    speed = {"tokens_per_example": length, "accumulation": count}
    record = experiment.Recorder(args, model, strategy, plan, **speed)
    model.fit(
        record.resumed(train),
        validation_data=validation,
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
        shuffle=False,  # the batches shuffle
    )
    loss = model.evaluate(test, return_dict=True, verbose=0)["loss"]
    results = record.results(test={"loss": loss, "perplexity": np.exp(loss)})
    for part in (backbone, tokenizer) if args.save else ():
        part.save_to_preset(str(args.save))
    if not args.data.endswith(".jsonl"):
        text.print_continued(backbone, tokenizer, np.array(test[0][0]["token_ids"][:4]), args.seed)
    return results


if __name__ == "__main__":
    experiment.run(main)
