"""The pickles of the seed's time, read without running anything and written byte for byte as Python writes them.

They hold trees of plain containers, Haiku's mappings and optax's named tuples, with 0 for every leaf. Only the names of
these classes are read: stand-in classes are created here.
"""

import collections
import functools
import io
import struct
import sys
from pickle import UnpicklingError

import jax

from shardformer.checkpoint.safe_pickle import Machine, run
from shardformer.errors import describe_value

MAX_BYTES = 16 * 2**20
OPTAX = {
    "AdditiveWeightDecayState": "",
    "AddDecayedWeightsState": "",
    "ClipByGlobalNormState": "",
    "ClipState": "",
    "EmptyState": "",
    "IdentityState": "",
    "ScaleByAdamState": "count mu nu",
    "ScaleByScheduleState": "count",
    "ScaleState": "",
    "TraceState": "trace",
}
HAIKU = ("FlatMapping", "FlatMap", "frozendict")
_FRAME = 64 * 2**10
_BATCH = 1000


class HaikuMapping(dict):
    """The stand-in for Haiku's immutable mapping; a subclass has the module and the name of the pickled class."""


@functools.cache
def stand_in_class(module: str, name: str) -> type:
    """Returns the stand-in for a class of such trees; rejects any other class."""
    package = module.partition(".")[0]
    if package == "optax" and name in OPTAX:
        return collections.namedtuple(name, OPTAX[name], module=sys.intern(module))
    if package == "haiku" and name in HAIKU:
        created = type(name, (HaikuMapping,), {"__module__": sys.intern(module)})
        jax.tree_util.register_pytree_with_keys(created, _flatten, functools.partial(_unflatten, created))
        return created
    raise UnpicklingError(
        f"it asks for {describe_value(module)}.{describe_value(name)}; a checkpoint of the seed holds only plain "
        "containers, Haiku's mappings and optax's states"
    )


def _flatten(mapping):
    keys = tuple(sorted(mapping))
    return [(jax.tree_util.DictKey(key), mapping[key]) for key in keys], keys


def _unflatten(cls: type, keys, children):
    return cls(zip(keys, children, strict=True))


def loads(pickled: bytes):
    """Returns the tree of a pickle."""
    return run(pickled, _Trees(), MAX_BYTES)


class _Trees(Machine):
    """The opcodes of these trees. Each container is used once, so that a tree cannot be larger than its pickle."""

    def run(self, opcode: str, argument) -> None:
        put, pop = self._stack.append, self._pop
        match opcode:
            case "BINUNICODE" | "SHORT_BINUNICODE":
                put(argument)
            case "BININT1" if argument == 0:
                put(0)
            case "NONE":
                put(None)
            case "EMPTY_DICT" | "EMPTY_LIST":
                put({"EMPTY_DICT": dict, "EMPTY_LIST": list}[opcode]())
            case "APPEND" | "APPENDS":
                items = pop(1) if opcode == "APPEND" else self._pop_to_mark()
                self._target(list).extend(items)
            case "LONG_BINPUT":
                self._memo[argument] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                put(self._memoized(argument))
            case "GLOBAL":
                put(stand_in_class(*argument.split(" ")))
            case "STACK_GLOBAL":
                put(stand_in_class(*map(_string, pop(2))))
            case "NEWOBJ" | "REDUCE":
                put(_construct(*pop(2)))
            case _:
                raise UnpicklingError(
                    f"it has the opcode {opcode} ({describe_value(argument)}), which a tree of leaves never has"
                )

    def _target(self, kind: type):
        if type(self._stack[-1]) is not kind:
            raise UnpicklingError(f"it adds to something that is not a {kind.__name__}")
        return self._stack[-1]

    def _set_items(self, items: list) -> None:
        keys = [_string(key) for key in items[::2]]
        self._target(dict).update(zip(keys, items[1::2], strict=True))

    def _memoized(self, index: int):
        value = self._memo[index]
        if not isinstance(value, str | type):
            raise UnpicklingError("it uses one container twice")
        return value


