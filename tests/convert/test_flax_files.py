"""Flax's MessagePack files: read as Flax reads them, and hostile files are rejected."""

import json
import shutil
import struct

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import flax_files, weight_files
from shardformer.convert.flax_files import read_flax_file, read_stream
from shardformer.errors import RunError, UsageError
from tests.convert.hf_models import FOLDER
from tests.convert.record_flax import make_tree
from tests.convert.test_hf import params_of
from tests.runs import FAILED

RECORDED = FOLDER.parent / "flax"  # written by record_flax.py
NAMES = json.loads((RECORDED / "names.json").read_text())  # Flax's name -> PyTorch's, and whether it is transposed


def pack(value) -> bytes:
    """Writes what flax.serialization writes, by MessagePack's specification."""
    if isinstance(value, dict):
        return struct.pack(">BH", 0xDE, len(value)) + b"".join(pack(key) + pack(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(pack, value))
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value.encode())) + value.encode()
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    return pack_extension(1, [value.shape, value.dtype.name, value.tobytes()])


def pack_extension(kind, content) -> bytes:
    return struct.pack(">BIb", 0xC9, len(pack(content)), kind) + pack(content)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else pack(content))
    return path


def nest(flat: dict) -> dict:
    result: dict = {}
    for name, value in flat.items():
        *modules, last = name.split("/")
        inside = result
        for module in modules:
            inside = inside.setdefault(module, {})
        inside[last] = value
    return result


