"""2,000 checkpoints with one file changed: each raises Damaged, in little time and memory."""

import dataclasses
import json
import os
import pickle
import random
import time
import tracemalloc
import zlib

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import Damaged, array_files, manifest, store
from tests.checkpoint import places
from tests.checkpoint.cases import bits, here, like, small_state
from tests.checkpoint.places import object_of

FILES = {"tree.pkl": 700, "manifest.json": 700, "arrays.npy": 600}
SECONDS, MEMORY = 5, 2**26  # of any one refusal


@pytest.fixture(scope="module")
def saved(kind, tmp_path_factory):
    return checkpoint.save(places.new_place(kind, tmp_path_factory.mktemp("run")), 40, small_state(), {})


def flip(draw: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(draw: random.Random, raw: bytes) -> bytes:
    return raw[: draw.randrange(len(raw))]


def lengthen(draw: random.Random, raw: bytes) -> bytes:
    return raw + draw.randbytes(draw.randint(1, 100))


def overwrite(draw: random.Random, raw: bytes) -> bytes:
    start = draw.randrange(len(raw))
    noise = draw.choice((draw.randbytes(16), bytes(16), b"\xff" * 16))[: len(raw) - start]
    return raw[:start] + noise + raw[start + len(noise) :]


def exchange(draw: random.Random, raw: bytes) -> bytes:
    """Two stretches of it, as when blocks of a disk are."""
    size = draw.randint(1, len(raw) // 4)
    a, b = sorted(draw.sample(range(len(raw) // size), 2))
    parts = [raw[i : i + size] for i in range(0, len(raw), size)]
    parts[a], parts[b] = parts[b], parts[a]
    return b"".join(parts)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(draw: random.Random, trace) -> bytes:
    """Pickles that would run something, or take all memory or time, if they were loaded as pickles are."""
    function, *arguments = draw.choice([
        (os.system, f"touch {trace}"), (os.mkdir, str(trace)), (eval, f"open({str(trace)!r}, 'w')"), (exec, "1 / 0"),
        (getattr, "x", "upper"), (open, str(trace), "w"), (__import__, "antigravity"), (bytearray, 2**40),
        (np.zeros, (3,), "O"),
    ])  # fmt: skip
    call = Call(function, *arguments)
    value = draw.choice([call, {"wide": call}, {"wide": ("float32", (call,))}, [call], {call: 1}])
    raw = [
        lambda: pickle.dumps(value, protocol=draw.randint(0, 5)),
        lambda: pickle.dumps(np.array([None, 1], object), protocol=draw.randint(0, 5)),
        lambda: pickle.dumps({"wide": ("float32", (2 ** draw.randint(40, 62),) * draw.randint(1, 64))}, protocol=4),
        lambda: b"\x80\x04}" + b")" + b"\x85" * draw.randint(100, 10_000) + b"K\x01s.",  # a deep key
        lambda: b"\x80\x04}" + b"]" * draw.randint(100, 10_000) + b".",
        lambda: b"\x80\x04}(" * draw.randint(100, 10_000) + b".",
        lambda: b"\x80\x04}r" + draw.randbytes(4) + b".",  # a memo as long as it says
        lambda: b"\x80\x04\x8d" + draw.randbytes(7) + b"\x7f" + b".",  # a string as long as it says
        lambda: b"\x80\x04\x8b" + draw.randbytes(3) + b"\x7f" + b".",  # a number as long as it says
        lambda: b"\x80\x04}\x8c\x04../x)s" + draw.randbytes(20) + b".",
    ]
    return draw.choice(raw)()


def signed(folder, change) -> None:
    """A manifest whose checksum fits, as an attacker's would."""
    content = json.loads((folder / store.MANIFEST).read_bytes())
    change(content)
    (folder / store.MANIFEST).write_bytes(manifest._sign(content).encode())


def hostile_manifest(draw: random.Random, content: dict) -> None:
    """Changes one value anywhere in it to one that no checkpoint has there, and signs it."""
    at = [content["files"]["arrays.npy"], content["leaves"]["wide"], content["leaves"]["wide"]["pieces"][0]]
    at += [content["leaves"], content["files"]]
    target = draw.choice(at)
    key = draw.choice([key for key in target if key not in ("spec", "key")])
    nothing = [None, True, -1, 1.5, 2**63, 2**200, "../../etc/passwd", "object", {}, [[]], [[0, 2**62]], "x" * 10_000]
    deep = []
    for _ in range(200):
        deep = [deep]
    target[key] = draw.choice([*nothing, deep])


def change(name: str, draw: random.Random, folder, trace) -> None:
    path = object_of(folder, name)
    raw = path.read_bytes()
    crafted = draw.random() < 0.4
    if name == "tree.pkl" and crafted:
        path.write_bytes(hostile(draw, trace))
        entry = {"bytes": len(path.read_bytes()), "crc32": zlib.crc32(path.read_bytes())}
        signed(folder, lambda content: content["files"].update({name: entry}))
    elif name == "manifest.json" and crafted:
        signed(folder, lambda content: hostile_manifest(draw, content))
    else:
        changed = raw
        while changed == raw:
            changed = draw.choice((flip, truncate, lengthen, overwrite, exchange))(draw, raw)
        path.write_bytes(changed)


WHOLE = {
    (4,): [[((0, 4),)], [((0, 1),), ((1, 4),)]],
    (4, 6): [[((0, 4), (0, 2)), ((0, 4), (2, 6))], [(r, c) for r in ((0, 1), (1, 4)) for c in ((0, 3), (3, 6))]],
    (0, 4): [[((0, 0), (0, 4))], [((0, 0), (0, 2)), ((0, 0), (2, 4))]],
    (): [[()]],
}
NOT_WHOLE = {
    (4,): [[((0, 2),), ((1, 3),)], [((0, 2),), ((2, 3),)], [((0, 2),), ((0, 2),)], [((0, 3),), ((2, 4),)], []],
    (4, 6): [
        [((0, 4), (0, 3)), ((0, 2), (3, 6)), ((0, 2), (3, 6))],
        [((0, 2), (0, 6)), ((1, 3), (0, 6))],  # as many elements as there are
        [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3))],
        [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((0, 2), (3, 6))],
    ],
    (): [[], [(), ()]],
}


@pytest.mark.parametrize(
    ("shape", "boxes", "whole"),
    [(shape, boxes, cases is WHOLE) for cases in (WHOLE, NOT_WHOLE) for shape in cases for boxes in cases[shape]],
)
def test_pieces_that_overlap_or_leave_gaps_are_refused(tmp_path, shape, boxes, whole):
    """Signed and end to end in their file: but what they do not cover would be memory that nobody wrote."""
    saved = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    folder = checkpoint.save(tmp_path, 1, {"x": jax.numpy.asarray(saved)}, {})
    stored = manifest.read_manifest(folder)
    slices = [("x", box, saved[tuple(slice(*edges) for edges in box)]) for box in boxes]
    pieces, nbytes = array_files.write_arrays(folder / "arrays.npy", slices)
    leaf = dataclasses.replace(stored.leaves["x"], pieces=tuple(pieces.get("x", ())))
    made_up = manifest.Manifest({"x": leaf}, stored.files | {"arrays.npy": {"bytes": nbytes}})
    (folder / store.MANIFEST).write_text(made_up.to_text())
    wanted = {"x": jax.ShapeDtypeStruct(shape, np.float32, sharding=here())}
    if whole:
        np.testing.assert_array_equal(checkpoint.restore(folder, wanted)["x"], saved)
    else:
        with pytest.raises(Damaged, match="the pieces of leaf 'x' do not cover it exactly once"):
            checkpoint.restore(folder, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_mutation_is_refused(saved, kind, out, tmp_path, name):
    folder, trace = places.copy(saved, out / saved.name), tmp_path / "trace"
    sound = {file: object_of(folder, file) for file in FILES}
    sound = {path: path.read_bytes() for path in sound.values()}
    wanted = like(small_state(), lambda leaf: here())
    tracemalloc.start()
    try:
        for seed in range(0, FILES[name], 1 if kind == "disk" else 8):
            change(name, random.Random(f"{name} {seed}"), folder, trace)
            tracemalloc.reset_peak()
            before, start = tracemalloc.get_traced_memory()[0], time.process_time()
            with pytest.raises(Damaged) as refusal:
                checkpoint.restore(folder, wanted)
            assert str(folder) in str(refusal.value), seed
            assert len(str(refusal.value)) < 2000, seed
            assert time.process_time() - start < SECONDS, seed
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY, seed
            for path, raw in sound.items():
                path.write_bytes(raw)
    finally:
        tracemalloc.stop()
    assert not trace.exists()
    assert bits(checkpoint.restore(folder, wanted)) == bits(small_state())


def test_hostile_pickles_run_code_under_plain_pickle(tmp_path):
    """The negative twin: `pickle.loads` runs some of them."""
    trace = tmp_path / "trace"
    corpus = [hostile(random.Random(f"tree.pkl {seed}"), trace) for seed in range(100)]
    pickle.loads(next(pickled for pickled in corpus if b"system" in pickled and b"touch" in pickled))
    assert trace.exists()
