"""Language: masked models, translation, recognition, and models of KerasHub."""

import keras
import keras_hub
import numpy as np
from keras import layers, ops

from tests.training.programs import (
    compile_model,
    cross_entropies,
    on_tensorflow,
    program,
    sparse_cross_entropy,
)

VOCABULARY, LENGTH, WIDTH = 15, 6, 8


def sentences(length=LENGTH):
    """Return words, and zeros after the last of each sentence."""
    random = np.random.default_rng(0)
    tokens = random.integers(2, VOCABULARY, (17, length))
    return np.where(np.arange(length) < random.integers(2, length + 1, (17, 1)), tokens, 0)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocab_size, embed_dim, mask_zero=True)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1])
        return self.token_emb(x) + self.pos_emb(positions)

    def compute_mask(self, x, *_):
        return self.token_emb.compute_mask(x)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.supports_masking = True
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        attn_output = self.dropout1(self.att(inputs, inputs))
        out1 = self.layernorm1(inputs + attn_output)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


def masked_tokens():
    y = sentences()
    is_masked = (np.random.default_rng(1).uniform(size=y.shape) < 0.3) & (y > 0)
    x, sample_weight = np.where(is_masked, 1, y), is_masked.astype("float32")
    return {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": 7}


def encoder_of_tokens():
    inputs = keras.Input((LENGTH,), dtype="int64")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(inputs)
    return inputs, TransformerBlock(WIDTH, 2, 16)(x)


@program("masked language model with sample weights", masked_tokens)
def masked_language_model():
    inputs, x = encoder_of_tokens()
    model = keras.Model(inputs, layers.Dense(VOCABULARY, activation="softmax")(x))
    loss, metrics = "sparse_categorical_crossentropy", ["accuracy"]
    return compile_model(model, "adam", loss, weighted_metrics=metrics)


class TransformerDecoder(layers.Layer):
    def __init__(self, embed_dim, latent_dim, num_heads):
        super().__init__()
        self.attention_1 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.attention_2 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = keras.Sequential(
            [layers.Dense(latent_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.layernorm_3 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoder_outputs = inputs
        causal_mask = self.get_causal_attention_mask(inputs)
        inputs_padding_mask, encoder_padding_mask = (None, None) if mask is None else mask
        attended = self.attention_1(
            query=inputs,
            value=inputs,
            key=inputs,
            attention_mask=causal_mask,
            query_mask=inputs_padding_mask,
        )
        out_1 = self.layernorm_1(inputs + attended)
        attended = self.attention_2(
            query=out_1,
            value=encoder_outputs,
            key=encoder_outputs,
            query_mask=inputs_padding_mask,
            key_mask=encoder_padding_mask,
        )
        out_2 = self.layernorm_2(out_1 + attended)
        return self.layernorm_3(out_2 + self.dense_proj(out_2))

    def compute_mask(self, _, mask=None):
        return None if mask is None else mask[0]

    def get_causal_attention_mask(self, inputs):
        batch_size, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
        rows, columns = ops.arange(length)[:, None], ops.arange(length)
        mask = ops.reshape(ops.cast(rows >= columns, "int32"), (1, length, length))
        return ops.tile(mask, [batch_size, 1, 1])


def translated_sentences():
    target = sentences(LENGTH + 1)
    x = {"encoder_inputs": sentences(), "decoder_inputs": target[:, :-1]}
    return {"x": x, "y": target[:, 1:], "batch_size": 7}


@program("translation with a transformer", translated_sentences)
def translation():
    encoder_inputs = keras.Input((None,), dtype="int64", name="encoder_inputs")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(encoder_inputs)
    encoder_outputs = TransformerBlock(WIDTH, 2, 16)(x)
    decoder_inputs = keras.Input((None,), dtype="int64", name="decoder_inputs")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(decoder_inputs)
    x = TransformerDecoder(WIDTH, 16, 2)([x, encoder_outputs])
    outputs = layers.Dense(VOCABULARY, activation="softmax")(layers.Dropout(0.5)(x))
    model = keras.Model([encoder_inputs, decoder_inputs], outputs, name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    return compile_model(model, "rmsprop", loss, metrics=["accuracy"])


def characters():
    one_hot = np.eye(VOCABULARY, dtype="float32")
    source, target = one_hot[sentences()], one_hot[sentences(LENGTH + 1)]
    return {"x": [source, target[:, :-1]], "y": target[:, 1:], "batch_size": 7}


@program("LSTM sequence to sequence with dropout", characters)
def sequence_to_sequence():
    encoder_inputs = keras.Input((None, VOCABULARY))
    encoder = layers.LSTM(WIDTH, return_state=True, dropout=0.2, recurrent_dropout=0.2)
    _, state_h, state_c = encoder(encoder_inputs)
    decoder_inputs = keras.Input((None, VOCABULARY))
    decoder = layers.LSTM(WIDTH, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)
    decoder_outputs = decoder(decoder_inputs, initial_state=[state_h, state_c])
    outputs = layers.Dense(VOCABULARY, activation="softmax")(decoder_outputs)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    return compile_model(model, "rmsprop", "categorical_crossentropy", metrics=["accuracy"])


class CTCLayer(layers.Layer):
    """An endpoint, which returns the predictions, and adds one loss for each example."""

    def call(self, y_true, y_pred):
        ones = ops.ones((ops.shape(y_true)[0],), dtype="int32")
        input_length = ops.shape(y_pred)[1] * ones
        label_length = ops.shape(y_true)[1] * ones
        loss = ops.ctc_loss(
            ops.cast(y_true, "int32"), y_pred, label_length, input_length, mask_index=4
        )
        self.add_loss(loss)
        return y_pred


def characters_of_image(image):
    x = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(image)
    x = layers.Reshape((8, 16))(layers.MaxPooling2D((1, 2))(x))
    return layers.Dense(5)(layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x))


def captchas():
    random = np.random.default_rng(0)
    images = random.uniform(size=(15, 8, 8, 1)).astype("float32")
    labels = random.integers(0, 4, (15, 3)).astype("float32")
    return {"x": {"image": images, "label": labels}, "batch_size": 7}


@program("captcha reader with CTC as an endpoint", captchas)
def captcha():
    image, labels = keras.Input((8, 8, 1), name="image"), keras.Input((None,), name="label")
    output = CTCLayer(name="ctc_loss")(labels, characters_of_image(image))
    return compile_model(keras.Model([image, labels], output), "adam")


def written_words():
    """Return a last batch of one example, which leaves replicas without any."""
    data = captchas()["x"]
    return {"x": data["image"], "y": data["label"].astype("int32") + 1, "batch_size": 7}


@program("handwriting with the CTC loss", written_words, run="slow")
def handwriting():
    image = keras.Input((8, 8, 1), name="image")
    model = keras.Model(image, characters_of_image(image))
    return compile_model(model, "adam", keras.losses.CTC())


# KerasHub: models whose layers or losses compare the examples of a batch.


class Contrastive(keras.Model):
    """Trains two towers on the logits of every image with every text of the batch."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def call(self, inputs):
        return self.backbone(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ARG002
        labels = ops.arange(ops.shape(x["token_ids"])[0])
        losses = [cross_entropies(labels, logits) for logits in y_pred.values()]
        return ops.mean(losses[0] + losses[1])


def images_and_texts():
    random = np.random.default_rng(0)
    images = random.uniform(size=(17, 8, 8, 3)).astype("float32")
    texts = random.integers(1, 20, size=(17, 6)).astype("int32")
    return {"x": {"images": images, "token_ids": texts}, "batch_size": 7}


@program("KerasHub's CLIP", images_and_texts, run="slow")
def clip():
    size = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
    models = keras_hub.models
    backbone = models.CLIPBackbone(
        vision_encoder=models.CLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **size),
        text_encoder=models.CLIPTextEncoder(20, 8, max_sequence_length=6, **size),
        projection_dim=6,
    )
    return compile_model(Contrastive(backbone))


def next_tokens():
    tokens = np.random.default_rng(0).integers(1, 20, size=(17, 7)).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((17, 6), bool)}
    return {"x": x, "y": tokens[:, 1:], "batch_size": 7}


@program("KerasHub's Mixtral", next_tokens, run="slow")
def mixtral():
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
    return compile_model(model, loss=sparse_cross_entropy())


def boxes():
    random = np.random.default_rng(0)
    corners = random.uniform(0, 16, size=(9, 2, 2))
    boxes = np.concatenate([corners, corners + random.uniform(6, 16, size=(9, 2, 2))], axis=-1)
    labels = random.integers(0, 3, size=(9, 2))
    y = {"boxes": boxes.astype("float32"), "labels": labels.astype("float32")}
    return {"x": random.uniform(size=(9, 32, 32, 3)).astype("float32"), "y": y, "batch_size": 5}


@program("KerasHub's RetinaNet", boxes)
def retinanet():
    images = keras_hub.models.ResNetBackbone(
        [64], [3], [64, 64, 64], [1, 1, 1], [1, 2, 2], "basic_block", image_shape=(32, 32, 3)
    )
    backbone = keras_hub.models.RetinaNetBackbone(
        images, 3, 4, use_p5=False, image_shape=(32, 32, 3)
    )
    model = keras_hub.models.RetinaNetObjectDetector(
        backbone, num_classes=3, pre_logits_num_conv_layers=1
    )
    huber = keras.losses.Huber(reduction="sum")
    focal = keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum")
    model.compile(keras.optimizers.SGD(0.05), box_loss=huber, classification_loss=focal)
    return model


def next_words():
    words = np.random.default_rng(1).integers(1, 9, (17, 6))
    words[::3, 3:] = 0
    return {"x": words[:, :-1], "y": words[:, 1:], "batch_size": 5}


@on_tensorflow("the perplexity of KerasHub", data=next_words, run="slow")
def with_perplexity():
    model = keras.Sequential([keras.Input((5,)), layers.Embedding(9, 4), layers.Dense(9)])
    perplexity = keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0)
    return compile_model(model, loss=sparse_cross_entropy(), metrics=[perplexity])


def padded_words():
    words = next_words()["x"]
    words[::2, 2:] = 0
    return {"x": [words, words[::-1].copy()], "y": np.arange(17) % 3, "batch_size": 5}


@on_tensorflow("attentions that share masked words", data=padded_words, run="slow")
def two_attentions():
    """Keras calls the second one first here, and it takes the mask off what both get."""
    words, others = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(9, 4, mask_zero=True)
    pair = embedding(words), embedding(others)
    attended = layers.Attention()([*pair]), layers.MultiHeadAttention(2, 3)(*pair)
    pooled = layers.GlobalAveragePooling1D()(layers.Concatenate()([*attended]))
    model = keras.Model([words, others], layers.Dense(3)(pooled))
    return compile_model(model, loss=sparse_cross_entropy())
