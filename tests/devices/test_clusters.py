"""The membership of a process is read from SLURM, Open MPI, GKE and a TPU VM's metadata server."""

import itertools
from types import SimpleNamespace

import jax
import pytest

from shardformer.config import Config
from shardformer.devices import clusters, processes
from shardformer.devices.clusters import Membership
from shardformer.errors import UsageError
from tests.launch import metadata_server
from tests.surroundings import before_call

SLURM = {"SLURM_JOB_ID": "4101", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
TPU = {"TPU_ACCELERATOR_TYPE": "v4-32"}
GKE = TPU | {"TPU_WORKER_HOSTNAMES": "job-0.svc,job-1.svc", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n7", "n7"), ("node001,host2", "node001"), ("node[001-015],host2", "node001"), ("gpu-[007,9-12]", "gpu-007"),
     ("gpu[1-4]-ib", "gpu1-ib"), ("gpu[3,7]-ib,login", "gpu3-ib"), ("r[1-2]n[03-04]", "r1n03"),
     ("r[1,4]n[03-04]-ib.cluster,x[1-2]", "r1n03-ib.cluster"), ("a-b.c,d[1-2]e", "a-b.c")],
)  # fmt: skip
def test_slurm_gives_the_first_host_of_its_list(nodes, host):
    found = clusters.find_membership(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert found == Membership(f"{host}:61445", 4, 3, [1], "SLURM")  # 65536 - 4096 + 4101 % 4096


def test_one_slurm_task_on_each_machine_uses_all_of_its_gpus():
    found = clusters.find_membership(SLURM | {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "4"})
    assert found.local_devices is None


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", *SLURM])
def test_a_process_outside_of_srun_is_single(missing):
    environment = SLURM | {"SLURM_STEP_NODELIST": "n7"}
    del environment[missing]
    assert clusters.find_membership(environment | {"JAX_PLATFORMS": "cpu"}) is None


def test_one_task_is_one_process():
    assert clusters.find_membership(SLURM | {"SLURM_STEP_NODELIST": "n", "SLURM_NTASKS": "1"}) is None


def test_open_mpi():
    assert clusters.find_membership(OPEN_MPI) == Membership("10.96.0.1:62624", 4, 2, [0], "Open MPI")
    six = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    assert clusters.find_membership(six | {"JAX_COORDINATOR_PORT": "5"}).address == "[fe80::b9b]:5"


def test_open_mpi_without_an_address_does_not_become_many_runs():
    del (environment := dict(OPEN_MPI))["OMPI_MCA_orte_hnp_uri"]
    with pytest.raises(UsageError, match=r"Open MPI started 4 processes and gives no address.*coordinator=HOST:PORT"):
        clusters.find_membership(environment)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_PROCID"])
def test_a_variable_that_is_not_a_number_is_named(name):
    with pytest.raises(UsageError, match=f"{name} must be a number, got 'two'"):
        clusters.find_membership(SLURM | {"SLURM_STEP_NODELIST": "n", name: "two"})


def test_gke():
    assert clusters.find_membership(GKE) == Membership("job-0.svc:8476", 2, 1, None, "the TPU pod")
    slices = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "first.svc:8080"}
    assert clusters.find_membership(GKE | slices) == Membership("first.svc:8476", 6, 5, None, "the TPU pod")


def test_a_tpu_pod_by_its_metadata_server():
    with metadata_server(1, 2) as port:
        environment = TPU | {"GCE_METADATA_IP": f"127.0.0.1:{port}"}
        assert clusters.find_membership(environment) == Membership("localhost:8476", 2, 1, None, "the TPU pod")
        assert clusters.find_membership(environment | {"JAX_COORDINATOR_PORT": "99"}).address == "localhost:99"
        assert clusters.find_membership(environment | {"TPU_SKIP_MDS_QUERY": "1"}) is None
        assert clusters.find_membership(environment | {"JAX_PLATFORMS": "cpu"}) is None


def test_slices_of_a_tpu_vm_by_its_metadata_server():
    more = {"tpu-env": "A: 'b'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
                       "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9'\n",
            "worker-network-endpoints": "x:0:10.0.0.1,x:1:10.0.0.2"}  # fmt: skip
    with metadata_server(0, 2, more) as port:
        found = clusters.find_membership(TPU | {"GCE_METADATA_IP": f"127.0.0.1:{port}"})
    assert found == Membership("10.0.0.9:8476", 4, 2, None, "the TPU pod")


def test_a_tpu_vm_of_one_worker_is_single():
    with metadata_server(0, 1) as port:
        assert clusters.find_membership(TPU | {"GCE_METADATA_IP": f"127.0.0.1:{port}"}) is None


def test_a_tpu_whose_metadata_server_does_not_answer():
    with pytest.raises(UsageError, match=r"metadata server 127\.0\.0\.1:9 does not answer.*set TPU_SKIP_MDS_QUERY=1"):
        clusters.find_membership(TPU | {"GCE_METADATA_IP": "127.0.0.1:9"}, clusters.Patience(seconds=0))


def test_a_silent_metadata_server_is_reported_while_waiting(capsys, monkeypatch):
    readings = itertools.count(0.0, 0.5)  # a clock that goes on with each reading
    monkeypatch.setattr(clusters, "time", SimpleNamespace(monotonic=lambda: next(readings), sleep=lambda _: None))
    patience = clusters.Patience(seconds=2, silence=0.5)
    with pytest.raises(UsageError, match="does not answer"):
        clusters.find_membership(TPU | {"GCE_METADATA_IP": "127.0.0.1:9"}, patience)
    error = capsys.readouterr().err
    assert error.startswith("waiting for the metadata server 127.0.0.1:9, which does not answer")
    assert error.count("\n") == 1


@pytest.mark.parametrize("nodes", ["", ",", "[]"])
def test_a_list_without_a_host_name_is_rejected(nodes):
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST holds no host name"):
        clusters.find_membership(SLURM | {"SLURM_STEP_NODELIST": nodes})


def test_a_kubernetes_job_needs_the_package_of_its_api(monkeypatch):
    for name, value in {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)

    def initialize(**timeouts):
        assert timeouts == {"initialization_timeout": 9, "heartbeat_timeout_seconds": 2}
        raise ValueError("coordinator_address should be defined.")

    before_call(monkeypatch, jax.distributed, "initialize", initialize)
    with pytest.raises(UsageError, match=r"indexed Kubernetes job; pip install 'jax\[k8s\]'"):
        processes.join_processes(Config.of(mesh="1x1", start_timeout=9))
