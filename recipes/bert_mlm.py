"""Train BERT as a masked language model on several replicas, from text to results.

    python recipes/bert_mlm.py --strategy mirrored --replicas 2

Each replica is a copy of the model on a device of its own, and all train as one. This is the
workload of the Keras guide to data-parallel training with KerasHub, without the guide's mistakes:
its learning-rate decay never reaches the optimizer, its masks are the same in each epoch, it
shuffles the validation data, and it cuts the ends of long lines off. Training sequences are full,
without padding, and the logits are computed at the masked positions only, for a part of the
vocabulary at a time; `--jit on` compiles the step with XLA. `--data` takes "builtin" (the English
documentation that ships with Python), a directory with the WikiText files, or a text file. With
KERAS_BACKEND=jax it trains on JAX. recipes/README.md has measured results.
"""

from kdpkit import experiment

parser = experiment.argument_parser(  # "sqrt": the rate grows with the root of the replicas
    __doc__, epochs=12, per_replica_batch_size=16, base_learning_rate=1.4e-3, rule="sqrt"
)
add, positive = parser.add_argument, experiment.positive_integer
add("--preset", help="a KerasHub name such as bert_tiny_en_uncased, or a preset directory")
add("--vocabulary-size", type=positive, default=2000, help="tokens to learn")
add("--sequence-length", type=positive, default=32, help="tokens in a sequence")
add("--warmup-steps", type=int, help="(default: a twentieth of all steps)")
add("--clip-norm", type=float, default=1.0, help="of all gradients together; 0: no clipping")
add("--jit", choices=("auto", "on", "off"), default="auto", help="compile steps with XLA")
add("--precision", choices=("float32", "mixed_bfloat16", "mixed_float16"), default="float32")
add("--steps-per-execution", type=positive, default=1, help="steps of a compiled call")
experiment.start(parser, __name__)  # checks the flags first: the imports below take seconds

import keras
import tensorflow as tf
from keras_hub import models

from kdpkit import corpora, pipelines, schedules, training
from kdpkit.experiment import text


def build_model(args, tokenizer):
    """Build BERT tiny (2 layers, 128 wide, 2 heads) from scratch, or load a preset."""
    if args.preset:
        model = text.from_preset(models.BertMaskedLM, args.preset, preprocessor=None)
    else:
        size = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
        size["max_sequence_length"] = max(512, args.sequence_length)
        size["dropout"] = 0.0  # for more epochs, or more layers, BERT's is 0.1
        model = models.BertMaskedLM(models.BertBackbone(tokenizer.vocabulary_size(), **size))
    model.backbone.get_layer("pooled_dense").trainable = False  # unused by the masked-word task
    return training.replica_exact(training.without_logits(model))


def main(argv=None):
    args = parser.parse_args(argv)
    keras.utils.set_random_seed(args.seed)
    strategy = experiment.strategy_from(args)
    keras.config.set_dtype_policy(args.precision)
    plan = experiment.plan_from(args, strategy)  # batch size and learning rate for the replicas
    size, length = plan.global_batch_size, args.sequence_length

    splits = corpora.load_text(args.data, longer_than=100)  # bytes, as headings are shorter
    print(f"{len(splits.train):,} lines to train on")
    tokenizer = text.tokenizer(args.preset, splits.train, args.vocabulary_size)

    def tokenized(lines, **settings):
        dataset = tf.data.Dataset.from_tensor_slices(list(lines))
        return dataset.apply(pipelines.tokenize(tokenizer, **settings))

    def held_out(lines):
        examples = tokenized(lines, sequence_length=length)  # each line in sequences of its own
        mask = pipelines.mask_tokens(tokenizer)  # 15 %, as in BERT's paper
        padded = pipelines.eval_pipeline(
            examples, prepare=mask, remainder="pad", global_batch_size=size
        )  # batches of one size, as XLA and TPUs prefer
        return padded.apply(pipelines.normalize_weights)  # the loss is the mean over masked tokens

    pack = pipelines.pack_tokens(length, **text.special_ids(tokenizer))
    train = pipelines.train_pipeline(
        tokenized(splits.train).apply(pack),
        pipelines.PipelineConfig(seed=args.seed),
        augment=pipelines.mask_tokens(tokenizer, rate=0.3),  # new in each epoch, more to learn from
        steps_per_epoch=args.steps_per_epoch,
        global_batch_size=size,
    )
    steps = len(train) * args.epochs
    warmup = steps // 20 if args.warmup_steps is None else args.warmup_steps
    rate = schedules.warmup_polynomial(plan.learning_rate, total_steps=steps, warmup_steps=warmup)

    def compiled():
        model = build_model(args, tokenizer)
        model.compile(
            optimizer=keras.optimizers.AdamW(rate, global_clipnorm=args.clip_norm or None),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            jit_compile={"on": True, "off": False}.get(args.jit, "auto"),
            steps_per_execution=args.steps_per_execution,
        )
        return model

    with strategy.scope():  # each replica gets a copy of the variables that are made here
        model = compiled()
    record = experiment.Recorder(args, model, strategy, plan, tokens_per_example=length)
    record.compare_first_steps(compiled, train)  # with those of one device
    model.fit(
        record.resumed(train),  # with --resume, what the last run has not trained on
        validation_data=held_out(splits.validation),
        epochs=args.epochs,
        callbacks=record.callbacks,
        verbose=record.verbose,
        shuffle=False,  # the pipeline shuffles
    )
    tested = held_out(splits.test)
    test = model.evaluate(tested, return_dict=True, verbose=0)
    results = record.results(test=test)
    text.print_guesses(model, tokenizer, splits, tested, test["accuracy"])
    return results


if __name__ == "__main__":
    experiment.run(main)
