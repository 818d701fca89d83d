"""The choice of the attention method: by the limits of kernels, by the length of rows, and between ring and gather."""

import pytest

from shardformer.cli.show_command import format_choices
from shardformer.devices.chips import CPU, Hardware
from shardformer.errors import UsageError
from shardformer.kernels import typed_pallas
from shardformer.kernels.attention import AttentionOptions, Plain
from shardformer.kernels.blockwise_attention import Blocks
from shardformer.kernels.fused_attention import Kernel
from shardformer.layout import resolve
from shardformer.layout.attention_limits import Rows, reason_against_kernel
from shardformer.layout.choose_attention import choose_attention, without_kernel
from shardformer.layout.choose_context import EXCHANGE, choose_ring_or_gather, find_waits, reason_against_ring
from shardformer.layout.choose_layers import Loop
from shardformer.parallel.ring_attention import Gathered, Ring
from tests import shared

TPU, AMPERE, HOPPER = Hardware("tpu"), Hardware("gpu", 8.0), Hardware("gpu", 9.0)
KERNEL = {"dtype": "bfloat16", "seq": 2048, "heads": 2, "d_model": 128, "mesh": "1x1"}


def chosen(config, hardware, tokens, **rows):
    return choose_attention(config, hardware, Rows(tokens, **rows)).attention


def assert_fused_is_rejected(config, hardware, tokens, reason, **rows):
    """Raises when it attends, so that devices without a kernel can be planned for."""

    def attend():
        method = chosen(config.replace(attention="fused"), hardware, tokens, **rows)
        method.attend(None, None, None, AttentionOptions(None))

    with pytest.raises(UsageError, match=f"attention=fused.*{reason}.*; give attention=auto"):
        attend()


@pytest.mark.parametrize(
    ("attention", "tokens", "method"),
    [
        ("auto", 255, Plain()),
        ("auto", 256, Plain(groups=4)),
        ("auto", 1023, Plain(groups=4)),
        ("auto", 1024, Blocks(block=64)),
        ("blocks", 512, Blocks(block=64)),
        ("plain", 2048, Plain(groups=4)),
    ],
)
def test_cpu_uses_groups_from_256_and_blocks_from_1024_tokens(attention, tokens, method):
    assert chosen(shared.tiny(attention=attention, seq=2048), CPU, tokens) == method


@pytest.mark.parametrize(
    ("hardware", "options"), [(CPU, {"dtype": "bfloat16"}), (CPU, {"kv_heads": 1}), (Hardware("gpu"), {})]
)
def test_others_attend_in_one_group(hardware, options):
    assert chosen(shared.tiny(attention="plain", seq=512, **options), hardware, 512) == Plain()


def test_layout_holds_the_choice_and_its_reason():
    layout = resolve(shared.tiny(attention="blocks"))
    assert layout.attention == Blocks(16)
    assert layout.reasons["attention"] == "attention=blocks"
    assert resolve(shared.tiny(dropout=0.1)).rows == Rows(16, dropout=True)
    longer = layout.for_rows(Rows(2048))
    assert longer.attention == Blocks(128)
    assert longer.for_rows(Rows(2048)) is longer


@pytest.mark.parametrize(
    ("hardware", "changes", "rows", "reason"),
    [
        (CPU, {}, {}, "cpu devices have no kernel"),
        (TPU, {}, {"tokens": 100}, "a multiple of 128 tokens, got 100"),
        (TPU, {}, {"tokens": 192}, "a multiple of 128 tokens, got 192"),
        (TPU, {"d_model": 320}, {}, "at most 128 or a multiple of it, got 160"),
        (TPU, {}, {"dropout": True}, "no kernel takes dropout"),
        (AMPERE, {"dtype": "float32"}, {}, "takes dtype=bfloat16, got float32"),
        (AMPERE, {"d_model": 512}, {}, "a multiple of 8 up to 128 here, got 256"),
        (HOPPER, {"d_model": 1024}, {}, "a multiple of 8 up to 256 here, got 512"),
        (Hardware("gpu", 7.5), {}, {}, "compute capability 8.0 or more, got 7.5"),
        (AMPERE, {}, {"documents": True}, "does not stop where documents do"),
        (AMPERE, {"attention_cap": 5.0}, {}, "cuDNN's kernel takes no attention_cap"),
        (TPU, {"sinks": True}, {}, "no kernel takes sinks"),
        (AMPERE, {"sinks": True}, {}, "no kernel takes sinks"),
        (TPU, {"window": 64, "window_chunks": True}, {}, "no kernel takes window_chunks"),
        (AMPERE, {"kv_latent": 8, "rotary_dims": 4}, {}, "no kernel takes values of another size than keys"),
    ],
)
def test_limits_of_a_kernel_lead_to_blocks_or_an_error(hardware, changes, rows, reason):
    rows = {"tokens": 2048} | rows
    config = shared.tiny(**KERNEL | changes)
    assert isinstance(chosen(config, hardware, **rows), Blocks if rows["tokens"] >= 1024 else Plain)
    assert_fused_is_rejected(config, hardware, reason=reason, **rows)


def test_jax_without_the_kernel_of_a_tpu_leads_to_blocks(monkeypatch):
    config = shared.tiny(**KERNEL)
    assert chosen(config, TPU, tokens=2048).uses_kernel
    monkeypatch.setattr(typed_pallas, "SPLASH", "jax.experimental.pallas.ops.tpu.moved")
    assert isinstance(chosen(config, TPU, tokens=2048), Blocks)
    assert_fused_is_rejected(config, TPU, reason="this JAX has no splash attention", tokens=2048)


def test_head_of_gptj_has_a_kernel_on_hopper():
    assert chosen(shared.tiny(**KERNEL | {"d_model": 512}), HOPPER, 2048) == Kernel("gpu")


