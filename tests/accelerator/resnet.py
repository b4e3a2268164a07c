"""ResNet-50, bfloat16: images of 224 x 224."""

import dataclasses
from typing import Any

import numpy as np

from tests.accelerator.speed import OURS, Work

CLASSES = 1000
FLOPS = 7.716e9  # of a forward pass at 224 x 224


@dataclasses.dataclass(frozen=True)
class Size:
    """An epoch, and the side of its images."""

    side: int
    batch: int
    steps: int


SIZES = {False: Size(224, batch=256, steps=12), True: Size(32, batch=4, steps=2)}


def work(size: Size) -> Work:
    """Count images, and the products of convolutions and the last layer."""
    images = size.batch * size.steps
    return Work("images", images, 3.0 * FLOPS * (size.side / 224) ** 2 * images)


def images_of(size: Size, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random images of bytes, and classes."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, size.side, size.side, 3), "uint8")
    return images, random.integers(0, CLASSES, count, "int32")


def model_of(size: Size, policy: str = "mixed_bfloat16") -> Any:
    """Build Keras' own ResNet-50, which takes bytes."""
    import keras

    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    images = keras.Input((size.side, size.side, 3), dtype="uint8")
    resnet = keras.applications.ResNet50(
        weights=None, input_shape=(size.side, size.side, 3), classifier_activation=None
    )
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images)
    return keras.Model(images, resnet(scaled))


def compiled_parts() -> tuple[Any, Any]:
    """Return the optimizer and the loss."""
    import keras

    return (
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def _kdpkit(size: Size) -> Any:
    from kdpkit.training import TrainingLoop
    from tests.accelerator import jax_training

    optimizer, loss = compiled_parts()
    loop = TrainingLoop(model_of(size), optimizer=optimizer, loss=loss)
    return jax_training.by_loop(loop, images_of(size, size.batch), size.steps)


def _from_array_batches(size: Size) -> Any:
    """Shuffle the images of an epoch, and take each batch from them."""
    from kdpkit.batches import ArrayBatches
    from kdpkit.training import TrainingLoop

    optimizer, loss = compiled_parts()
    loop = TrainingLoop(model_of(size), optimizer=optimizer, loss=loss)
    images = images_of(size, size.batch * size.steps)
    data = ArrayBatches(images, global_batch_size=size.batch, seed=0)
    return lambda: loop.fit(data, epochs=1, verbose=0)


def _stock_fit(size: Size) -> Any:
    from tests.accelerator import jax_training

    model = model_of(size)
    model.compile(*compiled_parts())
    return jax_training.by_fit(model, images_of(size, size.batch), size.steps)


def _by_hand(size: Size) -> Any:
    from tests.accelerator import jax_training

    images = images_of(size, size.batch)
    return jax_training.by_hand(model_of(size), *compiled_parts(), images, size.steps)


def _torch(size: Size, *, compiled: bool) -> Any:
    import torch
    import torchvision

    from tests.accelerator import torch_training

    model = torchvision.models.resnet50(num_classes=CLASSES)
    for block in model.modules():  # the strides of Keras' version, which computes a little less
        if isinstance(block, torchvision.models.resnet.Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    model = model.to(memory_format=torch.channels_last)

    def loss_of(model: Any, images: Any, labels: Any) -> Any:
        scaled = images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return torch.nn.functional.cross_entropy(model(scaled).float(), labels)

    images, labels = images_of(size, size.batch)
    batch = [images, labels.astype("int64")]
    update = torch_training.momentum
    return torch_training.trained(model, loss_of, batch, size.steps, update, compiled=compiled)


WAYS = {
    OURS: _kdpkit,
    "stock fit": _stock_fit,
    "a bare JAX loop": _by_hand,
    "PyTorch compiled": lambda size: _torch(size, compiled=True),
    "PyTorch eager": lambda size: _torch(size, compiled=False),
    "kdpkit from ArrayBatches": _from_array_batches,
}
