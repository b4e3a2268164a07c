"""The tests that run on JAX too, in groups; `.ci/environment` runs some of them."""

ON_JAX = {
    "parts": [
        "tests/test_schedules.py",
        "tests/test_testing.py",
        "tests/_internal/test_versions.py",
        "tests/test_docs.py::test_a_program_of_a_page_trains",
        "tests/test_doctests.py",
        "tests/test_batches.py",
        "tests/test_batch_sources.py",
        "tests/pipelines/test_validation.py",
        "tests/test_checkpoints.py",
        "tests/test_sharding.py",
        "tests/test_tpus.py",
    ],
    "callbacks": ["tests/callbacks"],
    "remat": ["tests/training/test_remat.py"],
    "diagnostics": [
        "tests/diagnostics/test_arrays.py",
        "tests/diagnostics/test_memory_plan.py",
        "tests/diagnostics/test_plan.py",
        "tests/diagnostics/test_slow_steps.py",
        "tests/diagnostics/test_speed.py",
        "tests/diagnostics/test_tpu_data.py",
    ],
    "exact": [
        "tests/training/test_exact.py",
        "tests/training/test_own_steps_jax.py",
        "tests/training/test_shards_jax.py",
        "tests/training/test_model_parallel_jax.py",
        "tests/training/test_users_arrays.py",
    ],
    "runs": ["tests/callbacks/test_resume.py", "tests/test_elastic.py", "tests/test_recipes.py"],
    "vocabulary": [
        "tests/training/test_linear_cross_entropy.py",
        "tests/training/test_without_logits.py",
    ],
}
