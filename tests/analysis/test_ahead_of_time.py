"""The TPU compiler's collectives on absent chips, of ZeRO and of a ring; needs libtpu, of the extra `aot`."""

import functools
import re

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.analysis import compiling, memory
from shardformer.devices import chips
from shardformer.experts import grouped_product
from shardformer.kernels import fused_attention
from shardformer.kernels.blockwise_attention import Mask, Sizes
from shardformer.layout import torus
from shardformer.model import Decoder, Model
from shardformer.parallel import replicas
from shardformer.parallel.ring_attention import attend_in_ring
from shardformer.shards.parameters import map_stacked
from shardformer.training.trainer import Trainer
from tests import shared
from tests.surroundings import change_pieces

pytestmark = pytest.mark.skipif(not compiling.has_libtpu(), reason="needs libtpu: pip install 'shardformer[aot]'")

L, D, V = 2, 256, 256
LAYERS = 12 * L * D * D  # q, k, v, o, up and down
MATRICES = LAYERS + 2 * V * D  # and the head and the token table
VECTORS = L * (4 * D + D + 2 * D) + V + 2 * D  # biases and norms
STAGES = {"v5e:4x4": (4, 4), "v4:2x2x2": (2, 2, 2), "v5e:4x8": (4, 8)}
LARGE = {"v4:4x4x4": (16, 4), "v5e:8x8": (8, 8)}  # stages of gathers; XLA all-reduces the smallest gradients there


@pytest.fixture(scope="module", autouse=True)
def no_flags_of_cpus():
    """libtpu reads XLA_FLAGS when it is loaded, and ends the process at a flag that it does not know."""
    jax.jit(lambda: 0)()  # the CPU's compiler has read them by now
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@functools.cache
def compiled(name, zero):
    """The collectives of a step on all chips of a slice."""
    slice_ = chips.parse_slice(name)
    sizes = {"layers": L, "d_model": D, "vocab": V, "seq": 128, "batch": slice_.count, "dtype": "bfloat16"}
    config = shared.tiny(mesh=f"{slice_.count}x1", zero=zero, **sizes)
    return compiling.compile_step(config, compiling.tpu_mesh(config, slice_), "libtpu").collectives


