"""Who may import whom, read from the source, and what an import may cost."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import kdpkit

ROOT = pathlib.Path(kdpkit.__file__).parent
FRAMEWORKS = {"tensorflow", "jax", "keras", "keras_hub", "tensorflow_text", "numpy"}
PURE = frozenset()
KERAS = frozenset({"keras", "numpy"})
TENSORFLOW = KERAS | {"tensorflow", "keras_hub"}

# What each part may import when it is loaded: frameworks, and other parts of kdpkit. What is in
# `_internal` is a part for each file; these may import each other, but for circles.
INTERNAL = {
    "address_exchange": PURE,
    "array_files": frozenset({"numpy"}),
    "checks": PURE,
    "cluster_sources": PURE,
    "commands": PURE,
    "child_processes": PURE,
    "cpu_threads": PURE,
    "atomic_files": PURE,
    "background": PURE,
    "check_results": PURE,
    "dataset_tuning": TENSORFLOW,
    "error_text": PURE,
    "framework_messages": PURE,
    "garbage_collection": PURE,
    "held_variables": TENSORFLOW,
    "interrupt": KERAS,
    "lazy": PURE,
    "listening": PURE,
    "multi_worker": TENSORFLOW,
    "optimizers": KERAS,
    "parameter_servers": TENSORFLOW,
    "precision": PURE,
    "prepared_data": KERAS,
    "process_launchers": PURE,
    "presets": PURE,
    "private_copies": TENSORFLOW,
    "processes": KERAS,
    "progress": PURE,
    "pyplot": PURE,
    "reachability": PURE,
    "require_keras": PURE,
    "result_figures": frozenset({"numpy"}),
    "shards": KERAS | {"jax"},
    "signal_handlers": PURE,
    "storage": PURE,
    "tpu_connection": TENSORFLOW,
    "tpu_host": PURE,
    "unjoined_processes": KERAS,
    "versions": KERAS,
    "worker_output": PURE,
    "writable": PURE,
}
ALLOWED = {
    "__init__": (PURE, set()),
    "__main__": (PURE, {"cli"}),
    "batches": (KERAS, {"scaling"}),
    "callbacks": (KERAS, {"batches", "checkpoints", "scaling"}),
    "checkpoints": (KERAS, set()),
    "cli": (PURE, {"__version__"}),
    "cluster": (PURE, set()),
    "corpora": (KERAS, {"scaling"}),
    "diagnostics": (
        TENSORFLOW | {"jax"},
        {"batches", "callbacks", "checkpoints", "cluster", "experiment"}
        | {"scaling", "schedules", "training"},
    ),
    "errors": (PURE, set()),
    "experiment": (KERAS, {"scaling"}),
    "launch": (PURE, {"cluster"}),
    "pipelines": (TENSORFLOW, {"scaling"}),
    "scaling": (PURE, set()),
    "schedules": (KERAS, {"scaling"}),
    "sharding": (KERAS | {"jax"}, {"batches"}),
    "strategies": (TENSORFLOW, set()),
    "testing": (KERAS, {"scaling"}),
    "training": (TENSORFLOW | {"jax"}, {"batches", "scaling", "sharding", "strategies"}),
}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] == "_internal" else parts[0]


def module_of(file):
    parts = ("kdpkit", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(tree, *, on_load):
    """Every module a file imports, `from x import y` as x.y; on load, outside of its functions."""
    modules = set()
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not (on_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return modules


def allowed(part):
    if not part.startswith("_internal"):
        frameworks, parts = ALLOWED[part]
        return frameworks, parts | {part}
    name = part.partition(".")[2]
    joining = ("multi_worker", "parameter_servers", "unjoined_processes")
    above = {"cluster"} if name in joining else set()
    return INTERNAL.get(name, PURE), {"launch"} if name == "commands" else above


def breaches(part, tree):
    frameworks, parts = allowed(part)
    found = set()
    for module in imports(tree, on_load=True):
        first, *rest = module.split(".")
        if first in FRAMEWORKS and first not in frameworks:
            found.add(first)
        elif first == "kdpkit" and rest[:1] == ["_internal"] and rest[1:]:
            found |= INTERNAL[rest[1]] - frameworks
        elif first == "kdpkit" and rest and rest[0] not in parts | {"errors", "_internal"}:
            found.add(rest[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_file_imports_only_what_its_part_may(file):
    assert breaches(part_of(file), ast.parse(file.read_text(encoding="utf-8"))) == set()


def test_no_imports_go_in_circles():
    trees = {module_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
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


def test_a_forbidden_import_would_be_seen():
    hidden = ast.parse("try:\n    import tensorflow.data as d\nexcept ImportError:\n    pass")
    sideways = ast.parse("class A:\n    from kdpkit import strategies")
    assert breaches("callbacks", hidden) == {"tensorflow"}
    assert breaches("pipelines", sideways) == {"strategies"}
    assert breaches("scaling", ast.parse("def f():\n    import keras")) == set()


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    ).stdout.strip()


def test_the_page_on_the_architecture_names_files_that_exist():
    page = (ROOT.parent / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where is")[2].partition("## Tests")[0]
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert len(named) >= 7
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_importing_kdpkit_loads_no_framework():
    loaded = run("import sys, kdpkit; print(*sorted({m.split('.')[0] for m in sys.modules}))")
    assert not FRAMEWORKS & set(loaded.split())


@pytest.mark.parametrize("part", ["scaling", "cluster", "launch", "cli"])
def test_pure_parts_load_no_framework(part):
    loaded = run(f"import sys, kdpkit.{part}; print(*{{m.split('.')[0] for m in sys.modules}})")
    assert not FRAMEWORKS & set(loaded.split())


def test_experiment_leaves_the_frameworks_to_the_program():
    loaded = run("import sys, kdpkit.experiment; print(*{m.split('.')[0] for m in sys.modules})")
    assert FRAMEWORKS & set(loaded.split()) == {"numpy"}


def test_importing_kdpkit_takes_under_50_ms():
    code = "import time as t; s = t.perf_counter(); import kdpkit; print(t.perf_counter() - s)"
    assert min(float(run(code)) for _ in range(5)) < 0.05


def test_an_unknown_part_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'schedulers'"):
        _ = kdpkit.schedulers
