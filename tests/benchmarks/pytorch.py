"""The same BERT in PyTorch, eager and compiled, where PyTorch is installed.

It trains in processes of its own, whose LLVM does not bear TensorFlow's beside it.
"""

import importlib.util
import os
import pathlib
import pickle
import sys
import tempfile

from tests.benchmarks.contestant import Contestant, serve

RATE, WIDTH, HEADS, HIDDEN, LAYERS = 1e-4, 128, 2, 512, 2
NAMES = ("token_ids", "segment_ids", "padding_mask", "mask_positions")


def contestants(vocabulary_size, batches):
    """Return by name functions that train on the batches once and return the seconds."""
    if importlib.util.find_spec("torch") is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".pickle", delete=False) as file:
        pickle.dump((vocabulary_size, batches), file)
    command = [sys.executable, "-m", "tests.benchmarks.pytorch"]
    ways = ("eager", "compiled")
    return {f"PyTorch {way}": Contestant([*command, way, file.name]).seconds for way in ways}


def main(way, file):
    """Train an epoch whenever it is asked for."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with pathlib.Path(file).open("rb") as pickled:
        vocabulary_size, batches = pickle.load(pickled)
    given = [tensors(torch, batch) for batch in batches]
    compile_with = torch.compile if way == "compiled" else lambda model: model
    serve(trainer(torch, vocabulary_size, given, compile_with))


def tensors(torch, batch):
    """Turn a batch of ours into PyTorch's tensors."""
    x, y, weights = batch
    features = [torch.tensor(x[name]).long() for name in NAMES]
    return [*features, torch.tensor(y).long(), torch.tensor(weights)]


def trainer(torch, vocabulary_size, given, compile_with):
    """Return a function that makes a step for each batch."""
    model = bert(torch, vocabulary_size)
    forward = compile_with(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.004)
    loss_of = torch.nn.CrossEntropyLoss(reduction="none")

    def epoch():
        model.train()
        for *x, labels, weights in given:
            optimizer.zero_grad()
            logits = forward(*x)
            losses = loss_of(logits.flatten(0, 1), labels.flatten())
            loss = (losses * weights.flatten()).mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    return epoch


def bert(torch, vocabulary_size):
    """BERT tiny with a masked-language-model head on its embedding."""
    nn = torch.nn

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary_size, WIDTH)
            self.positions = nn.Embedding(512, WIDTH)
            self.segments = nn.Embedding(2, WIDTH)
            self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
            self.dropout = nn.Dropout(0.1)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, HIDDEN, dropout=0.1, activation="gelu", batch_first=True
                )
                for _ in range(LAYERS)
            )
            self.dense = nn.Linear(WIDTH, WIDTH)
            self.head_norm = nn.LayerNorm(WIDTH, eps=1e-12)
            self.bias = nn.Parameter(torch.zeros(vocabulary_size))

        def forward(self, token_ids, segment_ids, padding_mask, mask_positions):
            places = self.positions.weight[: token_ids.shape[1]]
            hidden = self.tokens(token_ids) + places + self.segments(segment_ids)
            hidden = self.dropout(self.norm(hidden))
            for layer in self.layers:
                hidden = layer(hidden, src_key_padding_mask=padding_mask == 0)
            index = mask_positions[..., None].expand(-1, -1, WIDTH)
            masked = nn.functional.gelu(self.dense(hidden.gather(1, index)))
            return self.head_norm(masked) @ self.tokens.weight.T + self.bias

    return Bert()


if __name__ == "__main__":
    main(*sys.argv[1:])
