"""Whatever lies in a checkpoint's files, restore gives the right arrays or a RunError that names the file."""

import io
import os
import pickle
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from shardformer import checkpoint
from shardformer.checkpoint import records
from shardformer.errors import RunError


def like(**leaves):
    here = SingleDeviceSharding(jax.devices()[0])
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for name, (dtype, shape) in leaves.items()}


LIKE = {"half": (jnp.bfloat16, (3,)), "step": (jnp.int32, ()), "wide": (jnp.float32, (4, 6))}
LAYOUT = {"half": ("bfloat16", (3,)), "step": ("int32", ()), "wide": ("float32", (4, 6))}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    state = {"half": jnp.ones(3, jnp.bfloat16), "step": jnp.int32(40), "wide": jnp.ones((4, 6))}
    return checkpoint.save(tmp_path_factory.mktemp("run"), 40, state, {})


@pytest.fixture
def damaged(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / sound.name)


def restore(folder, **changes):
    return checkpoint.restore(folder, like(**{**LIKE, **changes}))


def write_tree(folder, layout):
    (folder / "tree.pkl").write_bytes(pickle.dumps(layout, protocol=4))


def test_the_sound_one_is_sound(damaged):
    assert int(restore(damaged)["step"]) == 40


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], r"arrays.npy is truncated: leaf 'wide' takes 96 bytes, 95 are left"),
        (lambda raw: raw[:200], r"arrays.npy: leaf 'step' at byte 134 has the header .* expected .*'<i4'"),
        (lambda raw: b"", r"arrays.npy: leaf 'half' at byte 0 has the header b''"),
        (lambda raw: raw + b"\0", r"arrays.npy has 1 bytes after its last leaf, expected none"),
        (lambda raw: raw.replace(b"(4, 6)", b"(6, 4)"), r"leaf 'wide' .* the header .*\(6, 4\).* expected .*\(4, 6\)"),
        (lambda raw: raw.replace(b"<i4", b"<f4"), r"leaf 'step' .* has the header .*<f4.* expected .*<i4"),
        (lambda raw: raw.replace(b"False", b"True "), r"leaf 'half' .* has the header .*True"),
    ],
)  # fmt: skip
def test_damaged_arrays(damaged, damage, message):
    path = damaged / "arrays.npy"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunError, match=message) as refusal:
        restore(damaged)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({**LAYOUT, "more": ("int32", ())}, r"leaf 'more' was not expected"),
        ({"half": LAYOUT["half"], "step": LAYOUT["step"]}, r"leaf 'wide' is missing"),
        ({**LAYOUT, "half": ("float16", (3,))}, r"leaf 'half' is float16\[3\], expected bfloat16\[3\]"),
        ({**LAYOUT, "wide": ("float32", (6, 4))}, r"leaf 'wide' is float32\[6,4\], expected float32\[4,6\]"),
        ({**LAYOUT, "wide": ("float32", (2**60, 2**60))}, r"leaf 'wide' is float32\[1152921504606846976,"),
        ({**LAYOUT, "wide": ("float32", (1,) * 100_000)}, r"is damaged: expected one dict"),
        ({**LAYOUT, "wide": ("float32", (-4, 6))}, r"is damaged: expected one dict"),
        ({**LAYOUT, "wide": ("float32", [4, 6])}, r"cannot be read: it has the opcode EMPTY_LIST"),
        ({**LAYOUT, 3: ("float32", (4, 6))}, r"is damaged: expected one dict"),
        (tuple(LAYOUT.items()), r"is damaged: expected one dict"),
    ],
)
def test_a_tree_that_does_not_fit(damaged, layout, message):
    write_tree(damaged, layout)
    with pytest.raises(RunError, match=message) as refusal:
        restore(damaged)
    assert str(damaged / "tree.pkl") in str(refusal.value)


