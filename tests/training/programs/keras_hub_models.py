"""Models of KerasHub whose layers or losses compare the examples of a batch."""

import keras
import keras_hub
import numpy as np
from keras import ops

from tests.training.programs import Program


class Contrastive(keras.Model):
    """Trains two towers on the logits of every image with every text of the batch."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def call(self, inputs):
        return self.backbone(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ARG002  # Keras'
        labels = ops.arange(ops.shape(x["token_ids"])[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            for logits in y_pred.values()
        ]
        return ops.mean(losses[0] + losses[1])


def _clip():
    size = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
    models = keras_hub.models
    backbone = models.CLIPBackbone(
        vision_encoder=models.CLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **size),
        text_encoder=models.CLIPTextEncoder(20, 8, max_sequence_length=6, **size),
        projection_dim=6,
    )
    model = Contrastive(backbone)
    model.compile(keras.optimizers.SGD(0.1))
    return model


def _siglip():
    size = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
    models = keras_hub.models
    backbone = models.SigLIPBackbone(
        vision_encoder=models.SigLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **size),
        text_encoder=models.SigLIPTextEncoder(20, 8, max_sequence_length=6, **size),
    )
    model = Contrastive(backbone)
    model.compile(keras.optimizers.SGD(0.1))
    return model


def _pairs():
    random = np.random.default_rng(0)
    images = random.uniform(size=(17, 8, 8, 3)).astype("float32")
    texts = random.integers(1, 20, size=(17, 6)).astype("int32")
    return {"x": {"images": images, "token_ids": texts}, "batch_size": 7}


def _mixtral():
    backbone = keras_hub.models.MixtralBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_query_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        num_key_value_heads=2,
        num_experts=3,
        router_aux_loss_coef=0.5,
    )
    model = keras_hub.models.MixtralCausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def _llama():
    backbone = keras_hub.models.LlamaBackbone(20, 2, 2, 8, 16, num_key_value_heads=1)
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def _tokens():
    tokens = np.random.default_rng(0).integers(1, 20, size=(17, 7)).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((17, 6), bool)}
    return {"x": x, "y": tokens[:, 1:], "batch_size": 7}


def _retinanet():
    images = keras_hub.models.ResNetBackbone(
        [64], [3], [64, 64, 64], [1, 1, 1], [1, 2, 2], "basic_block", image_shape=(32, 32, 3)
    )
    backbone = keras_hub.models.RetinaNetBackbone(
        images, 3, 4, use_p5=False, image_shape=(32, 32, 3)
    )
    model = keras_hub.models.RetinaNetObjectDetector(
        backbone, num_classes=3, pre_logits_num_conv_layers=1
    )
    model.compile(
        keras.optimizers.SGD(0.05),
        box_loss=keras.losses.Huber(reduction="sum"),
        classification_loss=keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum"),
    )
    return model


def _boxes():
    random = np.random.default_rng(0)
    corners = random.uniform(0, 16, size=(9, 2, 2))
    boxes = np.concatenate([corners, corners + random.uniform(6, 16, size=(9, 2, 2))], axis=-1)
    labels = random.integers(0, 3, size=(9, 2))
    y = {"boxes": boxes.astype("float32"), "labels": labels.astype("float32")}
    return {"x": random.uniform(size=(9, 32, 32, 3)).astype("float32"), "y": y, "batch_size": 5}


PROGRAMS = [
    Program("KerasHub's CLIP", _clip, _pairs),
    Program("KerasHub's SigLIP", _siglip, _pairs),
    Program("KerasHub's Mixtral", _mixtral, _tokens),
    Program("KerasHub's Llama", _llama, _tokens),
    Program("KerasHub's RetinaNet", _retinanet, _boxes),
]
