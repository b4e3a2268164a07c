"""The README and the pages under `docs/`: their programs run, and their links lead somewhere.

The ```python blocks of a page without a title are one program, in their order, and so are the new
lines of a ```diff block. A block whose title is a command with `python train.py` or
`pytest test_NAME.py` in it is a program of its own, which that command runs; the title may end in
"which fails: " and the message. The page of errors has programs that work or fail. A block whose
title begins with "on " (`title="on a cluster"`) cannot run here, and is only compiled. A program
that imports a package of the extra `trackers` is skipped where that is not installed. Programs that
a Python alone runs share the process of the tests, those on JAX that of tests/test_environments.py.
"""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from unittest import mock

import keras
import pytest

from kdpkit import cli
from kdpkit.testing._toys import off_by
from tests import processes
from tests.processes import ROOT

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ERRORS = ROOT / "docs" / "errors.md"
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "recipes/README.md", "recipes/cluster/README.md")
PAGES = [README, *DOCS, *(ROOT / page for page in BESIDE)]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"(?:python|pytest.*) (train|test_\w+)\.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MOST_PAGES = 60
MOST_NAMES = 100  # public ones, see docs/development/writing.md
REPOSITORY = "https://github.com/kdpkit/kdpkit/blob/main/"


def blocks(page, language):
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [(title, text) for name, title, text in found if name == language]


def programs():
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
    (_, before), *of_errors = blocks(ERRORS, "python")
    for number, (title, text) in enumerate(of_errors, 1):
        kind, _, message = title.partition("fails: ")
        on_jax = kind == "on JAX "
        command = f"{'KERAS_BACKEND=jax ' * on_jax}python train.py{FAILS * bool(message)}{message}"
        if message or kind == "works":
            found[f"errors: {number}"] = command, text if on_jax else before + text
    return found


FAILS = ", which fails: "
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


def run(command, folder, fails_with):
    variables = dict.fromkeys(("KERAS_BACKEND", "TF_CONFIG", "XLA_FLAGS"))
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    known = {
        "python": [sys.executable],
        "kdpkit": [sys.executable, "-m", "kdpkit"],
        "pytest": [sys.executable, "-m", "pytest", "-p", "kdpkit.testing.pytest_plugin"],
    }
    words = [part for word in words for part in known.get(word, [word])]
    done = processes.run(*words, cwd=folder, check=not fails_with, seconds=500, **variables)
    assert fails_with in done.stderr + done.stdout
    assert bool(done.returncode) == bool(fails_with)


@pytest.fixture(autouse=True)
def _has_all_devices():
    """Start the backend, before a program takes fewer devices for the whole process."""
    keras.ops.zeros(())


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_example_of_the_readme_trains_as_on_one_device():
    ((_, code),) = blocks(README, "python")
    assert len(code.splitlines()) <= 18

    def weights(old, new):
        names = {}
        assert code.count(old) == 1
        exec(code.replace(old, new), names)
        return [weight.numpy() for weight in names["model"].weights]

    start = weights("model.fit(x, y", "model.fit(x[:1], y[:1], initial_epoch=3")
    one = weights('"mirrored", devices=cpus', '"one"')
    exact, stock = weights("model.fit", "model.fit"), weights("replica_exact(keras", "(keras")
    assert off_by(exact, one, start) < 1e-5
    assert off_by(stock, one, start) > 1e-2  # so that it finds what is wrong


def test_pages_have_programs_and_no_other_titles():
    assert len(PROGRAMS) > 15
    for page in [page for page in DOCS if page != ERRORS]:
        for title, text in blocks(page, "python"):
            compile(text, f"{page}: {title}", "exec")
            known = not title or title.startswith("on a ") or RUNS.search(title)
            assert known, f"{page}: {title}"


def of_programs(*, here):
    for name, (command, _) in PROGRAMS.items():
        kind, _, message = command.partition(FAILS)
        # On JAX stock `fit` works once `replica_exact` was used in the process.
        marks = [] if message and "=jax" in kind else HERE.get(kind, [])
        if bool(marks) == here:
            repeats = [pytest.mark.exhaustive] if name.startswith(REPEATING) else []
            yield pytest.param(name, marks=[*marks, *repeats])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [*of_programs(here=True)])
