"""Reviews in words: text from files' lines to a masked recurrent network, with `tf.data`."""

import keras
import tensorflow as tf
from keras import layers

# + from kdpkit import pipelines

WORDS = ("a dull plot", "great acting and a great end", "dull", "we loved every minute of it")
lines = [" ".join([WORDS[i % 4], WORDS[i * 7 % 3]]) for i in range(45)]
data = tf.data.Dataset.from_tensor_slices((lines, [float(i % 4 in (1, 3)) for i in range(45)]))

vectorize = layers.TextVectorization(max_tokens=50)
vectorize.adapt(data.map(lambda text, _: text).batch(8))
tokens = data.map(lambda text, label: (vectorize(text), label)).cache()  # -
# + tokens = data.map(lambda text, label: (vectorize(text), label)).apply(pipelines.cache())
train = tokens.skip(9).shuffle(36, seed=1, reshuffle_each_iteration=False)
train = train.padded_batch(8).prefetch(tf.data.AUTOTUNE)  # -
# + train = train.padded_batch(8).apply(pipelines.prefetch())
# + print("Findings:", pipelines.lint(train))
test = tokens.take(9).padded_batch(8)


def build_model():
    model = keras.Sequential(
        [
            layers.Embedding(50, 8, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dense(1),
        ]
    )
    model.compile(
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(1e-2),
        metrics=["accuracy"],
    )
    return model


model = build_model()
history = model.fit(train, epochs=3, validation_data=test, validation_steps=2)
loss, accuracy = model.evaluate(test)
