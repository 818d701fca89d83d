"""The processes that train together, as a scheduler or a TPU pod names them.

The variables and attributes are those that `jax.distributed.initialize` reads. They are read here so that a process
can name the processes it waits for (see `rendezvous.py`), and so that N tasks never become N single runs.
"""

import functools
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.messages import log

# JAX's default, 8482, is closed by the firewall rule that comes with a TPU VM's network; this port is open.
TPU_PORT = "8476"
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


class Patience(NamedTuple):
    """The limits of waiting for the metadata server."""

    seconds: float = 30.0  # until the start fails
    silence: float = 10.0  # seconds of waiting before a line reports it


PATIENCE = Patience()


class Membership(NamedTuple):
    """The number of one process, and how it reaches the others."""

    address: str  # HOST:PORT of process 0
    processes: int
    process_id: int
    local_devices: list[int] | None = None  # GPUs of this machine; None means all
    source: str = ""  # the scheduler; empty for keys of the run


def find_membership(environment: Mapping[str, str] = os.environ, patience: Patience = PATIENCE) -> Membership | None:
    """Returns the membership that Open MPI, SLURM or a TPU pod gives; None for a single process."""
    port = environment.get("JAX_COORDINATOR_PORT", "")
    result = None
    if OPEN_MPI[0] in environment:
        result = _read_open_mpi(environment, port)
    elif all(name in environment for name in SLURM):
        result = _read_slurm(environment, port)
    elif is_tpu_vm(environment):
        result = _read_tpu_pod(environment, port or TPU_PORT, patience)
    return result if result and result.processes > 1 else None


def is_kubernetes_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this is a pod of an indexed Job; only the Kubernetes API knows the number of its pods."""
    return "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment


def is_tpu_vm(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this machine has a TPU; touches no device, as the processes must join first."""
    if (environment.get("JAX_PLATFORMS") or "tpu").split(",")[0] != "tpu":
        return False
    return "TPU_ACCELERATOR_TYPE" in environment or any(map(_is_tpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_tpu(pci_device: Path) -> bool:
    """Returns whether a PCI device is Google's and neither a disk (class 01) nor a network card (02)."""
    try:
        vendor, kind = ((pci_device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x1ae0" and not kind.startswith(("0x01", "0x02"))


def _read_open_mpi(environment: Mapping[str, str], port: str) -> Membership:
    count, index, local = (_number(environment, name) for name in OPEN_MPI)
    launcher = environment.get("OMPI_MCA_orte_hnp_uri", "")  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    address = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", launcher)
    if count > 1 and not address:
        raise UsageError(
            f"Open MPI started {count} processes and gives no address of the first (version 5 does not); give it "
            "to all of them: coordinator=HOST:PORT processes=N process_id=$OMPI_COMM_WORLD_RANK"
        )
    host = (address[1] or f"[{address[2]}]") if address else ""
    job = int(launcher.partition(".")[0] or 0) // 2**12 if launcher.partition(".")[0].isdecimal() else 0
    return Membership(f"{host}:{port or _ephemeral_port(job)}", count, index, [local], "Open MPI")


def _read_slurm(environment: Mapping[str, str], port: str) -> Membership:
    job, count, index, local = (_number(environment, name) for name in SLURM if name != "SLURM_STEP_NODELIST")
    host = _first_slurm_host(environment["SLURM_STEP_NODELIST"])
    # A single process on a machine uses all of its GPUs; multiple processes share them, one for each.
    single = environment.get("SLURM_STEP_NUM_NODES") == environment["SLURM_NTASKS"]
    return Membership(f"{host}:{port or _ephemeral_port(job)}", count, index, None if single else [local], "SLURM")


def _first_slurm_host(nodes: str) -> str:
    """Returns the first name of 'node001,host2', 'node[001,7-9],host2', 'gpu[1-4]-ib' or 'r[1-2]n[03-04]'."""
    first = re.match(r"(?:[^,\[\]\s]|\[[^,\-\[\]]+[^\[\]]*\])+", nodes)
    if not first:
        raise UsageError(f"SLURM_STEP_NODELIST holds no host name: {nodes!r}; start the processes with srun")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def _ephemeral_port(job: int) -> int:
    """Returns one of the last 2**12 ports; jobs on one machine seldom get the same one."""
    return 2**16 - 2**12 + job % 2**12


def _read_tpu_pod(environment: Mapping[str, str], port: str, patience: Patience) -> Membership | None:
    on_kubernetes = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    attribute = functools.partial(_read_metadata, environment, patience)
    if on_kubernetes:
        workers, worker = on_kubernetes.split(","), _number(environment, "TPU_WORKER_ID")
    elif "TPU_SKIP_MDS_QUERY" in environment:
        return None
    else:
        number = attribute("agent-worker-number")
        if number is None:
            return None  # this machine is not part of a pod
        workers, worker = (attribute("worker-network-endpoints") or "").split(","), int(number)
        workers = [worker.split(":")[-1] for worker in workers]  # 'host' or 'name:id:ip'
    text = "" if on_kubernetes else attribute("tpu-env") or ""
    slices = dict(re.findall(r"(MEGASCALE_\w+): *'?([^'\n]*)", text)) | dict(environment)
    count, this = int(slices.get("MEGASCALE_NUM_SLICES") or 1), int(slices.get("MEGASCALE_SLICE_ID") or 0)
    host = (slices.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]).split(":")[0]
    index = this * len(workers) + worker
    return Membership(f"{host}:{port}", count * len(workers), index, None, "the TPU pod")


def _read_metadata(environment: Mapping[str, str], patience: Patience, name: str) -> str | None:
    """Returns an attribute of this machine; None if it has none of this name."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begin, reported = time.monotonic(), False
    while True:
        try:
            with without_proxy.open(request, timeout=5) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            problem = f"answers {error.code}"
        except OSError as error:
            problem = f"does not answer ({getattr(error, 'reason', error)})"
        waited = time.monotonic() - begin
        if waited > patience.seconds:
            raise UsageError(
                f"this machine has a TPU, but its metadata server {server} {problem}; for a single machine set "
                "TPU_SKIP_MDS_QUERY=1, for several give coordinator=HOST:PORT processes=N process_id=0..N-1"
            )
        if waited > patience.silence and not reported:
            reported = True
            longest = f"for at most {patience.seconds:g} s in all"
            log.warning(f"waiting for the metadata server {server}, which {problem}, {longest}")
        time.sleep(0.5)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdecimal()):
        raise UsageError(f"{name} must be a number, got {value!r}; start the processes with srun, mpirun or GKE, or "
                         "give coordinator=HOST:PORT processes=N process_id=0..N-1")  # fmt: skip
    return int(value)
