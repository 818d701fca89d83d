"""Programs of several processes: a second start compiles nothing, another order of devices does."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.devices import program_folder, program_store, programs
from shardformer.devices.program_store import ProgramStore
from shardformer.devices.programs import KeptProgram
from shardformer.storage import bucket
from tests.checkpoint import places
from tests.checkpoint.conftest import memory_buckets  # noqa: F401 (fixture)
from tests.surroundings import let_fail, simulate_processes

ORDER = (0, 1, 2, 3)
TURNED = (0, 2, 1, 3)


def mesh_in(order) -> Mesh:
    return Mesh(np.array(jax.devices())[list(order)], ("dp",))


def weigh_rows(x, *, times: int = 1):
    """Returns each device's rows, times a number that depends on the device's place in the mesh."""
    place = jax.lax.axis_index("dp").astype(x.dtype)
    return jnp.float32(times) * jnp.sin(x) * (1 + place)


def start(folder, order=ORDER, gather=lambda text: [text], **options) -> tuple[ProgramStore, KeptProgram]:
    """Returns what a start of the command has: a store without programs in memory, and a program."""
    mesh, store = mesh_in(order), ProgramStore(folder, gather)

    def step(x, *, times: int = 1):
        def body(x):
            return weigh_rows(x, times=times)

        return jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x)

    options = {"static_argnames": "times", "out_shardings": NamedSharding(mesh, P("dp"))} | options
    return store, KeptProgram(jax.jit(step, **options), options, store, is_agreed=True)


def run(program: KeptProgram, order=ORDER, **static) -> np.ndarray:
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh_in(order), P("dp")))
    return np.asarray(program(x, **static))


@pytest.fixture
def kept(tmp_path):
    """The folder of a first start, and the result of its program."""
    store, program = start(tmp_path)
    result = run(program)
    assert store.compiled == 1
    return tmp_path, result


def compiled_by(folder, **how) -> int:
    """Returns the number of programs that another start compiles; its result must be the same."""
    store, program = start(folder, **how)
    expected = np.sin(np.arange(8, dtype=np.float32)) * np.repeat([1, 2, 3, 4], 2)
    np.testing.assert_allclose(run(program, how.get("order", ORDER)), expected, rtol=1e-6)
    return store.compiled


def test_second_start_compiles_nothing_and_gives_the_same(kept):
    folder, result = kept
    store, program = start(folder)
    np.testing.assert_array_equal(run(program), result)
    np.testing.assert_array_equal(run(program), result)  # the second call loads nothing again
    assert store.compiled == 0


def test_another_order_of_devices_compiles(kept):
    assert compiled_by(kept[0], order=TURNED) == 1
    assert compiled_by(kept[0], order=TURNED) == 0
    assert compiled_by(kept[0], order=ORDER) == 0


def test_text_of_a_program_does_not_tell_the_order():
    """The twin: without the devices, both orders would have one key."""
    texts = [
        start(program_store.Path("unused"), order)[1].lower(np.zeros(8, np.float32)).as_text()
        for order in (ORDER, TURNED)
    ]
    assert texts[0] == texts[1]
    devices = [list(mesh_in(order).devices.flat) for order in (ORDER, TURNED)]
    assert program_store.make_key(texts[0], devices[0]) != program_store.make_key(texts[1], devices[1])


def change_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=true")


def change_version(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "9.9.9")


def change_processor(monkeypatch):
    monkeypatch.setattr(program_store, "describe_processor", lambda: "another")


def change_process(monkeypatch):
    simulate_processes(monkeypatch, jax.process_count(), 1)


def change_process_count(monkeypatch):
    simulate_processes(monkeypatch, 4)


@pytest.mark.parametrize(
    "change", [change_flags, change_version, change_processor, change_process, change_process_count]
)
def test_key_depends_on_the_machine(monkeypatch, change):
    devices = jax.devices()
    before = program_store.make_key("text", devices)
    assert program_store.make_key("text", devices) == before
    change(monkeypatch)
    assert program_store.make_key("text", devices) != before


def test_key_depends_on_settings_and_compiler_options():
    devices = jax.devices()
    keys = {program_store.make_key("text", devices, options) for options in (None, {"xla_a": True}, {"xla_a": False})}
    before = jax.config.jax_default_matmul_precision
    try:
        jax.config.update("jax_default_matmul_precision", "float32")
        keys.add(program_store.make_key("text", devices))
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    assert len(keys) == 4


@pytest.mark.parametrize("others", [[""], ["0123456789abcdef"]], ids=["missing", "of another start"])
def test_all_compile_if_another_process_lacks_the_program(kept, others):
    assert compiled_by(kept[0], gather=lambda text: [text, *others]) == 1


def test_all_load_if_all_have_the_program_of_one_start(kept):
    assert compiled_by(kept[0], gather=lambda text: [text, text]) == 0


def test_other_arguments_are_other_programs(kept):
    folder, result = kept
    store, program = start(folder)
    np.testing.assert_array_equal(run(program, times=2), 2 * result)
    np.testing.assert_array_equal(run(program), result)
    assert store.compiled == 1


@pytest.mark.parametrize("at", [0, 40, 3000, -1], ids=["digest", "token", "program", "end"])
def test_damaged_program_is_compiled_again(kept, capsys, at):
    (path,) = kept[0].iterdir()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert compiled_by(kept[0]) == 1
    assert capsys.readouterr().err == f"a kept program is damaged and is compiled again: {path}\n"
    assert compiled_by(kept[0]) == 0


def test_program_of_another_backend_is_compiled_again(kept, monkeypatch, capsys):
    error = ValueError("unknown executable\nmore")
    let_fail(monkeypatch, program_store.serialize_executable, "deserialize_and_load", error)
    assert compiled_by(kept[0]) == 1
    assert capsys.readouterr().err.endswith("(unknown executable)\n")


def test_jax_that_cannot_write_programs_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program_store, "serialize_executable", None)
    store, program = start(tmp_path / "kept")
    np.testing.assert_array_equal(run(program, times=2), 2 * run(program))
    assert store.compiled == 2
    assert capsys.readouterr().err.count("compiled programs are not kept: this JAX has no") == 1


def test_folder_that_cannot_be_written_is_reported_once(capsys):
    store, program = start(program_store.Path("/dev/null/kept"))
    first = run(program)
    np.testing.assert_array_equal(run(program, times=2), 2 * first)
    assert store.compiled == 2
    error = capsys.readouterr().err
    assert error.count("compiled programs are not kept: /dev/null/kept") == 1
    assert "program_cache=none keeps none" in error


def leave_open(folder, monkeypatch):
    folder.chmod(0o777)
    return f"every user can write in {folder}"


def give_away(folder, monkeypatch):
    monkeypatch.setattr(program_folder.os, "getuid", lambda: folder.stat().st_uid + 1)
    return f"{folder} belongs to another user"


def leave_open_to_the_group(folder, monkeypatch):
    folder.chmod(0o770)
    monkeypatch.setattr(program_folder, "_is_own_group", lambda group: False)
    return f"the group of {folder} can write in it"


def leave_parent_open(folder, monkeypatch):
    folder.parent.chmod(0o777)
    return f"every user can write in {folder.parent}"


def test_folders_that_others_cannot_change_are_used(tmp_path, monkeypatch):
    """The negative twins: a sticky parent, a group of this user alone, and a parent of root."""
    folder = tmp_path / "kept"
    folder.mkdir()
    tmp_path.chmod(0o1777)
    folder.chmod(0o770)
    monkeypatch.setattr(program_folder, "_is_own_group", lambda group: True)
    assert program_folder.find_danger(folder) == ""
    assert program_folder.find_danger(tmp_path / "new") == ""
    tmp_path.chmod(0o777)
    assert program_folder.find_danger(tmp_path / "new").startswith(f"every user can write in {tmp_path}")


def test_group_of_other_members_is_not_own(monkeypatch):
    user = program_folder.pwd.getpwuid(os.getuid())
    for name, members, expected in ((user.pw_name, [], True), (user.pw_name, ["eve"], False), ("staff", [], False)):
        group = program_folder.grp.struct_group((name, "x", user.pw_gid, members))
        monkeypatch.setattr(program_folder.grp, "getgrgid", lambda _, group=group: group)
        assert program_folder._is_own_group(user.pw_gid) == expected


@pytest.mark.parametrize("change", [leave_open, give_away, leave_open_to_the_group, leave_parent_open])
def test_folder_of_other_users_is_neither_read_nor_written(kept, monkeypatch, capsys, change):
    folder, _ = kept
    (path,) = folder.iterdir()
    mode = folder.parent.stat().st_mode
    why = change(folder, monkeypatch)
    before = path.stat().st_mtime_ns
    try:
        assert compiled_by(folder) == 1
    finally:
        folder.parent.chmod(mode)  # other tests have folders there
    assert path.stat().st_mtime_ns == before
    assert capsys.readouterr().err.startswith(f"compiled programs are not kept: {why}, ")


def test_new_folder_is_closed_to_other_users(tmp_path):
    folder = tmp_path / "shared" / ".programs"
    assert [compiled_by(folder), compiled_by(folder)] == [1, 0]
    assert folder.stat().st_mode & 0o777 == 0o700


LONG_AGO = time.time() - (program_store.DAYS + 1) * 24 * 3600


def test_programs_of_long_ago_are_deleted(kept):
    """A start that compiles deletes them, of every process; other files in the folder stay."""
    folder, _ = kept
    (path,) = folder.iterdir()
    old = [folder / f"jit_update-{'0' * 32}-{i}-of-16" for i in (0, 15)]
    others = [folder / name for name in ("notes.txt", "jit_update-0-of-2", f"jit_update-{'0' * 32}-0-of-2.tmp")]
    recent = folder / f"jit_update-{'1' * 32}-0-of-2"
    for file in (*old, *others, recent):
        file.write_bytes(b"content")
    for file in (path, *old, *others):
        os.utime(file, (LONG_AGO, LONG_AGO))
    assert compiled_by(folder) == 0
    assert all(file.exists() for file in old)  # it compiled nothing
    assert compiled_by(folder, order=TURNED) == 1
    assert path.exists()  # the start before has used it
    assert recent.exists()
    assert [file.exists() for file in (*old, *others)] == [False] * 2 + [True] * 3


def test_other_processes_delete_no_program(kept, monkeypatch):
    (path,) = kept[0].iterdir()
    os.utime(path, (LONG_AGO, LONG_AGO))
    simulate_processes(monkeypatch, jax.process_count(), 1)
    assert compiled_by(kept[0], order=TURNED) == 1
    assert path.exists()


def test_program_that_was_deleted_meanwhile_is_no_failure(kept, monkeypatch):
    times = {f"jit_update-{'0' * 32}-0-of-2": LONG_AGO}
    monkeypatch.setattr(program_store, "_list_times", lambda folder: times)
    program_store.delete_unused(kept[0])


@pytest.mark.usefixtures("memory_buckets")
def test_programs_of_long_ago_are_deleted_from_a_bucket(tmp_path, monkeypatch):
    folder = places.new_place("memory", tmp_path).parent / "old" / ".programs"
    assert compiled_by(folder) == 1
    monkeypatch.setattr(program_store, "DAYS", -1)  # all are older than tomorrow
    assert compiled_by(folder, order=TURNED) == 1
    monkeypatch.undo()
    assert [compiled_by(folder), compiled_by(folder, order=TURNED)] == [1, 1]


@pytest.mark.usefixtures("memory_buckets")
def test_programs_are_kept_in_a_bucket(tmp_path):
    folder = places.new_place("memory", tmp_path).parent / ".programs"
    assert [compiled_by(folder), compiled_by(folder)] == [1, 0]


@pytest.mark.usefixtures("memory_buckets")
@pytest.mark.parametrize("same_path", [False, True])
def test_copied_programs_of_a_bucket_are_not_loaded(tmp_path, capsys, same_path):
    """A stranger's folder holds code, and its seal comes along; only the time of the copy is not the stranger's."""
    folder = places.new_place("memory", tmp_path).parent / f"stranger-{same_path}" / ".programs"
    assert compiled_by(folder) == 1
    target = folder if same_path else folder.parent.parent / "own" / ".programs"
    for name in bucket.list_objects(folder):
        (target / name).write_bytes((folder / name).read_bytes())
    assert [compiled_by(target), compiled_by(target)] == [1, 0]
    assert capsys.readouterr().err.count("damaged or was copied here and is compiled again") == 1


@pytest.mark.usefixtures("memory_buckets")
def test_bucket_that_cannot_be_read_keeps_no_program(tmp_path, monkeypatch, capsys):
    let_fail(monkeypatch, bucket, "head", OSError("denied"))
    folder = places.new_place("memory", tmp_path).parent / "denied" / ".programs"
    assert [compiled_by(folder), compiled_by(folder)] == [1, 1]
    assert f"compiled programs are not kept: {folder}: denied" in capsys.readouterr().err


def test_jit_without_a_store_is_that_of_jax():
    program = programs.jit(jnp.sin, out_shardings=NamedSharding(mesh_in(ORDER), P()))
    assert type(program) is type(jax.jit(jnp.sin))
