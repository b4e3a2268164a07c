"""What `environment` reads: the machine, packages, variables."""

import os
import sys
import types

import pytest

from kdpkit import diagnostics
from kdpkit.diagnostics._env import environment, packages

CPU = {"tensorflow": {"CPU": 1}, "jax": {"CPU": 2}}
WITH_GPU = {"tensorflow": {"CPU": 1, "GPU": 1}, "jax": {"GPU": 1}}


def found(*, backend="tensorflow", devices=None, broken=None, has_gpu=False):
    findings = environment.findings(backend, devices or CPU, broken or {}, has_gpu=has_gpu)
    return {finding.where: finding for finding in findings}


@pytest.mark.parametrize(
    ("visible", "known", "expected"),
    [
        (None, {"devices": WITH_GPU, "has_gpu": True}, {}),
        (None, {"has_gpu": True}, {"tensorflow": "unused-gpu", "jax": "unused-gpu"}),
        ("-1", {"has_gpu": True}, {}),
        (None, {"broken": {"jax": "No."}}, {"jax": "does-not-start"}),
        (None, {"backend": "torch"}, {"torch": "backend"}),
    ],
)
def test_what_cannot_work_or_wastes_time_is_found_and_no_more(
    visible, known, expected, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(packages, "supported", dict)
    assert {where: finding.rule for where, finding in found(**known).items()} == expected


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
    assert environment._gpus() == "GPU 0, GPU 1; driver 570.86.15"
    for missing in (types.SimpleNamespace(nvmlInit=fail), None):
        monkeypatch.setitem(sys.modules, "pynvml", missing)  # None: not installed
        assert environment._gpus() == ""


def planted(directory, name, version):
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_version_that_was_not_tested_is_found_with_the_command(tmp_path, monkeypatch):
    version = "99.0.1"
    assert "keras" not in found()
    planted(tmp_path, "keras", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = found()["keras"]
    assert (finding.rule, finding.level) == ("version", "wrong")
    assert version in finding.problem
    command = f'python -m pip install "keras{packages.supported()["keras"]}"'
    assert finding.remedy == f"Run `{command}`."


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_framework_that_raises_or_never_answers_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no /home/ann/lib/libx.so')")
    (tmp_path / "jax.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    reported = diagnostics.environment(timeout_seconds=8)
    problems = {f.where: f.problem for f in reported.findings if f.rule == "does-not-start"}
    assert problems["tensorflow"] == "It does not start: ImportError: no ~/lib/libx.so"
    assert "within 8 s" in problems["jax"]
    assert reported.devices["tensorflow"] == "does not start: ImportError: no ~/lib/libx.so"
    assert not reported.clean


def test_any_distribution_of_a_framework_counts(tmp_path, monkeypatch):
    planted(tmp_path, "tf-nightly", "99.0.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages.version("tensorflow") == "99.0.1"
