"""Support tickets: two inputs, two outputs, and batches of a `PyDataset` that shuffles itself."""

import keras
import numpy as np
from keras import layers

# + from kdpkit.callbacks import Resume, Throughput


class Tickets(keras.utils.PyDataset):
    def __init__(self, size, batch_size, shuffle=True, **kwargs):
        super().__init__(**kwargs)
        self.random = np.random.default_rng(7)
        self.title = self.random.integers(0, 2, (size, 10)).astype("float32")
        self.tags = self.random.integers(0, 2, (size, 4)).astype("float32")
        self.batch_size, self.shuffle = batch_size, shuffle
        self.indices = np.arange(size)

    def __len__(self):
        return -(-len(self.indices) // self.batch_size)

    def __getitem__(self, index):
        taken = self.indices[index * self.batch_size : (index + 1) * self.batch_size]
        title, tags = self.title[taken], self.tags[taken]
        labels = {"priority": title.mean(1, keepdims=True), "department": tags.argmax(1)}
        return {"title": title, "tags": tags}, labels

    def on_epoch_end(self):
        if self.shuffle:
            self.random.shuffle(self.indices)


def build_model():
    inputs = {"title": keras.Input((10,), name="title"), "tags": keras.Input((4,), name="tags")}
    x = layers.concatenate([layers.Dense(8, "relu")(inputs["title"]), inputs["tags"]])
    outputs = {
        "priority": layers.Dense(1, "sigmoid", name="priority")(x),
        "department": layers.Dense(4, name="department")(x),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss={
            "priority": "binary_crossentropy",
            "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"department": ["accuracy"]},
    )
    return model


training_generator = Tickets(45, batch_size=8)
validation_generator = Tickets(20, batch_size=8, shuffle=False)
model = build_model()
# + resume = Resume("states")
# + training_generator = resume.track(training_generator)
history = model.fit(
    training_generator,
    validation_data=validation_generator,
    epochs=4,
    shuffle=False,
    callbacks=[
        keras.callbacks.BackupAndRestore("backup"),  # -
        # + Throughput(8),
        # + resume,
    ],
)
