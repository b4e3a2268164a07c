"""Who may import whom, read from the source, and what an import may cost."""

import ast
import pathlib
import subprocess
import sys

import pytest

import kdpkit

ROOT = pathlib.Path(kdpkit.__file__).parent
FRAMEWORKS = {"tensorflow", "jax", "keras", "keras_hub", "tensorflow_text", "numpy"}
PURE = frozenset()
KERAS = frozenset({"keras", "numpy"})
TENSORFLOW = KERAS | {"tensorflow", "keras_hub"}

# What each part may import when it is loaded: frameworks, and other parts of kdpkit.
ALLOWED = {
    "__init__": (PURE, set()),
    "_checks": (PURE, set()),
    "_cpu_threads": (PURE, set()),
    "_lazy": (PURE, set()),
    "_optimizers": (KERAS, set()),
    "_precision": (PURE, {"_checks"}),
    "_tuning": (TENSORFLOW, set()),
    "_storage": (PURE, {"_checks"}),
    "_files": (PURE, {"_checks", "_storage"}),
    "_findings": (PURE, {"_checks"}),
    "_versions": (KERAS, {"_checks"}),
    "_private_copies": (TENSORFLOW, set()),
    "_processes": (KERAS, {"_checks", "_versions"}),
    "_interrupt": (KERAS, {"_files", "_processes", "_storage"}),
    "_multi_worker": (TENSORFLOW, {"_checks", "_processes", "_waiting", "cluster"}),
    "_tpu": (PURE, set()),
    "_tpu_connection": (TENSORFLOW, {"_checks", "_tpu", "_waiting"}),
    "_garbage": (PURE, set()),
    "_prepared": (KERAS, {"_checks", "_files", "_storage"}),
    "_presets": (PURE, {"_checks"}),
    "_cluster_sources": (PURE, {"_checks"}),
    "_waiting": (PURE, {"_checks"}),
    "cluster": (PURE, {"_checks", "_cluster_sources", "_waiting"}),
    "_children": (PURE, set()),
    "_output": (PURE, set()),
    "launch": (PURE, {"_checks", "_children", "_output", "_waiting", "cluster"}),
    "_commands": (PURE, {"_checks", "launch"}),
    "cli": (PURE, {"__version__", "_checks"}),
    "__main__": (PURE, {"cli"}),
    "scaling": (PURE, {"_checks"}),
    "batches": (KERAS, {"_checks", "scaling"}),
    "sharding": (KERAS | {"jax"}, {"_checks", "_processes", "_tpu", "batches"}),
    "_pyplot": (PURE, {"_checks", "_files", "_storage"}),
    "_figures": (PURE | {"numpy"}, {"_checks", "_pyplot"}),
    "schedules": (KERAS, {"_checks", "_pyplot", "scaling"}),
    "checkpoints": (KERAS, {"_checks", "_files", "_storage"}),
    "callbacks": (
        KERAS,
        {"_checks", "_cpu_threads", "_files", "_optimizers", "_processes", "_storage", "_versions"}
        | {"checkpoints", "scaling"},
    ),
    "corpora": (KERAS, {"_checks", "_files", "_storage", "scaling"}),
    "pipelines": (
        TENSORFLOW,
        {"_checks", "_files", "_findings", "_storage", "_tuning", "_waiting", "scaling"}
        | {"pipelines"},
    ),
    "_servers": (TENSORFLOW, {"_checks", "_waiting", "cluster"}),
    "strategies": (TENSORFLOW, {"_checks", "_processes", "_servers", "_tpu", "_tpu_connection"}),
    "training": (
        TENSORFLOW | {"jax"},
        {
            "_checks",
            "_garbage",
            "_optimizers",
            "_private_copies",
            "_processes",
            "_servers",
            "_tuning",
            "_versions",
            "batches",
            "scaling",
            "sharding",
        }
        | {"_lazy", "strategies", "training"},
    ),
    "diagnostics": (
        TENSORFLOW | {"jax"},
        {"_checks", "_files", "_findings", "_garbage", "_lazy", "_pyplot", "_versions"}
        | {"batches", "_children", "_cpu_threads", "_processes", "_tpu", "checkpoints", "cluster"}
        | {"diagnostics", "scaling", "schedules"},
    ),
    "experiment": (
        KERAS,
        {"_checks", "_cpu_threads", "_figures", "_files", "_garbage", "_precision", "_prepared"}
        | {"_presets", "_processes", "_storage", "scaling"},
    ),
    "testing": (KERAS, {"_checks", "_cpu_threads", "scaling"}),
}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(file):
    return file.relative_to(ROOT).with_suffix("").parts[0]


def imports_on_load(tree):
    """Every module a file imports outside its functions, `from kdpkit import x` as kdpkit.x."""
    modules = set()
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "kdpkit":
            modules |= {f"kdpkit.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
    return modules


def breaches(part, tree):
    frameworks, parts = ALLOWED[part]
    modules = {tuple(module.split(".")) for module in imports_on_load(tree)}
    foreign = {module[0] for module in modules if module[0] in FRAMEWORKS}
    own = {module[1] for module in modules if module[0] == "kdpkit" and len(module) > 1}
    return (foreign - frameworks) | (own - parts - {part})


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_file_imports_only_what_its_part_may(file):
    assert breaches(part_of(file), ast.parse(file.read_text(encoding="utf-8"))) == set()


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