def test_a_program_of_a_page_trains(name, tmp_path, monkeypatch):
    command, text = PROGRAMS[name]
    message = command.partition(FAILS)[2]
    fails = pytest.raises(Exception, match=re.escape(message)) if message else None
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text, encoding="utf-8")
    policy = keras.config.dtype_policy()
    try:
        # A program sets the number of devices in the environment.
        with mock.patch.dict(os.environ), fails or contextlib.nullcontext():
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
    command, _, message = command.partition(FAILS)
    (tmp_path / f"{RUNS.search(command)[1]}.py").write_text(text, encoding="utf-8")
    run(command, tmp_path, fails_with=message)


def anchors(page):
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


def public_modules():
    modules = {path.stem for path in (ROOT / "kdpkit").iterdir() if path.stem[0] not in "_."}
    return sorted(modules - {"py"})  # py.typed


def test_every_public_module_has_its_page_in_the_reference():
    public = set(public_modules())
    pages = {
        page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").iterdir()
    }
    assert {name for name, text in pages.items() if f"\n::: kdpkit.{name}\n" in text} == public
    assert all(f"({module}.md)" in pages["index"] for module in public)


def test_every_page_is_in_the_menu_of_the_site_or_is_for_those_who_change_kdpkit():
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS]
    assert len(pages) <= MOST_PAGES
    others = tuple(site["not_in_nav"].splitlines())
    listed = re.findall(r"[\w/]+\.md", str(site["nav"]))
    assert sorted(listed) == sorted(page for page in pages if not page.startswith(others))
    hub = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    for page in [page for page in pages if page.startswith(others)]:
        name = page.removeprefix("development/")
        assert name == "architecture.md" or f"{name})" in hub or page.startswith("upstream/"), page


def public_names(module):
    folder = ROOT / "kdpkit" / module
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    listed = re.search(r"^__all__ = \[(.*?)\]", file.read_text(encoding="utf-8"), re.M | re.S)
    assert listed, f"{file} has no `__all__`"
    return re.findall(r"\w+", listed[1])


def unused_names(names, text):
    unused = []
    for name in names:
        module, _, attribute = name.partition(".")
        imported = rf"from kdpkit\.{module} import [^\n]*\b{attribute}\b"
        if not re.search(rf"\b{re.escape(name)}\b|{imported}", text):
            unused.append(name)
    return unused


def test_there_are_few_public_names_and_a_page_or_a_recipe_uses_each():
    names = [f"{module}.{name}" for module in public_modules() for name in public_names(module)]
    assert len(names) <= MOST_NAMES
    folders = (ROOT / "docs" / "how_to", ROOT / "docs" / "moving_here", ROOT / "recipes")
    files = [file for folder in folders for file in folder.rglob("*")]
    readable = [README, *(file for file in files if file.suffix in (".md", ".py", ".ipynb"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in readable)
    assert unused_names(names, text) == ["cli.main"]  # which is the command `kdpkit`


def test_a_page_of_the_reference_that_lists_names_lists_all():
    pages = list((ROOT / "docs" / "reference").iterdir())
    listed = {
        page.stem: re.findall(r"^ {8}- (\w+)$", page.read_text(encoding="utf-8"), re.M)
        for page in pages
    }
    differ = {
        module: set(names) ^ set(public_names(module)) for module, names in listed.items() if names
    }
    for module, names in differ.items():
        assert not names, f"docs/reference/{module}.md and kdpkit.{module} differ in {names}"
    assert listed["training"][0] == "replica_exact"  # what a reader looks for


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere():
    for package in ("zensical", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'kdpkit[docs]'")
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    processes.run(*build, cwd=ROOT)
    built = sorted((ROOT / "build" / "site").rglob("*.html"))
    assert len(built) > len(DOCS)
    for page in built:
        text = page.read_text(encoding="utf-8")
        assert "<blockquote>" not in text, page  # an example of a docstring, without its fence
        loaded = re.findall(r'(?:src="|<link rel="(?!canonical)[^>]*href=")(https?://[^"]+)', text)
        assert loaded == [], page
    first = (ROOT / "build" / "site" / "index.html").read_text(encoding="utf-8")
    assert "uneven last batch" in first  # the table of the README
