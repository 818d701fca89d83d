"""From devices to a mesh of (dp, mp), and pp where there are stages."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from shardformer import preset
from shardformer.analysis import memory
from shardformer.checkpoint import FolderLost, FolderTaken
from shardformer.config import Config
from shardformer.config.names import AXES
from shardformer.devices import clusters, processes, rendezvous
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from tests import shared
from tests.surroundings import answer_for_processes, before_call, let_fail, simulate_processes

EIGHT_HEADS = Config.of(batch=12, heads=8)
FEW_TOKENS = Config.of(layers=1, d_model=480, heads=8, seq=8, batch=8, vocab=1000)


@pytest.mark.parametrize(
    ("devices", "batch", "virtual", "shape"),
    [
        (1, 12, False, "1x1"),
        (8, 16, False, "8x1"),
        (8, 12, False, "4x2"),  # the least mp that leaves a dp which divides the batch
        (8, 1, False, "1x8"),
        (32, 8, False, "8x4"),  # a pod with more devices than sequences
        (8, 16, True, "8x1"),
        (8, 12, True, "4x1"),  # virtual devices have no memory of their own: fewer, rather than mp
        (8, 7, True, "1x1"),
        (6, 12, True, "6x1"),
    ],
)
def test_auto(devices, batch, virtual, shape):
    assert mesh.choose_mesh(EIGHT_HEADS.replace(batch=batch), devices, virtual).parallel.mesh == shape


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, "1x4"),
        ({"batch": 400}, "4x1"),
        ({"batch": 24}, "1x4"),  # 21,700 parameters per token, and 18,600 with 28 rows
        ({"batch": 28}, "4x1"),
        ({"heads": 6}, "1x2"),
        ({"heads": 5}, "4x1"),
        ({"zero": 1}, "4x1"),
        ({"lora_rank": 2}, "4x1"),
    ],
)
def test_auto_takes_mp_on_a_cpu_for_few_tokens(changes, shape):
    """It has 65,000 parameters per token of a step, and 1,300 with 400 rows."""
    config = FEW_TOKENS.replace(**changes)
    assert mesh.choose_mesh(config, 4, virtual=True).parallel.mesh == shape
    if not changes:
        assert mesh.choose_mesh(config, 4, virtual=False).parallel.mesh == "4x1"


def test_auto_takes_the_least_mp_that_fits_in_memory(said):
    needed = {"8x1": 80e9, "4x2": 40e9, "2x4": 20e9, "1x8": 10e9}

    def resolve(available, virtual=False):
        return mesh.choose_mesh(EIGHT_HEADS.replace(batch=16), 8, virtual, lambda c: needed[c.parallel.mesh], available)

    assert resolve(80e9).parallel.mesh == "8x1"
    assert not said
    assert resolve(32e9).parallel.mesh == "2x4"
    assert said == ["mesh=auto took 2x4: 8x1 needs 80.00 GB, 4x2 needs 40.00 GB, and there are 32.00 GB"]
    with pytest.raises(
        UsageError, match=r"no mesh of 8 devices that fits.*1x8 needs 10\.00 GB, and there are 9\.00 GB"
    ):
        resolve(9e9)
    with pytest.raises(UsageError, match=r"8x1 needs 640\.00 GB"):  # virtual devices share one memory
        mesh.choose_mesh(Config.of(batch=8, heads=1), 8, True, lambda c: 80e9, 79e9)


def test_gptj_is_split_over_all_of_eight_devices_of_16_gb():
    def needed(c):
        return memory.predict_bytes(c).total

    whole = preset("gptj_6b").replace(zero=0)

    def resolve(available):
        return mesh.choose_mesh(whole, 8, False, needed, available).parallel.mesh

    assert resolve(16e9) == "1x8"
    assert resolve(95e9) == "8x1" if needed(whole.replace(mesh="8x1")) < 95e9 else "4x2"


def test_auto_without_a_fit_names_a_batch_that_fits():
    with pytest.raises(UsageError, match=r"dp x mp = 16 devices with batch=12.*try batch=16$"):
        mesh.choose_mesh(Config.of(batch=12, heads=2), 16)
    assert mesh.choose_mesh(Config.of(batch=16, heads=2), 16).parallel.mesh == "16x1"


def test_a_given_mesh_is_left_alone():
    assert mesh.choose_mesh(Config.of(mesh="1x1"), 8).parallel.mesh == "1x1"


@pytest.mark.parametrize("shape", ["8x1", "4x2", "1x8", "2x2", "1x1"])
def test_make(shape):
    made = mesh.make(EIGHT_HEADS.replace(batch=8, mesh=shape))
    dp, mp = map(int, shape.split("x"))
    assert made.shape == {"dp": dp, "mp": mp}
    assert made.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert len(set(made.devices.flat)) == dp * mp


@pytest.mark.parametrize(("shape", "needed"), [("16x1", 16), ("3x1", 3), ("3x2", 6), ("12x8", 96)])
def test_a_mesh_that_these_devices_cannot_make(shape, needed):
    with pytest.raises(UsageError, match=f"mesh={shape} takes {needed} devices.*the 8 cpu devices here; try mesh=auto"):
        mesh.make(EIGHT_HEADS.replace(batch=48, mesh=shape))


@pytest.mark.parametrize(
    ("shape", "batch", "count", "expected"),
    [("4x2", 8, "1", 8), ("4x2", 8, "2", 4), ("1x1", 8, "2", 1), ("auto", 12, "1", 6), ("auto", 7, "1", 7)],
)
def test_cpu_devices_of_one_process(monkeypatch, shape, batch, count, expected):
    counts = []
    before_call(monkeypatch, mesh, "use_cpu_devices", lambda count, many_in_flight: counts.append(count))
    monkeypatch.setattr(processes, "join_processes", lambda config: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", count)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    mesh.start(EIGHT_HEADS.replace(mesh=shape, batch=batch))
    assert counts == [expected]


@pytest.mark.parametrize(
    ("heads", "together", "expected"),
    [(8, 1, 8), (12, 1, 6), (12, 2, 7), (5, 1, 5), (1, 1, 7)],  # with two processes, or without mp, as the batch has it
)
def test_cpu_devices_follow_the_model_where_mp_is_faster(monkeypatch, heads, together, expected):
    counts = []
    before_call(monkeypatch, mesh, "use_cpu_devices", lambda count, many_in_flight: counts.append(count))
    monkeypatch.setattr(processes, "join_processes", lambda config: None)
    monkeypatch.setattr(processes, "find_membership", lambda config: SimpleNamespace(processes=together))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    mesh.start(FEW_TOKENS.replace(heads=heads, batch=7, vocab=960))
    assert counts == [expected]


@pytest.mark.parametrize(("number", "process"), [("", "0"), ("2", ""), ("two", "0"), ("2", "2"), ("2", "-1")])
def test_processes_that_are_named_in_part(monkeypatch, number, process):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", number)
    monkeypatch.setenv("JAX_PROCESS_ID", process)
    with pytest.raises(UsageError, match="needs JAX_NUM_PROCESSES and JAX_PROCESS_ID"):
        mesh.start(Config.of(mesh="1x1"))


def test_keys_name_the_processes_and_come_before_the_environment(monkeypatch):
    calls = []
    monkeypatch.setattr(mesh.jax.distributed, "initialize", lambda *named, **options: calls.append((named, options)))
    monkeypatch.setattr(rendezvous, "connect", lambda *args: calls.append(args[:4]) or {})
    monkeypatch.setattr(rendezvous, "Watch", lambda *args: calls.append(args))
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "elsewhere:1")
    for name in clusters.SLURM:
        monkeypatch.setenv(name, "2")
    mesh.start(Config.of(mesh="2x1", coordinator="here:2", processes=2, process_id=1, start_timeout=33))
    options = {"initialization_timeout": 33, "heartbeat_timeout_seconds": 7 + processes.JAX_HEARTBEAT_DELAY}
    options["cluster_detection_method"] = "deactivate"
    assert calls == [("here:2", 2, 1, 33), ({}, 2, 6.6), (("here:2", 2, 1, None), options)]
    monkeypatch.setattr(processes, "_watch", None)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, 5),
        ({"JAX_NUM_CPU_DEVICES": "2"}, 2),
    ],
)
def test_a_users_own_device_count_wins(environment, devices):
    code = "import jax; from shardformer.layout import mesh; mesh.use_cpu_devices(3); print(jax.device_count())"
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", code]
    environment = clean | {"JAX_PLATFORMS": "cpu"} | environment
    assert subprocess.check_output(command, env=environment, text=True).split() == [str(devices)]


def test_collectives_get_threads_and_time(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_call_warn_stuck_timeout_seconds=7")
    monkeypatch.delenv("NPROC", raising=False)
    mesh.use_cpu_devices(8)
    assert "NPROC" not in os.environ  # the training loop bounds what is in flight, and is faster without
    mesh.use_cpu_devices(8, many_in_flight=True)
    assert os.environ["NPROC"] == "64"
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=7",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]


@pytest.mark.parametrize("follow_wires", [True, False])
def test_the_devices_of_one_mp_are_nearer_than_those_of_one_pp(follow_wires):
    made = mesh.arrange(shared.tiny(mesh="2x2x2", accum=2), jax.devices(), follow_wires)
    assert made.axis_names == AXES[:3]
    assert [[d.id for d in row] for row in made.devices[0]] == [[0, 2], [1, 3]]  # [mp][pp]


@pytest.mark.parametrize("follow_wires", [True, False])
def test_devices_of_one_mp_are_nearer_than_those_of_one_cp(follow_wires):
    made = mesh.arrange(shared.tiny(mesh="dp2.cp2.mp2"), jax.devices(), follow_wires)
    assert made.axis_names == AXES
    assert [[d.id for d in row] for row in made.devices[0, :, 0]] == [[0, 2], [1, 3]]  # [mp][cp]


def test_one_stage_is_none():
    assert (shared.tiny(mesh="4x2x1").parallel.mesh_shape, shared.tiny(mesh="4x2").parallel.pp) == ((4, 2), 1)
    assert mesh.make(shared.tiny(mesh="4x2x1")) == mesh.make(shared.tiny(mesh="4x2"))


def test_mesh_without_neighbours_on_the_wire_is_made(monkeypatch):
    neighbours = mesh.make(shared.tiny(mesh="4x2"))
    let_fail(monkeypatch, jax, "make_mesh", NotImplementedError("physical axes must be split"))
    assert mesh.make(shared.tiny(mesh="4x2")) == neighbours  # on the CPU any order is as good


def test_what_fails_on_one_process_fails_on_all(monkeypatch):
    assert processes.succeed_or_fail_together(lambda: 7) == 7
    with pytest.raises(UsageError, match=r"^here$"):
        processes.succeed_or_fail_together(lambda: (_ for _ in ()).throw(UsageError("here")))
    with pytest.raises(RunError, match=r"^\[Errno 2\] No such file or directory: '/not/there'$"):
        processes.succeed_or_fail_together(lambda: os.listdir("/not/there"))
    with pytest.raises(RunError, match=r"^TimeoutError$"):
        processes.succeed_or_fail_together(lambda: (_ for _ in ()).throw(TimeoutError()))
    for kind in (RunError, UsageError):
        answer_for_processes(monkeypatch, lambda own, kind=kind: [own, f"{kind.__name__}:there: it"])
        with pytest.raises(kind, match=r"^process 1: there: it$"):
            processes.succeed_or_fail_together(lambda: 7)


@pytest.mark.parametrize(("raised", "kind"), [(FolderTaken, UsageError), (FolderLost, RunError)])
def test_a_failure_is_of_one_kind_on_all_processes(raised, kind, monkeypatch):
    """A wrong command has the exit status of one on every process, whatever class of error it is."""
    told = []
    answer_for_processes(monkeypatch, lambda own: told.append(own) or [own])
    with pytest.raises(raised, match=r"^a run$"):
        processes.succeed_or_fail_together(lambda: (_ for _ in ()).throw(raised("a run")))
    answer_for_processes(monkeypatch, lambda own: [own, *told])
    with pytest.raises(kind, match=r"^process 1: a run$"):
        processes.succeed_or_fail_together(lambda: 7)


def test_what_the_first_process_does_the_others_only_hear_of(monkeypatch):
    done = []
    for process in (0, 1):
        simulate_processes(monkeypatch, 1, process)
        processes.run_on_first_process(lambda process=process: done.append(process))
    assert done == [0]
    answer_for_processes(monkeypatch, lambda own: ["RunError:disk full", own])
    with pytest.raises(RunError, match=r"^process 0: disk full$"):
        processes.run_on_first_process(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("shape", "rows", "available", "expected"),
    [
        ("4x1", 0, 1e9, ("4x1", 1)),
        ("4x1", 4, 1e9, ("4x1", 2)),  # 32 rows on 4 devices: no more than 4 at a time
        ("4x1", 3, 1e9, ("4x1", 4)),
        ("auto", 8, 1e9, ("8x1", 1)),
        ("8x1", 0, 2.0, ("8x1", 2)),  # as few microbatches as fit in memory
        ("auto", 0, 1.0, ("8x1", 4)),
    ],
)
def test_accum_auto(shape, rows, available, expected):
    def needed(c):
        return c.training.batch // c.parallel.dp // c.training.accum

    settings = EIGHT_HEADS.replace(mesh=shape, batch=32, accum=0)
    got = mesh.choose_mesh(settings, 8, False, needed, available, rows)
    assert (got.parallel.mesh, got.training.accum) == expected
    assert got.training.batch == 32


def test_batch_without_microbatches_names_one_that_has():
    message = r"^accum=auto on mesh=1x1x4 needs a batch that dp \* pp = 4 divides; got batch=6, try batch=8$"
    with pytest.raises(UsageError, match=message):
        mesh.choose_mesh(shared.tiny(mesh="1x1x4", layers=4, accum=4).replace(batch=6, accum=0), 8)


def test_zero_is_given_a_mesh_with_several_dp():
    settings = EIGHT_HEADS.replace(batch=16, zero=3)
    needed = {"8x1": 80, "4x2": 40, "2x4": 20}
    with pytest.raises(UsageError, match=r"2x4 needs 20 .*, and there are 15"):
        mesh.choose_mesh(settings, 8, False, lambda c: needed[c.parallel.mesh], 15)
    assert mesh.choose_mesh(settings, 1).parallel.mesh == "1x1"


def test_an_evaluation_uses_all_devices(monkeypatch):
    def started(**options):
        return mesh.start(shared.tiny(mesh="auto", batch=3), **options)

    assert started().parallel.mesh == "1x1"
    with_rows = started(may_add_rows=True)
    assert (with_rows.parallel.mesh, with_rows.training.batch) == ("8x1", 8)


def test_accum_auto_that_never_fits_is_refused_with_numbers():
    with pytest.raises(UsageError, match=r"8x1 accum=1 needs .* 8x1 accum=4 needs"):
        mesh.choose_mesh(EIGHT_HEADS.replace(mesh="8x1", batch=32, accum=0), 8, False, lambda c: 9, 8)


def test_a_batch_beyond_reason_is_split_at_once():
    """Finds every divisor without trying two thousand million numbers."""
    prime = 2**31 - 1
    c = shared.tiny(batch=prime, seq=1, accum=0, mesh="1x1")
    assert [found.training.accum for found in mesh.candidates(c, 1)] == [1, prime]
    c = shared.tiny(batch=24, accum=0, mesh="2x1")
    assert [found.training.accum for found in mesh.candidates(c, 2)] == [1, 2, 3, 4, 6, 12]
    assert [found.training.accum for found in mesh.candidates(c, 2, rows=3)] == [4, 6, 12]


def test_devices_that_started_before_are_reported_with_the_fix(monkeypatch):
    def fail(name, value):
        raise RuntimeError(f"{name} config should be updated before backends are initialized")

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    config, devices = SimpleNamespace(jax_num_cpu_devices=-1, update=fail), [SimpleNamespace(platform="cpu")]
    monkeypatch.setattr(mesh, "jax", SimpleNamespace(config=config, devices=lambda: devices))
    with pytest.raises(UsageError, match=r"started with 1 CPU device, and 4 are needed; restart Python .*devices\", 4"):
        mesh.use_cpu_devices(4)
    mesh.use_cpu_devices(1)
