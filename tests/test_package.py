"""The wheel: what is in it, and that it works outside of the checkout, for a type checker too."""

import json
import os
import re
import shutil
import site
import sys
import venv
import zipfile

import pytest

import kdpkit
from tests import processes
from tests.processes import ROOT

TYPED = "typed_program.py"
HIDDEN = ("__pycache__", "images")  # of the recipes, not in the wheel

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow, pytest.mark.timeout(900)]

MISUSED = """\
import kdpkit
from kdpkit import diagnostics, scaling, training

scaling.ScalePlan(replicas="2", per_replica_batch_size=8, base_learning_rate=0.1)
scaling.split_batch(10, 4).append(1)
training.exact
diagnostics.plans
kdpkit.scaling.no_such_name
kdpkit.schedulers
"""


def run(*command, cwd, check=True):
    """Run a program as a user does, who has no checkout on the path; return its output."""
    finished = processes.run(*command, cwd=cwd, check=check, seconds=800, PYTHONPATH=None)
    assert check or finished.stderr == ""
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    copy = processes.copy_checkout(tmp_path_factory.mktemp("copy"))
    wheels = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, copy, cwd=wheels)
    (built,) = wheels.iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Install the wheel where our packages are found, but the editable kdpkit is not."""
    directory = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(directory)  # with the pip of the other packages
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    python = directory / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed")
    run(*pip, wheel, cwd=directory)
    return python


def files_in(directory):
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and not {*HIDDEN} & {*path.parts}
    }


def test_the_wheel_has_the_package_the_recipes_and_the_license_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"kdpkit-{kdpkit.__version__}.dist-info/"
    expected = {f"kdpkit/{name}" for name in files_in(ROOT / "kdpkit")}
    expected |= {f"kdpkit/_recipes/{name}" for name in files_in(ROOT / "recipes")}
    assert {name for name in names if not name.startswith(information)} == expected
    assert {"kdpkit/py.typed", "kdpkit/_recipes/cluster/slurm.sh"} <= expected
    assert f"{information}licenses/LICENSE" in names


def test_the_readme_in_the_wheel_has_no_relative_link(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"kdpkit-{kdpkit.__version__}.dist-info/METADATA").decode()
    _, _, text = metadata.partition("\n\n")
    links = re.findall(r"\]\(([^)]+)\)", text)
    home = re.search(r"^Project-URL: Homepage, (.*)$", metadata, re.M)[1]
    assert f"{home}/blob/main/docs/how_to/several_gpus.md" in links
    assert [link for link in links if not link.startswith("https://")] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.replace(f"]({home}/blob/main/", "](").strip() == readme.strip()
    assert "\nDescription-Content-Type: text/markdown\n" in metadata


def test_errors_name_the_command_that_installs_from_where_this_kdpkit_came(python, wheel, tmp_path):
    code = "from kdpkit._internal import checks\nprint(checks.install_command('jax'))"

    def named():
        return run(python, "-c", code, cwd=tmp_path).strip()

    assert named() == f'pip install "kdpkit[jax] @ {wheel.as_uri()}"'
    (noted,) = python.parent.parent.glob("lib/python*/site-packages/kdpkit-*/direct_url.json")
    repository = {"vcs": "git", "commit_id": "abc"}
    noted.write_text(json.dumps({"url": "https://host/kdpkit", "vcs_info": repository}))
    assert named() == 'pip install "kdpkit[jax] @ git+https://host/kdpkit@abc"'
    noted.unlink()  # as after an installation from an index
    assert named() == 'pip install "kdpkit[jax]"'


def test_a_recipe_is_copied_by_the_command_and_starts(python, tmp_path):
    command = python.parent / "kdpkit"
    assert "recipe" in run(command, "--help", cwd=tmp_path)
    for name in ("cnn_fit", "cluster"):
        run(command, "recipe", "copy", name, "mine", cwd=tmp_path)
    assert os.access(tmp_path / "mine" / "cluster" / "slurm.sh", os.X_OK)
    assert "--smoke" in run(python, "mine/cnn_fit.py", "--help", cwd=tmp_path)


@pytest.fixture(scope="module")
def checked(python, tmp_path_factory):
    """What mypy says of two programs, as their user checks them, with the installed package."""
    directory = tmp_path_factory.mktemp("programs")
    shutil.copy(ROOT / "tests" / TYPED, directory)
    (directory / "misused.py").write_text(MISUSED, encoding="utf-8")
    flags = ("--strict", "--ignore-missing-imports", "--config-file=", "--no-error-summary")
    words = (sys.executable, "-m", "mypy", *flags, "--python-executable", python)
    return run(*words, "misused.py", TYPED, cwd=directory, check=False)


def test_programs_with_types_pass_mypy_strict_and_run(python, checked, tmp_path):
    assert TYPED not in checked, checked
    shutil.copy(ROOT / "tests" / TYPED, tmp_path)
    pytest_command = (python, "-m", "pytest", "-q", "-o", "kdpkit_devices=2", TYPED)
    assert "4 passed" in run(*pytest_command, cwd=tmp_path)


def test_mypy_finds_misuse_because_the_package_has_types(checked):
    found = re.findall(r"^misused.py:(\d+): error: .*\[(.*)\]$", checked, re.M)
    assert found == [("4", "arg-type"), *((str(line), "attr-defined") for line in range(5, 10))]
