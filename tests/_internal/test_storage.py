"""Paths with a scheme, on file systems of fsspec: with directories, and with buckets."""

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import errors
from kdpkit._internal import storage

NAMES = st.text("abc.-_0", min_size=1, max_size=5).filter(lambda name: name.strip("."))


def put(position, content):
    with storage.replacing(position) as temporary:
        temporary.write_bytes(content)


@pytest.mark.parametrize("text", ["/tmp/a b", "C:/x", "a:b/c", "~/x", "gs:"])
def test_paths_without_a_scheme_are_those_of_pathlib(text):
    assert storage.path(text) == pathlib.Path(text)
    assert type(storage.path(text)) is type(pathlib.Path(text))
    assert not storage.is_remote(text)


@given(st.sampled_from(["gs", "s3", "memory"]), st.lists(NAMES, min_size=2, max_size=4))
def test_parts_come_together_and_apart_as_in_pathlib(scheme, parts):
    url = f"{scheme}://{'/'.join(parts)}"
    path = storage.path(url)
    joined = storage.path(f"{scheme}://{parts[0]}/")
    for part in parts[1:]:
        joined = joined / part
    assert joined == path == storage.path(path)
    assert (str(path), os.fspath(path), path.name) == (url, url, parts[-1])
    assert str(path.parent) == f"{scheme}://{'/'.join(parts[:-1])}"
    assert str(storage.path("file:///tmp/x/").parent) == "file:///tmp"


@pytest.mark.parametrize("path", [pathlib.Path("gs://bucket/x"), "gs:/bucket/x"])
def test_a_scheme_with_one_slash_which_pathlib_makes_raises(path):
    with pytest.raises(ValueError, match=r"two slashes.*gs:/bucket/x.*Pass it as text"):
        storage.path(path)


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_the_file_appears_when_the_block_ends_well(kind, remote, tmp_path):
    directory = storage.path(remote) if kind == "remote" else tmp_path
    path = directory / "a.txt"
    put(path, b"old")
    with storage.replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.suffix == ".txt"
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"

    def write_half():
        with storage.replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"new"
    assert [*directory.glob("*")] == [path]


def test_no_permission_is_reported_in_a_sentence():
    where = "file:///sys/kernel/kdpkit.txt"  # nobody may write there, nor root
    with pytest.raises(OSError, match=f"{where} cannot be used.*Check the") as caught:
        put(where, b"x")
    assert isinstance(caught.value, errors.RemoteFileError)
    for path in (where, "/sys/kernel/x"):
        with pytest.raises(ValueError, match=rf"{path}\W"):
            storage.make_writable(storage.path(path))


def test_a_scheme_that_nothing_knows_raises():
    with pytest.raises(ValueError, match=r"reads and writes nope:// .*nope://b/x.*\[storage"):
        storage.path("nope://b/x").exists()
