"""ResNet-50, bfloat16: images of 224 x 224."""

import dataclasses
from typing import Any

import numpy as np

from tools.accelerator.speed import Work

CLASSES = 1000
FLOPS = 7.716e9  # of a forward pass at 224 x 224


@dataclasses.dataclass(frozen=True)
class Size:
    """An epoch, and the side of its images."""

    side: int
    batch: int
    steps: int


SIZES = {False: Size(224, batch=256, steps=12), True: Size(32, batch=4, steps=2)}
MORE: dict[str, Any] = {}


def work(size: Size) -> Work:
    """Count images, and the products of convolutions and the last layer."""
    images = size.batch * size.steps
    return Work("images", images, 3.0 * FLOPS * (size.side / 224) ** 2 * images)


def batch_of(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Return random images of bytes, and classes."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (size.batch, size.side, size.side, 3), "uint8")
    return images, random.integers(0, CLASSES, size.batch, "int32")


def plain_model_of(size: Size) -> Any:
    """Build Keras' own ResNet-50, which takes bytes."""
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
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


def exact_of(size: Size) -> Any:
    """Make the kit's model."""
    from kdpkit import training

    model = training.replica_exact(plain_model_of(size))
    model.compile(*compiled_parts())
    return model


def torch_of(size: Size) -> tuple[Any, ...]:
    """Return the same in PyTorch: the model, its loss, a batch and what makes the optimizer."""
    import torch
    import torchvision

    from tools.accelerator import torch_training

    model = torchvision.models.resnet50(num_classes=CLASSES)
    for block in model.modules():  # the strides of Keras' version, which computes a little less
        if isinstance(block, torchvision.models.resnet.Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    model = model.to(memory_format=torch.channels_last)

    def loss_of(model: Any, images: Any, labels: Any) -> Any:
        scaled = images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return torch.nn.functional.cross_entropy(model(scaled).float(), labels)

    images, labels = batch_of(size)
    return model, loss_of, [images, labels.astype("int64")], torch_training.momentum
