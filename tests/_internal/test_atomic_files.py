import pytest

from kdpkit._internal import atomic_files


def test_the_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic_files.replacing(path) as temporary:
        temporary.write_text("complete")
        assert temporary.parent == path.parent
        assert temporary.suffix == ".txt"
        assert not path.exists()
    assert path.read_text() == "complete"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with atomic_files.replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_must_be_here_raises_elsewhere(tmp_path):
    (tmp_path / "script.py").write_text("1")
    assert atomic_files.readable_here(tmp_path / "script.py") == tmp_path / "script.py"
    with pytest.raises(ValueError, match=r"of this machine is needed: file://.*Copy it"):
        atomic_files.readable_here(f"file://{tmp_path}/script.py")
