"""PyTorch's pickled weights: read as PyTorch reads them, and without running anything that they hold."""

import io
import json
import pickle
import pickletools
import shutil
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.convert import torch_files, weight_files
from shardformer.convert.torch_files import read_torch_file
from shardformer.errors import RunError, UsageError
from tests.convert.hf_models import FOLDER
from tests.convert.test_hf import params_of
from tests.runs import USAGE

RECORDED = FOLDER.parent / "torch"  # written by record_torch.py


class Call:
    """Pickles as a call of a function of another module, which need not exist here."""

    def __init__(self, module, name, *arguments):
        self.module, self.name, self.arguments = module, name, arguments


class Storage:
    def __init__(self, kind, key, count):
        self.kind, self.key, self.count = kind, key, count


class Writer(pickle._Pickler):
    """Python's pickler, with module and name written as opcodes, because only PyTorch has the functions."""

    def save_global_name(self, module, name):
        self.write(f"c{module}\n{name}\n".encode())

    def persistent_id(self, obj):
        return None

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Call):
            self.save_global_name(obj.module, obj.name)
            super().save(obj.arguments)
            self.write(b"R")
        elif isinstance(obj, Storage):
            self.write(b"(")
            super().save("storage")
            self.save_global_name("torch", obj.kind)
            for value in (obj.key, "cpu", obj.count):
                super().save(value)
            self.write(b"tQ")
        else:
            super().save(obj, save_persistent_id)


def tensor(kind, key, shape, strides=None, offset=0, count=10**6):
    strides = strides or tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    arguments = (Storage(kind, key, count), offset, tuple(shape), strides, False, OrderedDict())
    return Call("torch._utils", "_rebuild_tensor_v2", *arguments)


def pickled(content) -> bytes:
    stream = io.BytesIO()
    Writer(stream, protocol=2).dump(content)
    return stream.getvalue()


def write_archive(path, content, storages=(), **how):
    """A file as torch.save writes it: `storages` are arrays, with the keys 0, 1, ..."""
    with zipfile.ZipFile(path, "w", **how) as archive:
        archive.writestr("archive/data.pkl", content if isinstance(content, bytes) else pickled(content))
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(storages):
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path


@pytest.mark.parametrize("name", ["plain", "transposed", "parameters", "protocol_4"])
def test_a_file_of_pytorch_is_read_bitwise(name):
    expected = np.load(RECORDED / "expected.npz")
    found = read_torch_file(RECORDED / f"{name}.bin")
    assert found.keys() == set(expected.files)
    for key, leaf in found.items():
        got = leaf.read()
        assert got.shape == leaf.shape == expected[key].shape
        assert got.view(expected[key].dtype).tobytes() == expected[key].tobytes(), key


