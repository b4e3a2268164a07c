"""Who takes part: recorded environments of schedulers, and what is written and read back."""

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdpkit import cluster
from kdpkit._internal import cluster_sources
from kdpkit.cluster import ClusterConfig

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
INDEX = "KERAS_DISTRIBUTION_PROCESS_ID"


def read(environ, **settings):
    return ClusterConfig.from_environment(environ, **settings)


# Laws.


@st.composite
def configs(draw):
    """Any cluster, seen by any of its processes."""
    hosts = st.sampled_from(["a", "gpu01", "10.0.0.7", "node-3.cluster", "[::1]"])
    address = st.builds("{}:{}".format, hosts, st.integers(1, 65535))
    addresses = draw(st.lists(address, min_size=1, max_size=7, unique=True))
    servers = draw(st.integers(0, len(addresses) - 1))
    workers, parameter_servers = addresses[servers:], addresses[:servers]
    chief = workers.pop() if len(workers) > 1 and draw(st.booleans()) else None
    config = ClusterConfig(workers, chief=chief, parameter_servers=parameter_servers)
    role, index, _ = draw(st.sampled_from([*config.tasks, ("evaluator", 0, None)]))
    return config.for_task(role, index)


@given(configs())
def test_what_is_written_is_read_back(config):
    assert read({"TF_CONFIG": config.to_tf_config()}) == config
    assert read(config.to_environment()) == config


@given(configs())
def test_keras_sees_the_same_processes(config):
    variables = config.to_environment()
    variables.pop("TF_CONFIG")
    if config.parameter_servers or config.role == "evaluator":
        assert variables == {}
        return
    keras = read(variables)
    assert keras.coordinator == config.coordinator
    assert keras.process_count == config.process_count
    assert keras.process_index == config.process_index
    assert keras.is_chief == config.is_chief
    assert keras.to_environment()[ADDRESSES] == variables[ADDRESSES]


@given(configs())
def test_every_process_is_numbered_once_and_one_is_the_chief(config):
    training = [config.for_task(r, i) for r, i, _ in config.tasks if r in ("chief", "worker")]
    assert sorted(c.process_index for c in training) == list(range(config.process_count))
    assert [c.address for c in training if c.is_chief] == [config.coordinator]


@given(st.lists(st.integers(0, 120), min_size=1, max_size=9, unique=True), st.integers(1, 4))
def test_node_ranges_are_what_they_were_folded_from(numbers, width):
    names = [f"n{number:0{width}d}" for number in numbers]
    folded = "n[" + ",".join(name[1:] for name in names) + "]"
    assert cluster_sources._nodes(folded) == names


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_slurm_tasks_all_see_one_cluster(per_node, data):
    tasks = sum(per_node)
    way = data.draw(st.sampled_from(["block", "cyclic"]))
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


# SLURM, as recorded in tasks that `srun` started.

ONE_A_NODE = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[01-03,07],login1",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "1(x5)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-03,07],login1",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
}
SEVERAL_A_NODE = {
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


@pytest.mark.parametrize(
    ("environ", "change", "workers", "address"),
    [
        (ONE_A_NODE, {}, "gpu01:1 gpu02:1 gpu03:1 gpu07:1 login1:1", "gpu07:1"),
        (
            ONE_A_NODE,  # a step on a part of the job
            {
                "SLURM_STEP_NODELIST": "gpu[02-03]",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_PROCID": "1",
                "SLURM_NODEID": "1",
            },
            "gpu02:1 gpu03:1",
            "gpu03:1",
        ),
        (SEVERAL_A_NODE, {}, "n1:1 n1:2 n2:1 n2:2 n3:1 n3:2 n4:1", "n2:2"),
        (
            SEVERAL_A_NODE,
            {"SLURM_DISTRIBUTION": "cyclic:block", "SLURM_PROCID": "5"},
            "n1:1 n2:1 n3:1 n4:1 n1:2 n2:2 n3:2",
            "n2:2",
        ),
    ],
)
def test_slurm_as_recorded(environ, change, workers, address):
    config = read(environ | change, base_port=1)
    assert (config.workers, config.address) == (tuple(workers.split()), address)


def test_slurm_with_parameter_servers():
    configs = [
        read(SEVERAL_A_NODE | position(i), base_port=8888, parameter_servers=2) for i in range(7)
    ]
    roles = [("chief", 0), *(("worker", i) for i in range(4)), ("ps", 0), ("ps", 1)]
    assert [(config.role, config.index) for config in configs] == roles
    assert configs[0].parameter_servers == ("n3:8889", "n4:8888")
    assert configs[0].chief == "n1:8888"


def position(index):
    return {
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(index // 2),
        "SLURM_LOCALID": str(index % 2),
    }


def test_the_variables_of_the_job_serve_where_the_step_has_none():
    environ = {name: v for name, v in SEVERAL_A_NODE.items() if "STEP" not in name}
    assert read(environ) == read(SEVERAL_A_NODE)


def test_jobs_after_each_other_have_ports_apart():
    ports = [
        {int(address.partition(":")[2]) for address in read(SEVERAL_A_NODE | job).workers}
        for job in ({"SLURM_JOB_ID": "100"}, {"SLURM_JOB_ID": "101"})
    ]
    assert not ports[0] & ports[1]
    assert all(1024 < port < 32768 for port in ports[0] | ports[1])


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("a[1,3],b-2.site,c[5-6]-ib", ["a1", "a3", "b-2.site", "c5-ib", "c6-ib"]),
    ],
)
def test_node_lists_are_expanded(text, nodes):
    assert cluster_sources._nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[]", "n[a-b]", "n[1-2-3]", "a,,b", ",a"])