@pytest.mark.parametrize("dtype", ["object", "nonsense", "f4,f4", "<f4"])
def test_unknown_dtypes_of_leaves_left_out(damaged, dtype):
    write_tree(damaged, {"optimizer": (dtype, (3,)), **LAYOUT})
    with pytest.raises(RunError, match=f"tree.pkl: leaf 'optimizer' has the unknown dtype '{dtype}'"):
        checkpoint.restore(damaged, like(**LIKE), without=("optimizer",))


def test_bytes_after_the_tree(damaged):
    path = damaged / "tree.pkl"
    path.write_bytes(path.read_bytes() + b"N.")
    with pytest.raises(RunError, match=f"{path} is damaged: expected one dict .* and nothing else"):
        restore(damaged)


def test_another_configuration(damaged):
    with pytest.raises(RunError, match=r"leaf 'wide' is float32\[4,6\], expected float32\[8,6\].*config.json"):
        restore(damaged, wide=(jnp.float32, (8, 6)))


def test_a_giant_shape_allocates_nothing(damaged):
    """Tree, header and target agree on 4 TiB: only the size of the file tells."""
    shape = (2**40,)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    (damaged / "arrays.npy").write_bytes(header.getvalue())
    write_tree(damaged, {"wide": ("float32", shape)})
    tracemalloc.start()
    try:
        with pytest.raises(RunError, match="truncated: leaf 'wide' takes 4398046511104 bytes, 0 are left"):
            checkpoint.restore(damaged, like(wide=(jnp.float32, shape)))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["arrays.npy", "tree.pkl"])
def test_a_missing_file(damaged, name):
    (damaged / name).unlink()
    with pytest.raises(RunError, match=f"{damaged}.*{name}"):
        restore(damaged)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(RunError, match=f"{tmp_path / 'nowhere'} is not a checkpoint: it has no tree.pkl"):
        restore(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"has no config\.json"):
        checkpoint.document(tmp_path, "config.json")


class Hostile:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_by_name_and_does_not_run(damaged, protocol):
    trace = damaged / "trace"
    hostile = pickle.dumps({"wide": Hostile(f"touch {trace}")}, protocol=protocol)
    (damaged / "tree.pkl").write_bytes(hostile)
    wanted = f"asks for {os.system.__module__}.system" if protocol else "has the opcode DICT"
    with pytest.raises(RunError, match=f"tree.pkl cannot be read: it {wanted}"):
        restore(damaged)
    assert not trace.exists()
    pickle.loads(hostile)  # the twin: a plain load would have run it
    assert trace.exists()


def test_an_optimizer_class_in_the_pickle_is_refused_by_name(damaged):
    (damaged / "tree.pkl").write_bytes(b"\x80\x04\x8c\x05optax\x8c\tAdamState\x93.")
    with pytest.raises(RunError, match=r"asks for optax.AdamState"):
        restore(damaged)


def test_a_number_in_the_pickle_claims_no_memory(damaged):
    """LONG_BINPUT makes the unpickler's memo as long as it says: here 2 GiB."""
    (damaged / "tree.pkl").write_bytes(b"\x80\x04}r\xff\xff\xff\x07.")
    with pytest.raises(RunError, match="has the opcode LONG_BINPUT"):
        restore(damaged)


def test_every_flipped_bit_of_the_tree_and_the_headers_is_caught(damaged):
    """Flipped values of an array are beyond this format: it has no checksums."""

    def flipped(raw, bit):
        return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]

    def layout_or_none():
        try:
            layout = records.read_layout(damaged)
            records.Records(damaged, layout)
        except RunError:
            return None
        return layout

    for name, size in (("tree.pkl", None), ("arrays.npy", 128)):
        path = damaged / name
        raw = path.read_bytes()
        for bit in range(8 * (size or len(raw))):
            path.write_bytes(flipped(raw, bit))
            layout = layout_or_none()
            # A flip in a leaf's name, or in the pickle's frame, leaves a layout that describes the same records.
            assert layout is None or (name == "tree.pkl" and list(layout.values()) == list(LAYOUT.values())), bit
        path.write_bytes(raw)
    assert layout_or_none() == LAYOUT
