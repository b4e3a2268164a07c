"""What `environment` reads: the machine, packages, variables; and what it must not tell."""

import dataclasses
import json
import os
import pathlib
import re
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import diagnostics
from kdpkit._internal import check_results
from kdpkit.diagnostics._env import child_program, environment, machine, packages, rules

MACHINE = machine.Machine(
    cpu="a processor",
    cores=8,
    cores_present=8,
    cores_limit=None,
    memory_gib=16.0,
    gpus=(),
    gpu_driver=None,
    cuda_of_driver=None,
    tpu_chips=0,
)
WITH_A_GPU = dataclasses.replace(
    MACHINE,
    gpus=(machine.Gpu("a GPU", 80.0, "9.0"),),
    gpu_driver="580.1",
    cuda_of_driver="13.0",
)


def found(variables, hardware=None, frameworks=()):
    """Return what the rules find on a machine with these variables, besides packages."""
    known = rules.Known(variables, hardware or MACHINE, frameworks)
    of_packages = {"old-version", "untested-version", "two-tensorflows"}
    kept = {name: rule for name, rule in rules.RULES.items() if name not in of_packages}
    return check_results.found(kept, known)


TENSORFLOW = rules.Framework("tensorflow", "2.21.0", {"CPU": 1}, is_built_with_cuda=True)
JAX = rules.Framework("jax", "0.10.2", {"CPU": 1})


# The container's limits.


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        ("/", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (None, False)),
        ("/", {"cpu.max": "150000 100000\n", "memory.max": "1024\n"}, (1.5, True)),
        (
            "/pod/one",
            {"pod/cpu.max": "200000 100000", "pod/one/cpu.max": "400000 100000"},
            (2.0, False),  # the group around it is the tighter one
        ),
        ("/elsewhere", {"cpu.max": "300000 100000"}, (3.0, False)),
        (None, {}, (None, False)),
    ],
)
def test_the_tightest_limit_of_the_groups_around_a_process_counts(
    monkeypatch, tmp_path, group, files, limits
):
    for place, text in files.items():
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    membership = tmp_path / "membership"
    if group is not None:
        membership.write_text(f"0::{group}\n")
    monkeypatch.setattr(machine, "_GROUP_FILE", membership)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    assert (machine.cores_limit(), machine.memory_bytes() == 1024) == limits


# GPUs.


class NvmlError(Exception):
    """As NVML's."""


def nvml(*, fails=False):
    """Return what `pynvml` has on a machine with one GPU and a part of another."""
    opened = []

    def init():
        if fails:
            raise NvmlError("Driver Not Loaded")
        opened.append(True)

    def memory(handle):
        if handle:
            raise NvmlError("Insufficient Permissions")
        return types.SimpleNamespace(total=80 * 2**30)

    return types.SimpleNamespace(
        opened=opened,
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=opened.clear,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=int,
        nvmlSystemGetDriverVersion=lambda: "570.86.15",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12080,
        nvmlDeviceGetName="GPU {}".format,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, handle),
    )


def test_gpus_are_read_through_nvml_and_what_one_does_not_tell_is_left_out(monkeypatch):
    library = nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    seen = machine.look()
    assert seen.gpus == (machine.Gpu("GPU 0", 80.0, "9.0"), machine.Gpu("GPU 1", None, "9.1"))
    assert (seen.gpu_driver, seen.cuda_of_driver) == ("570.86.15", "12.8")
    assert not library.opened


def test_without_a_driver_or_its_package_there_are_no_gpus(monkeypatch):
    for module in (nvml(fails=True), None):
        monkeypatch.setitem(sys.modules, "pynvml", module)  # None: not installed
        assert machine.look().gpus == ()


@pytest.mark.parametrize(
    ("tensorflow", "jax", "expected"),
    [
        ({"CPU": 1, "GPU": 1}, {"GPU": 1}, {}),
        ({"CPU": 1}, {"GPU": 1}, {"tensorflow": "does not find CUDA's libraries"}),
        ({"CPU": 1, "GPU": 1}, {"CPU": 2}, {"jax": "installed for the CPU alone"}),
        (None, None, {}),  # not asked
    ],
)
def test_a_gpu_that_a_framework_does_not_use_is_a_finding(tensorflow, jax, expected):
    frameworks = (
        dataclasses.replace(TENSORFLOW, devices=tensorflow),
        dataclasses.replace(JAX, devices=jax),
    )
    problems = {f.where: f.problem for f in found({}, WITH_A_GPU, frameworks)}
    assert problems.keys() == expected.keys()
    assert all(part in problems[where] for where, part in expected.items())
    assert found({}, MACHINE, frameworks) == ()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(hidden):
    (finding,) = found({"CUDA_VISIBLE_DEVICES": hidden}, WITH_A_GPU, (TENSORFLOW, JAX))
    assert (finding.rule, finding.level) == ("hidden-gpus", "note")


# Packages.


