import dataclasses
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kdpkit
from kdpkit._internal import atomic_files, prepared_data, storage

DTYPES = ["?", "u1", "i4", ">i8", "f2", "f8", "c8", "<U3"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
datasets = st.dictionaries(st.text(), arrays | st.lists(st.text()), max_size=3)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda part: st.lists(part).map(tuple) | st.dictionaries(st.text(), part, max_size=1),
    max_leaves=6,
)
TOKENS = {"tokens": np.arange(40, dtype="int32"), "words": ["the", "", "\0", "naïve"]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return a new directory for each example that Hypothesis draws."""
    root = tmp_path_factory.mktemp("cache")
    return (root / str(number) for number in itertools.count())


class Building:
    """Builds the same data each time and counts how often."""

    def __init__(self, data):
        self.data = data
        self.times = 0

    def __call__(self):
        self.times += 1
        return self.data


def equal(left, right):
    return left.keys() == right.keys() and all(
        left[name] == right[name]
        if isinstance(left[name], list)
        else left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


def get(build, directory, key="key"):
    return prepared_data.prepared("Some tokens", build, key=key, cache_dir=directory)


@given(data=datasets)
def test_what_is_read_equals_what_was_built(directories, data):
    build, directory = Building(data), next(directories)
    assert equal(get(build, directory), data)
    assert equal(get(build, directory), data)
    assert build.times == 1


@given(data=st.data(), kind=st.sampled_from(["flip", "cut", "append"]))
def test_damaged_files_are_never_trusted(directories, data, kind):
    build, directory = Building(TOKENS), next(directories)
    get(build, directory)
    (path,) = directory.iterdir()
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[position] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[position:]
    else:
        content += bytes(position + 1)
    path.write_bytes(content)
    # Of an archive some bytes mean nothing; what is damaged otherwise is built again, once.
    for _ in range(2):
        assert equal(get(build, directory), TOKENS)
    assert build.times <= 2


def test_rebuilding_is_printed_in_one_line(tmp_path, capsys):
    build = Building(TOKENS)
    get(build, tmp_path)
    assert capsys.readouterr().out == ""
    get(build, tmp_path)
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().out == f"Some tokens: read from {path}.\n"
    path.write_bytes(b"half")
    get(build, tmp_path)
    assert capsys.readouterr().out == f"Some tokens: built again, as {path} is damaged.\n"


def test_a_file_of_another_key_is_not_taken(tmp_path):
    get(Building({"which": ["other"]}), tmp_path, key="other")
    (other,) = tmp_path.iterdir()
    get(Building({"which": ["mine"]}), tmp_path, key="mine")
    (mine,) = set(tmp_path.iterdir()) - {other}
    other.replace(mine)
    assert get(Building({"which": ["mine"]}), tmp_path, key="mine") == {"which": ["mine"]}


def test_data_are_the_same_with_and_without_a_cache(tmp_path):
    build = Building({"examples": ((1, 2), (3, 4)), "words": ("a", "b")})
    plain = get(build, None)
    assert plain["words"] == ["a", "b"]
    for _ in range(2):
        assert equal(get(build, tmp_path), plain)
    assert build.times == 2


@given(plain_values, plain_values)
@example(("a", "bstrc"), ("astrb", "c"))
@example((1,), 1)
@example(((1, 2), 3), (1, (2, 3)))
@example(1, True)
@example(1, 1.0)
@example("", b"")
@example({"a": 1}, (("a", 1),))
@example(0.0, -0.0)
def test_keys_differ_exactly_when_their_values_do(left, right):
    same = prepared_data._fingerprint(left) == prepared_data._fingerprint(right)
    assert same == (repr(left) == repr(right))


@dataclasses.dataclass
class Settings:
    length: int = 128


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ([1, 2], (1, 2), True),
        (Settings(), Settings(), True),
        (Settings(), Settings(127), False),
        (Settings(), {"length": 128}, False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), [0, 1, 2], False),
        (np.zeros(4, "i4"), np.zeros(4, "f4"), False),
        (np.zeros((2, 3)), np.zeros((3, 2)), False),
        (np.zeros(4, ml_dtypes.int4), np.zeros(4, ml_dtypes.uint4), False),
    ],
)
def test_keys_hold_settings_and_arrays(left, right, same):
    assert (prepared_data._fingerprint(left) == prepared_data._fingerprint(right)) is same


def test_a_path_in_the_key_is_its_content(remote, tmp_path):
    build = Building(TOKENS)
    for file in (storage.path(remote) / "input.txt", tmp_path / "input.txt"):
        for content in ("one", "two", "two"):
            with atomic_files.replacing(file) as temporary:
                temporary.write_text(content)
            get(build, tmp_path / "cache", key=file)
        assert build.times == 2  # the second file's content is known already
    with pytest.raises(OSError, match="no such file: .*nowhere"):
        get(build, tmp_path / "cache", key=tmp_path / "nowhere")


@pytest.mark.parametrize("part", [{1, 2}, object(), Settings, np.array([None])])
def test_keys_that_cannot_be_read_raise(part):
    with pytest.raises(ValueError, match="Parts of a cache's key are numbers.*Received: part="):
        get(Building(TOKENS), "unused", key=("fine", part))


@pytest.mark.parametrize(
    "part",
    [
        [[1, 2], [3]],
        np.array(["a", None], object),
        np.zeros(2, ml_dtypes.bfloat16),
        np.zeros(2, "i4,f4"),
        [b"bytes", "text", None],
        {1, 2},
    ],
)
def test_data_that_would_not_come_back_raise(part, tmp_path):
    with pytest.raises(
        ValueError, match="or lists of strings, which 'examples' is not.*Store ragged"
    ):
        get(Building({"examples": part}), tmp_path)
    assert not any(tmp_path.iterdir())


def test_where_nothing_can_be_written_the_data_are_used_uncached(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert equal(get(Building(TOKENS), tmp_path / "file"), TOKENS)
    printed = capsys.readouterr().out
    assert printed.startswith("Some tokens: used uncached, as ")
    assert printed.count("\n") == 1


def test_a_file_that_cannot_be_read_is_built_again(tmp_path, capsys):
    get(Building(TOKENS), tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert equal(get(Building(TOKENS), tmp_path), TOKENS)
    assert f"built again, as {path} cannot be read (Is a directory)" in capsys.readouterr().out


def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(interrupted, tmp_path)
    assert not any(tmp_path.iterdir())


def test_two_processes_may_build_the_same_at_once(tmp_path):
    code = """
import pathlib, sys, time, numpy
from kdpkit._internal.prepared_data import prepared
markers = pathlib.Path(sys.argv[1])

def build():
    markers.joinpath(sys.argv[2]).touch()
    while len(list(markers.iterdir())) < 2:
        time.sleep(0.01)
    return {"numbers": numpy.arange(300_000)}

print(prepared("numbers", build, key=1, cache_dir=sys.argv[3])["numbers"].sum())
"""
    markers, cache = tmp_path / "markers", tmp_path / "cache"
    markers.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, markers, name, cache], stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    assert [process.communicate(timeout=300)[0] for process in processes] == ["44999850000\n"] * 2
    assert [process.returncode for process in processes] == [0, 0]
    assert len(list(cache.iterdir())) == 1


def test_a_change_anywhere_in_kdpkit_builds_again(tmp_path):
    shutil.copytree(Path(kdpkit.__file__).parent, tmp_path / "kdpkit")
    code = """
from kdpkit._internal.prepared_data import prepared
prepared("numbers", lambda: {"numbers": [1]}, key=1, cache_dir="cache")
"""

    def printed():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    assert printed() == ""
    assert "read from" in printed()
    with (tmp_path / "kdpkit" / "pipelines" / "_text.py").open("a") as file:
        file.write("# another way to prepare\n")
    assert printed() == ""


def test_a_cache_in_object_storage_is_built_once_and_never_trusted_when_damaged(remote, capsys):
    build = Building(TOKENS)
    for _ in range(2):
        assert equal(get(build, remote), TOKENS)
    assert build.times == 1
    (path,) = storage.path(remote).iterdir()
    assert capsys.readouterr().out == f"Some tokens: read from {path}.\n"
    with atomic_files.replacing(path) as temporary:
        temporary.write_bytes(path.read_bytes()[:-1])
    assert equal(get(build, remote), TOKENS)
    assert build.times == 2
