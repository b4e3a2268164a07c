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
from kdpkit.diagnostics import (
    _cgroups,
    _environment,
    _machine,
    _packages,
    _private,
    _settings,
    _usable,
)

MACHINE = _machine.Machine(
    cpu="a processor",
    cores=8,
    cores_present=8,
    cores_limit=None,
    memory_gib=16.0,
    gpus=(),
    gpu_driver=None,
    cuda_of_driver=None,
    gpus_unread=None,
    tpu_chips=0,
)
WITH_A_GPU = dataclasses.replace(
    MACHINE,
    gpus=(_machine.Gpu("a GPU", 80.0, "9.0"),),
    gpu_driver="580.1",
    cuda_of_driver="13.0",
)
TENSORFLOW = _usable.Framework("tensorflow", "2.21.0", {"CPU": 1}, is_built_with_cuda=True)
JAX = _usable.Framework("jax", "0.10.2", {"CPU": 1})


@pytest.fixture
def no_cluster(monkeypatch):
    """Leave out the variables that describe a cluster or a TPU."""
    for name in ("TF_CONFIG", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "TPU_NAME", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("KERAS_DISTRIBUTION")]:
        monkeypatch.delenv(name)


# The container's limits.


def groups(directory, membership, **files):
    """Write a membership file and files of groups, `path__name="text"`."""
    (directory / "membership").write_text(membership)
    for place, text in files.items():
        file = directory / "cgroup" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory / "membership", directory / "cgroup"


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (None, None)),
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "1024\n"}, (1.5, 1024)),
        (
            "0::/pod/one\n",
            {"pod/cpu.max": "200000 100000", "pod/one/cpu.max": "400000 100000"},
            (2.0, None),  # the group around it is the tighter one
        ),
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "memory/a/memory.limit_in_bytes": "4096",
            },
            (0.5, 4096),
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            (None, None),
        ),
        ("0::/elsewhere\n", {"cpu.max": "300000 100000"}, (3.0, None)),
        ("", {}, (None, None)),
    ],
)
def test_the_tightest_limit_of_the_groups_around_a_process_counts(
    tmp_path, membership, files, limits
):
    assert _cgroups.limits(*groups(tmp_path, membership, **files)) == limits


def test_where_there_are_no_groups_there_is_no_limit(tmp_path):
    assert _cgroups.limits(tmp_path / "none", tmp_path) == (None, None)


# GPUs.


