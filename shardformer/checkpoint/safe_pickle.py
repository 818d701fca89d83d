"""A reader of pickles that cannot run code: a stack machine with the few opcodes of plain containers."""

import pickletools
from pickle import UnpicklingError
from typing import Any

from shardformer.errors import describe_value

MAX_BYTES = 4 * 2**20  # about 50,000 leaves
MAX_OPCODES = 1_000_000  # 12 a leaf; read in 2 s

_LITERALS = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}


def loads(pickled: bytes):
    """Returns the dicts (of string keys), tuples of tuples, strings and integers of a pickle; rejects all else."""
    return run(pickled, _Plain(), MAX_BYTES)


def run(pickled, machine: "Machine", max_bytes: int):
    """Runs all opcodes of a pickle on a machine and returns its result.

    The pickle is bytes, or a file with a length.
    """
    if len(pickled) > max_bytes:
        raise UnpicklingError(f"it has {len(pickled)} bytes, more than the limit of {max_bytes}")
    for number, (opcode, argument, position) in enumerate(pickletools.genops(pickled)):
        if number == MAX_OPCODES:
            raise UnpicklingError(f"it has more than {MAX_OPCODES} opcodes")
        if opcode.name == "STOP":
            end = (position or 0) + 1
            if end != len(pickled):
                raise UnpicklingError(f"{len(pickled) - end} bytes follow its end")
            return machine.result()
        if not machine.run_common(opcode.name, argument):
            machine.run(opcode.name, argument)
    raise UnpicklingError("it has no end")


class Machine:
    """The stack of a reader, and the opcodes that every reader has; subclasses define the rest."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run_common(self, opcode: str, argument) -> bool:
        """Runs an opcode of tuples, items, marks or the memo; returns False for any other opcode."""
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(opcode[-1]))))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINPUT":  # into a dict: `pickle` would make a list as long as this number
                self._memo[argument] = stack[-1]
            case _:
                return False
        return True

    def run(self, opcode: str, argument) -> None:
        """Runs an opcode of this reader, or rejects it."""
        raise NotImplementedError

    def _set_items(self, items: list) -> None:
        """Adds keys and values to the dict on the stack, or rejects them."""
        raise NotImplementedError

    def result(self):
        (result,) = self._stack
        return result

    def _pop(self, count: int) -> list:
        if len(self._stack) < count:
            raise UnpicklingError("it takes more from its stack than it has put there")
        return [self._stack.pop() for _ in range(count)][::-1]

    def _pop_to_mark(self) -> list:
        return self._pop(len(self._stack) - self._marks.pop())


class ObjectMachine(Machine):
    """The opcodes of dicts with string keys, and of names of classes and functions, which subclasses look up."""

    def run_object(self, opcode: str, argument) -> bool:
        """Runs an opcode of literals, dicts, the memo or names; returns False for any other opcode."""
        put = self._stack.append
        match opcode:
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                put(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                put({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_DICT":
                put({})
            case "LONG_BINPUT":
                self._memo[argument] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                put(self._memo[argument])
            case "GLOBAL":
                put(self._find_name(*argument.split(" ")))
            case "STACK_GLOBAL":
                put(self._find_name(*self._pop(2)))
            case _:
                return False
        return True

    def _find_name(self, module, name):
        """Returns what stands for a class or function that the pickle names, or rejects it."""
        raise NotImplementedError

    def _set_items(self, items: list) -> None:
        if type(self._stack[-1]) is not dict or not all(type(name) is str for name in items[::2]):
            raise UnpicklingError("it has a dictionary whose keys are not strings")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))


class _Plain(Machine):
    """A machine for dicts of string keys, tuples, strings and integers."""

    def run(self, opcode: str, argument) -> None:
        if opcode in _LITERALS:
            self._stack.append(argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif opcode == "EMPTY_DICT":
            self._stack.append({})
        else:
            self._refuse(opcode, argument)

    def _set_items(self, items: list) -> None:
        target = self._stack[-1]
        keys = items[::2]
        # A tuple as a key could take exponential time to hash: each of its items may be the same tuple twice.
        if type(target) is not dict or len(items) % 2 or not all(type(key) is str for key in keys):
            raise UnpicklingError("it has a dict whose keys are not strings")
        target.update(zip(keys, items[1::2], strict=True))

    def _refuse(self, opcode: str, argument) -> None:
        if opcode in ("GLOBAL", "STACK_GLOBAL"):
            wanted = argument.split(" ") if opcode == "GLOBAL" else self._stack[-2:]
            names = ".".join(map(describe_value, wanted))
            raise UnpicklingError(f"it asks for {names}, but a checkpoint needs no class or function")
        raise UnpicklingError(f"it has the opcode {opcode}, which a checkpoint's tree never has")
