"""`kdpkit recipe`: the programs that come with kdpkit, to start your own from."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from kdpkit._internal import check_results, checks

HELP = "list the recipes, which are complete training programs, or copy one"

EXAMPLE = """\
A recipe is one readable script or notebook. Copy it, run it, change it:

    kdpkit recipe list
    kdpkit recipe copy bert_mlm
    kdpkit recipe copy cluster my_project

They need the extra `recipes`, and cnn_jax the extra `jax`."""

_PACKAGE = Path(__file__).parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="action", required=True, dest="action")
    actions.add_parser("list", help="print all recipes", allow_abbrev=False)
    add = actions.add_parser("copy", help="copy a recipe", allow_abbrev=False).add_argument
    add("name", help="one of `kdpkit recipe list`, such as bert_mlm")
    add("directory", nargs="?", default=".", help="created if needed (default: the current one)")


def run(args: argparse.Namespace) -> int:
    recipes = _recipes()
    if args.action == "copy":
        print(f"Copied to {_copy(recipes, args.name, Path(args.directory))}.")
        return 0
    width = max(map(len, recipes)) + 2
    for name, path in recipes.items():
        print(check_results.wrapped(_summary(path), first=name.ljust(width), indent=width))
    return 0


def _copy(recipes: dict[str, Path], name: str, directory: Path) -> Path:
    source = recipes.get(Path(name).stem)
    if source is None:
        checks.fail(
            "There is no such recipe.", name=name, remedy=f"There are {', '.join(recipes)}."
        )
    target = directory / source.name
    if target.exists():
        checks.fail_for_file(
            "The recipe would overwrite an existing file",
            target,
            remedy="Remove it, or name another directory.",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=directory) as temporary:
            complete = Path(temporary, source.name)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, complete)
            complete.rename(target)
    except OSError as error:
        checks.fail_for_file(
            f"The recipe cannot be copied ({error.strerror})",
            target,
            remedy="Choose a directory, not a file, with room, where you may write.",
        )
    return target


def _recipes() -> dict[str, Path]:
    """Return the recipes by name: those in the installed package, else the checkout's."""
    installed = _PACKAGE / "_recipes"  # which setup.py adds to a wheel
    directory = installed if installed.is_dir() else _PACKAGE.parent / "recipes"
    kinds = ("*.py", "*.ipynb", "cluster")
    return {path.stem: path for kind in kinds for path in sorted(directory.glob(kind))}


def _summary(path: Path) -> str:
    """Return the first line of a docstring, or of a notebook's or a README's heading."""
    file = path / "README.md" if path.is_dir() else path
    text = file.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = json.loads(text)["cells"][0]["source"][0]
    return text.partition("\n")[0].strip('"# ')