def test_damaged_node_lists_raise(text):
    with pytest.raises(ValueError, match="SLURM's list of nodes must look like"):
        cluster_sources._nodes(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be an integer of at least 0"),
        ({"SLURM_PROCID": "7"}, "one of the cluster's.*index=7, of_this_role=7"),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, "for as many nodes and tasks.*nodes=3"),
        ({"SLURM_STEP_NODELIST": "n1,n1,n2,n3"}, "A node appears twice"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3"}, r"look like '2\(x3\),1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, "for as many nodes and tasks.*tasks=7"),
        ({"SLURM_LOCALID": "0"}, "Task 3 is not where its number puts it.*SLURM_LOCALID='0'"),
        ({"SLURM_NODEID": "2"}, "Task 3 is not where its number puts it.*SLURM_NODEID='2'"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "by block or cyclic.*'plane=2'"),
    ],
)
def test_what_slurm_cannot_have_set_raises(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(SEVERAL_A_NODE | change)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("NODELIST", "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST must be set too"),
        ("TASKS", "SLURM_STEP_NUM_TASKS or SLURM_NTASKS or SLURM_NPROCS must be set too"),
        ("TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE must be set too"),
    ],
)
def test_missing_variables_of_slurm_are_named(missing, sentence):
    environ = {name: v for name, v in SEVERAL_A_NODE.items() if not name.endswith(missing)}
    with pytest.raises(ValueError, match=sentence):
        read(environ)


def test_a_batch_script_is_not_taken_for_a_task():
    environ = {name: v for name, v in SEVERAL_A_NODE.items() if "STEP" not in name}
    environ |= {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(ValueError, match="the batch script itself.*with `srun`"):
        read(environ | {"ENVIRONMENT": "BATCH"})


# Kubernetes.

INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
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


def test_an_indexed_job_of_kubernetes():
    config = read(INDEXED_JOB, processes=3, service="trainers")
    pods = tuple(f"train-bert-{index}.trainers:9876" for index in range(3))
    assert (config.workers, config.index) == (pods, 2)


def test_an_indexed_job_with_parameter_servers():
    config = read(INDEXED_JOB, processes=4, service="t", parameter_servers=1, base_port=80)
    assert (config.chief, config.parameter_servers) == ("train-bert-0.t:80", ("train-bert-3.t:80",))
    assert (config.role, config.index) == ("worker", 1)


def test_a_jobset_of_several_jobs():
    config = read(JOBSET, processes=4)
    assert config.workers == (
        "bert-workers-0-0.bert:9876",
        "bert-workers-0-1.bert:9876",
        "bert-workers-1-0.bert:9876",
        "bert-workers-1-1.bert:9876",
    )
    assert config.process_index == 2


def test_a_jobset_of_one_job_needs_no_number_of_jobs():
    environ = JOBSET | {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "1"}
    del environ["REPLICATED_JOB_REPLICAS"]
    config = read(environ, processes=2, service="net")
    assert config.address == "bert-workers-0-1.net:9876"


@pytest.mark.parametrize(
    ("environ", "settings", "sentence"),
    [
        (INDEXED_JOB, {}, "cannot see how many.*Pass `processes`"),
        (INDEXED_JOB, {"processes": 3}, "through a headless service.*`subdomain`"),
        (INDEXED_JOB, {"processes": 2, "service": "s"}, "one of the cluster's.*index=2"),
        (INDEXED_JOB | {"HOSTNAME": "laptop"}, {"processes": 3, "service": "s"}, "ends with its"),
        (JOBSET, {"processes": 3}, "spread evenly over its Jobs.*processes=3"),
        (JOBSET | {"JOB_INDEX": "2"}, {"processes": 4}, "spread evenly over its Jobs"),
        (JOBSET | {"JOB_INDEX": ""}, {"processes": 4}, "JOB_INDEX must be set too.*label"),
        (JOBSET | {"REPLICATED_JOB_NAME": ""}, {"processes": 4}, "REPLICATED_JOB_NAME must be set"),
        (
            {k: v for k, v in JOBSET.items() if k != "REPLICATED_JOB_REPLICAS"},
            {"processes": 4},
            "REPLICATED_JOB_REPLICAS must be set",
        ),
    ],
)
def test_what_kubernetes_does_not_set_is_asked_for(environ, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ, **settings)


# TF_CONFIG and Keras' variables.


def tf_config(cluster=None, task=None, **more):
    cluster = {"worker": ["a:1", "b:1"]} if cluster is None else cluster
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": cluster, "task": task or {"type": "worker", "index": 1}} | more
        )
    }


