import pytest

from kdpkit import _files


def test_the_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with _files.replacing(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent
        assert temporary.suffix == ".txt"
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with _files.replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_must_be_here_is_refused_elsewhere(tmp_path):
    (tmp_path / "script.py").write_text("1")
    assert _files.readable_here(tmp_path / "script.py") == tmp_path / "script.py"
    with pytest.raises(ValueError, match=r"of this machine is needed here: file://.*Copy it"):
        _files.readable_here(f"file://{tmp_path}/script.py")
