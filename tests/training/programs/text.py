"""Language: masked models, translation, classification, recognition."""

import keras
import numpy as np
from keras import layers, ops

from tests.training.programs import Program

VOCABULARY, LENGTH, WIDTH = 15, 6, 8


def _random():
    return np.random.default_rng(0)


def _sentences(random, length=LENGTH, rows=17):
    """Words, and zeros after the last of each sentence."""
    tokens = random.integers(2, VOCABULARY, (rows, length))
    lengths = random.integers(2, length + 1, (rows, 1))
    return np.where(np.arange(length) < lengths, tokens, 0)


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


def _masked_lm():
    inputs = keras.Input((LENGTH,), dtype="int64")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(inputs)
    x = TransformerBlock(WIDTH, 2, 16)(x)
    outputs = layers.Dense(VOCABULARY, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
    )
    return model


def _masked_tokens():
    random = _random()
    y = _sentences(random)
    sample_weight = ((random.uniform(size=y.shape) < 0.3) & (y > 0)).astype("float32")
    x = np.where(sample_weight, 1, y)
    return {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": 7}


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


def _translation():
    encoder_inputs = keras.Input((None,), dtype="int64", name="encoder_inputs")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(encoder_inputs)
    encoder_outputs = TransformerBlock(WIDTH, 2, 16)(x)
    decoder_inputs = keras.Input((None,), dtype="int64", name="decoder_inputs")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(decoder_inputs)
    x = TransformerDecoder(WIDTH, 16, 2)([x, encoder_outputs])
    outputs = layers.Dense(VOCABULARY, activation="softmax")(layers.Dropout(0.5)(x))
    model = keras.Model([encoder_inputs, decoder_inputs], outputs, name="transformer")
    model.compile(
        "rmsprop",
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        metrics=["accuracy"],
    )
    return model


def _sentence_pairs():
    random = _random()
    target = _sentences(random, LENGTH + 1)
    x = {"encoder_inputs": _sentences(random), "decoder_inputs": target[:, :-1]}
    return {"x": x, "y": target[:, 1:], "batch_size": 7}


def _sequence_to_sequence():
    encoder_inputs = keras.Input((None, VOCABULARY))
    encoder = layers.LSTM(WIDTH, return_state=True, dropout=0.2, recurrent_dropout=0.2)
    _, state_h, state_c = encoder(encoder_inputs)
    decoder_inputs = keras.Input((None, VOCABULARY))
    decoder = layers.LSTM(WIDTH, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)
    decoder_outputs = decoder(decoder_inputs, initial_state=[state_h, state_c])
    outputs = layers.Dense(VOCABULARY, activation="softmax")(decoder_outputs)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    return model


def _characters():
    random = _random()
    one_hot = np.eye(VOCABULARY, dtype="float32")
    source, target = (one_hot[_sentences(random, n)] for n in (LENGTH, LENGTH + 1))
    return {"x": [source, target[:, :-1]], "y": target[:, 1:], "batch_size": 7}


def _transformer_classifier():
    inputs = keras.Input((LENGTH,))
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, WIDTH)(inputs)
    x = TransformerBlock(WIDTH, 2, 16)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(8, activation="relu")(layers.Dropout(0.1)(x))
    outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(x))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _reviews():
    random = _random()
    return {"x": _sentences(random), "y": random.integers(0, 2, 17), "batch_size": 7}


def _bidirectional():
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    return model


class CTCLayer(layers.Layer):
    """An endpoint: gives the predictions through, and adds one loss an example."""

    def call(self, y_true, y_pred):
        ones = ops.ones((ops.shape(y_true)[0],), dtype="int32")
        input_length = ops.shape(y_pred)[1] * ones
        label_length = ops.shape(y_true)[1] * ones
        loss = ops.ctc_loss(
            ops.cast(y_true, "int32"), y_pred, label_length, input_length, mask_index=4
        )
        self.add_loss(loss)
        return y_pred


def _columns_of_image(image):
    x = layers.Conv2D(4, (3, 3), activation="relu", padding="same")(image)
    x = layers.MaxPooling2D((1, 2))(x)
    x = layers.Reshape((8, 16))(x)
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(x))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.25))(x)
    return layers.Dense(5)(x)


def _captcha():
    image, labels = keras.Input((8, 8, 1), name="image"), keras.Input((None,), name="label")
    output = CTCLayer(name="ctc_loss")(labels, _columns_of_image(image))
    model = keras.Model([image, labels], output, name="ocr_model")
    model.compile(optimizer=keras.optimizers.Adam())
    return model


def _captchas():
    random = _random()
    images = random.uniform(size=(17, 8, 8, 1)).astype("float32")
    labels = random.integers(0, 4, (17, 3)).astype("float32")
    return {"x": {"image": images, "label": labels}, "batch_size": 7}


def _ctc():
    image = keras.Input((8, 8, 1), name="image")
    model = keras.Model(image, _columns_of_image(image))
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.CTC())
    return model


def _written_words():
    data = _captchas()
    return {"x": data["x"]["image"], "y": data["x"]["label"].astype("int32") + 1, "batch_size": 7}


PROGRAMS = [
    Program("masked language model with sample weights", _masked_lm, _masked_tokens),
    Program("translation with a transformer", _translation, _sentence_pairs),
    Program("LSTM sequence to sequence with dropout", _sequence_to_sequence, _characters),
    Program("text classification with a transformer block", _transformer_classifier, _reviews),
    Program("bidirectional LSTM", _bidirectional, _reviews),
    Program("captcha reader with CTC as an endpoint", _captcha, _captchas),
    Program("handwriting with the CTC loss", _ctc, _written_words),
]
