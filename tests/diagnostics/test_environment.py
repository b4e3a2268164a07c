"""What `environment` reads: the machine, packages, variables; and what it must not tell."""

import os
import pathlib
import sys
import types

import pytest

from kdpkit import diagnostics
from kdpkit._internal import check_results
from kdpkit.diagnostics._env import children, packages, rules

CPU = {"tensorflow": {"CPU": 1}, "jax": {"CPU": 2}}
WITH_GPU = {"tensorflow": {"CPU": 1, "GPU": 1}, "jax": {"GPU": 1}}


@pytest.mark.parametrize(
    ("variables", "known", "expected"),
    [
        ({}, {}, {}),
        ({"OMP_NUM_THREADS": "8"}, {}, {}),
        ({"OMP_NUM_THREADS": "9"}, {}, {"OMP_NUM_THREADS": ("many-threads", "slow")}),
        ({"TF_NUM_INTRAOP_THREADS": "secret"}, {}, {}),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, {}, {}),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            {},
            {"XLA_FLAGS": ("device-threads", "error")},
        ),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "16"},
            {},
            {},
        ),
        ({}, {"devices": CPU}, {}),
        ({}, {"devices": WITH_GPU, "has_gpu": True}, {}),
        (
            {},
            {"devices": CPU, "has_gpu": True},
            {"tensorflow": ("unused-gpu", "slow"), "jax": ("unused-gpu", "slow")},
        ),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"devices": CPU, "has_gpu": True}, {}),
        ({}, {"broken": {"jax": "No."}}, {"jax": ("does-not-start", "error")}),
        ({}, {"backend": "torch"}, {"torch": ("backend", "error")}),
    ],
)
def test_what_cannot_work_or_wastes_time_is_found_and_no_more(variables, known, expected):
    known = rules.Known(variables, 8, **known)
    kept = {name: rule for name, rule in rules.RULES.items() if name != "version"}
    found = check_results.found(kept, known)
    assert {f.where: (f.rule, f.level) for f in found} == expected


def test_gpus_are_named_by_nvml_and_without_a_driver_there_are_none(monkeypatch):
    def fail():
        raise RuntimeError("Driver Not Loaded")

    library = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetName="GPU {}".format,
        nvmlSystemGetDriverVersion=lambda: "570.86.15",
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    machine = diagnostics.environment(start_frameworks=False).machine
    assert machine["GPU"] == "GPU 0, GPU 1; driver 570.86.15"
    for missing in (types.SimpleNamespace(nvmlInit=fail), None):
        monkeypatch.setitem(sys.modules, "pynvml", missing)  # None: not installed
        machine = diagnostics.environment(start_frameworks=False).machine
        assert machine["GPU"].startswith("none that NVML finds")


def planted(directory, name, version):
    """Make what `pip` leaves of a distribution, for `importlib.metadata`."""
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "level", "problem", "remedy"),
    [
        ("3.9.2", "error", "works with", "Run `"),
        ("99.0.1", "note", "is untested", "If it fails: Run `"),
    ],
)
def test_an_older_version_is_an_error_a_newer_one_untested_and_both_name_the_command(
    tmp_path, monkeypatch, version, level, problem, remedy
):
    planted(tmp_path, "keras", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check_results.found(rules.RULES, rules.Known({}, 8))
    (finding,) = (f for f in found if f.where == "keras")
    assert (finding.rule, finding.level) == ("version", level)
    assert version in finding.problem
    assert problem in finding.problem
    command = f'python -m pip install "{packages.wanted()["keras"]}"'
    assert finding.remedy == f"{remedy}{command}`."


def test_a_python_that_was_not_tested_is_a_note(monkeypatch):
    found = check_results.found(rules.RULES, rules.Known({}, 8))
    assert not [f for f in found if f.where == "python"]
    monkeypatch.setattr(packages, "tested_pythons", lambda: ["3.7", "3.8"])
    found = check_results.found(rules.RULES, rules.Known({}, 8))
    (finding,) = (f for f in found if f.where == "python")
    assert finding.level == "note"
    assert "3.7, 3.8" in finding.problem


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_framework_that_raises_or_never_answers_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "pl4nted-s3cret")
    home = pathlib.Path.home()
    (tmp_path / "tensorflow.py").write_text(
        f"raise ImportError('no {home}/lib/libx.so of pl4nted-s3cret')"
    )
    (tmp_path / "jax.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    reported = diagnostics.environment(timeout_seconds=8)
    problems = {f.where: f.problem for f in reported.findings if f.rule == "does-not-start"}
    assert problems["tensorflow"] == "It does not start: ImportError: no libx.so of ..."
    assert "within 8 s" in problems["jax"]
    assert reported.devices["tensorflow"] == "does not start: ImportError: no libx.so of ..."
    assert not reported.clean


def test_directories_names_and_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "t0ken-of-mine")
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/users/ann b"))
    text = "/opt/a/lib.so: t0ken-of-mine, C:\\Users\\ann\\x.dll, ~/ann/y and /users/ann b/z or/not"
    assert children.without_secrets(text) == "lib.so: ..., x.dll, y and z or/not"
    assert children.without_secrets("grpc://HOST:8470, 1/R, `python -m x`") == (
        "grpc://HOST:8470, 1/R, `python -m x`"
    )


@pytest.mark.parametrize(
    ("package", "distribution"), [("tensorflow", "tf-nightly"), ("keras", "keras-nightly")]
)
def test_any_distribution_of_a_framework_counts(package, distribution, tmp_path, monkeypatch):
    planted(tmp_path, distribution, "99.0.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages.version(package) == "99.0.1"