def _string(value) -> str:
    if type(value) is not str:
        raise UnpicklingError(f"it has a {type(value).__name__} where only a string can be")
    return value


def _construct(cls, arguments):
    if type(cls) is not type or type(arguments) is not tuple:
        raise UnpicklingError("it calls something that is not a class")
    if issubclass(cls, HaikuMapping):
        (items,) = arguments
        if type(items) is not dict:
            raise UnpicklingError(f"it makes a {cls.__name__} of a {type(items).__name__}")
        return cls(items)
    return cls(*arguments)


def dumps(tree, protocol: int) -> bytes:
    """Returns the bytes of pickle.dump(tree, file, protocol), for the trees of `loads` or of the true classes."""
    writer = _Writer()
    writer.save(tree)
    return b"\x80" + bytes([protocol]) + writer.frames()


class _Writer:
    """Python's pickler, with classes taken by name."""

    def __init__(self):
        self._frame, self._done, self._memo, self._kept = io.BytesIO(), [], {}, []

    def frames(self) -> bytes:
        self._emit(b".")
        self._close_frame()
        return b"".join(self._done)

    def save(self, value) -> None:
        if self._frame.tell() >= _FRAME:
            self._close_frame()
        if id(value) in self._memo:
            self._get(self._memo[id(value)])
        elif value is None or type(value) is int:
            self._emit(b"N" if value is None else b"K" + bytes([value]))
        elif type(value) is str:
            self._string(value)
        elif type(value) in (dict, list):
            self._emit(b"}" if type(value) is dict else b"]")
            self._memoize(value)
            self._items(value)
        elif type(value) is tuple:
            self._tuple(value)
        elif isinstance(value, type):
            self.save(value.__module__)
            self.save(value.__qualname__)
            self._emit(b"\x93")
            self._memoize(value)
        else:
            self._object(value)

    def _object(self, value) -> None:
        named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
        if not named_tuple and not isinstance(value, HaikuMapping):
            raise TypeError(f"a checkpoint of the seed cannot hold a {type(value).__name__}")
        self.save(type(value))
        self._tuple(tuple(value) if named_tuple else (dict(value),))
        self._emit(b"\x81" if named_tuple else b"R")
        self._memoize(value)

    def _string(self, value: str) -> None:
        encoded = value.encode("utf-8", "surrogatepass")
        short = len(encoded) < 256
        self._emit((b"\x8c" + bytes([len(encoded)]) if short else b"X" + struct.pack("<I", len(encoded))) + encoded)
        self._memoize(value)

    def _tuple(self, value: tuple) -> None:
        if not value:
            self._emit(b")")
            return
        if len(value) > 3:
            self._emit(b"(")
        for item in value:
            self.save(item)
        self._emit({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))
        self._memoize(value)

    def _items(self, value: dict | list) -> None:
        pairs = list(value.items()) if type(value) is dict else [(item,) for item in value]
        one, multiple = (b"s", b"u") if type(value) is dict else (b"a", b"e")
        if len(pairs) == 1:
            self._save_all(pairs)
            self._emit(one)
            return
        # A dict of whole batches ends with an empty one, a list does not: so does Python.
        last = len(pairs) + 1 if type(value) is dict and pairs else len(pairs)
        for start in range(0, last, _BATCH):
            self._emit(b"(")
            self._save_all(pairs[start : start + _BATCH])
            self._emit(multiple)

    def _save_all(self, pairs: list[tuple]) -> None:
        for pair in pairs:
            for item in pair:
                self.save(item)

    def _get(self, index: int) -> None:
        self._emit(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))

    def _memoize(self, value) -> None:
        self._memo[id(value)] = len(self._memo)
        self._kept.append(value)  # or another would be given its id
        self._emit(b"\x94")

    def _emit(self, data: bytes) -> None:
        self._frame.write(data)

    def _close_frame(self) -> None:
        content = self._frame.getvalue()
        self._done.append((b"\x95" + struct.pack("<Q", len(content)) if len(content) >= 4 else b"") + content)
        self._frame = io.BytesIO()
