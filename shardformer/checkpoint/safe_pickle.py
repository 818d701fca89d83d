"""A reader of pickles that cannot run anything: a stack machine of the few opcodes that plain containers take."""

import pickletools
from pickle import UnpicklingError

MOST_BYTES = 4 * 2**20  # some 50,000 leaves; read in seconds, whatever it holds

_LITERALS = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}


def loads(pickled: bytes):
    """The dicts (of string keys), tuples, strings and whole numbers of a pickle; anything else is refused by name."""
    return run(pickled, _Plain(), MOST_BYTES)


def run(pickled: bytes, machine: "Machine", most_bytes: int):
    """What a machine of some opcodes has made at the pickle's end."""
    if len(pickled) > most_bytes:
        raise UnpicklingError(f"it has {len(pickled)} bytes, and {most_bytes} are the most that are read")
    for opcode, argument, position in pickletools.genops(pickled):
        if opcode.name == "STOP":
            if position + 1 != len(pickled):
                raise UnpicklingError(f"{len(pickled) - position - 1} bytes follow its end")
            return machine.result()
        machine.run(opcode.name, argument)
    raise UnpicklingError("it has no end")


class Machine:
    """The stack of a reader; a subclass says which opcodes it takes."""

    def __init__(self):
        self._stack, self._marks, self._memo = [], [], {}

    def run(self, opcode: str, argument) -> None:
        raise NotImplementedError

    def result(self):
        (result,) = self._stack
        return result

    def _pop(self, count: int) -> list:
        if len(self._stack) < count:
            raise UnpicklingError("it takes more than it has put there")
        return [self._stack.pop() for _ in range(count)][::-1]

    def _pop_to_mark(self) -> list:
        return self._pop(len(self._stack) - self._marks.pop())


class _Plain(Machine):
    def run(self, opcode: str, argument) -> None:
        stack = self._stack
        if opcode in _LITERALS:
            stack.append(argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode == "BINPUT":  # a dict of its own: the machine of `pickle` makes a list as long as the number says
            self._memo[argument] = stack[-1]
        elif opcode == "MARK":
            self._marks.append(len(stack))
        elif opcode == "EMPTY_DICT":
            stack.append({})
        elif opcode == "EMPTY_TUPLE":
            stack.append(())
        elif opcode in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(opcode[-1]))))
        elif opcode == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif opcode == "SETITEM":
            self._set_items(self._pop(2))
        elif opcode == "SETITEMS":
            self._set_items(self._pop_to_mark())
        elif opcode not in ("PROTO", "FRAME"):
            self._refuse(opcode, argument)

    def _set_items(self, items: list) -> None:
        target = self._stack[-1]
        keys = items[::2]
        # Keys are strings alone: a tuple that holds another twice, and so on, takes for ever to hash.
        if type(target) is not dict or len(items) % 2 or not all(type(key) is str for key in keys):
            raise UnpicklingError("it has a dict whose keys are not strings")
        target.update(zip(keys, items[1::2], strict=True))

    def _refuse(self, opcode: str, argument) -> None:
        if opcode in ("GLOBAL", "STACK_GLOBAL"):
            wanted = argument.split(" ") if opcode == "GLOBAL" else [str(word) for word in self._stack[-2:]]
            raise UnpicklingError(f"it asks for {'.'.join(wanted)[:80]}, and a checkpoint needs no class or function")
        raise UnpicklingError(f"it has the opcode {opcode}, and a checkpoint's tree never does")
