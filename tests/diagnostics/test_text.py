"""The reason that a report names, of errors that frameworks raise."""

import keras
import numpy as np
import pytest

from kdpkit.diagnostics import _text


class Failing(keras.layers.Layer):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def call(self, _):
        raise self.error


def reason_from(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 of any kind
        function(*args)
    return _text.reason_of(caught.value)


def test_the_reason_is_what_a_layer_raised_not_where_keras_called_it():
    x = np.zeros((2, 3), "float32")
    assert reason_from(Failing(RuntimeError("Mine.\nAnd more.")), x) == "RuntimeError: Mine"
    assert "calling Failing.call()" in reason_from(Failing(RuntimeError()), x)


def test_an_error_without_a_message_has_the_name_of_its_kind():
    assert [_text.reason_of(error) for error in (ValueError(), KeyError())] == [
        "ValueError",
        "KeyError",
    ]


@pytest.mark.tensorflow
def test_tensorflows_names_of_nodes_are_left_out():
    import tensorflow as tf

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", lambda _, y: tf.debugging.check_numerics(y / 0.0, "no number"))
    x = np.ones((2, 3), "float32")
    start = "InvalidArgumentError: no number"
    assert reason_from(tf.debugging.check_numerics, [np.inf], "no number").startswith(start)
    assert reason_from(lambda: model.fit(x, x[:, :2], verbose=0)).startswith(start)