def test_rows_of_a_tensor_are_read_in_any_shape(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    content = {"plain": tensor("FloatStorage", "0", (6, 4)), "turned": tensor("FloatStorage", "0", (4, 6), (1, 4))}
    found = read_torch_file(write_archive(tmp_path / "a.bin", content, [array]))
    np.testing.assert_array_equal(found["plain"].read(slice(2, 4)), array[2:4])
    np.testing.assert_array_equal(found["turned"].read(slice(1, 3)), array.T[1:3])
    np.testing.assert_array_equal(found["turned"].read(slice(0, 1), (2, 12)), array.T.reshape(2, 12)[:1])


def as_torch(folder, index=False):
    """Replaces the safetensors of a folder by PyTorch's files."""
    tensors = weight_files.find_tensors(folder)
    names = sorted(tensors)
    groups = [names[::2], names[1::2]] if index else [names]
    places = {}
    for number, group in enumerate(groups):
        file = f"pytorch_model-{number}.bin" if index else "pytorch_model.bin"
        content = OrderedDict(
            (name, tensor("BFloat16Storage", str(key), tensors[name].shape)) for key, name in enumerate(group)
        )
        write_archive(folder / file, content, [tensors[name].read() for name in group])
        places |= dict.fromkeys(group, file)
    if index:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("name", ["gptj", "gpt2", "neox_parallel"])
def test_pickled_weights_are_the_model(name, index, tmp_path):
    folder = shutil.copytree(FOLDER / name, tmp_path / "src")
    expected = {key: leaf.tobytes() for key, leaf in params_of(folder).items()}
    as_torch(folder, index)
    assert {key: leaf.tobytes() for key, leaf in params_of(folder).items()} == expected


def test_pickled_weights_become_a_run(tmp_path):
    folder = shutil.copytree(FOLDER / "gptj", tmp_path / "src")
    as_torch(folder, index=True)
    assert main(["convert", str(folder), str(tmp_path / "run")]) == 0


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch harmed",)


FLOATS = np.zeros(8, np.float32)
HOSTILE = {
    "system": (pickle.dumps({"a": Evil()}, 2), "asks for posix.system"),
    "eval": (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "asks for __builtin__.eval"),
    "torch_load": (b"\x80\x02ctorch\nload\n.", "asks for torch.load"),
    "bytes_io": (b"\x80\x02c_io\nBytesIO\n)R.", "asks for _io.BytesIO"),
    "set_state": ({"a": Call("torch._utils", "_rebuild_sparse_tensor", 1)}, "asks for torch._utils._rebuild_sparse"),
    "a_number": ({"a": 7}, "'a' is not a tensor"),
    "a_list": (pickle.dumps([1], 2), "opcode EMPTY_LIST"),
    "nothing": (pickled({}), "is not a dictionary of tensors"),
    "calls_a_string": (b"\x80\x02X\x01\x00\x00\x00a)R.", "calls something that is not a function"),
    "negative": ({"a": tensor("FloatStorage", "0", (-4,), (1,))}, "sizes are not whole numbers"),
    "strides": ({"a": tensor("FloatStorage", "0", (2, 2), (1,))}, "not described as PyTorch"),
    "a_path": ({"a": tensor("FloatStorage", "../data.pkl", (4,))}, "storage that is not described"),
    "truncated": (pickled({"a": tensor("FloatStorage", "0", (4,))})[:-9], "was not loaded"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = HOSTILE[name]
    with pytest.raises(UsageError, match="was not loaded, as its pickle may hold tensors only") as rejection:
        read_torch_file(write_archive(tmp_path / "a.bin", content, [FLOATS]))
    assert message in str(rejection.value)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"a": tensor("FloatStorage", "0", (9,))}, RunError, "reaches beyond its storage of 32 bytes"),
        ({"a": tensor("FloatStorage", "0", (8,), offset=1)}, RunError, "reaches beyond its storage"),
        ({"a": tensor("FloatStorage", "0", (2**40,), (0,))}, UsageError, "repeats the numbers of its storage"),
        ({"a": tensor("FloatStorage", "1", (8,))}, RunError, "lacks the entry data/1"),
    ],
)
def test_tensors_outside_their_storage_are_rejected(content, error, message, tmp_path):
    with pytest.raises(error, match=message):
        read_torch_file(write_archive(tmp_path / "a.bin", content, [FLOATS]))


def test_a_compressed_archive_is_rejected(tmp_path):
    content = {"a": tensor("FloatStorage", "0", (8,))}
    path = write_archive(tmp_path / "a.bin", content, [FLOATS], compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="is compressed"):
        read_torch_file(path)


def test_a_damaged_archive_is_named(tmp_path):
    path = write_archive(tmp_path / "a.bin", {"a": tensor("FloatStorage", "0", (8,))}, [FLOATS])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(RunError, match=r"a\.bin is damaged"):
        read_torch_file(path)


def test_the_format_before_zip_is_rejected_by_name(tmp_path, capsys):
    folder = shutil.copytree(FOLDER / "gpt2", tmp_path / "src")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_files.LEGACY[0] + bytes(100))
    assert main(["convert", str(folder), str(tmp_path / "run")]) == USAGE
    assert "is not in PyTorch's zip format (of version 1.6 and later)" in capsys.readouterr().err


def test_an_archive_of_a_million_entries_is_rejected_at_once(tmp_path):
    path = tmp_path / "a.bin"
    with zipfile.ZipFile(path, "w") as archive:
        for key in range(150):  # with long names, which fill the list as a million short ones do
            archive.writestr(f"archive/data/{key:060000d}", b"")
    with pytest.raises(UsageError, match="more than the limit"):
        read_torch_file(path)


def test_the_writer_of_these_tests_writes_what_pytorch_writes():
    """The opcodes of a recorded file and of `pickled`, without the memo indices."""
    with zipfile.ZipFile(RECORDED / "plain.bin") as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        theirs = {opcode.name for opcode, _, _ in pickletools.genops(archive.read(name))}
    ours = {opcode.name for opcode, _, _ in pickletools.genops(pickled({"a": tensor("FloatStorage", "0", (8,))}))}
    assert ours - {"EMPTY_DICT", "BININT", "TUPLE1"} <= theirs | {"LONG_BINPUT"}
