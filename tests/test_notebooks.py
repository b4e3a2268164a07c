import re
import shutil
import subprocess
import sys
import zipfile

import nbformat
import pytest

from tests.processes import copy_checkout
from tools import make_notebooks, notebooks

PATHS = [make_notebooks.SOURCE, *map(make_notebooks.path_of, make_notebooks.TITLES)]
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@EACH
def test_outputs_are_short_text_and_every_cell_is_short_and_explained(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown"
    printed = []
    for before, cell in zip(kinds, notebook.cells[1:], strict=False):
        if cell.cell_type == "code":
            printed += [output.text for output in cell.outputs]  # text alone
            assert cell.execution_count is None
            assert before == "markdown" or notebooks.is_picture(cell)
            assert len(cell.source.splitlines()) <= 13
    assert len("".join(printed)) < 6000
    assert not re.search(r"/(tmp|home|root|content)/|[\x00-\x08\r\x1b]", "".join(printed))
    assert bool(printed) == (path == make_notebooks.SOURCE)  # the others have not run at full size
    recipes = [cell.source for cell in notebook.cells if ".main([" in cell.source]
    assert len(recipes) >= 2


@pytest.mark.parametrize("name", make_notebooks.TITLES)
def test_the_other_notebooks_are_made_from_the_first(name):
    written = make_notebooks.path_of(name).read_text(encoding="utf-8")
    made = nbformat.writes(make_notebooks.notebook(name))
    assert written.strip() == made.strip(), "Run `python -m tools.make_notebooks`."


def test_what_is_installed_may_be_a_name_an_address_or_a_path(tmp_path):
    notebook = nbformat.read(make_notebooks.SOURCE, nbformat.NO_CONVERT)
    (cell,) = (cell for cell in notebook.cells if "%pip" in cell.source)
    python = "\n".join(line for line in cell.source.splitlines() if line[0] not in "!%")

    def installed(source):
        names = {"SOURCE": source}
        exec(python, names)
        return names["package"]

    extras = re.search(r"\[recipes.*?\]", python)[0]
    assert installed("kdpkit==0.1.0") == f"kdpkit{extras}==0.1.0"
    address = "git+https://github.com/kdpkit/kdpkit"
    assert installed(address) == f"kdpkit{extras} @ {address}"
    wheel = tmp_path / "kdpkit-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        folder = "kdpkit-0.1.0.dist-info"
        file.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: kdpkit\nVersion: 0.1.0\n")
        file.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr(f"{folder}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", "installed"]
    pip += ["--no-index", "--no-deps"]
    for source in (wheel.name, str(wheel)):
        subprocess.run([*pip, "--upgrade", installed(source)], cwd=tmp_path, check=True)
        assert (tmp_path / "installed" / folder).is_dir()
        shutil.rmtree(tmp_path / "installed")


@pytest.fixture
def source(tmp_path):
    """What a notebook installs, a copy of the checkout."""
    return copy_checkout(tmp_path / "checkout").as_uri()


@pytest.mark.sampled(1)
@EACH
@pytest.mark.slow
@pytest.mark.tensorflow  # all start kernels of their own; once is enough
@pytest.mark.timeout(1800)
def test_a_notebook_runs_from_its_top_where_kdpkit_is_not_installed(path, source, tmp_path):
    output = tmp_path / "done.ipynb"
    program = [sys.executable, "-m", "tools.notebooks", path, "--smoke", "--output", output]
    subprocess.run([*program, "--source", source], cwd=notebooks.CHECKOUT, check=True)
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
    boards = [cell for cell in done.cells if "tensorboard" in notebooks.tags(cell)]
    assert len(boards) == path.stem.startswith("colab")  # Kaggle shows none
    assert all("iframe" in str(board.outputs) for board in boards)
