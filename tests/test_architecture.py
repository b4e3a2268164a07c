"""Who may import whom, read from the source, and what an import may cost."""

import ast
import graphlib
import pathlib
import re
import sys

import pytest

import kdpkit
from tests.processes import run_code

ROOT = pathlib.Path(kdpkit.__file__).parent
FRAMEWORKS = {"tensorflow", "jax", "keras", "keras_hub", "tensorflow_text", "numpy"}
PURE = frozenset()
KERAS = frozenset({"keras", "numpy"})
TENSORFLOW = KERAS | {"tensorflow", "keras_hub"}

# The frameworks that each file of `_internal` may import when it is loaded.
INTERNAL = {
    "held_variables": TENSORFLOW,
    "optimizers": KERAS,
    "datasets": TENSORFLOW,
    "processes": KERAS,
    "versions": KERAS,
}
MOST_INTERNAL_FILES = 10

# The parts, from the lowest to the highest: a part imports only what is listed before it. When it
# is loaded, it may import these frameworks, and these parts besides `errors` and `_internal`.
ALLOWED = {
    "errors": (PURE, set()),
    "_internal": (PURE, set()),
    "__init__": (PURE, set()),
    "scaling": (PURE, set()),
    "cluster": (TENSORFLOW, set()),
    "launch": (PURE, {"cluster"}),
    "batches": (KERAS, {"scaling"}),
    "schedules": (KERAS, {"scaling"}),
    "corpora": (KERAS, {"scaling"}),
    "pipelines": (TENSORFLOW, {"scaling"}),
    "strategies": (TENSORFLOW, {"cluster"}),
    "sharding": (KERAS | {"jax"}, {"batches", "cluster"}),
    "checkpoints": (KERAS, set()),
    "callbacks": (KERAS, {"batches", "checkpoints", "scaling"}),
    "training": (TENSORFLOW | {"jax"}, {"batches", "scaling", "sharding", "strategies"}),
    "testing": (KERAS, {"scaling", "schedules"}),
    "diagnostics": (
        TENSORFLOW | {"jax"},
        {"batches", "callbacks", "checkpoints", "cluster", "scaling", "schedules", "training"},
    ),
    "experiment": (KERAS, {"callbacks", "corpora", "scaling"}),
    "_recipe_command": (PURE, set()),
    "cli": (PURE, {"__version__", "launch"}),
    "__main__": (PURE, {"cli"}),
}
FILES = sorted(ROOT.rglob("*.py"))

PRIVATE = ("keras.src", "tensorflow.core", "tensorflow.python")
USING_PRIVATE = {
    "_internal/processes.py",
    "_internal/versions.py",
    "cluster/_multi_worker.py",
    "pipelines/_stages.py",
    "training/_keras_internals.py",
    "training/jax/_fit.py",
    "training/tensorflow/_keras_internals.py",
    "training/tensorflow/_patches.py",
}


def name_of(file):
    return str(file.relative_to(ROOT))


def part_of(name):
    """Return the part of a file."""
    return pathlib.PurePath(name).with_suffix("").parts[0]


