"""Paths with a scheme, on file systems of fsspec: with directories, and with buckets."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import errors
from kdpkit._internal import atomic_files, storage

NAMES = st.text("abc.-_0", min_size=1, max_size=5).filter(lambda name: name.strip("."))


def put(position, content):
    with atomic_files.replacing(position) as temporary:
        temporary.write_bytes(content)


@pytest.mark.parametrize("text", ["logs", "/tmp/a b", "./x", "C:/x", "a:b/c", "~/x", "gs:", ""])
def test_paths_without_a_scheme_are_those_of_pathlib(text):
    assert storage.path(text) == pathlib.Path(text)
    assert type(storage.path(text)) is type(pathlib.Path(text))
    assert not storage.is_remote(text)


@given(st.sampled_from(["gs", "s3", "memory", "file"]), st.lists(NAMES, min_size=2, max_size=4))
def test_parts_come_together_and_apart_as_in_pathlib(scheme, parts):
    url = f"{scheme}://{'/'.join(parts)}"
    path = storage.path(url)
    expected = pathlib.PurePosixPath("/", *parts)
    joined = storage.path(f"{scheme}://{parts[0]}/")
    for part in parts[1:]:
        joined = joined / part
    assert joined == path == storage.path(path)
    assert (str(path), os.fspath(path)) == (url, url)
    assert (path.name, path.suffix) == (expected.name, expected.suffix)
    assert str(path.parent) == f"{scheme}:/{expected.parent}"
    assert path.with_name("other").parent == path.parent


def test_a_bucket_has_no_parent():
    assert storage.path("gs://bucket").parent == storage.path("gs://bucket")
    assert str(storage.path("gs://bucket") / "a" / "b/c") == "gs://bucket/a/b/c"
    assert str(storage.path("file:///tmp/x/").parent) == "file:///tmp"
    assert str(storage.path("file:///") / "f") == "file:///f"


@pytest.mark.parametrize("path", [pathlib.Path("gs://bucket/x"), "gs:/bucket/x"])
def test_a_scheme_with_one_slash_which_pathlib_makes_raises(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:").mkdir()  # as a run would have made that took it for a directory
    with pytest.raises(ValueError, match=r"two slashes.*Pass it as text: 'gs://bucket/x'"):
        storage.path(path)
    assert storage.path("./gs:/bucket/x") == pathlib.Path("gs:/bucket/x")


@pytest.mark.parametrize("name", ["run*", "run?x", "run[lr=0.1]"])
def test_names_that_fsspec_takes_for_patterns_raise(name):
    with pytest.raises(ValueError, match=r"must not contain \*, \?, \[ or \].*run"):
        put(storage.path(f"memory://bucket/{name}/state-1.npz"), b"state")


def test_files_are_put_read_listed_and_removed(remote):
    directory = storage.path(remote) / "new" / "directory"
    file = directory / "state-1.npz"
    assert not directory.exists()
    assert not file.exists()
    assert [*directory.glob("*")] == []
    for content in (b"first", b"second, longer"):
        put(file, content)
        assert file.read_bytes() == content
    put(directory / "other", "text: ä".encode())
    assert (directory / "other").read_text() == "text: ä"
    assert [path.name for path in directory.iterdir()] == ["other", "state-1.npz"]
    assert [*directory.glob("state-*.npz")] == [file]
    assert (file.is_file(), file.is_dir(), directory.is_file()) == (True, False, False)
    assert directory.is_dir()
    with atomic_files.fetched(file) as copy:
        assert (copy.read_bytes(), copy.suffix) == (b"second, longer", ".npz")
    assert not copy.exists()
    file.unlink()
    file.unlink(missing_ok=True)
    assert [path.name for path in directory.iterdir()] == ["other"]


def test_the_file_appears_when_the_block_ends_well(remote):
    path = storage.path(remote) / "a.txt"
    put(path, b"old")
    with atomic_files.replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.suffix == ".txt"
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"

    def write_half():
        with atomic_files.replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"new"
    assert [*path.parent.iterdir()] == [path]


def test_a_directory_is_tried_and_left_as_it_was(remote):
    directory = storage.path(remote) / "new"
    directory.try_writing()
    assert [*directory.glob("*")] == []


@pytest.mark.parametrize("path", ["file:///sys/kernel/x", "nope://bucket/x"])
def test_a_directory_that_cannot_be_written_is_named_as_it_was_written(path):
    with pytest.raises(ValueError, match=rf"{path}\W") as caught:
        storage.path(path).try_writing()
    assert ".kdpkit-" not in str(caught.value)


def test_what_is_missing_is_named_as_it_was_written(remote):
    missing = storage.path(remote) / "none"
    asks = [missing.read_bytes, missing.iterdir, missing.unlink]
    for ask in asks:
        with pytest.raises(FileNotFoundError) as caught:
            ask()
        assert str(caught.value).startswith("There is no such file, directory or bucket: ")
        assert f"{missing}. " in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such file"), atomic_files.fetched(missing):
        pass
    with pytest.raises(ValueError, match="There is no such file: .*none. Check the path"):
        atomic_files.readable(missing)


def test_a_readable_file_is_one_with_content(remote):
    directory = storage.path(remote) / "data"
    put(directory / "file", b"x")
    put(directory / "empty", b"")
    assert atomic_files.readable(directory / "file").read_bytes() == b"x"
    with pytest.raises(ValueError, match="The file is empty: .*://.*empty"):
        atomic_files.readable(directory / "empty")
    with pytest.raises(ValueError, match="A file is needed, and this is a directory: .*://.*data"):
        atomic_files.readable(directory)


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_no_permission_is_reported_in_a_sentence(scheme):
    position = storage.path(
        f"{scheme}:///sys/kernel/kdpkit.txt"
    )  # nobody may write there, nor root
    with pytest.raises(OSError, match=rf"{scheme}:///sys/kernel/kdpkit.txt.*Check the") as caught:
        put(position, b"x")
    assert isinstance(caught.value, errors.RemoteFileError)
    assert caught.value.strerror


def test_a_scheme_that_nothing_knows_raises():
    with pytest.raises(ValueError, match=r"reads and writes nope:// .*nope://b/x.*kdpkit\[storage"):
        storage.path("nope://b/x").exists()


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_package_that_is_missing_is_named():
    with pytest.raises(ValueError, match=r"No installed package .* s3:// \(.*s3fs.*s3://b/x"):
        storage.path("s3://b/x").read_bytes()


def test_what_tensorflow_cannot_read_raises():
    assert storage.require_tensorflow("ram://b/x") == "ram://b/x"
    assert storage.require_tensorflow("./x") == "./x"
    with pytest.raises(ValueError, match="does not know memory://.*path='memory://b/x'.*ram://"):
        storage.require_tensorflow("memory://b/x")


def test_loading_it_loads_no_framework():
    code = "import sys, kdpkit._internal.storage as s; s.path('gs://b/x'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    ).stdout.split()
    assert not {"tensorflow", "fsspec", "keras", "jax"} & set(loaded)


KILLED = """
    import os, pathlib, signal, sys, threading
    import numpy as np
    from kdpkit.checkpoints import CheckpointDirectory, Position, TrainingState

    position = pathlib.Path(sys.argv[1])
    directory = CheckpointDirectory(f"file://{position}")
    save = lambda step, size: directory.save(
        TrainingState(position=Position(0, step), arrays={"weight": np.full(size, step)})
    )
    save(1, 1)

    def kill_in_the_middle():
        while not any(position.glob(".state-000000-000000002*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_in_the_middle, daemon=True).start()
    save(2, 1 << 25)  # 256 MB, whose copying takes longer than seeing that it has begun
"""


@pytest.mark.slow
def test_a_state_that_a_killed_process_left_half_written_is_no_state(tmp_path):
    from kdpkit.checkpoints import CheckpointDirectory, Position, TrainingState

    program = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path]
    killed = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left, complete = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".state-000000-000000002")
    assert complete == "state-000000-000000001.npz"
    directory = CheckpointDirectory(f"file://{tmp_path}")
    assert directory.latest().position.step == 1
    directory.save(TrainingState(position=Position(0, 2), arrays={}))
    assert directory.latest().position.step == 2
    assert left not in [path.name for path in tmp_path.iterdir()]
