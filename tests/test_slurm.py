"""The batch script under SLURM: real daemons, two nodes, a requeue and a killed task."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kdpkit.checkpoints import CheckpointDirectory, Position
from tests.processes import ROOT

NAMESPACES = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")

# Two jobs at once: one runs undisturbed, the other goes back into the queue and later loses a task.
JOBS = """
submit() {
  STATE_DIRECTORY=$PWD/$1 sbatch --parsable --chdir="$ROOT" --output="$PWD/$1.log" \
    --gpus-per-node=0 --cpus-per-task=1 "$ROOT/recipes/cluster/slurm.sh" \
    python recipes/$RECIPE --smoke --epochs 5
}
trained() {
  until ls disturbed/state-00000$1* > /dev/null 2>&1; do
    [ -n "$(squeue --noheader --jobs $job)" ] || exit 1
    sleep 0.1
  done
}
submit undisturbed > /dev/null
job=$(submit disturbed)
trained 1
scontrol requeue $job
until scontrol update job=$job StartTime=now; do sleep 0.2; done  # SLURM would wait two minutes
trained 3
kill -KILL $(scontrol listpids $job n2 | awk '$5 == 1 {print $1}')
until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done
"""


def unavailable():
    """Return why there can be no cluster here, if so."""
    missing = [command for command in COMMANDS if not shutil.which(command)]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    possible = os.geteuid() == 0 and not subprocess.call([*NAMESPACES, "true"])
    return "" if possible else "only root may create network namespaces"


@pytest.mark.exhaustive  # in minutes, and on a busy machine the task is killed too late
@pytest.mark.tensorflow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("mark")
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("cnn_jax.py", "jax"),
        ("multi_worker.py", "tensorflow"),
    ],
)
def test_a_requeued_job_that_loses_a_task_trains_what_an_undisturbed_one_does(
    recipe, backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("RECIPE", recipe)
    monkeypatch.setenv("ROOT", str(ROOT))
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "daemons").mkdir()
    cluster = [*NAMESPACES, "--mount-proc", ROOT / "tests/slurm_cluster.sh", tmp_path / "daemons"]
    subprocess.run([*cluster, "bash", "-c", JOBS], cwd=tmp_path, timeout=800, check=True)

    log = (tmp_path / "disturbed.log").read_text()
    assert "DUE TO JOB REQUEUE" in log
    assert "Training was stopped by SIGTERM." in log
    assert "Attempt 1 of 3 ended with exit code" in log
    found, expected = (
        CheckpointDirectory(tmp_path / name).latest() for name in ("disturbed", "undisturbed")
    )
    assert found.position == expected.position == Position(5, 0)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, values in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], values, err_msg=name)
