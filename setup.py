"""Build the wheel with the recipes in it; everything else is in pyproject.toml."""

import shutil
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


setup(cmdclass={"build_py": BuildWithRecipes})
