"""`kdpkit recipe`: what it lists and copies, and what it does not overwrite."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kdpkit
from kdpkit import cli

RECIPES = pathlib.Path(kdpkit.__file__).parent.parent / "recipes"
NAMES = {path.stem for kind in ("*.py", "*.ipynb") for path in RECIPES.glob(kind)} | {"cluster"}


def test_every_recipe_is_listed_with_the_first_line_of_its_docstring(capsys):
    assert cli.main(["recipe", "list"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == NAMES
    words = " ".join(printed.split())
    for path in RECIPES.glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert f"{path.stem} {docstring.partition(chr(10))[0]}" in words


@pytest.mark.parametrize("name", ["bert_mlm", "colab_gpu.ipynb", "cluster"])
def test_a_copy_equals_the_recipe(name, tmp_path, capsys):
    assert cli.main(["recipe", "copy", name, str(tmp_path / "new" / "one")]) == 0
    target = pathlib.Path(capsys.readouterr().out.removeprefix("Copied to ").removesuffix(".\n"))
    source = RECIPES / target.name
    assert target.parent == tmp_path / "new" / "one"
    assert target.stem == name.partition(".")[0]
    files = [path for path in [source, *source.rglob("*")] if path.is_file()]
    for file in files:
        copy = target / file.relative_to(source)
        assert copy.read_bytes() == file.read_bytes()
        assert copy.stat().st_mode == file.stat().st_mode


@pytest.mark.parametrize("name", ["cnn_fit", "cluster"])
def test_what_exists_is_not_overwritten(name, tmp_path, capsys):
    target = tmp_path / (RECIPES / "cluster" if name == "cluster" else RECIPES / f"{name}.py").name
    target.write_text("mine", encoding="utf-8")
    assert cli.main(["recipe", "copy", name, str(tmp_path)]) == 2
    assert f"existing file: {target}." in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("directory", ["a_file", "a_file/inside", "/dev/null/inside"])
def test_a_directory_that_cannot_be_made_is_one_sentence(directory, tmp_path, capsys):
    (tmp_path / "a_file").touch()
    assert cli.main(["recipe", "copy", "cnn_fit", str(tmp_path / directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be copied" in line
    assert f"{directory}/cnn_fit.py" in line


@pytest.mark.parametrize("name", ["bert_mlm", "cluster"])
def test_a_full_disk_leaves_no_part_of_a_recipe(name, tmp_path):
    command = f"ulimit -f 0; {sys.executable} -m kdpkit recipe copy {name} {tmp_path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be copied" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_recipe_is_one_sentence_with_the_known_ones(tmp_path, capsys):
    assert cli.main(["recipe", "copy", "gpt", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "name='gpt'" in line
    assert all(name in line for name in NAMES)
    assert list(tmp_path.iterdir()) == []
