import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from kdpkit import scaling, strategies
from kdpkit.training import global_mean_loss


def parts(per_example, replicas, **arguments):
    """The loss of each replica, when the examples are split as tf.distribute splits them."""
    strategy = strategies.select_strategy("mirrored", devices=replicas)
    sizes = scaling.split_batch(len(per_example), replicas)
    shards = np.split(per_example, np.cumsum(sizes)[:-1])
    weights = arguments.pop("sample_weight", None)
    weight_shards = None if weights is None else np.split(weights, np.cumsum(sizes)[:-1])

    def on_replica(context):
        index = context.replica_id_in_sync_group
        weight = None if weights is None else tf.constant(weight_shards[index])
        return {"loss": tf.constant(shards[index]), "weight": weight}

    values = strategy.experimental_distribute_values_from_function(on_replica)
    losses = strategy.run(
        lambda value: global_mean_loss(value["loss"], sample_weight=value["weight"], **arguments),
        args=(values,),
    )
    return [float(loss) for loss in strategy.experimental_local_results(losses)]


@given(
    examples=st.integers(1, 9),
    replicas=st.integers(1, 4),
    losses_per_example=st.sampled_from([(), (3,), (2, 2)]),
    weighted=st.booleans(),
)
@settings(max_examples=20)
def test_the_parts_of_all_replicas_add_up_to_the_mean(
    examples, replicas, losses_per_example, weighted
):
    random = np.random.default_rng(examples)
    losses = random.normal(size=(examples, *losses_per_example)).astype("float32")
    weights = random.uniform(0, 2, examples).astype("float32") if weighted else None
    expected = (
        losses if weights is None else losses * weights.reshape(-1, *[1] * len(losses_per_example))
    )
    total = sum(parts(losses, replicas, sample_weight=weights))
    assert total == pytest.approx(expected.mean(), abs=1e-6)


def test_known_parts_of_five_examples_on_four_replicas():
    losses = np.array([1, 2, 3, 4, 5], "float32")  # split into 2, 2, 1 and 0 examples
    assert parts(losses, 4) == pytest.approx([0.6, 1.4, 1.0, 0.0])
    assert parts(losses, 4, global_batch_size=10) == pytest.approx([0.3, 0.7, 0.5, 0.0])


def test_its_gradient_on_replicas_adds_up_to_one_devices():
    strategy = strategies.select_strategy("mirrored", devices=2)
    x = np.array([[1.0], [2.0], [4.0]], "float32")
    with strategy.scope():
        weight = tf.Variable([[3.0]])
    dataset = tf.data.Dataset.from_tensors(x)

    def gradient(x):
        with tf.GradientTape() as tape:
            loss = global_mean_loss(tf.square(x @ weight)[:, 0])
        return tape.gradient(loss, weight)

    [batch] = strategy.experimental_distribute_dataset(dataset)
    total = strategy.reduce("SUM", strategy.run(gradient, args=(batch,)), axis=None)
    assert float(total[0, 0]) == pytest.approx(2 * 3.0 * (1 + 4 + 16) / 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"per_example": 1.0}, "one loss for each example.*Received: per_example=1.0"),
        ({"per_example": [1.0], "global_batch_size": 0}, "`global_batch_size` must be a positive"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        global_mean_loss(arguments.pop("per_example"), **arguments)


def test_half_precision_losses_keep_their_type_and_the_count_of_examples():
    losses = tf.ones(300, tf.bfloat16)
    mean = global_mean_loss(losses)
    assert mean.dtype == tf.bfloat16
    assert float(mean) == 1.0