def installed(directory, name, version, *requirements):
    """Plant the metadata of a package."""
    of_package = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    of_package.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (of_package / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a directory whose packages go before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_two_distributions_of_tensorflow_are_found(planted):
    installed(planted, "tensorflow-cpu", packages.version("tensorflow"))
    assert [finding[1] for finding in rules._two_tensorflows(None)] == ["tensorflow"]


@pytest.mark.parametrize(
    ("version", "rule"), [("3.9.2", "old-version"), ("3.16.0", "untested-version")]
)
def test_a_version_with_which_kdpkit_does_not_work_is_found_with_the_command_that_fixes_it(
    planted, version, rule
):
    installed(planted, "keras", version)
    known = rules.Known({}, MACHINE)
    (finding,) = (f for f in check_results.found(rules.RULES, known) if f.where == "keras")
    assert (finding.rule, finding.level) == (rule, "error")
    assert version in finding.problem
    assert finding.remedy == 'Run `python -m pip install "keras<3.16,>=3.13.2"`.'


# Variables.

SECRETS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=6, max_size=12).map("s3cr3t".__add__)


@given(st.sampled_from(sorted(environment._NAMES)), SECRETS, st.data())
def test_no_value_is_shown_but_numbers_and_known_words(name, secret, data):
    forms = [
        "{}",
        "1 {}",
        "--xla_dump_to=/home/{}/x --xla_cpu_multi_thread_eigen=true",
        "--xla_dump_to={}",
        "{}=1",
        "--{}=1",
        "/home/{}/flags.txt",
        "GPU-{}",
        "cpu,{}",
        "1\n{}",
    ]
    value = data.draw(st.sampled_from(forms)).format(secret)
    assert secret not in json.dumps(environment.shown_settings({name: value}))


@pytest.mark.parametrize(
    ("value", "shown"),
    [("0,2", "0,2"), ("", "empty"), ("--xla_x=2 -x", "--xla_x=2 (not shown)")],
)
def test_what_is_harmless_is_shown(value, shown):
    assert environment.shown_settings({"XLA_FLAGS": value}) == {"XLA_FLAGS": shown}


@pytest.mark.parametrize(
    ("variables", "limits", "expected"),
    [
        ({}, {}, []),
        ({"OMP_NUM_THREADS": "8"}, {}, []),
        ({"OMP_NUM_THREADS": "9"}, {}, [("many-threads", "slow")]),
        ({"TF_NUM_INTRAOP_THREADS": "64"}, {"cores": 64}, []),
        ({"TF_NUM_INTRAOP_THREADS": "secret"}, {}, []),
        ({}, {"cores_limit": 5.0}, []),
        ({}, {"cores_limit": 2.0}, [("container-share", "slow")]),
        ({"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"}, {"cores_limit": 2.0}, []),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, {}, []),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            {},
            [("device-threads", "error")],
        ),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "16"},
            {},
            [],
        ),
    ],
)
def test_threads_that_hang_jax_or_exceed_the_cores_are_found(variables, limits, expected):
    findings = found(variables, dataclasses.replace(MACHINE, **limits))
    assert [(finding.rule, finding.level) for finding in findings] == expected


# Frameworks that do not start, as real processes.


@pytest.fixture
def frameworks(tmp_path, monkeypatch):
    """Return a function that puts other packages instead of TensorFlow and JAX."""

    def put(**programs):
        for name, program in programs.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_framework_that_raises_or_never_answers_is_a_finding(frameworks, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "pl4nted-s3cret")
    home = pathlib.Path.home()
    frameworks(
        tensorflow=f"raise ImportError('no {home}/lib/libx.so of pl4nted-s3cret')",
        jax="import time; time.sleep(600)",
    )
    reported = diagnostics.environment(timeout_seconds=10)
    problems = {f.where: f.problem for f in reported.findings if f.rule == "does-not-start"}
    assert problems["tensorflow"].endswith("does not start: ImportError: no libx.so of ...")
    assert "within 10 s" in problems["jax"]
    assert str(reported).count("does not start") == 4
    assert not reported.clean


# The report.


def test_directories_names_and_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "t0ken-of-mine")
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/users/ann b"))
    text = "/opt/a/lib.so: t0ken-of-mine, C:\\Users\\ann\\x.dll, ~/ann/y and /users/ann b/z or/not"
    assert child_program.without_secrets(text) == "lib.so: ..., x.dll, y and z or/not"
    assert child_program.without_secrets("grpc://HOST:8470, 1/R, `python -m x`") == (
        "grpc://HOST:8470, 1/R, `python -m x`"
    )


def test_the_report_reads_in_80_columns_and_is_plain_json(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1000000")
    reported = diagnostics.environment(start_frameworks=False)
    text = str(dataclasses.replace(reported, machine=WITH_A_GPU))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search("^  OMP_NUM_THREADS +1000000$", text, re.MULTILINE)
    assert "a GPU, 80.0 GiB, compute capability 9.0" in text
    plain = json.loads(json.dumps(reported.to_dict()))
    assert plain["clean"] is False
    assert plain["findings"][0]["rule"] == "many-threads"
    assert plain["machine"]["cores"] == reported.machine.cores


def test_a_limit_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="`timeout_seconds` must be above 0"):
        diagnostics.environment(timeout_seconds=0)
