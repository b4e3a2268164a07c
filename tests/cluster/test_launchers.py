"""Recorded environments of launchers and schedulers: who takes part, and what is missing."""

import json

import pytest

from kdpkit import cluster
from kdpkit.cluster import ClusterConfig
from kdpkit.cluster._launchers import ADDRESSES, COUNT, INDEX, _port_of

read = ClusterConfig.from_environment


def tf_config(cluster=None, task=None, **more):
    cluster = {"worker": ["a:1", "b:1"]} if cluster is None else cluster
    task = task or {"type": "worker", "index": 1}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task} | more)}


KERAS = {ADDRESSES: "10.0.0.1:1234,10.0.0.2:2345", COUNT: "2", INDEX: "1"}
SLURM = {  # as recorded in a task that `srun` started
    "SLURM_JOB_ID": "4712",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}
BATCH_SCRIPT = {name: value for name, value in SLURM.items() if "STEP" not in name}
# What Open MPI 4.1.4 sets for the second of two processes.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "745472000.0;tcp://192.0.2.2:47295;tcp6://[fd00::2]:42369",
    "PMIX_NAMESPACE": "745472001",
}
OF_TWO_MACHINES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
TORCHRUN = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
# What MPICH 5.0.2 sets for the second of two processes; Intel MPI 2021.19 also sets an identifier.
PMI = {"PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2"}
MPICH = PMI | {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
MPICH_OF_TWO = MPICH | {"MPI_LOCALNRANKS": "1"}
INTEL = MPICH | {"I_MPI_HYDRA_UUID": "221c0000-5082-3e0f-5b61-0600b8442533"}
PALS = PMI | {"PMI_LOCAL_SIZE": "2", "PMI_LOCAL_RANK": "1"}
PREFIXES = {"MVAPICH": "MV2_COMM_WORLD", "jsrun": "JSM_NAMESPACE", "horovodrun": "HOROVOD"}
OTHERS = {
    name: {f"{prefix}_LOCAL_SIZE": "2", f"{prefix}_RANK": "1", f"{prefix}_SIZE": "2"}
    for name, prefix in PREFIXES.items()
}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
P, Q, R = _port_of("4712"), _port_of("745472000"), _port_of("745472001")
S, T = _port_of(""), _port_of(INTEL["I_MPI_HYDRA_UUID"])


@pytest.mark.parametrize(
    ("environ", "addresses", "address"),
    [
        (tf_config(task={"type": "worker", "index": "1"}), "a:1 b:1", "b:1"),  # of Kubeflow
        (KERAS, "10.0.0.1:1234 10.0.0.2:2345", "10.0.0.2:2345"),
        (JAX, "node0:1234", None),
        (TORCHRUN, "node0:29501", None),
        (OPEN_MPI, f"localhost:{R} localhost:{R + 1}", f"localhost:{R + 1}"),
        (OF_TWO_MACHINES, f"192.0.2.2:{Q}", None),
        (
            OF_TWO_MACHINES | {"OMPI_MCA_orte_hnp_uri": "745472000.0;tcp6://[fd00::2]:4"},
            f"[fd00::2]:{Q}",
            None,
        ),
        (MPICH, f"localhost:{S} localhost:{S + 1}", f"localhost:{S + 1}"),
        (INTEL, f"localhost:{T} localhost:{T + 1}", f"localhost:{T + 1}"),
        (PALS, f"localhost:{S} localhost:{S + 1}", f"localhost:{S + 1}"),
        *(
            (each, f"localhost:{S} localhost:{S + 1}", f"localhost:{S + 1}")
            for each in OTHERS.values()
        ),
        # Hydra starts one task of `srun` on each machine, and numbers the processes itself.
        (MPICH_OF_TWO | SLURM | {"SLURM_PROCID": "0"}, f"n1:{P}", None),
        (SLURM | PMI, f"n1:{P}", None),  # of `srun --mpi=pmi2`
        (PMI | {"PMI_RANK": "0", "PMI_SIZE": "1"}, f"localhost:{S}", f"localhost:{S}"),
        (tf_config({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}), "a:1 b:1", "b:1"),
        (SLURM, f"n1:{P}", None),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b[1-2]"}, f"a:{P}", None),
        (SLURM | {"SLURM_STEP_NODELIST": "n[01-10,12],a"}, f"n01:{P}", None),
        (SLURM | {"SLURM_STEP_NODELIST": "r[2-3]n[8,9]"}, f"r2n8:{P}", None),
    ],
)
def test_clusters_as_recorded(environ, addresses, address):
    config = read(environ)
    assert [known for _, _, known in config.tasks] == addresses.split()
    assert config.address == address
    if address is None:
        assert (config.process_count, config.process_index) == (2, 1)


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        (SLURM, {"SLURM_JOB_ID": "4713"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "745472002"}),
        (INTEL, {"I_MPI_HYDRA_UUID": "281c0000-3ae7-3e0f-5b61-06000a067a64"}),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, {"MASTER_PORT": "29501"}),
    ],
)
def test_jobs_have_ports_apart(environ, other):
    one, two = (
        {int(address.rpartition(":")[2]) for address in read(each).workers}
        for each in (environ, environ | other)
    )
    assert not one & two
    assert all(1024 < port < 32768 for port in one | two)


# Which of several counts, and what is wrong.


def test_what_was_set_for_the_program_goes_before_launchers_and_these_before_schedulers():
    everything = SLURM | OPEN_MPI | JAX | KERAS | tf_config()  # `srun` numbers tasks for MPI too
    everything |= MPICH | PALS
    order = ("TF_CONFIG", "KERAS_DISTRIBUTION", "JAX", "Open MPI", "MPICH or Intel MPI", "SLURM")
    for name in (*order, "PMI (PALS, Flux)"):
        assert cluster.source(everything) == name
        marks = {"Open MPI": "OMPI_", "MPICH or Intel MPI": "MPI_"}.get(name, name)
        everything = {key: value for key, value in everything.items() if not key.startswith(marks)}
    assert cluster.source({"RANK": "0", "WORLD_SIZE": "2"}) is None  # anybody's names
    assert cluster.source(BATCH_SCRIPT) is None  # which is one process


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TF_CONFIG": "{}"}, "No cluster is described.*kdpkit launch"),
        (BATCH_SCRIPT, "No cluster is described.*start the processes with `srun`"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid JSON"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, 'must have.*and a "task"'),
        (tf_config({"boss": ["a:1"]}), "the roles chief, worker, ps.*'boss'"),
        (tf_config(task={"type": "evaluator", "index": 0}), "`role` must be one of.*'evaluator'"),
        (tf_config({"chief": ["a:1", "b:1"]}), "may have at most one chief"),
        (KERAS | {COUNT: "3"}, "an address for every process.*=3"),
        ({COUNT: "2", INDEX: "0"}, f"{ADDRESSES} must be set too.*TPU"),
        (KERAS | {COUNT: "two"}, f"`{COUNT}` must be a non-negative integer.*'two'"),
        (TORCHRUN | {"MASTER_PORT": ""}, "the first.*torchrun.*WORLD_SIZE=2.*JAX_COORDINATOR"),
        (MPICH_OF_TWO, "the first.*MPICH or Intel MPI.*PMI_SIZE=2.*JAX_COORDINATOR_ADDRESS=HOST"),
        (PMI, "the first.*Flux.*PMI_SIZE=2.*JAX_COORDINATOR"),
        (SLURM | {"SLURM_PROCID": "2"}, "one of the cluster's.*index=2, of_this_role=2"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM's list of nodes must look like"),
    ],
)
def test_what_is_wrong_is_reported(environ, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ)
