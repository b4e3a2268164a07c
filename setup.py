"""Build the wheel with the recipes and the README in it; all else is in pyproject.toml."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithRecipes(build_py):
    """Copies `recipes/` into the package as `kdpkit/_recipes`, where `kdpkit recipe` finds it.

    An editable install has no copy and uses the checkout's `recipes/`.
    """

    def run(self) -> None:
        """Build the package, then add the recipes."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "kdpkit", "_recipes")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        ignored = shutil.ignore_patterns("__pycache__", ".*", "images")
        shutil.copytree(ROOT / "recipes", target, ignore=ignored)


def readme() -> str:
    """Return the README with links to the repository, as package indexes do not have its files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = f"{project['urls']['Homepage']}/blob/main/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({files}", text)


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
