"""The oldest versions that are promised are those that are tested."""

import ast
import re
import sys
import tomllib

from tests import test_architecture
from tests.processes import ROOT, run

FOR_USERS = ("tensorflow", "jax", "recipes", "gpu")
NEEDS_A_GPU = {"nvidia-ml-py"}
THREE = r"\d+\.\d+\.\d+"
RELEASES = {"packaging": r"\d+\.\d+"}  # the first of a series has two numbers


def lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(bound for name in FOR_USERS for bound in extras[name])]
    found = {}
    for requirement in wanted:
        name, bound = re.fullmatch(
            r"([\w-]+(?:\[[\w-]+\])?)(?:>=([\d.]+)(?:,<[\d.]+)?)?", requirement
        ).groups()
        package = name.partition("[")[0]
        if package != "kdpkit":
            found.setdefault(package, set()).add(bound)
    return found


def test_every_package_has_one_lower_bound_that_names_a_release():
    for package, bounds in lower_bounds().items():
        assert len(bounds) == 1, package
        assert package in NEEDS_A_GPU or re.fullmatch(RELEASES.get(package, THREE), *bounds), (
            package
        )


def test_the_oldest_versions_allowed_are_those_tested():
    bounds = lower_bounds().items()
    promised = {package: bound for package, (bound,) in bounds if package not in NEEDS_A_GPU}
    printed = run(sys.executable, ROOT / ".ci" / "environment", "oldest", "--packages")
    tested = dict(line.split("==") for line in printed.stdout.splitlines())
    assert {"keras", "tensorflow", "jax", "numpy"} <= set(promised)
    assert {package: tested.get(package) for package in promised} == promised


def test_what_is_imported_on_load_is_declared():
    """Of packages, that is: the parts which need a framework are loaded with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]}
    extras = {"jax", "keras_hub", "matplotlib", "tensorboard", "tensorflow", "tensorflow_text"}
    extras |= {"hypothesis", "pytest"}  # of `kdpkit.testing`, loaded by who uses them
    imported = {
        module.partition(".")[0]
        for file in test_architecture.FILES
        for module in test_architecture.imports(ast.parse(file.read_text("utf-8")), on_load=True)
    }
    assert imported - {*sys.stdlib_module_names, "kdpkit"} - extras == declared - {"rich"}