def test_tf_config_as_kubeflow_writes_it():
    config = read(tf_config(task={"type": "worker", "index": "1"}, environment="cloud"))
    assert config == ClusterConfig(["a:1", "b:1"], role="worker", index=1)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid JSON"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG must be a JSON object"),
        ({"TF_CONFIG": '{"cluster": []}'}, 'TF_CONFIG must have a "cluster"'),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, 'TF_CONFIG must have a "task"'),
        (tf_config({"boss": ["a:1"]}), "roles; they must be among chief, worker.*'boss'"),
        (tf_config({"chief": ["a:1"], "master": ["b:1"]}), "may have at most one chief"),
        (tf_config({"worker": "a:1"}), "`worker` must be a list of strings"),
        (tf_config({"worker": {"1": "a:1"}}), "`worker` must be a list of strings"),
        (tf_config({"chief": ["a:1", "b:1"]}), "may have at most one chief"),
        (tf_config({"worker": ["a:1"]}), "one of the cluster's.*index=1, of_this_role=1"),
        (tf_config(task={"type": "worker", "index": -1}), "must be a non-negative integer"),
        (tf_config(task={"type": "boss", "index": 0}), "`role` must be one of"),
        (tf_config(task={"type": "ps", "index": 0}), "role='ps', index=0, of_this_role=0"),
        (tf_config({"worker": ["a:1", "b"]}), "`worker 1` must be the address and port"),
        (tf_config({"ps": ["a:1"]}), "A cluster needs a worker"),
    ],
)
def test_what_is_wrong_with_tf_config_is_reported(environ, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ)


def test_keras_variables_as_documented():
    config = read({ADDRESSES: "10.0.0.1:1234,10.0.0.2:2345", COUNT: "2", INDEX: "1"})
    assert config == ClusterConfig(["10.0.0.1:1234", "10.0.0.2:2345"], index=1)


def test_the_coordinator_alone_is_enough_for_jax():
    environ = {ADDRESSES: "10.0.0.1:1234", COUNT: "3", INDEX: "2"}
    config = read(environ)
    assert (config.coordinator, config.process_count) == ("10.0.0.1:1234", 3)
    assert (config.process_index, config.address, config.is_chief) == (2, None, False)
    assert config.to_environment() == environ
    with pytest.raises(ValueError, match="TF_CONFIG needs the address of every process"):
        config.to_tf_config()


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({ADDRESSES: "a:1,b:1", COUNT: "3", INDEX: "0"}, "an address for every process.*=3"),
        ({ADDRESSES: "a:1,b:1", COUNT: "2"}, f"{INDEX} must be set too"),
        ({COUNT: "2", INDEX: "0"}, f"{ADDRESSES} must be set too.*TPU"),
        ({ADDRESSES: "a:1,b:1", INDEX: "2"}, "one of the cluster's.*index=2, of_this_role=2"),
        (
            {ADDRESSES: "a:1", COUNT: "2", INDEX: "2"},
            "one of the cluster's.*index=2, of_this_role=2",
        ),
        ({ADDRESSES: "a:1", COUNT: "two", INDEX: "0"}, f"{COUNT} must be an integer of at least 0"),
    ],
)
def test_what_is_wrong_with_keras_variables_is_reported(environ, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ)


