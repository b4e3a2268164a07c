"""The README and the pages under `docs/`: their programs run, and their links lead somewhere.

The ```python blocks of a page without a title are one program, in their order, and so are the new
lines of a ```diff block. A block whose title
is a command with `python train.py` or `pytest test_NAME.py` in it is a program of its own, which
that command runs; the title may end in "which fails: " and the message. A block whose title begins
with "on " (`title="on a cluster"`) cannot run here, and is only compiled. A program that imports a
package of the extra `trackers` is skipped where that is not installed. Programs that a Python alone
runs share the process of the tests, those on JAX that of tests/test_environments.py.
"""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import keras
import pytest

from kdpkit import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ERRORS = ROOT / "docs" / "errors.md"
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "recipes/README.md", "recipes/cluster/README.md")
PAGES = [README, *DOCS, *(ROOT / page for page in BESIDE)]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"(?:python|pytest.*) (train|test_\w+)\.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")
REPOSITORY = "https://github.com/kdpkit/kdpkit/blob/main/"


def blocks(page, language):
    """Return title and text of a page's blocks."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [(title, text) for name, title, text in found if name == language]


def programs():
    """Return command and text of every program, by name."""
    found = {}
    for page in [page for page in DOCS if page != ERRORS]:
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        page_blocks = blocks(page, "python")
        titled = [block for block in page_blocks if block[0] and not block[0].startswith("on a ")]
        for title, text in titled:
            found[f"{name}: {title}, {len(found)}"] = title, text
        if untitled := [text for title, text in page_blocks if not title]:
            found[name] = "python train.py", "\n".join(untitled)
        for _, text in blocks(page, "diff"):
            kept = [line[2:] for line in text.splitlines() if not line.startswith("- ")]
            found[f"{name}: changed"] = "python train.py", "\n".join(kept)
    return found


PROGRAMS = programs()
HERE = {
    "python train.py": [pytest.mark.tensorflow],
    "KERAS_BACKEND=jax python train.py": [pytest.mark.jax],
}
REPEATING = (  # others show nearly the same, or have tests of their own
    "how_to/experiment_trackers: ",
    "how_to/large_vocabularies",
    "how_to/parameter_servers: ",
    "how_to/several_processes: KERAS_BACKEND=jax",
    "moving_here/horovod: ",
    "moving_here/keras_hub_guide",
)


def run(command, folder, fails_with=None):
    """Run a command with the Python of the tests, and return what it prints."""
    unset = ("KERAS_BACKEND", "TF_CONFIG", "XLA_FLAGS")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    known = {
        "python": [sys.executable],
        "kdpkit": [sys.executable, "-m", "kdpkit"],
        "pytest": [sys.executable, "-m", "pytest", "-p", "kdpkit.testing.pytest_plugin"],
    }
    words = [part for word in words for part in known.get(word, [word])]
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=500
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if fails_with:
        assert fails_with in done.stderr + done.stdout, said
    assert bool(done.returncode) == bool(fails_with), said
    return done.stdout


def test_the_readme_is_a_page():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_first_shell_commands_of_the_readme_are_those_that_ci_runs():
    train, test, *_ = [text for _, text in blocks(README, "sh")]
    assert "recipes/bert_mlm.py" in train
    assert "pytest" in test
    # `--smoke` is appended to the last line of the first.
    assert train.splitlines()[-1].startswith(".venv/bin/python recipes/")


COMPARED = """
import sys
import numpy as np

code = open("readme.py").read()

def weights(code):
    names = {}
    exec(code, names)
    return [weight.numpy() for weight in names["model"].weights]

changed = {
    "start": ("model.fit(x, y", "model.fit(x[:1], y[:1], initial_epoch=3"),
    "one device": ('"mirrored", devices=cpus', '"one"'),
    "stock Keras": ("replica_exact(keras.Seq", "(keras.Seq"),
}
for old, new in changed.values():
    assert code.count(old) == 1, old
start, one, stock = (weights(code.replace(*change)) for change in changed.values())
difference = lambda a, b: max(abs(x - y).max() for x, y in zip(a, b, strict=True))
change = difference(one, start)
print(difference(one, weights(code)) / change, difference(one, stock) / change)
"""


@pytest.mark.slow
def test_the_example_of_the_readme_trains_as_on_one_device(tmp_path):
    ((_, code),) = blocks(README, "python")
    assert len(code.splitlines()) <= 18
    (tmp_path / "readme.py").write_text(code, encoding="utf-8")
    (tmp_path / "compared.py").write_text(COMPARED, encoding="utf-8")
    printed = run("python compared.py", tmp_path)
    exact, stock = map(float, printed.splitlines()[-1].split())
    assert exact < 1e-5
    assert stock > 1e-2  # so the comparison finds what is wrong


def test_pages_have_programs_and_no_other_titles():
    assert len(PROGRAMS) > 15
    for page in [page for page in DOCS if page != ERRORS]:
        for title, text in blocks(page, "python"):
            compile(text, f"{page}: {title}", "exec")
            known = not title or title.startswith("on a ") or RUNS.search(title)
            assert known, f"{page}: {title}"


def of_programs(*, here):
    """Give names of programs as a test's parameters."""
    for name, (command, _) in PROGRAMS.items():
        if (command in HERE) == here:
            marks = [pytest.mark.exhaustive] if name.startswith(REPEATING) else []
            yield pytest.param(name, marks=[*HERE.get(command, []), *marks])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*of_programs(here=True)])