def imports(tree, *, on_load):
    """Every module a file imports, `from x import y` as x.y; on load, outside of its functions.

    What is for type checkers alone counts, too, except in the package's list of its submodules.
    """
    modules = set()
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and on_load:
            continue
        elif not (on_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return modules


def frameworks_of(name):
    of_part, _ = ALLOWED[part_of(name)]
    return INTERNAL.get(pathlib.PurePath(name).stem, of_part) if "_internal/" in name else of_part


def breaches(name, tree):
    """Return what a file may not import."""
    part, frameworks = part_of(name), frameworks_of(name)
    _, parts = ALLOWED[part]
    below = [*ALLOWED][: [*ALLOWED].index(part) + 1]
    found = set()
    for module in imports(tree, on_load=True):
        first, *rest = module.split(".")
        if first in FRAMEWORKS and first not in frameworks:
            found.add(first)
        elif first == "kdpkit" and rest[:1] == ["_internal"] and part != "_internal" and rest[1:]:
            found |= INTERNAL.get(rest[1], PURE) - frameworks
        elif first == "kdpkit" and rest and rest[0] not in parts | {part, "errors", "_internal"}:
            found.add(rest[0])
    for module in imports(tree, on_load=part == "__init__"):
        first, *rest = module.split(".")
        if first == "kdpkit" and rest and rest[0] in ALLOWED and rest[0] not in below:
            found.add(rest[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_file_imports_only_what_its_part_may(file):
    name, tree = name_of(file), ast.parse(file.read_text(encoding="utf-8"))
    assert not breaches(name, tree)


def test_internal_has_few_files_which_several_parts_share():
    files = [*(ROOT / "_internal").rglob("*.py")]
    assert len(files) <= MOST_INTERNAL_FILES
    users = {}
    for file in FILES:
        for module in imports(ast.parse(file.read_text(encoding="utf-8")), on_load=False):
            if module.startswith("kdpkit._internal."):
                stem = module.split(".")[2]
                users.setdefault(stem, set()).add(part_of(name_of(file)))
    names = {file.relative_to(ROOT / "_internal").parts[0].removesuffix(".py") for file in files}
    assert not {name for name in names if len(users.get(name, ())) == 1}


def test_no_imports_go_in_circles():
    trees = {}
    for file in FILES:
        parts = ("kdpkit", *file.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        trees[name] = ast.parse(file.read_text(encoding="utf-8"))
    needs = {
        name: {
            known
            for module in imports(tree, on_load=False)
            for known in (module, module.rpartition(".")[0])
            if known in trees and known not in (name, "kdpkit")
        }
        for name, tree in trees.items()
    }
    for name in needs:  # a package loads its parts when they are used
        needs[name] -= {name.rpartition(".")[0]}
    graphlib.TopologicalSorter(needs).prepare()


def test_private_parts_of_a_framework_are_imported_where_the_list_says():
    users = set()
    for file in FILES:
        modules = imports(ast.parse(file.read_text(encoding="utf-8")), on_load=False)
        users |= {name_of(file) for module in modules if module.startswith(PRIVATE)}
    assert users == USING_PRIVATE


def test_a_forbidden_import_would_be_seen():
    hidden = ast.parse("try:\n    import tensorflow.data as d\nexcept ImportError:\n    pass")
    sideways = ast.parse("class A:\n    from kdpkit import strategies")
    assert breaches("callbacks/_a.py", hidden) == {"tensorflow"}
    assert breaches("pipelines/_a.py", sideways) == {"strategies"}
    assert breaches("scaling.py", ast.parse("def f():\n    import keras")) == set()
    upward = ast.parse("def f():\n    from kdpkit import training")
    assert breaches("strategies/_a.py", upward) == {"training"}
    assert breaches("_internal/a.py", upward) == {"training"}


PAGES = (
    "development/architecture.md",
    "development/facts.md",
    "development/walkthrough.md",
    "upstream/README.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_name_files_and_functions_that_exist(page):
    text = (ROOT.parent / "docs" / page).read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = re.findall(r"`([\w/]+\.py)(?:(?:::|`, `)(\w+))?`", rows)
    assert len(named) >= 7
    files = [
        path for part in ("kdpkit", "tests", "tools") for path in (ROOT.parent / part).rglob("*.py")
    ]
    for file, function in named:
        texts = [path.read_text(encoding="utf-8") for path in files if path.match(file)]
        assert any(function in text for text in texts), f"{page}: {file}, {function}"


def test_every_fact_has_its_test_or_the_fault_upstream():
    text = (ROOT.parent / "docs" / "development" / "facts.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| (?!fact \|)", line)]
    assert len(rows) > 40
    missing = [row for row in rows if not re.search(r"\| .*(\.py::test_|/upstream/).*\|$", row)]
    assert missing == []


def test_the_map_of_the_architecture_names_the_files_that_exist():
    page = (ROOT.parent / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    lines = re.search(r"^    kdpkit/.*?(?=^\S)", page, re.MULTILINE | re.DOTALL)[0]
    assert lines.count("\n") <= 45  # a screen
    words = set(re.findall(r"\w+", lines))
    assert {file.stem for file in FILES} - {"__init__"} <= words
    known = {part for file in FILES for part in file.with_suffix("").relative_to(ROOT).parts}
    assert {word for word in words if word.startswith("_")} <= known


@pytest.mark.parametrize(
    "parts",
    [
        "kdpkit.scaling, kdpkit.launch, kdpkit.cli",
        "kdpkit.testing.pytest_plugin",
        "kdpkit.experiment",  # leaves the frameworks to the program
    ],
)
def test_pure_parts_load_no_framework(parts):
    loaded = run_code(
        f"import sys, {parts}; print(*{{m.split('.')[0] for m in sys.modules}})"
    ).stdout
    assert not FRAMEWORKS & set(loaded.split())


def test_importing_kdpkit_loads_little_of_the_standard_library_and_nothing_else():
    code = "import sys; former = {*sys.modules}; import kdpkit; print(*{*sys.modules} - former)"
    loaded = run_code(code).stdout.split()
    others = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {"kdpkit", "kdpkit._internal"}
    assert len(loaded) < 40
