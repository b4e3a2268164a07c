"""Recorded environments of launchers and schedulers: who takes part, and what is missing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import cluster
from kdpkit.cluster import ClusterConfig
from kdpkit.cluster._launchers import ADDRESSES, COUNT, INDEX, _nodes


def read(environ, **settings):
    return ClusterConfig.from_environment(environ, **settings)


def tf_config(cluster=None, task=None, **more):
    cluster = {"worker": ["a:1", "b:1"]} if cluster is None else cluster
    task = task or {"type": "worker", "index": 1}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task} | more)}


KERAS = {ADDRESSES: "10.0.0.1:1234,10.0.0.2:2345", COUNT: "2", INDEX: "1"}
SLURM = {  # as recorded in a task that `srun` started
    "SLURM_JOB_ID": "4712",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
SLURM_PART = SLURM | {  # a step on a part of the job, one task a node
    "SLURM_STEP_NODELIST": "gpu[02-03],login1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}
SLURM_CYCLIC = SLURM | {"SLURM_DISTRIBUTION": "cyclic:block", "SLURM_PROCID": "5"}
SLURM_JOB = {name: value for name, value in SLURM.items() if "STEP" not in name}
INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "train-bert-2",
    "JOB_COMPLETION_INDEX": "2",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "bert-workers-1-0",
    "JOBSET_NAME": "bert",
    "REPLICATED_JOB_NAME": "workers",
    "REPLICATED_JOB_REPLICAS": "2",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "0",
}
ONE_JOB = {name: value for name, value in JOBSET.items() if "REPLICAS" not in name}
ONE_JOB |= {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "1"}
# What Open MPI 4.1.4 and MPICH 4.0.2 set for the second of two processes.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "745472000.0;tcp://192.0.2.2:47295;tcp6://[fd00::2]:42369",
    "PMIX_NAMESPACE": "745472001",
}
OF_TWO_MACHINES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"MPI_LOCALNRANKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "job-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "2",
    "PROCESS_ID": "1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}
POOLS = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {"cluster": POOLS, "task": {"type": "workerpool1", "index": 1, "trial": "none"}}
    )
}


@pytest.mark.parametrize(
    ("environ", "settings", "addresses", "address"),
    [
        (tf_config(environment="cloud"), {}, "a:1 b:1", "b:1"),
        (tf_config(task={"type": "worker", "index": "1"}), {}, "a:1 b:1", "b:1"),  # of Kubeflow
        (
            tf_config({"master": ["a:1"], "worker": ["b:1"]}, {"type": "master", "index": 0}),
            {},
            "a:1 b:1",
            "a:1",
        ),
        (KERAS, {}, "10.0.0.1:1234 10.0.0.2:2345", "10.0.0.2:2345"),
        (JAX, {}, "node0:1234", None),
        (JAX_JOB, {}, "job-worker-0:6666", None),
        (TORCHRUN, {}, "node0:29501", None),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "2"},
            {"base_port": 9},
            "localhost:9 localhost:10",
            "localhost:10",
        ),
        (OPEN_MPI, {"base_port": 9}, "localhost:9 localhost:10", "localhost:10"),
        (OF_TWO_MACHINES, {"base_port": 9}, "192.0.2.2:9", None),
        (
            OF_TWO_MACHINES | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:4"},
            {"base_port": 9},
            "[fd00::2]:9",
            None,
        ),
        (MPICH, {"base_port": 9}, "localhost:9 localhost:10", "localhost:10"),
        (VERTEX, {}, "a:1 b:1 c:1", "c:1"),
        (SAGEMAKER, {"base_port": 7}, "algo-1:7 algo-2:7", "algo-2:7"),
        (SLURM, {"base_port": 1}, "n1:1 n1:2 n2:1 n2:2 n3:1 n3:2 n4:1", "n2:2"),
        (SLURM_JOB, {"base_port": 1}, "n1:1 n1:2 n2:1 n2:2 n3:1 n3:2 n4:1", "n2:2"),
        (SLURM_PART, {"base_port": 1}, "gpu02:1 gpu03:1 login1:1", "login1:1"),
        (SLURM_CYCLIC, {"base_port": 1}, "n1:1 n2:1 n3:1 n4:1 n1:2 n2:2 n3:2", "n2:2"),
        (
            INDEXED_JOB,
            {"processes": 3, "service": "net"},
            "train-bert-0.net:9876 train-bert-1.net:9876 train-bert-2.net:9876",
            "train-bert-2.net:9876",
        ),
        (
            JOBSET,
            {"processes": 4, "base_port": 8},
            "bert-workers-0-0.bert:8 bert-workers-0-1.bert:8 "
            "bert-workers-1-0.bert:8 bert-workers-1-1.bert:8",
            "bert-workers-1-0.bert:8",
        ),
        (
            ONE_JOB,
            {"processes": 2, "service": "net"},
            "bert-workers-0-0.net:9876 bert-workers-0-1.net:9876",
            "bert-workers-0-1.net:9876",
        ),
    ],
)
def test_clusters_as_recorded(environ, settings, addresses, address):
    config = read(environ, **settings)
    assert [known for _, _, known in config.tasks] == addresses.split()
    assert config.address == address
    if address is None:
        assert (config.process_count, config.process_index, config.is_chief) == (2, 1, False)
        with pytest.raises(ValueError, match="all addresses are needed"):
            read(environ, **settings, parameter_servers=1)


def test_jobs_have_ports_apart():
    pairs = [
        (SLURM, {"SLURM_JOB_ID": "4713"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "745472002"}),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, {"MASTER_PORT": "29501"}),
        (SAGEMAKER, {"TRAINING_JOB_NAME": "another"}),
    ]
    for environ, other in pairs:
        one, two = (
            {int(a.rpartition(":")[2]) for a in read(e).workers} for e in (environ, environ | other)
        )
        assert not one & two
        assert all(1024 < port < 32768 for port in one | two)


def test_the_last_processes_are_parameter_servers():
    tasks = [
        {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i // 2), "SLURM_LOCALID": str(i % 2)}
        for i in range(7)
    ]
    configs = [read(SLURM | task, base_port=8888, parameter_servers=2) for task in tasks]
    roles = [("chief", 0), *(("worker", i) for i in range(4)), ("ps", 0), ("ps", 1)]
    assert [(config.role, config.index) for config in configs] == roles
    assert configs[0].parameter_servers == ("n3:8889", "n4:8888")
    assert configs[0].chief == "n1:8888"


# SLURM's notations.


@given(st.lists(st.integers(0, 120), min_size=1, max_size=9, unique=True), st.integers(1, 4))
def test_node_ranges_are_what_they_were_folded_from(numbers, width):
    names = [f"n{number:0{width}d}" for number in numbers]
    assert _nodes("n[" + ",".join(name[1:] for name in names) + "]") == names


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("a[1,3],b-2.site,c[5-6]-ib", ["a1", "a3", "b-2.site", "c5-ib", "c6-ib"]),
    ],
)
def test_node_lists_are_expanded(text, nodes):
    assert _nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[]", "n[a-b]", "n[1-2-3]", "a,,b", ",a"])
def test_damaged_node_lists_raise(text):
    with pytest.raises(ValueError, match="SLURM's list of nodes must look like"):
        _nodes(text)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(["block", "cyclic"]))
def test_slurm_tasks_all_see_one_cluster(per_node, way):
    tasks = sum(per_node)
    shared = {
        "SLURM_STEP_NODELIST": f"n[1-{len(per_node)}]",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, per_node)),
        "SLURM_DISTRIBUTION": way,
    }
    seen = [read(shared | {"SLURM_PROCID": str(index)}) for index in range(tasks)]
    assert len({config.tasks for config in seen}) == 1
    assert [config.address for config in seen] == list(seen[0].workers)
    on_nodes = [address.partition(":")[0] for address in seen[0].workers]
    assert [on_nodes.count(f"n{i + 1}") for i in range(len(per_node))] == per_node


# Which of several counts.


def test_what_was_set_for_the_program_goes_before_launchers_and_these_before_schedulers():
    # `srun` numbers its tasks for MPI too.
    everything = {"PMI_RANK": "0", "PMI_SIZE": "7"} | INDEXED_JOB | SLURM | OPEN_MPI | JAX
    everything |= KERAS | tf_config()
    for name in ("TF_CONFIG", "KERAS_DISTRIBUTION", "JAX", "Open MPI", "SLURM", "Kubernetes"):
        assert cluster.source(everything) == name
        marks = {"Open MPI": "OMPI_", "SLURM": "SLURM_"}.get(name, name)
        everything = {key: value for key, value in everything.items() if not key.startswith(marks)}
    assert cluster.source({"RANK": "0", "WORLD_SIZE": "2"}) is None  # anybody's names
    assert cluster.source({"PROCESS_ID": "0", "NUM_PROCESSES": "2"}) is None


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config()["TF_CONFIG"])
    assert ClusterConfig.from_environment().index == 1
    assert cluster.source() == "TF_CONFIG"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"processes": 3}, "describes another cluster. Received: processes=3, found=2"),
        ({"parameter_servers": 1}, "describes another cluster. Received: parameter_servers=1"),
        ({"processes": 0}, "`processes` must be a positive integer"),
        ({"base_port": "80"}, "`base_port` must be a positive integer"),
    ],
)
def test_arguments_must_agree_with_the_environment(settings, sentence):
    assert read(tf_config(), processes=2, parameter_servers=0) == read(tf_config())
    with pytest.raises(ValueError, match=sentence):
        read(tf_config(), **settings)


# What is wrong.

NO_CLUSTER = "No cluster is described.*"
CHIEFS = "may have at most one chief"
OF_TWO = "one of the cluster's.*index=2"


@pytest.mark.parametrize(
    ("environ", "settings", "sentence"),
    [
        ({}, {}, NO_CLUSTER + "kdpkit launch"),
        ({"TF_CONFIG": "{}"}, {}, NO_CLUSTER + "kdpkit launch"),
        ({"SLURM_JOB_ID": "1"}, {}, NO_CLUSTER + "start the processes with `srun`"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, NO_CLUSTER + "completionMode: Indexed"),
        ({"TF_CONFIG": "{"}, {}, "TF_CONFIG is not valid JSON"),
        ({"TF_CONFIG": "[]"}, {}, "TF_CONFIG must be a JSON dict"),
        ({"TF_CONFIG": '{"cluster": []}'}, {}, 'TF_CONFIG must have a "cluster"'),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, {}, 'must have.*and a "task"'),
        (tf_config({"boss": ["a:1"]}), {}, "roles; there are chief, worker.*'boss'"),
        (tf_config({"chief": ["a:1"], "master": ["b:1"]}), {}, CHIEFS),
        (tf_config({"chief": ["a:1", "b:1"]}), {}, CHIEFS),
        (tf_config({"worker": "a:1"}), {}, "`worker` must be a list of strings"),
        (tf_config({"worker": ["a:1"]}), {}, "one of the cluster's.*index=1, of_this_role=1"),
        (tf_config(task={"type": "worker", "index": -1}), {}, "must be a non-negative integer"),
        (tf_config(task={"type": "boss", "index": 0}), {}, "`role` must be one of"),
        (tf_config({"ps": ["a:1"]}), {}, "A cluster needs a worker"),
        (KERAS | {COUNT: "3"}, {}, "an address for every process.*=3"),
        (KERAS | {INDEX: ""}, {}, f"{INDEX} must be set too"),
        ({COUNT: "2", INDEX: "0"}, {}, f"{ADDRESSES} must be set too.*TPU"),
        (KERAS | {INDEX: "2"}, {}, OF_TWO),
        (KERAS | {COUNT: "two"}, {}, f"`{COUNT}` must be a non-negative integer.*'two'"),
        (tf_config() | KERAS | {INDEX: "0"}, {}, "process 1 of 2, and Keras' variables another"),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, {}, "the first.*MPICH.*PMI_SIZE=2.*JAX_COORDINATOR"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, {}, "OMPI_COMM_WORLD_RANK.*integer.*'x'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, {}, OF_TWO),
        (TORCHRUN | {"MASTER_PORT": ""}, {}, "address of the first.*torchrun"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node0"}, {}, "must be the address and port"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, {}, "SM_HOSTS is not valid JSON"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, {}, "`SM_CURRENT_HOST` must be.*'algo-3'"),
        ({"CLUSTER_SPEC": '{"task": {}}'}, {}, 'CLUSTER_SPEC must have a "cluster"'),
        (SLURM | {"SLURM_PROCID": "x"}, {}, "`SLURM_PROCID` must be a non-negative integer"),
        (SLURM | {"SLURM_PROCID": "7"}, {}, "one of the cluster's.*index=7, of_this_role=7"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-3]"}, {}, "for as many nodes and tasks.*nodes=3"),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n1,n2,n3"}, {}, "A node appears twice"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, {}, r"look like '2\(x3\),1'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, {}, "for as many.*tasks=7"),
        (SLURM | {"SLURM_LOCALID": "0"}, {}, "Task 3 is not where its.*SLURM_LOCALID='0'"),
        (SLURM | {"SLURM_NODEID": "2"}, {}, "Task 3 is not where its.*SLURM_NODEID='2'"),
        (SLURM | {"SLURM_DISTRIBUTION": "plane=2"}, {}, "by block or cyclic.*'plane=2'"),
        (
            {k: v for k, v in SLURM.items() if not k.endswith("NODELIST")},
            {},
            "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST must be set too",
        ),
        (SLURM_JOB | {"ENVIRONMENT": "BATCH"}, {}, "the batch script itself.*with `srun`"),
        (INDEXED_JOB, {}, "cannot see how many.*Pass `processes`"),
        (INDEXED_JOB, {"processes": 3}, "through a headless service.*`subdomain`"),
        (INDEXED_JOB, {"processes": 2, "service": "s"}, OF_TWO),
        (INDEXED_JOB | {"HOSTNAME": "laptop"}, {"processes": 3, "service": "s"}, "ends with its"),
        (JOBSET, {"processes": 3}, "spread evenly over its Jobs.*processes=3"),
        (JOBSET | {"JOB_INDEX": "2"}, {"processes": 4}, "spread evenly over its Jobs"),
        (JOBSET | {"JOB_INDEX": ""}, {"processes": 4}, "JOB_INDEX must be set too.*label"),
        (ONE_JOB | {"JOB_INDEX": "1"}, {"processes": 4}, "REPLICATED_JOB_REPLICAS must be set"),
    ],
)
def test_what_is_wrong_is_reported(environ, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ, **settings)
