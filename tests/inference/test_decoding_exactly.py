"""Each function of the decoder gives the logits of the dense reference, in float64, on every mesh."""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.model import Chunk, Decoder
from shardformer.shards.parameters import map_stacked
from tests import meshes, shared
from tests.inference.test_generator import OVER_DP, ROWS

SEQ, ROUNDS = 8, 3
LENGTHS = np.array([5, 3, 4, 1], np.int32)
BOUND = 1e-12
ACROSS_CONTEXT = ("rotary, parallel, scanned", "windows, unrolled", "latents", "experts")
# longrope changes the frequencies of a growing text: the generator reads its context again.
FIXED = [row for row in ROWS if "longrope" not in row]
EXTENDED = "4x2"  # the mesh of extensions: one text for each shard of dp
FORMS = ("rotary, parallel, scanned", "none, parallel, unrolled", "latents", "experts")
CASES = [(row, "2x4") for row in FIXED] + [(row, "dp2.cp2.mp2") for row in ACROSS_CONTEXT]
CASES += [(ACROSS_CONTEXT[0], "dp2.cp4.mp1"), *((row, "2x2") for row in OVER_DP)]


@functools.cache
def decoder_and_parameters(row: str, mesh: str):
    config = shared.tiny(**{"mesh": mesh, "seq": SEQ, "heads": 4, "batch": 8} | (ROWS | OVER_DP)[row][0])
    params = verify_exact.draw_parameters(config)
    unstacked = map_stacked(lambda name, leaf: list(leaf), params)
    return Decoder(traced.make_trainer(config).model), params, unstacked


@functools.cache
def texts() -> np.ndarray:
    return np.random.default_rng(0).integers(0, shared.VOCAB, (len(LENGTHS), SEQ), np.int32)


def run(function, *arguments):
    return exact.run(trace_once(function), *arguments).outputs


@functools.cache
def trace_once(function):
    """Returns the function with a cache of its traces: each token of a text runs the same program."""
    return jax.jit(function, inline=True)


@functools.cache
def reference_logits(row: str) -> np.ndarray:
    """Returns the dense reference's logits [texts, SEQ, V] after each token."""
    decoder, params, _ = decoder_and_parameters(row, "1x1")
    return meshes.compute_logits(decoder.model.config, params, texts())


def assert_logits(got, row: str, lengths) -> None:
    """Compares the logits [B, V] after the first `lengths` tokens of each text with those of the dense reference."""
    assert_close(got[:, : shared.VOCAB], reference_logits(row)[np.arange(len(LENGTHS)), np.asarray(lengths) - 1])


def assert_close(got, expected) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=BOUND * np.abs(expected).max())


def project(row: str, hidden):
    """Returns the logits of vectors after the last norm."""
    params = decoder_and_parameters(row, "1x1")[1]
    if head := params.get("transformer/head"):
        return (hidden @ head["w"] + head.get("bias", 0))[..., : shared.VOCAB]
    return hidden @ params["transformer/embed"]["tokens"][: shared.VOCAB].T


@functools.cache
def prefill(row: str, mesh: str):
    """Returns the logits and the caches after the first tokens; every row ends just before slot 5."""
    decoder, params, _ = decoder_and_parameters(row, mesh)
    end = int(LENGTHS.max())
    return exact.run(lambda *args: decoder.prefill(*args, SEQ), params, texts(), LENGTHS, np.int32(end)).outputs


@pytest.mark.parametrize(("row", "mesh"), CASES)
def test_decoding_equals_full_passes(row, mesh):
    decoder, _, unstacked = decoder_and_parameters(row, mesh)
    logits, caches = prefill(row, mesh)
    assert_logits(logits, row, LENGTHS)
    for i in range(ROUNDS):
        positions, slot = LENGTHS + np.int32(i), np.int32(LENGTHS.max() + i)
        tokens = texts()[np.arange(len(LENGTHS)), positions]
        logits, caches = run(decoder.decode, unstacked, tokens, positions, caches, slot)
        assert_logits(logits, row, positions + 1)


def test_decoding_in_another_slot_is_noticed():
    row, mesh = next(iter(ROWS)), "2x4"
    decoder, _, unstacked = decoder_and_parameters(row, mesh)
    _, caches = prefill(row, mesh)
    tokens = texts()[np.arange(len(LENGTHS)), LENGTHS]
    logits, _ = run(decoder.decode, unstacked, tokens, LENGTHS, caches, np.int32(0))
    with pytest.raises(AssertionError):
        assert_logits(logits, row, LENGTHS + 1)


@functools.cache
def empty(row: str):
    """Returns the logits and caches without tokens of each row, with as many slots in a window's as in others."""
    logits, caches = prefill(row, EXTENDED)
    return logits, jax.tree.map(
        lambda x_BhSK: np.zeros((*x_BhSK.shape[:2], SEQ, x_BhSK.shape[3]), x_BhSK.dtype), caches
    )


def make_chunks() -> list[Chunk]:
    """Returns two chunks of a row of each shard of dp, the last of which has padding."""
    chunks = []
    for start, stop in ((0, 3), (3, 6)):
        sizes = np.clip(LENGTHS - start, 0, stop - start).astype(np.int32)
        position = np.full(len(LENGTHS), start, np.int32)
        chunks.append(Chunk(texts()[:, start:stop], np.zeros_like(LENGTHS), position, sizes, LENGTHS))
    return chunks


@pytest.mark.parametrize("row", FIXED)
def test_extending_equals_full_passes(row):
    """As `serve` does: a chunk of one row of each shard of dp, then a token of each row in the slot of its position."""
    decoder, _, unstacked = decoder_and_parameters(row, EXTENDED)
    assert_logits(prefill(row, EXTENDED)[0], row, LENGTHS)
    logits, caches = empty(row)
    expected, bound = reference_logits(row), BOUND * np.abs(reference_logits(row)).max()
    for chunk in make_chunks():
        every, new = run(decoder.extend_with_logits, unstacked, chunk, logits, caches)
        logits, caches = run(decoder.replace_rows, chunk.row, (logits, caches), new)
        for d, (start, size) in enumerate(zip(chunk.position, chunk.count, strict=True)):
            found = every[d, :size, : shared.VOCAB]
            np.testing.assert_allclose(found, expected[d, start : start + size], rtol=0, atol=bound)
    tokens = texts()[np.arange(len(LENGTHS)), LENGTHS]
    logits, caches = run(decoder.decode, unstacked, tokens, LENGTHS, caches)
    assert_logits(logits, row, LENGTHS + 1)


@pytest.mark.parametrize("row", FORMS)
def test_each_form_of_an_extension_is_the_same(row):
    """The three differ only after the layers, so these rows have the heads of all."""
    decoder, _, unstacked = decoder_and_parameters(row, EXTENDED)
    logits, caches = empty(row)
    for chunk in make_chunks():
        new = run(decoder.extend, unstacked, chunk, logits, caches)
        every, (_, with_logits) = run(decoder.extend_with_logits, unstacked, chunk, logits, caches)
        hidden, (_, with_hidden) = run(decoder.extend_with_hidden, unstacked, chunk, logits, caches)
        jax.tree.map(np.testing.assert_array_equal, with_logits, new[1])
        jax.tree.map(np.testing.assert_array_equal, with_hidden, new[1])
        assert_close(project(row, hidden), every[..., : shared.VOCAB])
        logits, caches = run(decoder.replace_rows, chunk.row, (logits, caches), new)
    assert_logits(logits, row, LENGTHS)