def ring_program(name: str, block: int) -> str:
    """Returns the TPU's program of ring attention over all chips of a slice; blocks of 0 tokens are its kernel's."""
    slice_ = chips.parse_slice(name)
    config = shared.tiny(mesh=f"cp{slice_.count}", seq=8192, batch=1)
    spec = P(None, "mp", "cp", None)
    device_mesh = compiling.tpu_mesh(config, slice_)
    x = jax.ShapeDtypeStruct((1, 2, config.model.seq, 128), "bfloat16", sharding=NamedSharding(device_mesh, spec))

    def attend(q, k, v):
        return attend_in_ring(q, k, v, Mask(), Sizes(block, config.model.seq, 0.0, None))

    mapped = jax.shard_map(attend, mesh=device_mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(x, x, x).compile().as_text()


@pytest.mark.parametrize(("block", "turn"), [(128, "while"), (0, "custom-call")])
def test_a_ring_sends_while_it_computes(block, turn):
    """Each turn's loop, or kernel, is between the starts and the ends of the next turn's two sends."""
    entry = ring_program("v5e:2x2", block).partition("ENTRY")[2]
    events = re.findall(r"%(\S+) = .* (collective-permute-start|collective-permute-done|while|custom-call)\(", entry)
    under_way, found = 0, []
    for name, event in events:
        under_way += {"collective-permute-start": 1, "collective-permute-done": -1}.get(event, 0)
        if event == turn and (event == "while" or name.startswith("splash")):
            found.append(under_way)
    assert found == [2, 2, 2, 0]


def bytes_of(found, operation, dtype):
    return sum(c.times * c.bytes for c in found if (c.operation, c.dtype) == (operation, dtype))


def largest_sum(found):
    return max(c.bytes for c in found if c.operation == "all-reduce")


def staged_bytes(name, elements):
    """The bytes that a device keeps after each stage."""
    part, kept = 4 * elements, 0
    for size in STAGES[name]:
        part //= size
        kept += part
    return kept


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_are_scattered_not_all_reduced(name, zero):
    """With zero=3, devices exchange parts of the layers' gradients, where dimensions are short."""
    found, exchanged = compiled(name, zero), LAYERS if zero == 3 and name != "v5e:4x8" else 0
    assert bytes_of(found, "all-to-all", "f32") == 4 * exchanged
    assert bytes_of(found, "reduce-scatter", "f32") == staged_bytes(name, MATRICES - exchanged)
    assert largest_sum(found) <= 4 * L * 4 * D  # a vector's, too small to be worth a scatter


def exchanging_program() -> str:
    """Returns a step with six gradients in a loop, four of 256 x 256 and two of 512 x 256."""
    sizes = {"layers": L, "d_model": D, "d_ff": 2 * D, "vocab": V, "seq": 128, "batch": 4, "dtype": "bfloat16"}
    config = shared.tiny(mesh="4x1", zero=3, **sizes)
    t = Trainer(config, compiling.tpu_mesh(config, chips.parse_slice("v5e:2x2")))
    return t.lower(t.abstract, t.abstract_batch)[0].compile().as_text()


@pytest.mark.parametrize(("elements", "sent"), [(1 << 24, 6), (D * D // 2, 14)])
def test_wide_gradients_are_computed_and_sent_in_pieces(monkeypatch, elements, sent):
    """Each piece is sent as its product leaves it: the concatenation between them is gone."""
    change_pieces(monkeypatch, elements)
    text = exchanging_program()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == sent
    assert not re.findall(rf"f32\[{D},(?:{D}|{2 * D})\]\S* concatenate\(", text)


def test_exchanges_run_beside_arithmetic(monkeypatch):
    """The option makes most of them asynchronous; none is without it."""
    assert " all-to-all-start(" in exchanging_program()
    monkeypatch.setattr(chips, "EXCHANGING", {})
    assert " all-to-all-start(" not in exchanging_program()


@pytest.mark.parametrize("name", STAGES | LARGE)
@pytest.mark.parametrize(("zero", "passes"), [(1, 1), (3, 2)])
def test_matrices_are_gathered_in_bfloat16(name, zero, passes):
    """Once with zero=1, however many layers; with zero=3 for the forward and for the backward pass.

    On large slices, the first of two stages leaves a part of the matrices.
    """
    found, stages = compiled(name, zero), 1 + 1 / LARGE[name][0] if name in LARGE else 1
    least = stages * 2 * (MATRICES - LAYERS + LAYERS * passes)
    assert least <= bytes_of(found, "all-gather", "bf16") <= least + stages * 4 * passes * VECTORS
    assert bytes_of(found, "all-gather", "f32") <= stages * 4 * passes * VECTORS


@pytest.mark.parametrize("name", LARGE)
def test_parts_of_large_slices_are_not_gathered_at_once(broken, name):
    """The twin: why gathers have stages."""

    def gather_at_once(x, dimension, stages, axes):
        return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)

    broken(replicas, "gather_parts", gather_at_once)
    assert largest_sum(compiled.__wrapped__(name, 3)) >= 2 * D * D


def test_full_gradients_are_summed_over_all_dimensions(broken):
    """The twin: why stages are worth their lines."""
    broken(torus, "factor_dp", lambda device_mesh: (8,))
    found = compiled.__wrapped__("v4:2x2x2", 1)
    assert largest_sum(found) >= 4 * L * 4 * D * D


def test_step_is_timed_by_its_schedule():
    slice_, config = chips.parse_slice("v5e:2x4"), shared.tiny(mesh="4x2")
    step = compiling.compile_step(config, compiling.tpu_mesh(config, slice_), "libtpu", slice_)
    held = memory.predict_bytes(config)
    assert step.arguments >= held.total - held.gradients
    assert {found.over((4, 2)) for found in step.collectives} <= {"dp", "mp", "dp mp", ""}
    assert 0 < step.timeline.exposed <= step.timeline.wire * 1.001  # rounded
    assert step.timeline.computing == pytest.approx(step.cycles / slice_.chip.clock, rel=0.2)


def kept_heads(heads: int, kv_heads: int) -> list[int]:
    """Returns the number of heads of each array of [L, B, heads, T, K] that the forward loop keeps for the backward."""
    layers, rows, tokens, head_dim = 3, 2, 512, 128
    config = shared.tiny(mesh="4x1", layers=layers, batch=4 * rows, seq=tokens, d_model=256, heads=heads,
                         head_dim=head_dim, kv_heads=kv_heads, dtype="bfloat16", attention="fused")  # fmt: skip
    t = Trainer(config, compiling.tpu_mesh(config, chips.parse_slice("v5e:2x2")))
    batch = jax.ShapeDtypeStruct((config.training.batch, tokens), "int32", sharding=t.model.sharding(t.model.row_spec))
    step = jax.jit(functools.partial(t.model.loss_and_grad, dropout_key=None))
    text = step.lower(t.abstract.params, {"tokens": batch, "targets": batch}).compile().as_text()
    forward, backward = (re.findall(rf"bf16\[{layers},{rows},(\d+),{tokens},{head_dim}\]", line.partition(" while(")[0])
                         for line in text.splitlines() if " while(" in line)  # fmt: skip
    assert sorted(forward) == sorted(backward)
    return sorted(map(int, forward))


def test_layers_keep_grouped_keys_and_values_once():
    """Queries and attended values have 8 heads; kept bytes of keys and values fall by h/g."""
    assert kept_heads(heads=8, kv_heads=2) == [2, 2, 8, 8]


def test_layers_keep_repeated_heads_in_full(broken):
    """The twin: heads repeated before the kernel are kept, and take h/g times the bytes."""
    attend = fused_attention.attend_by_kernel

    def attend_repeated(kernel, q, k, v, *rest):
        k, v = (jax.numpy.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return attend(kernel, q, k, v, *rest)

    broken(fused_attention, "attend_by_kernel", attend_repeated)
    assert kept_heads(heads=8, kv_heads=2) == [8] * 4


EXPERTS, PAIRS = 8, 2 * 2 * 256  # experts, and pairs of a token and an expert of each device
MIXED = {
    "mesh": "2x2", "layers": 2, "d_model": 256, "d_ff": 512, "heads": 2, "vocab": 256, "seq": 256, "batch": 4,
    "dtype": "bfloat16", "activation": "swiglu", "bias": "none", "experts": EXPERTS,
}  # fmt: skip


def lower_step() -> jax.stages.Lowered:
    config = shared.tiny(**MIXED)
    t = Trainer(config, compiling.tpu_mesh(config, chips.parse_slice("v5e:2x2")))
    return t.lower(t.abstract, t.abstract_batch)[0]


def lower_generation() -> list[jax.stages.Lowered]:
    """Returns generation's first pass, and that of the next token."""
    config = shared.tiny(**MIXED)
    model = Model.on(config, compiling.tpu_mesh(config, chips.parse_slice("v5e:2x2")))
    decoder = Decoder(model)

    def shape(dtype, spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=model.sharding(spec))

    tokens, lengths = shape("int32", P("dp"), 4, 256), shape("int32", P("dp"), 4)

    def prefill(params, tokens, lengths):
        return decoder.prefill(params, tokens, lengths, jax.numpy.int32(0), 256)

    def decode(params, tokens, caches):
        unstacked = map_stacked(lambda name, leaf: [leaf[i] for i in range(config.model.layers)], params)
        return decoder.decode(unstacked, tokens, tokens, caches, jax.numpy.int32(3))

    caches = jax.eval_shape(prefill, model.abstract, tokens, lengths)[1]
    caches = jax.tree.map(lambda x: shape(x.dtype, decoder.cache_spec, *x.shape), caches)
    first = jax.jit(prefill).lower(model.abstract, tokens, lengths)
    return [first, jax.jit(decode).lower(model.abstract, lengths, caches)]


def find_dense_copies(text: str) -> set[str]:
    """Returns the types of arrays that have all rows for each of this shard's experts, or matrices for each row."""
    experts = rf"\[{EXPERTS // 2},(?:1,)?{PAIRS},(?:256|512)\]"
    return set(re.findall(rf"(?:bf16|f32|pred)(?:{experts}|\[2,(?:1,|2,)?(?:256,512|512,256)\])", text))


def test_no_program_has_a_dense_copy_for_experts():
    for lowered in (lower_step(), *lower_generation()):
        text = lowered.compile().as_text()
        assert "tpu_custom_call" in text
        assert not find_dense_copies(text)


def test_dense_copy_of_ragged_dot_is_noticed(broken):
    """Libtpu makes a dense product of it on a v5e."""
    broken(grouped_product, "multiply_by_kernel", lambda x, w, sizes, *_: jax.lax.ragged_dot(x, w, sizes))
    assert find_dense_copies(lower_step().compile().as_text())


def offloaded_step(**keys) -> tuple[Trainer, jax.stages.Compiled]:
    sizes = {"layers": L, "d_model": D, "vocab": V, "seq": 128, "batch": 4, "dtype": "bfloat16"}
    config = shared.tiny(mesh="4x1", zero=3, param_dtype="bfloat16", **sizes, **keys)
    trainer = Trainer(config, compiling.tpu_mesh(config, chips.parse_slice("v5e:2x2")))
    return trainer, trainer.lower(trainer.abstract, trainer.abstract_batch)[0].compile()


def count_arithmetic_beside_copies(text: str, copy: str) -> list[int]:
    """Returns for each copy of a layer from or to the host's memory the fusions that run between its start and end."""
    found, lines = [], text.splitlines()
    for start, line in enumerate(lines):
        if match := re.match(rf"\s+%(\S+) = \(.*S\(5\).* {copy}-start\(", line):
            end = next(i for i in range(start, len(lines)) if f"{copy}-done(%{match[1]})" in lines[i])
            found.append(sum(" fusion(" in between for between in lines[start:end]))
    return found


def test_offloaded_state_is_copied_by_layer_beside_arithmetic():
    """Each layer's moments and masters come from the host's memory and go back while another matrix is updated."""
    trainer, step = offloaded_step(offload="optimizer")
    arrays = 3 * 6  # two moments and a master of six matrices
    assert step.memory_analysis().host_argument_size_in_bytes == memory.predict_bytes(trainer.config).host
    for copy in ("dynamic-slice", "dynamic-update-slice"):
        beside = count_arithmetic_beside_copies(step.as_text(), copy)
        assert len(beside) == arrays, copy
        assert sum(count > 0 for count in beside) > arrays / 2, copy
    assert_host_link_starts_early(step.as_text())
    for start in (" copy-start(", " dynamic-update-slice-start("):
        late = sorted(step.as_text().splitlines(), key=lambda line: start in line)
        with pytest.raises(AssertionError):
            assert_host_link_starts_early("\n".join(late))


def assert_host_link_starts_early(text: str) -> None:
    """Asserts that the table's state comes before the backward pass, and a layer's goes back while others come."""
    lines = text.splitlines()

    def find(pattern: str) -> list[int]:
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]

    (backward,) = find(r" while\(.*transpose\(jvp\(\)\)/while")
    assert min(find(r"S\(5\).* copy-start\(")) < backward
    assert min(find(r"S\(5\).* dynamic-update-slice-start\(")) < max(find(r" dynamic-slice-done\("))


def test_state_on_the_device_is_not_copied():
    _, step = offloaded_step()
    assert step.memory_analysis().host_argument_size_in_bytes == 0
    assert not count_arithmetic_beside_copies(step.as_text(), "dynamic-slice")


def test_tpu7x_has_two_devices_a_chip():
    config = shared.tiny(mesh="8x1")
    assert compiling.tpu_mesh(config, chips.parse_slice("tpu7x:2x2x1")).devices.size == 8
