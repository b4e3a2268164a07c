"""The files for clusters, run without one: shell scripts stand in for `srun` and `mpirun`."""

import os
import pathlib
import re
import sys

import pytest
import yaml

from kdpkit.cluster import ClusterConfig
from tests.processes import ROOT, run

CLUSTER = ROOT / "recipes" / "cluster"

# Two tasks on this machine, with the variables that SLURM sets; the highest exit code is srun's.
START = """#!/bin/bash
until [[ $1 == python ]]; do shift; done
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost \
  SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 "$@" & started[$task]=$!
done
highest=0
for task in 0 1; do
  wait ${started[$task]}; code=$?
  (( code > highest )) && highest=$code
done
exit $highest
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*"
"""


def started(directory, script, *command):
    commands = directory / "bin"
    commands.mkdir()
    for name, text in (("srun", START), ("mpirun", START), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    variables = {
        "PATH": f"{commands}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": os.getpid(),
        "STATE_DIRECTORY": directory / "state",
    }
    return run("bash", CLUSTER / script, *command, cwd=ROOT, check=False, **variables)


def leaving(*codes):
    """A program that leaves with one code after the other, and prints what it was given."""
    return (
        "import os, pathlib, sys; task = os.environ['SLURM_PROCID'];"
        "assert sys.argv[1] == '--resume';"
        "tries = pathlib.Path(f'{sys.argv[2]}-{task}'); "
        "tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x');"
        f"sys.exit({list(codes)}[len(tries.read_text()) - 1])"
    )


@pytest.mark.parametrize(
    ("script", "codes", "code", "printed"),
    [
        ("slurm.sh", [1, 43, 0], 0, "Attempt 2 of 3 ended with exit code 43."),
        ("slurm.sh", [1, 42], 42, "scontrol requeue"),
        ("mpi.sh", [137, 43, 0], 0, "Attempt 2 of 3 ended with exit code 43."),
        ("mpi.sh", [1, 1, 7, 0], 7, "Attempt 3 of 3 ended with exit code 7."),
    ],
)
def test_a_script_tries_again_what_may_work_again(tmp_path, script, codes, code, printed):
    hosts = ["-n", "2", "--host", "gpu1,gpu2"] if script == "mpi.sh" else []
    ended = started(tmp_path, script, *hosts, "python", "-c", leaving(*codes))
    assert ended.returncode == code, ended.stderr
    assert printed in ended.stdout + ended.stderr
    for task in (0, 1):
        assert len((tmp_path / f"state-{task}").read_text()) == min(len(codes), 3)


@pytest.mark.parametrize("program", ["ray_jax.py", "ray_tensorflow.py"])
def test_the_programs_for_ray_explain_their_flags_before_they_import_it(program):
    assert "--workers" in run(sys.executable, CLUSTER / program, "--help").stdout


def manifests():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    return service, job


def test_the_pods_of_the_manifest_find_each_other():
    service, job = manifests()
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    pods = job["spec"]["completions"]
    hosts = [f"{job['metadata']['name']}-{i}.{pod['subdomain']}" for i in range(pods)]
    port = trainer["ports"][0]["containerPort"]
    for index in range(pods):
        config = ClusterConfig.from_environment(environment_of(trainer, index))
        assert config.workers == tuple(f"{host}:{port}" for host in hosts)
        assert (config.process_index, config.process_count) == (index, pods)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["parallelism"] == pods


def environment_of(container, index):
    """Return a container's variables as Kubernetes fills them in."""
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    found = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == annotation
        found[variable["name"]] = variable.get("value", str(index))
    return found


@pytest.mark.tensorflow
@pytest.mark.parametrize("manifest", ["kubernetes.yaml", "trainjob.yaml"])
def test_the_manifests_run_a_recipe_with_flags_that_it_has(manifest, tmp_path):
    (words,) = re.findall(r"command: \[(.*)\]", (CLUSTER / manifest).read_text())
    from recipes import multi_worker

    python, recipe, *flags = words.split(", ")
    assert (python, recipe) == ("python", "recipes/multi_worker.py")
    multi_worker.parser.parse_args([flag.replace("/state", str(tmp_path)) for flag in flags])
