"""`inspect` and `diff` of checkpoints, GPT-J's shards and safetensors, made small by hand."""

import json
import os
import sys
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.convert import safetensors_files, shard_files

WEIGHTS = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)


def save(out, weights=WEIGHTS, **more):
    state = {"step": jnp.int32(7), "params": {"w": jnp.asarray(weights), **more}}
    return checkpoint.save(out, 7, state, {"progress.json": "{}"})


def lines(capsys, *words, status=0):
    assert main([*map(str, words)]) == status
    return capsys.readouterr().out.splitlines()


def test_inspect_lists_the_newest_checkpoint(tmp_path, capsys):
    folder = save(tmp_path / "run", bias=jnp.array([1.0, jnp.nan], jnp.bfloat16))
    first, header, *rows, last = lines(capsys, "inspect", tmp_path / "run")
    assert first == str(folder)
    assert header.split() == ["array", "shape", "dtype", "split", "norm", "largest", "note"]
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert found["params/w"][:2] == ["2x2", "float32"]
    assert found["params/w"][-2:] == ["5.0000", "4.0000"]
    assert " ".join(found["params/bias"][:2]) == "2 bfloat16"
    assert " ".join(found["params/bias"][-5:]) == "1.0000 1.0000 1 not finite"
    assert found["step"][:2] == ["scalar", "int32"]
    assert last == "3 arrays, 7 numbers, 24 B; all bytes read, all checksums right"
    *_, last = lines(capsys, "inspect", folder, "norms=false")
    assert last == "3 arrays, 7 numbers, 24 B; arrays not read (norms=false)"


def test_inspect_finds_damage(tmp_path, capsys):
    path = save(tmp_path / "run") / "arrays.npy"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert main(["inspect", str(tmp_path / "run")]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_inspect_reads_shards_and_safetensors(tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    shard_files.write_shard(tmp_path / "shards", 0, [lambda: WEIGHTS] * 16)
    rows = lines(capsys, "inspect", tmp_path / "shards")
    assert sum("2x2" in row and "5.0000" in row for row in rows) == 16
    made = safetensors_files.CreatedTensor("w", WEIGHTS.dtype, WEIGHTS.shape, lambda: WEIGHTS)
    (tmp_path / "hf").mkdir()
    safetensors_files.write_tensors(tmp_path / "hf", [made], 10**6)
    for place in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        rows = lines(capsys, "inspect", place)
        assert [row.split()[0] for row in rows[2:-1]] == ["w"]


def test_diff_lists_what_differs_most_first(tmp_path, capsys):
    other = WEIGHTS + np.float32([[0, 0.5], [0, 0]])
    a = save(tmp_path / "a", same=jnp.ones(3), far=jnp.ones(2), alone=jnp.ones(1), cut=jnp.ones(2))
    b = save(tmp_path / "b", other, same=jnp.ones(3), far=jnp.array([1.0, 9.0]), cut=jnp.ones(3))
    assert lines(capsys, "diff", a, tmp_path / "a")[-1] == "arrays: 6 equal, 0 different"
    _, *rows, only, last = lines(capsys, "diff", a, b, status=1)
    assert [row.split()[0] for row in rows] == ["params/cut", "params/far", "params/w"]
    assert "shape 2 against 3" in rows[0]
    assert rows[1].split()[1:] == ["8.0000", "5.6569"]
    assert rows[2].split()[1:] == ["0.5000", "0.1000"]
    assert only == f"only in {a}: params/alone"
    assert last == "arrays: 2 equal, 3 different"


def test_diff_counts_a_new_nan(tmp_path, capsys):
    a = save(tmp_path / "a", np.float32([np.nan, np.inf, 1.0]))
    b = save(tmp_path / "b", np.float32([np.nan, np.inf, np.nan]))
    assert lines(capsys, "diff", a, a)[-1] == "arrays: 2 equal, 0 different"
    assert lines(capsys, "diff", a, b, status=1)[-1] == "arrays: 1 equal, 1 different"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect"], "inspect takes one run, checkpoint, shards or safetensors"),
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "."], "is not a run, a checkpoint"),
        (["diff", "."], "diff takes two"),
        (["diff", ".", ".", "most=-1"], "most must not be negative"),
    ],
)
def test_invalid_arguments(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_inspect_rejects_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "shard_0").mkdir()
    os.mkfifo(tmp_path / "shard_0" / "0.npz")
    for path in (tmp_path / "a.safetensors", tmp_path):
        assert main(["inspect", str(path)]) == 1
        assert "It is a pipe or a device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("descr", "shape", "message"),
    [
        ("<i8", "(-1,)", "0.npz is damaged"),
        ("<i8", f"({2**40},)", "0.npz is damaged"),
        ("<i8", f"({2**62}, 0)", "0.npz is damaged"),
        ("<i8", "(True,)", "0.npz is damaged"),
        ("|S8", "(1,)", "an array of |S8 holds no numbers"),
        ("<f4,<f4", "(1,)", "holds no numbers"),
    ],
)
def test_inspect_rejects_impossible_arrays(tmp_path, capsys, descr, shape, message):
    """A damaged header causes one line: neither a traceback nor an allocation of its size."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\1" * 8
    (tmp_path / "shard_0").mkdir()
    for piece in range(shard_files.PIECES):
        with zipfile.ZipFile(tmp_path / "shard_0" / f"{piece}.npz", "w") as archive:
            archive.writestr("arr_0.npy", content)
    assert main(["inspect", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("columns", "is_table"), [(20, False), (200, True)])
def test_inspect_fits_a_narrow_terminal(tmp_path, capsys, monkeypatch, columns, is_table):
    folder = save(tmp_path / "run")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, *listed, last = lines(capsys, "inspect", folder)
    assert (listed[0].split() == ["array", "shape", "dtype", "split", "norm", "largest", "note"]) == is_table
    assert ("  shape 2x2" in listed) != is_table
    assert is_table or max(map(len, listed)) <= columns
    assert last.startswith("2 arrays")


def test_inspect_escapes_terminal_controls(tmp_path, capsys):
    """A name in someone else's file may clear the screen, retitle the window or forge a line."""
    name = "w\x1b[2J\x1b]0;title\x07\nforged"
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "strange.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "w\\x1b[2J\\x1b]0;title\\x07\\nforged" in printed
    assert all(c.isprintable() for c in printed.replace("\n", ""))
    assert main(["diff", str(path), str(path)]) == 0