# Which environment counts.


# Launchers that number the processes.

# What Open MPI 4.1.4 and MPICH 4.0.2 set for the second of two processes.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "745472000.0;tcp://192.0.2.2:47295;tcp6://[fd00::2]:42369",
    "PMIX_NAMESPACE": "745472001",
}
MPICH = {"MPI_LOCALNRANKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}
TORCHRUN = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "node0:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "job-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "2",
    "PROCESS_ID": "1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}])
def test_processes_on_one_machine_all_have_its_address(environ):
    config = read(environ)
    assert (config.process_count, config.process_index) == (2, 1)
    assert [address.partition(":")[0] for address in config.workers] == ["localhost"] * 2
    assert read(environ, base_port=9000).workers == ("localhost:9000", "localhost:9001")
    first = read(environ | {name: "0" for name in environ if name.endswith("RANK")})
    assert first.workers == config.workers
    assert first.is_chief


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        (TORCHRUN, "node0:29501"),
        (JAX, "node0:1234"),
        (JAX_JOB, "job-worker-0:6666"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "192.0.2.2:"),
        (
            OPEN_MPI
            | {
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                "OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:4",
            },
            "[fd00::2]:",
        ),
    ],
)
def test_of_several_machines_the_first_process_has_an_address(environ, first):
    config = read(environ)
    assert config.coordinator.startswith(first)
    assert (config.process_count, config.process_index, config.is_chief) == (2, 1, False)
    with pytest.raises(ValueError, match="needs the address of every process"):
        config.to_tf_config()
    with pytest.raises(ValueError, match="all addresses are needed"):
        read(environ, parameter_servers=1)


def test_jobs_on_one_machine_have_ports_apart():
    other = OPEN_MPI | {"PMIX_NAMESPACE": "745472002"}
    assert {*read(OPEN_MPI).workers}.isdisjoint(read(other).workers)


def test_hosts_of_sagemaker():
    config = read(SAGEMAKER, base_port=7000)
    assert config == ClusterConfig(["algo-1:7000", "algo-2:7000"], index=1)


def test_worker_pools_of_vertex_ai():
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}
    task = {"type": "workerpool1", "index": 1, "trial": "none"}
    environ = {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": task})}
    assert read(environ) == ClusterConfig(["b:1", "c:1"], chief="a:1", index=1)
    assert read(environ).process_index == 2


def test_the_chief_may_be_called_master():
    task = {"type": "master", "index": 0}
    config = read(tf_config({"master": ["a:1"], "worker": ["b:1"]}, task))
    assert config == ClusterConfig(["b:1"], chief="a:1", role="chief")


def test_a_launcher_inside_a_scheduler_goes_before_it():
    assert cluster.source(OPEN_MPI | SEVERAL_A_NODE | INDEXED_JOB) == "Open MPI"
    assert cluster.source(JAX | OPEN_MPI) == "JAX"
    assert cluster.source({"RANK": "0", "WORLD_SIZE": "2"}) is None  # anybody's names
    assert cluster.source({"PROCESS_ID": "0", "NUM_PROCESSES": "2"}) is None
    # `srun` numbers its tasks for MPI too.
    assert cluster.source({"PMI_RANK": "0", "PMI_SIZE": "7"} | SEVERAL_A_NODE) == "SLURM"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            MPICH | {"MPI_LOCALNRANKS": "1"},
            "the first.*MPICH.*PMI_SIZE=2.*JAX_COORDINATOR",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK must be an integer"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "one of the cluster's.*index=2"),
        (TORCHRUN | {"MASTER_PORT": ""}, "address of the first.*torchrun"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node0"}, "must be the address and port"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is not valid JSON"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "must be one of SM_HOSTS.*'algo-3'"),
        ({"CLUSTER_SPEC": "{}"}, "must have a `cluster` of worker pools"),
        ({"CLUSTER_SPEC": "["}, "CLUSTER_SPEC is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_launchers_variables_is_reported(environ, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(environ)


def test_what_was_set_for_the_program_goes_before_schedulers():
    keras = {ADDRESSES: "k:1,l:1", COUNT: "2", INDEX: "1"}
    everything = tf_config() | keras | SEVERAL_A_NODE | INDEXED_JOB
    assert read(everything).coordinator == "a:1"
    del everything["TF_CONFIG"]
    assert read(everything).coordinator == "k:1"
    for name in keras:
        del everything[name]
    assert cluster.source(everything) == "SLURM"
    assert read(everything).process_count == 7
    assert cluster.source(INDEXED_JOB) == "Kubernetes"


def test_variables_left_from_another_run_raise():
    left = {ADDRESSES: "k:1,l:1,m:1", COUNT: "3", INDEX: "0"}
    with pytest.raises(ValueError, match="this process 1 of 2, and Keras' variables another"):
        read(tf_config() | left)


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({}, "kdpkit launch"),
        ({"TF_CONFIG": "{}"}, "kdpkit launch"),
        ({"SLURM_JOB_ID": "1"}, "start the processes with `srun`"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "completionMode: Indexed"),
    ],
)
def test_no_cluster_raises_with_a_fix(environ, hint):
    assert cluster.source(environ) is None
    with pytest.raises(ValueError, match=f"No cluster is described.*{hint}"):
        read(environ)


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


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config()["TF_CONFIG"])
    assert ClusterConfig.from_environment().index == 1
    assert cluster.source() == "TF_CONFIG"


