"""Files that may be where a training state was, drawn from a seed; tests/test_checkpoints.py."""

# ruff: noqa: ARG001 not every kind uses what there was

import io
import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np

HEADER = {
    "format": 1,
    "epoch": 0,
    "step": 2,
    "notes": {"best": 0.5},
    "dtypes": {"bias": "bfloat16", "weight": "float64"},
}
NO_NUMBERS = [True, False, None, "2", [2], 2.0, float("nan"), float("inf"), {}]
WRONG = [-1, -(1 << 70), 1, 3, 1 << 31, 1 << 64, 10**400, *NO_NUMBERS]


def npy(array):
    """Return the bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def claiming(shape, descr="<f8", version=1):
    """Return a `.npy` file that claims a shape, and has nothing."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


def write_archive(path, header=HEADER, *, compression=zipfile.ZIP_STORED, **parts):
    """Write what a state would be, but with a header or parts of its own."""
    text = header if isinstance(header, str) else json.dumps(header)
    own = {"weight": npy(np.arange(20.0)), "bias": npy(np.arange(3, dtype="u2"))}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {"header": npy(np.array(text)), **own, **parts}.items():
            if content is not None:
                file.writestr(f"{name}.npy", content)


# Each makes another file of the newest state, whose undamaged bytes are in `content`.


def flipped(draw, path, content):
    damaged = bytearray(content)
    damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)


def cut(draw, path, content):
    path.write_bytes(content[: draw.randrange(len(content))])


def longer(draw, path, content):
    more = draw.randbytes(draw.choice([1, 22, 500, 70_000]))
    path.write_bytes(content + more if draw.random() < 0.7 else more + content)


def torn(draw, path, content):
    """What a crash leaves of blocks that were never written, or written twice."""
    damaged = bytearray(content)
    start, size = draw.randrange(len(content)), draw.choice([1, 16, 512])
    stop = min(start + size, len(content))
    source = draw.randrange(len(content))
    other = (content * 2)[source : source + stop - start]
    damaged[start:stop] = draw.choice([bytes(stop - start), other, draw.randbytes(stop - start)])
    path.write_bytes(damaged)


def no_file(draw, path, content):
    older = path.with_name("state-000000-000000001.npz")
    kinds = {
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "itself": lambda: path.symlink_to(path),
        "nowhere": lambda: path.symlink_to(path.with_name("nowhere")),
        "another state": lambda: path.symlink_to(older),
        "a copy": lambda: shutil.copy(older, path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "empty": lambda: path.symlink_to("/dev/null"),
        "its directory": lambda: path.symlink_to(path.parent),
    }
    kinds[draw.choice(sorted(kinds))]()


def claims_much(draw, path, content):
    side = draw.choice([1 << 20, 1 << 28, 1 << 33, 1 << 50, 1 << 62, 10**30])
    shape = draw.choice([f"({side},)", f"({side}, {side})", f"({side}, -1)"])
    descr = draw.choice(["<f8", "|u1", "<U1000000", "|V0", "|O", "<c16"])
    write_archive(path, weight=claiming(shape, descr, version=draw.choice([1, 2])))


def unpacks_to_much(draw, path, content):
    zeros = npy(np.zeros(draw.choice([1 << 17, 1 << 21])))
    write_archive(path, compression=zipfile.ZIP_DEFLATED, weight=zeros)


def archive_claims_much(draw, path, content):
    """The sizes in the archive's directory are others."""
    damaged = bytearray(content)
    entry = damaged.index(b"PK\x01\x02")
    field = entry + draw.choice([20, 24, 42])  # compressed and full size, where it begins
    damaged[field : field + 4] = draw.choice([1 << 20, 1 << 31, 0xFFFFFFFE]).to_bytes(4, "little")
    path.write_bytes(damaged)


def deep(draw, path, content):
    depth = draw.choice([10_000, 100_000])
    text = draw.choice(["[", '{"notes":', "[[{" * 3]) * depth
    write_archive(path, draw.choice([text, text + "1" + "]" * depth]))


def another_header(draw, path, content):
    name = draw.choice([*HEADER])
    wrong = draw.choice(NO_NUMBERS if name == "format" else WRONG)
    if name == "notes":
        wrong = draw.choice([None, 1, "notes", [], [["setup", 1]], True])
    if name == "dtypes":
        wrong = draw.choice([{}, {"weight": "float64"}, {"weight": "no type"}, [], None, "x"])
    whole = [[], {}, "", 1, None, "{", "NaN", {k: v for k, v in HEADER.items() if k != name}]
    write_archive(path, draw.choice([HEADER | {name: wrong}] * 3 + [draw.choice(whole)]))


def other_parts(draw, path, content):
    parts = [{"weight": None}, {"more": npy(np.zeros(2))}, {"weight": b""}, {"bias": b"\x93NUMPY"}]
    write_archive(path, **draw.choice(parts))


KINDS = [
    *[flipped] * 5,
    *[cut] * 2,
    longer,
    *[torn] * 2,
    no_file,
    claims_much,
    unpacks_to_much,
    archive_claims_much,
    deep,
    *[another_header] * 3,
    other_parts,
]


def damage(seed: int, path: Path, content: bytes) -> str:
    """Put something else where the newest state is; return what kind it is."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    path.unlink()
    kind(draw, path, content)
    return kind.__name__