def test_a_program_of_a_page_trains(name, tmp_path, monkeypatch):
    _, text = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text, encoding="utf-8")
    policy = keras.config.dtype_policy()
    try:
        with mock.patch.dict(os.environ):  # of which a program sets the number of devices
            runpy.run_path("train.py", run_name="__main__")
    finally:
        keras.config.set_dtype_policy(policy)
        keras.distribution.set_distribution(None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*of_programs(here=False)])
def test_a_program_of_a_page_runs(name, tmp_path):
    command, text = PROGRAMS[name]
    for package in ("mlflow", "wandb"):
        if f"import {package}\n" in text:
            pytest.importorskip(package)
    command, _, message = command.partition(", which fails: ")
    (tmp_path / f"{RUNS.search(command)[1]}.py").write_text(text, encoding="utf-8")
    run(command, tmp_path, fails_with=message)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(blocks(ERRORS, "python"))))
def test_a_program_of_the_page_of_errors_does_what_its_title_says(number, tmp_path):
    page_blocks = blocks(ERRORS, "python")
    (first, before), (title, text) = page_blocks[0], page_blocks[number]
    assert first == "before each program"
    kind, _, message = title.partition("fails: ")
    assert message or kind == "works"
    on_jax = kind == "on JAX "
    (tmp_path / "train.py").write_text(text if on_jax else before + text, encoding="utf-8")
    backend = "jax" if on_jax else "tensorflow"
    run(f"KERAS_BACKEND={backend} python train.py", tmp_path, fails_with=message)


def anchors(page):
    """Return the anchors of a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = [
        re.sub(r"`|\[|\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", line).strip().lower()) for line in headings}


def broken(page):
    """Return the relative links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        in_repository = path.startswith(REPOSITORY)
        if not in_repository and ("://" in link or path.startswith("mailto:")):
            continue
        target = (page.parent / path).resolve() if path else page
        if in_repository:
            target = ROOT / path.removeprefix(REPOSITORY)
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    assert broken(page) == []


def test_a_broken_link_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    file = f"{REPOSITORY}kdpkit/none.py"
    page.write_text(
        f"# A page\n[1](page.md#a-page) [2](#a-page) [3](#none) [4](other.md) [5]({file})"
        f"[6]({REPOSITORY}SECURITY.md#what-listens-on-the-network)\n"
    )
    assert broken(page) == ["#none", "other.md", file]


def commands():
    """Return every call of `kdpkit` in the shell blocks, without what follows `--`."""
    shell = [text for page in PAGES for _, text in blocks(page, "bash")]
    lines = "".join(shell).replace("\\\n", "").splitlines()
    calls = [re.search(r"(?:^|\s)kdpkit (\S.*)$", line) for line in lines]
    return sorted(
        {call[1].partition("#")[0].partition(" -- ")[0].strip() for call in calls if call}
    )


@pytest.mark.parametrize("call", commands())
def test_commands_and_flags_exist(call):
    command, *words = shlex.split(call)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    for flag in [word for word in words if word.startswith("--")]:
        assert re.search(rf"{flag}\b", printed.getvalue()), flag


def test_every_public_module_has_its_page_in_the_reference():
    modules = [path.stem for path in (ROOT / "kdpkit").iterdir() if path.stem[0] not in "_."]
    public = {module for module in modules if module != "py"}  # py.typed
    pages = {
        page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").iterdir()
    }
    assert {name for name, text in pages.items() if f"\n::: kdpkit.{name}\n" in text} == public
    assert all(f"({module}.md)" in pages["index"] for module in public)


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", menu))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}


def public_names(module):
    """Return the names that a module offers, constants not, from its source."""
    folder = ROOT / "kdpkit" / module
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    if listed := re.search(r"^__all__ = \[(.*?)\]", text, re.M | re.S):
        return [name for name in re.findall(r"\w+", listed[1]) if not name.isupper()]
    defined = re.findall(r"^(?:def|class) ([^\W_]\w*)", text, re.M)
    return defined + re.findall(r"import (\w+) as \1$", text, re.M)


def test_a_page_of_the_reference_that_lists_names_lists_all():
    pages = list((ROOT / "docs" / "reference").iterdir())
    listed = {
        page.stem: re.findall(r"^ {8}- (\w+)$", page.read_text(encoding="utf-8"), re.M)
        for page in pages
    }
    differ = {
        module: set(names) ^ set(public_names(module)) for module, names in listed.items() if names
    }
    assert not {module: names for module, names in differ.items() if names}
    assert listed["training"][0] == "replica_exact"  # what a reader looks for


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere():
    for package in ("zensical", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'kdpkit[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", "mkdocs.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted((ROOT / "build" / "site").rglob("*.html"))
    assert len(built) > len(DOCS)
    for page in built:
        text = page.read_text(encoding="utf-8")
        assert "<blockquote>" not in text, page  # an example of a docstring, without its fence
        loaded = re.findall(r'(?:src="|<link rel="(?!canonical)[^>]*href=")(https?://[^"]+)', text)
        assert loaded == [], page
    first = (ROOT / "build" / "site" / "index.html").read_text(encoding="utf-8")
    assert "uneven last batch" in first  # the table of the README
