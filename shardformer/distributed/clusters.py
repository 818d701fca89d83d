"""Which processes train together, as a scheduler or a TPU pod tells each of them.

The variables and attributes are those that `jax.distributed.initialize` reads by itself. Reading them here lets a
process say whom it waits for (see `rendezvous.py`), and refuses what would start as many single runs instead.
"""

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardformer.errors import UsageError

# JAX's own choice, 8482, is closed by the firewall rule that comes with a TPU VM's network; this port is open.
TPU_PORT = "8476"
METADATA_SECONDS = 30  # until a metadata server that does not answer is given up
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


class Membership(NamedTuple):
    """One process's place among those that train together."""

    address: str  # HOST:PORT of process 0
    count: int
    index: int
    local_devices: list[int] | None = None  # which of this machine's GPUs; None means all
    source: str = ""  # who says so


def find_membership(environment: Mapping[str, str] = os.environ) -> Membership | None:
    """What the first that applies of Open MPI, SLURM and a TPU pod says; None for a process on its own."""
    port = environment.get("JAX_COORDINATOR_PORT", "")
    found = None
    if OPEN_MPI[0] in environment:
        found = _read_open_mpi(environment, port)
    elif all(name in environment for name in SLURM):
        found = _read_slurm(environment, port)
    elif is_tpu_vm(environment):
        found = _read_tpu_pod(environment, port or TPU_PORT)
    return found if found and found.count > 1 else None


def is_kubernetes_job(environment: Mapping[str, str] = os.environ) -> bool:
    """A pod of an indexed Job, whose number of processes the Kubernetes API alone knows."""
    return "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment


def is_tpu_vm(environment: Mapping[str, str] = os.environ) -> bool:
    """Without touching a device: the processes must have found each other before."""
    if (environment.get("JAX_PLATFORMS") or "tpu").split(",")[0] != "tpu":
        return False
    return "TPU_ACCELERATOR_TYPE" in environment or any(map(_is_tpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_tpu(pci_device: Path) -> bool:
    """A PCI device of Google's that is neither a disk (class 01) nor a network card (02)."""
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
            f"Open MPI started {count} processes and gives no address of the first (its version 5 does not); name it "
            "to all of them: coordinator=HOST:PORT processes=N process_id=$OMPI_COMM_WORLD_RANK"
        )
    host = (address[1] or f"[{address[2]}]") if address else ""
    job = int(launcher.partition(".")[0] or 0) // 2**12 if launcher.partition(".")[0].isdecimal() else 0
    return Membership(f"{host}:{port or _ephemeral_port(job)}", count, index, [local], "Open MPI")


def _read_slurm(environment: Mapping[str, str], port: str) -> Membership:
    job, count, index, local = (_number(environment, name) for name in SLURM if name != "SLURM_STEP_NODELIST")
    nodes = environment["SLURM_STEP_NODELIST"]  # 'node001', 'node001,host2', 'node[001-015],host2' or 'node[001,7-9]'
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if not first:
        raise UsageError(f"SLURM_STEP_NODELIST holds no host name: {nodes!r}; start the processes with srun")
    host = first[1] + (first[2] or "")
    # One process on each machine uses all of its GPUs; several share them, one for each.
    alone = environment.get("SLURM_STEP_NUM_NODES") == environment["SLURM_NTASKS"]
    return Membership(f"{host}:{port or _ephemeral_port(job)}", count, index, None if alone else [local], "SLURM")


def _ephemeral_port(job: int) -> int:
    """Of the last 2**12 ports; jobs on the same machine seldom get the same one."""
    return 2**16 - 2**12 + job % 2**12


def _read_tpu_pod(environment: Mapping[str, str], port: str) -> Membership | None:
    on_kubernetes = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    attribute = lambda name: _read_metadata(environment, name)
    if on_kubernetes:
        workers, worker = on_kubernetes.split(","), _number(environment, "TPU_WORKER_ID")
    elif "TPU_SKIP_MDS_QUERY" in environment:
        return None
    else:
        number = attribute("agent-worker-number")
        if number is None:
            return None  # a machine that belongs to no pod
        workers, worker = (attribute("worker-network-endpoints") or "").split(","), int(number)
        workers = [worker.split(":")[-1] for worker in workers]  # 'host' or 'name:id:ip'
    text = "" if on_kubernetes else attribute("tpu-env") or ""
    slices = dict(re.findall(r"(MEGASCALE_\w+): *'?([^'\n]*)", text)) | dict(environment)
    count, this = int(slices.get("MEGASCALE_NUM_SLICES") or 1), int(slices.get("MEGASCALE_SLICE_ID") or 0)
    host = (slices.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]).split(":")[0]
    index = this * len(workers) + worker
    return Membership(f"{host}:{port}", count * len(workers), index, None, "the TPU pod")


def _read_metadata(environment: Mapping[str, str], name: str) -> str | None:
    """An attribute of this machine; None where it has no such attribute."""
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + METADATA_SECONDS
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
        if time.monotonic() > deadline:
            raise UsageError(
                f"this machine has a TPU, but its metadata server {server} {problem}; for a single machine set "
                "TPU_SKIP_MDS_QUERY=1, for several give coordinator=HOST:PORT processes=N process_id=0..N-1"
            )
        time.sleep(0.5)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdecimal()):
        raise UsageError(f"{name} must be a number, got {value!r}; start the processes with srun, mpirun or GKE, or "
                         "name them: coordinator=HOST:PORT processes=N process_id=0..N-1")  # fmt: skip
    return int(value)