class Nvml(types.ModuleType):
    """What `pynvml` gives on a machine with one GPU and a part of another."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self, *, fails=False):
        super().__init__("pynvml")
        self.fails = fails
        self.is_open = False

    def nvmlInit(self):  # noqa: N802 NVML's names
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        assert self.is_open
        return index

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return 12080

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        if handle:
            raise self.NVMLError("Insufficient Permissions")
        return types.SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return (9, handle)


def test_gpus_are_read_through_nvml_and_what_one_does_not_tell_is_left_out(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    machine = _machine.look()
    assert machine.gpus == (_machine.Gpu("GPU 0", 80.0, "9.0"), _machine.Gpu("GPU 1", None, "9.1"))
    assert (machine.gpu_driver, machine.cuda_of_driver) == ("570.86.15", "12.8")
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("module", "reason"), [(Nvml(fails=True), "Driver Not Loaded"), (None, "`nvidia-ml-py`")]
)
def test_a_driver_that_cannot_be_asked_is_told_and_no_driver_is_no_matter(
    monkeypatch, tmp_path, module, reason
):
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: not installed
    monkeypatch.setattr(_machine, "_NVIDIA_FILES", tmp_path / "none")
    assert (_machine.look().gpus, _machine.look().gpus_unread) == ((), None)
    monkeypatch.setattr(_machine, "_NVIDIA_FILES", tmp_path)
    assert reason in _machine.look().gpus_unread


@pytest.mark.parametrize(
    ("tensorflow", "jax", "found"),
    [
        ({"CPU": 1, "GPU": 1}, {"GPU": 1}, {}),
        ({"CPU": 1}, {"GPU": 1}, {"tensorflow": "does not find CUDA's libraries"}),
        ({"CPU": 1, "GPU": 1}, {"CPU": 2}, {"jax": "installed for the CPU alone"}),
        (None, None, {}),  # not asked
    ],
)
def test_a_gpu_that_a_framework_does_not_use_is_a_finding(monkeypatch, tensorflow, jax, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    frameworks = (
        dataclasses.replace(TENSORFLOW, devices=tensorflow),
        dataclasses.replace(JAX, devices=jax),
    )
    findings = {f.where: f.problem for f in _environment._of_gpus(WITH_A_GPU, *frameworks)}
    assert findings.keys() == found.keys()
    assert all(part in findings[where] for where, part in found.items())
    assert not [*_environment._of_gpus(MACHINE, *frameworks)]


def test_a_tensorflow_without_cuda_beside_a_gpu_is_told_with_the_command_that_mends_it(
    monkeypatch,
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tensorflow = dataclasses.replace(TENSORFLOW, is_built_with_cuda=False)
    (finding,) = _environment._of_gpus(WITH_A_GPU, tensorflow, _usable.Framework("jax", None))
    assert "built without CUDA" in finding.problem
    assert '"tensorflow[and-cuda]==2.21.0"' in finding.remedy


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not [*_environment._of_gpus(WITH_A_GPU, TENSORFLOW, JAX)]
    (finding,) = _settings.findings(os.environ, WITH_A_GPU)
    assert (finding.rule, finding.level) == ("hidden-gpus", "note")


# Packages.


def installed(directory, name, version, *requirements):
    """Plant the metadata of a package."""
    of_package = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    of_package.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (of_package / "METADATA").write_text("\n".join(lines) + "\n")


def rules(findings):
    return [(finding.rule, finding.where) for finding in findings]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Give a directory whose packages go before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_version_below_the_minimum_is_found_with_the_command_that_mends_it(planted):
    installed(planted, "keras", "3.9.2")
    (finding,) = [finding for finding in _packages.findings() if finding.rule == "old-version"]
    assert (finding.rule, finding.level, finding.where) == ("old-version", "refused", "keras")
    assert (
        finding.problem == "Version 3.9.2 is installed, and kdpkit works with keras<3.16,>=3.10.0."
    )
    assert finding.remedy == 'Run `python -m pip install "keras<3.16,>=3.10.0"`.'


def test_a_version_that_was_not_tried_yet_is_found(planted):
    installed(planted, "keras", "3.16.0")
    (finding,) = [finding for finding in _packages.findings() if finding.where == "keras"]
    assert finding.rule == "untested-version"
    assert "keras<3.16" in finding.remedy


def test_packages_that_do_not_fit_each_other_are_found(planted):
    installed(planted, "tensorflow-text", "2.20.0", "tensorflow<2.21,>=2.20", "absent-package>9")
    found = {finding.where: finding for finding in _packages.findings()}["tensorflow-text"]
    assert found.rule == "misfit"
    assert "needs tensorflow<2.21,>=2.20" in found.problem


def test_two_distributions_of_tensorflow_are_found(planted):
    installed(planted, "tensorflow-cpu", _packages.version("tensorflow"))
    assert ("two-tensorflows", "tensorflow") in rules(_packages.findings())


def test_this_environment_has_no_fault_of_packages():
    assert rules(_packages.findings()) == []


def test_an_extra_lacks_what_is_missing_too_old_or_incomplete(planted):
    needs = [
        "keras>=3.10",
        'absent-package[fast]>=2; extra == "all"',
        'absent-package[fast]>=2; extra == "one"',
        'keras>=99; extra == "two"',
        'numpy>=1; extra == "two"',
        'never>1; extra == "two" and python_version < "3"',
        'kdpkit[one,two]; extra == "three"',
        'whole[part]>=1; extra == "four"',
    ]
    installed(planted, "kdpkit", "9.0.0", *needs)
    installed(planted, "whole", "1.5", 'absent-package; extra == "part"')
    with (planted / "kdpkit-9.0.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.writelines(f"Provides-Extra: {n}\n" for n in ("one", "two", "three", "four"))
    found = {extra.name: extra for extra in _packages.extras()}
    assert found["one"].missing == ("absent-package[fast]>=2",)
    assert found["two"].missing == ("keras>=99",)
    assert found["three"].missing == ("absent-package[fast]>=2", "keras>=99")
    assert found["four"].missing == ("whole[part]>=1",)
    command = 'python -m pip install "absent-package[fast]>=2" "keras>=99"'
    assert found["three"].command == command


def test_a_long_command_is_broken_so_that_a_shell_takes_it_as_one():
    command = _packages.install_command(f"package-number-{i}>=1.2.3" for i in range(9))
    wrapped = _packages.wrapped_command(command, indent="  ")
    assert max(map(len, wrapped.splitlines())) <= 80
    assert " ".join(line.rstrip("\\").strip() for line in wrapped.splitlines()) == command


# Variables.

SECRETS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=6, max_size=12).map("s3cr3t".__add__)


@given(st.sampled_from(sorted(_settings._SHOWN)), SECRETS, st.data())
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
    assert secret not in json.dumps(_settings.shown({name: value}))


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"TF_GPU_THREAD_MODE": "gpu_private"}, "gpu_private"),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, "0,2"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "empty"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, "cuda,cpu"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "set (not shown)"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_dump_to=/a -x"},
            "--xla_force_host_platform_device_count=2 --xla_dump_to=(not shown) (not shown)",
        ),
    ],
)
def test_what_is_harmless_is_shown(variables, shown):
    assert [*_settings.shown(variables).values()] == [shown]


@pytest.mark.parametrize(
    ("variables", "machine", "found"),
    [
        ({}, {}, []),
        ({"OMP_NUM_THREADS": "8"}, {}, []),
        ({"OMP_NUM_THREADS": "9"}, {}, [("many-threads", "slow")]),
        ({"TF_NUM_INTRAOP_THREADS": "64"}, {}, [("many-threads", "slow")]),
        ({"TF_NUM_INTRAOP_THREADS": "64"}, {"cores": 64}, []),
        ({"OMP_NUM_THREADS": "1"}, {}, [("one-thread", "note")]),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}, {}, [("one-thread", "note")]),
        ({"OMP_NUM_THREADS": "1"}, {"cores": 1}, []),
        ({"TF_NUM_INTRAOP_THREADS": "1"}, {}, [("one-thread", "slow")]),
        ({"TF_NUM_INTRAOP_THREADS": "secret"}, {}, []),
        ({}, {"cores_limit": 5.0}, []),
        ({}, {"cores_limit": 2.0}, [("container-share", "slow")]),
        (
            {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"},
            {"cores_limit": 2.0},
            [],
        ),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, {}, []),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            {},
            [("device-threads", "refused")],
        ),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "16"},
            {},
            [],
        ),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PJRT_NPROC": "2"},
            {},
            [("device-threads", "refused")],
        ),
    ],
)
def test_threads_that_fight_each_other_or_the_cores_are_found(variables, machine, found):
    findings = _settings.findings(variables, dataclasses.replace(MACHINE, **machine))
    assert [(finding.rule, finding.level) for finding in findings] == found


@pytest.mark.parametrize(
    ("variables", "machine", "found"),
    [
        ({"TF_GPU_THREAD_MODE": "gpu_private"}, WITH_A_GPU, []),
        ({"TF_GPU_THREAD_MODE": "gpu_private"}, MACHINE, ["note"]),
        ({"TF_GPU_THREAD_MODE": "private"}, WITH_A_GPU, ["refused"]),
        ({"TF_GPU_THREAD_COUNT": "2"}, WITH_A_GPU, ["note"]),
        ({"TF_GPU_THREAD_COUNT": "2", "TF_GPU_THREAD_MODE": "gpu_shared"}, WITH_A_GPU, []),
    ],
)
def test_threads_of_gpus_have_a_mode_that_tensorflow_knows(variables, machine, found):
    findings = [*_settings.findings(variables, machine)]
    assert [finding.level for finding in findings] == found
    assert all(finding.rule == "thread-mode" for finding in findings)


# Strategies.


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("tensorflow", "jax", "replicas"),
    [
        ({"CPU": 1}, {"CPU": 1}, (1, 1, 1)),
        ({"CPU": 1, "GPU": 4}, {"GPU": 4}, (1, 4, 4)),
        (None, None, (1, None, None)),
    ],
)
def test_replicas_are_the_devices_that_the_frameworks_found(tensorflow, jax, replicas):
    found = _usable.strategies(
        dataclasses.replace(TENSORFLOW, devices=tensorflow),
        dataclasses.replace(JAX, devices=jax),
        tpu_chips=0,
    )
    of = {usable.strategy: usable for usable in found}
    assert tuple(of[name].replicas for name in ("one", "mirrored", "mesh")) == replicas
    can = {"one": True, "mirrored": True, "multi_worker": False, "parameter_server": False}
    assert {name: usable.usable for name, usable in of.items()} == can | {
        "tpu": False,
        "mesh": True,
    }


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("jobs", "task", "usable"),
    [
        ({"worker": ["alpha:1", "beta:1"]}, "worker", ["multi_worker"]),
        (
            {"chief": ["alpha:1"], "worker": ["beta:1"], "ps": ["gamma:1"]},
            "chief",
            ["parameter_server"],
        ),
        ({"worker": ["beta:1"], "ps": ["gamma:1"]}, "worker", []),
        ({"worker": ["alpha:port", "beta:1"]}, "worker", []),
    ],
)
def test_a_cluster_is_usable_where_the_environment_describes_it_and_its_hosts_are_not_told(
    monkeypatch, jobs, task, usable
):
    config = {"cluster": jobs, "task": {"type": task, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    found = _usable.strategies(TENSORFLOW, JAX, tpu_chips=0)
    cluster = [one for one in found if one.strategy in ("multi_worker", "parameter_server")]
    assert [one.strategy for one in cluster if one.usable] == usable
    said = " ".join(one.detail for one in cluster)
    assert not any(host in said for host in ("alpha", "beta", "gamma"))


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("devices", "chips", "usable"),
    [({"CPU": 1}, 4, False), ({"CPU": 1, "TPU_SYSTEM": 1}, 4, True), ({"CPU": 1}, 0, False)],
)
def test_a_tpu_needs_chips_and_a_tensorflow_that_drives_them(devices, chips, usable):
    tensorflow = dataclasses.replace(TENSORFLOW, devices=devices)
    found = _usable.strategies(tensorflow, JAX, tpu_chips=chips)
    (tpu,) = [one for one in found if one.strategy == "tpu"]
    assert tpu.usable == usable
    assert usable or "TPU" in tpu.detail


def test_without_a_framework_nothing_of_it_is_usable_and_the_way_to_it_is_told():
    found = _usable.strategies(_usable.Framework("tensorflow", None), JAX, tpu_chips=0)
    assert [one.strategy for one in found if one.usable] == ["mesh"]
    sentence = 'TensorFlow is not installed. Run `python -m pip install "tensorflow>=2.19.0"`.'
    assert {one.detail for one in found if one.framework == "tensorflow"} == {sentence}


# Frameworks that do not start, as real processes.


@pytest.fixture
def frameworks(tmp_path, monkeypatch):
    """Give a function that puts other packages in the place of TensorFlow and JAX."""

    def put(**programs):
        for name, program in programs.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))

    return put


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_framework_that_raises_ends_or_never_answers_is_a_finding(frameworks, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "pl4nted-s3cret")
    home = pathlib.Path.home()
    frameworks(
        tensorflow=f"raise ImportError('no {home}/lib/libx.so of pl4nted-s3cret')",
        jax="import time; time.sleep(600)",
    )
    found = diagnostics.environment(timeout_seconds=20)
    problems = {f.where: f.problem for f in found.findings if f.rule == "does-not-start"}
    assert problems["tensorflow"].endswith("does not start: ImportError: no libx.so of ...")
    assert problems["jax"].endswith("does not start: it did not answer within 20 s.")
    assert not any(usable.usable for usable in found.strategies)
    assert not found.clean


@pytest.mark.timeout(240)
def test_a_framework_that_ends_its_process_is_a_finding(frameworks):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    frameworks(tensorflow=program, jax="raise SystemExit('no home')")
    found = diagnostics.environment(timeout_seconds=200)
    problems = {f.where: f.problem for f in found.findings if f.rule == "does-not-start"}
    assert "ended with exit code 137" in problems["tensorflow"]
    assert "ended with exit code 1 (no home)" in problems["jax"]


# The whole.


def test_directories_names_and_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "t0ken-of-mine")
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/users/ann b"))
    text = "/opt/a/lib.so: t0ken-of-mine, C:\\Users\\ann\\x.dll, ~/ann/y and /users/ann b/z or/not"
    assert _private.without(text) == "lib.so: ..., x.dll, y and z or/not"
    assert _private.without("grpc://HOST:8470, 1/R, `python -m x`") == (
        "grpc://HOST:8470, 1/R, `python -m x`"
    )


def test_the_report_reads_in_80_columns_and_is_plain_json(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1000000")
    found = diagnostics.environment(start_frameworks=False)
    text = str(dataclasses.replace(found, machine=WITH_A_GPU))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search("^  OMP_NUM_THREADS +1000000$", text, re.MULTILINE)
    assert "a GPU, 80.0 GiB, compute capability 9.0" in text
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["clean"] is False
    assert plain["findings"][0]["rule"] == "many-threads"
    assert plain["machine"]["cores"] == found.machine.cores
    assert plain["extras"]["jax"] == {"missing": [], "command": None}


def test_a_limit_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`timeout_seconds` must be above 0"):
        diagnostics.environment(timeout_seconds=0)