# Checks.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": []}, "A cluster needs a worker"),
        ({"workers": "a:1"}, "`workers` must be a list of strings"),
        ({"workers": ["a"]}, "`worker 0` must be the address and port"),
        ({"workers": ["a:0"]}, "the port from 1 to 65535"),
        ({"workers": ["a:65536"]}, "the port from 1 to 65535"),
        ({"workers": ["http://a:80"]}, "`worker 0` must be the address and port"),
        ({"workers": ["a:1", "a:1"]}, "an address of its own.*'worker 0', 'worker 1'"),
        ({"workers": ["a:1"], "chief": "a:1"}, "an address of its own.*'chief 0', 'worker 0'"),
        ({"workers": ["a:1"], "index": 1}, "one of the cluster's.*index=1, of_this_role=1"),
        ({"workers": ["a:1"], "role": "ps"}, "one of the cluster's.*of_this_role=0"),
        ({"workers": ["a:1"], "role": "chief"}, "one of the cluster's.*of_this_role=0"),
        ({"workers": ["a:1"], "role": "boss"}, "`role` must be one of"),
        ({"workers": ["a:1", "b:1"], "processes": 3}, "only that of the first"),
        ({"workers": [], "chief": "a:1", "parameter_servers": ["b:1"]}, "need workers"),
    ],
)
def test_clusters_that_cannot_be_raise(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClusterConfig(**({"role": "worker"} | arguments)).validate()


def test_a_local_address_beside_others_raises():
    config = ClusterConfig(["localhost:1", "gpu2:1"])
    with pytest.raises(ValueError, match=r"local=\['localhost'\], others=\['gpu2'\]"):
        config.validate()
    local = ClusterConfig(["localhost:1", "127.0.0.1:2"])
    assert local.validate() is local


def test_servers_and_evaluators_have_no_number_among_those_that_train():
    config = ClusterConfig(["a:1"], chief="b:1", parameter_servers=["c:1"])
    assert not config.for_task("ps", 0).is_chief
    with pytest.raises(ValueError, match="not among the processes that train"):
        _ = config.for_task("ps", 0).process_index
    with pytest.raises(ValueError, match="not among the processes that train"):
        _ = config.for_task("evaluator", 0).process_index


@pytest.mark.timeout(300)
def test_hosts_are_reachable_also_before_their_process_listens():
    with socket.socket() as listening, socket.socket() as silent:
        for each in (listening, silent):
            each.bind(("127.0.0.1", 0))
        listening.listen()
        ports = [each.getsockname()[1] for each in (listening, silent)]
        addresses = ["127.0.0.1:1", *(f"127.0.0.1:{port}" for port in ports)]
        ClusterConfig(addresses).validate(reachable=True, timeout_seconds=30)


@pytest.mark.timeout(300)
def test_a_host_whose_name_does_not_resolve_is_named():
    config = ClusterConfig(["here.invalid:1", "no-such-host.invalid:1"])
    with pytest.raises(ValueError, match=r"cannot be reached.*'no-such-host.invalid:1'"):
        config.validate(reachable=True, timeout_seconds=1)