def as_flax(folder, names: dict, parts=1):
    """Replaces the safetensors of a folder by Flax's files."""
    theirs = weight_files.find_tensors(folder)
    flat = {flax: theirs[name].read() for flax, (name, _) in names.items()}
    flat = {flax: np.ascontiguousarray(flat[flax].T if names[flax][1] else flat[flax]) for flax in names}
    if parts == 1:
        write(folder / "flax_model.msgpack", nest(flat))
    else:
        places = {name: f"flax_model-{number % parts}.msgpack" for number, name in enumerate(flat)}
        for file in set(places.values()):
            write(folder / file, nest({name: flat[name] for name in flat if places[name] == file}))
        (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("name", ["plain", "chunked"])
def test_a_file_of_flax_is_read_bitwise(name):
    tree, found = make_tree(), read_flax_file(RECORDED / f"{name}.msgpack")
    layer = tree["h"]["0"]
    expected = {
        "wte.weight": tree["wte"]["embedding"],
        "h.0.ln_1.weight": layer["ln_1"]["scale"],
        "h.0.mlp.weight": layer["mlp"]["kernel"].T,
        "h.0.mlp.bias": layer["mlp"]["bias"],
        "none": tree["none"],
        "count": tree["count"],
    }
    assert found.keys() == expected.keys()
    for key, leaf in found.items():
        assert leaf.shape == leaf.read().shape == expected[key].shape
        assert leaf.dtype == expected[key].dtype
        assert leaf.read().tobytes() == expected[key].tobytes(), key
    assert bool(found["h.0.mlp.weight"].pieces) == (name == "chunked")


def test_a_stream_has_the_parameters_of_a_training_state():
    found, layer = read_stream(RECORDED / "stream"), make_tree()["h"]["0"]["mlp"]
    assert {name: leaf.read().tobytes() for name, leaf in found.items()} == {
        f"mlp.{name}": array.tobytes() for name, array in layer.items()
    }


def test_files_of_the_installed_flax_are_read(tmp_path):
    serialization = pytest.importorskip("flax.serialization")
    (tmp_path / "a.msgpack").write_bytes(serialization.to_bytes(make_tree()))
    assert (tmp_path / "a.msgpack").read_bytes() == (RECORDED / "plain.msgpack").read_bytes()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", [*NAMES, "mistral"])
def test_weights_of_flax_are_the_model(name, parts, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "src")
    expected = {key: leaf.tobytes() for key, leaf in params_of(folder).items()}
    as_flax(folder, NAMES["llama" if name == "mistral" else name], parts)
    assert {key: leaf.tobytes() for key, leaf in params_of(folder).items()} == expected


def test_weights_of_flax_become_a_run(tmp_path, capsys):
    folder = as_flax(shutil.copytree(FOLDER / "gpt2", tmp_path / "src"), NAMES["gpt2"])
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0
    assert main(["inspect", str(folder / "flax_model.msgpack")]) == 0
    assert "transformer.h.0.attn.c_attn.weight" in capsys.readouterr().out


def test_rows_of_a_kernel_are_read_without_the_others(tmp_path, monkeypatch):
    """In one piece and in pieces, whose borders are inside of a stored row."""
    kernel = np.arange(30, dtype=np.float32).reshape(5, 6)
    pieces = {str(number): part for number, part in enumerate(np.split(kernel.ravel(), [9, 20]))}
    chunked = {flax_files.CHUNKED: True, "shape": {"0": 5, "1": 6}, "chunks": pieces}
    found = read_flax_file(write(tmp_path / "a.msgpack", {"a": {"kernel": kernel}, "b": {"kernel": chunked}}))
    for name in ("a.weight", "b.weight"):
        np.testing.assert_array_equal(found[name].read(), kernel.T)
        np.testing.assert_array_equal(found[name].read(slice(2, 4)), kernel.T[2:4])
        np.testing.assert_array_equal(found[name].read(slice(1, 2), (3, 2, 5)), kernel.T.reshape(3, 2, 5)[1:2])
        np.testing.assert_array_equal(found[name].read(slice(1, 2), (5, 6)), kernel.T.reshape(5, 6)[1:2])
    read, tensor = [], found["a.weight"]
    monkeypatch.setattr(type(tensor), "_read_values", lambda self, spans: read.extend(spans) or np.zeros(10))
    tensor.read(slice(2, 4))
    assert read == [(2, 2), (8, 2), (14, 2), (20, 2), (26, 2)]


ARRAY = np.zeros(4, np.float32)
GOOD = pack({"a": ARRAY})


def described(shape, name="float32", content=bytes(16)) -> bytes:
    return b"\x81\xa1a" + pack_extension(1, [shape, name, content])


def chunked(shape, *pieces) -> dict:
    numbered = {str(number): piece for number, piece in enumerate(pieces)}
    return {"a": {flax_files.CHUNKED: True, "shape": dict(enumerate_names(shape)), "chunks": numbered}}


def enumerate_names(values):
    return ((str(number), value) for number, value in enumerate(values))


HOSTILE = {
    "truncated": (GOOD[:-1], RunError, "the file ends before"),
    "empty": (b"", RunError, "it ends at byte 0, inside an object"),
    "rest": (GOOD + b"\xc0", RunError, "1 bytes follow its end"),
    "huge_map": (b"\xdf\xff\xff\xff\xff", RunError, "map at byte 5 has 4,294,967,295 parts"),
    "huge_name": (b"\x81\xdb\xff\xff\xff\xff", RunError, "str at byte 6 has 4,294,967,295 parts"),
    "huge_bytes": (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", RunError, "ext at byte 8 has 4,294,967,295 parts"),
    "huge_shape": (b"\x81\xa1a\xc7\x08\x01\x93\xdd\xff\xff\xff\xff\xa1", RunError, "4,294,967,295 parts"),
    "long_name": (pack({"a": 1}).replace(b"\xd9\x01a", b"\xda\x07\xd0" + b"a" * 2000), UsageError, "2,000 bytes"),
    "many_entries": (b"\xdf\x00\x01\x86\xa1" + bytes(100_001), UsageError, "more arrays than the limit of 100,000"),
    "deep": (b"\x81\xa1a" * 200 + GOOD, UsageError, "maps in more than 16 levels"),
    "deep_arrays": (b"\x91" * 100_000, UsageError, "has a array at byte 0"),
    "no_type": (b"\x81\xa1a\xc1", RunError, "byte 3 is 0xc1, which starts no object"),
    "a_number": ({"a": 7}, UsageError, "'a' is a number, and weights have only arrays"),
    "a_string": ({"a": "b"}, UsageError, "has a str at byte 6"),
    "a_timestamp": (b"\x81\xa1a\xd6\xff" + bytes(4), UsageError, "extension of type 255"),
    "twice": (b"\x82" + GOOD[3:] + GOOD[3:], UsageError, "two arrays named 'a'"),
    "one_name": ({"a": {"scale": ARRAY, "kernel": ARRAY}}, UsageError, "two arrays of one name in PyTorch"),
    "an_object": (described([4], "object"), UsageError, "array of dtype 'object'"),
    "a_structure": (described([4], "f4,f4"), UsageError, "array of dtype 'f4,f4'"),
    "too_large": (described([2**31, 2**31]), RunError, "is [2147483648, 2147483648] of float32, and has 16 bytes"),
    "negative": (described([-2, -2]), RunError, "is [-2, -2] of float32"),
    "too_small": (described([3]), RunError, "is [3] of float32, and has 16 bytes"),
    "no_shape": (b"\x81\xa1a" + pack_extension(1, [7, "float32", b""]), UsageError, "has a int at byte"),
    "no_name": (described([4], b"\xff"), RunError, "is not UTF-8"),
    "beyond_extension": (described([4])[:7] + b"\x10" + described([4])[8:], RunError, "of float32"),
    "pieces_lost": (chunked([3, 4], ARRAY, ARRAY), RunError, "do not have its [3, 4]"),
    "pieces_of_nothing": (chunked([0]), RunError, "do not have its [0]"),
    "pieces_of_two_types": (chunked([2, 4], ARRAY, np.zeros(4, np.int32)), RunError, "the pieces of 'a'"),
    "pieces_of_numbers": (chunked([2], 1, 1), RunError, "the pieces of 'a'"),
    "pieces_of_maps": (chunked([{}], ARRAY), RunError, "the pieces of 'a'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_rejected(name, tmp_path):
    content, error, message = HOSTILE[name]
    with pytest.raises(error) as rejection:
        read_flax_file(write(tmp_path / "a.msgpack", content))
    assert message in str(rejection.value)


def test_every_cut_of_a_file_is_rejected(tmp_path):
    content = (RECORDED / "chunked.msgpack").read_bytes()
    for length in range(len(content)):
        with pytest.raises((RunError, UsageError)):
            read_flax_file(write(tmp_path / "a.msgpack", content[:length]))


STREAM_OF_ONE = pack([["a", "kernel"], pack(ARRAY)])
HOSTILE_STREAMS = {
    "truncated": (STREAM_OF_ONE[:-1], "the file ends before"),
    "twice": (STREAM_OF_ONE * 2, "two arrays named 'a.kernel'"),
    "no_pair": (pack([["a"], pack(ARRAY), 1]), "no pair of a name and an array"),
    "no_name": (pack([[], pack(ARRAY)]), "no pair of a name and an array"),
    "a_number": (pack([["a"], pack(7)]), "'a' is a number"),
    "bytes_after": (pack([["a"], pack(ARRAY) + b"\x07"]), "'a' ends at byte"),
    "array_beyond": (STREAM_OF_ONE.replace(pack(pack(ARRAY))[:5], b"\xc6\0\0\0\x10"), "'a.kernel' ends at byte"),
}


@pytest.mark.parametrize("name", HOSTILE_STREAMS)
def test_hostile_streams_are_rejected(name, tmp_path):
    content, message = HOSTILE_STREAMS[name]
    with pytest.raises((RunError, UsageError)) as rejection:
        read_stream(write(tmp_path / "a", content))
    assert message in str(rejection.value)


def test_a_file_without_layers_is_named(tmp_path, capsys):
    folder = as_flax(shutil.copytree(FOLDER / "gpt2", tmp_path / "src"), NAMES["gpt2"])
    write(folder / "flax_model.msgpack", {"transformer": {"wte": {"embedding": ARRAY}}})
    assert main(["convert", str(folder), str(tmp_path / "run")]) == FAILED
    assert "has 1 arrays, fewer than the 2 layers of its config.json" in capsys.readouterr().err


def test_an_index_of_other_names_is_damaged(tmp_path):
    folder = as_flax(shutil.copytree(FOLDER / "gpt2", tmp_path / "src"), NAMES["gpt2"], 2)
    index = folder / "flax_model.msgpack.index.json"
    index.write_text(index.read_text().replace("wte/embedding", "wte/other"))
    with pytest.raises(RunError, match=r"transformer\.wte\.other' is not in flax_model-0\.msgpack"):
        weight_files.find_tensors(folder)
