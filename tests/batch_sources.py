"""Data as users have them, small, and the batches that they must give; test_batch_sources.py."""

import contextlib

import keras
import numpy as np

from kdpkit import batches, testing
from kdpkit.training import TrainingLoop, replica_exact

ON_JAX = keras.backend.backend() == "jax"
EXAMPLES, EPOCHS = 23, 2
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SHUFFLED_BY_GRAIN = ("grain MapDataset", "grain IterDataset", "grain DataLoader")
NAMES = ("datasets", "parquet", "images", *SHUFFLED_BY_GRAIN)


def write(directory):
    """Write what the sources read."""
    import datasets

    x, y = arrays("datasets", directory)
    table = {"features": x.tolist(), "label": y.tolist(), "weight": [1.0] * EXAMPLES}
    datasets.Dataset.from_dict(table).to_parquet(directory / "train.parquet", batch_size=7)
    for index, pixels in enumerate(np.random.default_rng(1).integers(0, 4, (EXAMPLES, 2, 2, 1))):
        folder = directory / "images" / "abc"[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(folder / f"{index:02}.png", pixels, scale=False)


def arrays(name, directory):
    """All examples of a source, in its order."""
    if name != "images":
        x, y = testing.toy_classification(EXAMPLES)
        return x.astype("float32"), y
    files = sorted((directory / "images").rglob("*.png"))
    x = [keras.utils.img_to_array(keras.utils.load_img(f, color_mode="grayscale")) for f in files]
    return np.stack(x), np.array(["abc".index(file.parent.name) for file in files])


def of_grain(name):
    """A dataset of Grain, which for a `MapDataset` has an order of its own in each epoch."""
    import grain

    source = [*zip(*arrays(name, None), strict=True)]
    examples = grain.MapDataset.source(source)
    if name == "grain MapDataset":
        return examples.shuffle(seed=4)
    if name == "grain IterDataset":  # which ends
        return examples.shuffle(seed=4).to_iter_dataset().filter(lambda _: True)
    return grain.DataLoader(  # which does not
        data_source=source,
        sampler=grain.samplers.IndexSampler(EXAMPLES, shuffle=True, seed=4),
        shard_options=grain.sharding.NoSharding(),
    )


def made(name, directory, size=5, **settings):
    """Batches of a source, of which the last of an epoch is smaller."""
    import datasets

    columns = {"x": "features", "y": "label"}
    if name in SHUFFLED_BY_GRAIN:
        examples = None if name == "grain MapDataset" else EXAMPLES
        source = batches.from_grain(of_grain(name), examples=examples)
    elif name == "datasets":
        x, y = arrays(name, directory)
        data = datasets.Dataset.from_dict({"features": x.tolist(), "label": y.tolist()})
        source = batches.from_datasets(data, **columns)
    elif name == "parquet":
        source = batches.from_parquet(directory / "train.parquet", **columns)
    else:
        source = batches.from_images(directory / "images", size=(2, 2), color_mode="grayscale")
    settings = {"remainder": "keep"} | settings
    if name not in SHUFFLED_BY_GRAIN:
        settings = {"seed": 1} | settings
    return batches.ArrayBatches(source, global_batch_size=size, **settings)


def expected(name, directory, size=5, epochs=EPOCHS):
    """The same batches, of arrays in memory and of what Grain itself iterates."""
    if name not in SHUFFLED_BY_GRAIN:
        dataset = batches.ArrayBatches(
            arrays(name, directory), global_batch_size=size, seed=1, remainder="keep"
        )
        for dataset.epoch in range(epochs):
            yield from (dataset[index] for index in range(len(dataset)))
        return
    dataset = of_grain(name)
    if name == "grain MapDataset":
        taken = [*dataset.repeat(epochs)]
    elif name == "grain IterDataset":
        taken = [*dataset] * epochs
    else:
        taken = [example for example, _ in zip(dataset, range(epochs * EXAMPLES), strict=False)]
    for epoch in range(epochs):
        of_epoch = taken[epoch * EXAMPLES : (epoch + 1) * EXAMPLES]
        for first in range(0, EXAMPLES, size):
            x, y = zip(*of_epoch[first : first + size], strict=True)
            yield np.stack(x), np.array(y)


def model(shape):
    """A model with the same weights on both backends."""
    keras.utils.set_random_seed(0)  # processes of JAX compare what each has drawn
    layers = keras.layers
    built = keras.Sequential(
        [keras.Input(shape), layers.Flatten(), layers.Dense(8, "tanh"), layers.Dense(3)]
    )
    random = np.random.default_rng(2)
    built.set_weights([random.normal(0, 0.3, w.shape) for w in built.get_weights()])
    return built


def by_fit(train, *callbacks, scope):
    """Train with `fit`, in the scope of a strategy or distribution."""
    shape = train[0][0].shape[1:]
    if ON_JAX:
        keras.distribution.set_distribution(scope)
    try:
        with contextlib.nullcontext() if ON_JAX else scope.scope():
            built = replica_exact(model(shape))
            built.compile(keras.optimizers.Adam(0.01), LOSS)
        settings = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
        built.fit(train, callbacks=[*callbacks], **settings)
    finally:
        if ON_JAX:
            keras.distribution.set_distribution(None)
    return built.get_weights()


def by_loop(train, *callbacks, scope):
    """Train with a `TrainingLoop`."""
    shape = train[0][0].shape[1:]
    with contextlib.nullcontext() if ON_JAX else scope.scope():
        built = model(shape)
    loop = TrainingLoop(built, optimizer=keras.optimizers.Adam(0.01), loss=LOSS, strategy=scope)
    loop.fit(train, epochs=EPOCHS, callbacks=[*callbacks], verbose=0)
    return built.get_weights()


def stock(given):
    """Train with stock Keras on one device, on batches from memory."""
    given = [*given]
    built = model(given[0][0].shape[1:])
    built.compile(keras.optimizers.Adam(0.01), LOSS)
    built.fit((batch for batch in given), epochs=1, steps_per_epoch=len(given), verbose=0)
    return built.get_weights()
