"""What must hold in other environments: the JAX backend, and a Python without TensorFlow."""

import json
import sys

import keras
import numpy as np
import pytest

from tests import processes
from tests.on_jax import ON_JAX
from tests.processes import ROOT
from tests.python_without import python_with, python_without

# What they test differs least between the backends.
REPEATING = ("callbacks", "diagnostics", "vocabulary")

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="starts other environments; once is enough"
)


def run(command, **variables):
    return processes.run(*command, cwd=ROOT, seconds=1800, **variables).stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(files, id=name, marks=pytest.mark.exhaustive if name in REPEATING else ())
        for name, files in ON_JAX.items()
    ],
)
def test_what_serves_both_backends_passes_on_jax(files, request):
    all_of_them = request.config.getoption("exhaustive")
    # What is slow and not about JAX alone is the same again.
    which = ["--exhaustive"] if all_of_them else ["--all", "-m", "not slow or jax"]
    run([sys.executable, "-m", "pytest", "-n", "0", *which, *files], KERAS_BACKEND="jax")


WITHOUT_TENSORFLOW = """
import importlib.util, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
assert importlib.util.find_spec("tensorflow") is None
import kdpkit.scaling, kdpkit.schedules, kdpkit.callbacks, kdpkit.corpora, kdpkit.experiment
import keras, numpy as np
assert keras.backend.backend() == "jax"
from kdpkit import callbacks, schedules
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(schedules.warmup_cosine(0.1, total_steps=8)), "mse")
x = np.ones((16, 2), "float32")
watching = callbacks.training_callbacks(sys.argv[1], global_batch_size=4)
history = model.fit(x, x[:, :1], batch_size=4, epochs=2, callbacks=watching, verbose=0).history
print(sorted(history), history["learning_rate"])

from kdpkit import sharding, training

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return x[:3], x[:3, :1]

with sharding.DataParallel(2).scope():
    exact = training.replica_exact(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    exact.compile("sgd", "mse")
    logs = exact.fit(Batches(), shuffle=False, verbose=0).history
    print("exact:", *logs, exact.predict(Batches(), verbose=0).shape)

from kdpkit import batches
from kdpkit._internal import storage
resume = callbacks.Resume("memory://run")
board = callbacks.TensorBoard("memory://run/logs")
train = resume.track(batches.ArrayBatches((x, x[:, :1]), global_batch_size=4))
model.fit(train, shuffle=False, callbacks=[board, resume], verbose=0)
print("stored:", [path.name for path in storage.path("memory://run").glob("*")])
try:
    callbacks.Resume("gs://bucket/run")
except ValueError as error:
    print("gs:", error)

from kdpkit import diagnostics
report = diagnostics.check_tpu(Batches(), model=exact, replicas=1)
print("TPU:", *sorted({finding.rule for finding in report.findings}))
"""


@pytest.mark.slow
def test_training_works_where_tensorflow_is_not_installed(tmp_path):
    python = python_with(tmp_path / "venv", "kdpkit[jax]", "fsspec")
    (tmp_path / "program.py").write_text(WITHOUT_TENSORFLOW)
    printed = run([python, tmp_path / "program.py", tmp_path / "logs"], KERAS_BACKEND="jax")
    assert "'examples_per_second', 'learning_rate', 'loss', 'process_cpu_utilization'" in printed
    assert "'process_memory_gib', 'steps_per_second'" in printed
    assert "exact: loss (12, 1)" in printed
    assert "stored: ['logs', 'state-000001-000000000.npz']" in printed
    assert "gs: No installed package reads and writes gs:// (" in printed
    assert "TPU: tile-batch\n" in printed  # three examples in each of four
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    flags = ["--smoke", "--replicas", "2", "--resume", tmp_path / "states"]
    recipe = [python, "recipes/cnn_jax.py", *flags, "--log-dir", tmp_path / "recipe"]
    assert "DataParallel: 2 replicas" in run(recipe)
    assert (tmp_path / "recipe" / "model.keras").exists()
    with pytest.raises(AssertionError, match=r"kdpkit.pipelines. needs .tensorflow. .*install -e"):
        run([python, "-c", "from kdpkit import pipelines"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.needs(reason="tokenizes with TensorFlow alone", keras_hub="0.32")
def test_a_language_model_trains_where_tensorflow_is_not_installed_as_on_one_device(tmp_path):
    python = python_without(tmp_path / "venv", "tensorflow")
    words = [*"abcdefghijklmnopqrstuvwxyz"]
    random = np.random.default_rng(0)
    lines = (f"{' '.join(random.choice(words, 70)).capitalize()}." for _ in range(300))
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    flags = ["--data", tmp_path / "corpus.txt", "--vocabulary-size", "60", "--layers", "1"]
    flags += ["--sequence-length", "16", "--epochs", "1", "--steps-per-epoch", "4"]
    flags += ["--per-replica-batch-size", "4", "--global-batch-size", "8"]

    def history(replicas):
        results = tmp_path / f"{replicas}.json"
        command = [python, "recipes/lm.py", *flags, "--replicas", replicas, "--results", results]
        printed = run(command, KERAS_BACKEND="jax")
        assert f"DataParallel: {replicas} replicas" in printed or replicas == 1
        return json.loads(results.read_text())["history"]

    one, three = history(1), history(3)
    for name in ("loss", "val_loss"):
        assert three[name] == pytest.approx(one[name], rel=1e-5)


@pytest.fixture(scope="module")
def python_without_frameworks(tmp_path_factory):
    return python_without(tmp_path_factory.mktemp("without") / "venv", "tensorflow", "jax")


@pytest.mark.parametrize(
    ("recipe", "backend"), [("cnn_fit.py", None), ("cnn_jax.py", None), ("lm.py", "jax")]
)
def test_a_recipe_without_its_framework_names_what_to_install(
    recipe, backend, python_without_frameworks
):
    command = [python_without_frameworks, f"recipes/{recipe}", "--smoke"]
    finished = processes.run(*command, cwd=ROOT, check=False, KERAS_BACKEND=backend)
    on_jax = backend == "jax" or recipe == "cnn_jax.py"
    package, extra = ("jax", "jax") if on_jax else ("tensorflow", "recipes")
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"{recipe}: `{package}` is not installed.")
    assert line.endswith(f'Run `pip install -e "{ROOT}[{extra}]"`.')
    assert (finished.returncode, finished.stdout) == (2, "")
