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
