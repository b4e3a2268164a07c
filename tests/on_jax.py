"""The tests that run on JAX too, in groups; `.ci/environment` runs some of them."""


def _files(folder, names):
    return [f"tests/{folder}test_{name}.py" for name in names.split()]


ON_JAX = {
    "parts": [
        *_files("", "schedules testing doctests batches batch_sources checkpoints sharding tpus"),
        *_files("_internal/", "versions"),
        *_files("pipelines/", "validation"),
        "tests/test_docs.py::test_a_program_of_a_page_trains",
    ],
    "callbacks": ["tests/callbacks"],
    "remat": _files("training/", "remat"),
    "diagnostics": _files("diagnostics/", "arrays memory_plan plan slow_steps speed tpu_data"),
    "exact": _files("training/", "exact own_steps_jax shards_jax model_parallel_jax users_arrays"),
    "runs": [*_files("callbacks/", "resume"), *_files("", "elastic recipes")],
    "vocabulary": _files("training/", "linear_cross_entropy without_logits"),
}