@pytest.mark.parametrize(("hardware", "documents"), [(TPU, False), (TPU, True), (AMPERE, False)])
def test_auto_chooses_the_kernel_of_the_device(hardware, documents):
    for attention in ("auto", "fused"):
        config = shared.tiny(attention=attention, **KERNEL)
        assert chosen(config, hardware, 2048, documents=documents) == Kernel(hardware.platform)
    assert chosen(shared.tiny(attention="plain", **KERNEL), hardware, 2048, documents=documents) == Plain()
    for positions in ("t5", "alibi"):
        config = shared.tiny(positions=positions, **KERNEL)
        assert isinstance(chosen(config, hardware, 2048, documents=documents), Blocks)


def test_pattern_of_windows_in_stages_needs_whole_patterns():
    windows = {"kv_heads": 4, "window": 40, "window_pattern": "wf", "heads": 4}
    config = shared.tiny(**KERNEL | windows | {"mesh": "1x1x2", "layers": 4, "accum": 2})
    layout = resolve(config, TPU)
    assert (layout.attention, layout.loop) == (Kernel("tpu"), Loop(scan=True, types=2))
    reason = reason_against_kernel(config.replace(layers=6), TPU, Rows(2048))
    assert "wf in stages of 3 layers, which must be a multiple of the pattern's 2" in reason


SPLIT = {"mesh": "dp1.cp2.mp1", "seq": 512, "d_model": 512, "heads": 4, "dtype": "bfloat16"}


def test_tpu_computes_a_ring_by_its_kernel():
    assert chosen(shared.tiny(**SPLIT), TPU, 256, documents=True) == Ring(block=0)
    assert chosen(shared.tiny(**SPLIT), CPU, 256, documents=True).block


@pytest.mark.parametrize(
    ("changes", "hardware", "tokens", "reason"),
    [
        ({}, CPU, 256, "only a TPU"),
        ({"window": 100}, TPU, 256, "no window"),
        ({"context_parallel": "gather"}, TPU, 256, "context_parallel=gather"),
        ({"positions": "t5"}, TPU, 256, "positions=t5"),
        ({}, TPU, 128, "got 64"),  # tokens of a chunk
    ],
)
def test_reason_against_a_ring_of_kernels_is_printed(changes, hardware, tokens, reason):
    config = shared.tiny(**SPLIT | changes)
    assert reason in reason_against_ring(config, hardware, Rows(tokens))
    assert chosen(config, hardware, tokens).block
    assert_fused_is_rejected(config, hardware, tokens, reason)


def rates(flops=0.0, wire=0.0):
    return Hardware("cpu", flops=flops, wire=wire)


SLOW_WIRE, FAST_WIRE = rates(1e12, 1e6), rates(1e9, 1e15)
FEW_KEYS = {"mesh": "dp2.cp4.mp1", "heads": 8, "kv_heads": 1, "seq": 512}


@pytest.mark.parametrize(
    ("changes", "hardware", "method"),
    [
        ({}, rates(), "gather"),
        ({}, SLOW_WIRE, "ring"),
        ({}, FAST_WIRE, "gather"),
        ({"kv_heads": 2}, FAST_WIRE, "ring"),  # gathered keys and values would take twice the memory of the queries
        ({"context_parallel": "gather"}, SLOW_WIRE, "gather"),
    ],
)
def test_auto_chooses_by_memory_then_by_time(changes, hardware, method):
    config = shared.tiny(**FEW_KEYS | changes)
    assert choose_ring_or_gather(config, hardware)[0] == method
    assert isinstance(resolve(config, hardware).attention, {"ring": Ring, "gather": Gathered}[method])


def test_waits_are_those_of_the_roofline():
    config = shared.tiny(**FEW_KEYS | {"batch": 4, "d_model": 64, "dtype": "bfloat16"})
    flops = 4 * 2 * (128 * 128 / 2) * 64  # two rows of a device, 128 x 128 tokens of which the mask leaves half
    sent = 2 * 2 * 128 * 8 * 2  # keys and values of two rows, 128 tokens, one head of 8, two bytes
    hidden = find_waits(config, rates(flops, sent / 0.75))  # a step computes for 1 s and sends for 0.75 s
    assert hidden == {"ring": pytest.approx(3 * EXCHANGE), "gather": pytest.approx(3 * 0.75 + EXCHANGE)}
    exposed = find_waits(config, rates(flops, sent / 3))
    assert exposed == {"ring": pytest.approx(3 * (2 + EXCHANGE)), "gather": pytest.approx(9 + EXCHANGE)}


def test_show_prints_the_choice_and_its_reason():
    shown = format_choices(shared.tiny(**FEW_KEYS | {"batch": 2, "seq": 65_536, "d_model": 1024}))
    assert "gather, blocks of 128 tokens  keys and values of complete rows take 1 times" in shown
    assert "ring, blocks of 128 tokens    a layer waits" in shown


def test_split_context_without_a_kernel_is_in_blocks():
    """A trace without the device: the ring's kernel becomes a ring of blocks, and plain attention stays."""
    on_tpu = shared.tiny(**KERNEL | {"seq": 4096, "mesh": "dp1.cp2.mp1", "context_parallel": "ring"})
    layout = resolve(on_tpu, TPU)
    ring = without_kernel(layout.attention, on_tpu, layout.rows)
    assert layout.attention.uses_kernel
    assert isinstance(ring, Ring)
    assert not ring.uses_kernel
    plain = chosen(shared.tiny(mesh="1x1"), CPU, 16)
    assert without_kernel(plain, shared.tiny(mesh="1x1"), Rows(16)) is plain
