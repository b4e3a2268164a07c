import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from tests import notebooks

PATHS = [notebooks.CHECKOUT / "recipes" / f"colab_{kind}.ipynb" for kind in ("gpu", "tpu")]
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@EACH
def test_outputs_are_stripped_and_every_cell_is_short_and_explained(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown"
    for before, cell in zip(kinds, notebook.cells[1:], strict=False):
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert before == "markdown" or notebooks.is_picture(cell)
            assert len(cell.source.splitlines()) <= 13
    recipes = [cell.source for cell in notebook.cells if ".main([" in cell.source]
    assert len(recipes) >= 2


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory):
    """A checkout in a `.zip` file, with a directory on top as GitHub makes them."""
    directory = tmp_path_factory.mktemp("upload")
    tree = directory / "kdpkit-main"
    for part in ("kdpkit", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(notebooks.CHECKOUT / part, tree / part, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(notebooks.CHECKOUT / file, tree / file)
    return shutil.make_archive(str(directory / "kdpkit"), "zip", directory, "kdpkit-main")


@EACH
@pytest.mark.slow
@pytest.mark.tensorflow  # both start kernels of their own; once is enough
@pytest.mark.timeout(1800)
def test_a_notebook_runs_from_its_top_where_kdpkit_is_not_installed(path, uploaded, tmp_path):
    output = tmp_path / "done.ipynb"
    command = [sys.executable, "-m", "tests.notebooks", path, "--smoke", "--output", output]
    subprocess.run([*command, "--source", uploaded], cwd=notebooks.CHECKOUT, check=True)
    done = nbformat.read(output, nbformat.NO_CONVERT)
    where, backend = done.cells[-1].outputs[0].text.split()
    assert "/venv/lib/" in where
    assert backend == ("jax" if path.stem.endswith("tpu") else "tensorflow")
    shown = notebooks.pictures(done)
    assert sorted(shown) == ["bert", "cnn"]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in shown.values())
    printed = "".join(
        output.get("text", "") for cell in done.cells for output in cell.get("outputs", [])
    )
    for name in ("CNN", "BERT"):
        assert re.search(rf"^{name}: .*, \d+ steps\n  [\d,]+ examples/s, test ", printed, re.M)
    (board,) = (cell for cell in done.cells if "tensorboard" in notebooks.tags(cell))
    assert "iframe" in str(board.outputs)
