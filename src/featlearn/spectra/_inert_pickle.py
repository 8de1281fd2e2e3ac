"""Interpreter of pickles that builds inert objects: no module is imported and no foreign function is called.

The standard unpickler looks up names of modules and calls what it finds. Here a name stays a `Global`, an object of an
unknown class becomes a `Built` that lists its arguments, items and state, and the only functions that run are those of
the table that the caller passes, written for data that are hostile.
"""

from __future__ import annotations

import os
import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

MOST_INSTRUCTIONS = 3_000_000  # bounds time and memory: an instruction of one byte builds an object of about 100 bytes
_MOST_CONTAINERS = 500_000
_LARGEST_MEMO = 1 << 32


class DamagedError(ValueError):
    """The bytes of a file of weights do not follow their format."""


class Global:
    """Name of a class or function in a pickle, which is never imported.

    Args:
        name: Dotted name, such as "collections.OrderedDict".
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Built:
    """Object of a pickle as it was described: a dict, or an object of a class that is not imported.

    Args:
        name: Dotted name of the class or function; "dict" or "set" for these types.
        arguments: Arguments of the constructor.

    Attributes:
        pairs: Keys and values that were set, as of a dict.
        elements: Elements that were appended, as to a list.
        states: States that the object would have been restored from.
    """

    __slots__ = ("arguments", "elements", "name", "pairs", "states")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.pairs: list[tuple[Any, Any]] | tuple[()] = ()  # a list when used: most objects need no lists
        self.elements: list[Any] | tuple[()] = ()
        self.states: list[Any] | tuple[()] = ()

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values.

        Args:
            items: Keys and values in turn.
        """
        if len(items) % 2:
            raise DamagedError("a dict with a key without a value")
        self.pairs = self.pairs or []
        self.pairs.extend(zip(items[::2], items[1::2], strict=True))

    def extend(self, elements: list[Any]) -> None:
        """Add elements.

        Args:
            elements: Elements of a list or set.
        """
        self.elements = self.elements or []
        self.elements.extend(elements)

    def build(self, state: Any) -> None:
        """Add a state without restoring it.

        Args:
            state: State of the object, mostly a dict of its attributes.
        """
        self.states = self.states or []
        self.states.append(state)


Constructors = Mapping[str, Callable[..., Any]]
"""Functions that may run, by the dotted name that they stand for."""


def read_pickle(
    file: IO[bytes], constructors: Constructors, persistent: Callable[[Any], Any], most: int = MOST_INSTRUCTIONS
) -> Any:
    """Interpret one pickle up to its end, and leave the file after it.

    Args:
        file: File at the start of the pickle.
        constructors: Functions that run instead of the functions and classes of these names.
        persistent: Function that returns the object of a persistent id.
        most: Largest number of instructions.

    Returns:
        The object: plain Python values, lists, tuples, `Global`, `Built`, and what the constructors return.

    Raises:
        DamagedError: If the bytes are not a pickle, or have too many instructions.
    """
    machine = _Machine(constructors, persistent)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], _Limited(file)))):
            if count > most:
                raise DamagedError(f"its pickle has more than {most:,} instructions")
            machine.execute(opcode.name, argument)
        return machine.pop()
    except (DamagedError, MemoryError):
        raise
    except Exception as error:  # bytes that are not a pickle can raise any exception
        raise DamagedError(f"its pickle is damaged ({type(error).__name__})") from error


class _Limited:
    """File that allocates no more than it contains when a pickle declares a larger number of bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.readline, self.tell = file, file.readline, file.tell
        start = file.tell()
        self.end = file.seek(0, os.SEEK_END)
        file.seek(start)

    def read(self, size: int) -> bytes:
        """Read at most the rest of the file."""
        # Almost all reads are short; the position is asked for the others only.
        return self.file.read(size if size < 1024 else min(size, self.end - self.file.tell()))


_PUSHED = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
        *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE", "BINUNICODE8"),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_IGNORED = frozenset(("PROTO", "FRAME", "STOP", "READONLY_BUFFER"))


class _Machine:
    """Stack and memo of a pickle, without any effect outside of them."""

    def __init__(self, constructors: Constructors, persistent: Callable[[Any], Any]) -> None:
        self.constructors, self.persistent = constructors, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    def execute(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        stack = self.stack
        if name in _PUSHED:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            place = len(self.memo) if name == "MEMOIZE" else argument
            if not 0 <= place < _LARGEST_MEMO:
                raise DamagedError("its pickle has a memo that is out of range")
            self.memo[place] = stack[-1]
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.push_tuple(int(name[-1]))
        elif name in _IGNORED:
            return
        else:
            _ACTIONS[name](self, argument)

    def pop(self) -> Any:
        """Remove the top of the stack, which must not lie below the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise DamagedError("its pickle takes more from the stack than it contains")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        """Remove everything above the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def push_tuple(self, size: int) -> None:
        """Replace the top values by a tuple of them."""
        if len(self.stack) < size:
            raise DamagedError("its pickle takes more from the stack than it contains")
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def call(self, function: Any, arguments: Any) -> None:
        """Push the result of a constructor of the table, otherwise an inert object."""
        if not isinstance(arguments, tuple):
            raise DamagedError("its pickle has arguments that are not a tuple")
        if not isinstance(function, Global):
            self.push_container(Built("", (function, *arguments)))
        elif function.name in self.constructors:
            self.push_container(self.constructors[function.name](*arguments))
        else:
            self.push_container(Built(function.name, arguments))

    def push_container(self, value: Any) -> None:
        """Push an object that takes much more memory than its instruction takes in the file."""
        self.containers += 1
        if self.containers > _MOST_CONTAINERS:
            raise DamagedError(f"its pickle has more than {_MOST_CONTAINERS:,} objects")
        self.stack.append(value)

    def extend(self, elements: list[Any]) -> None:
        """Append elements to the list or object on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, list | Built):
            raise DamagedError("its pickle appends to an object that is not a list")
        target.extend(elements)

    def set_items(self, items: list[Any]) -> None:
        """Set keys and values of the object on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, Built):
            raise DamagedError("its pickle sets items of an object that is not a dict")
        target.set_items(items)

    def build(self) -> None:
        """Record the state of the object below it. Tensors and plain values have no state that matters."""
        state = self.pop()
        target = self.stack[-1]
        if build := getattr(target, "build", None):
            build(state)

    def stack_global(self) -> None:
        """Push a name whose parts are on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise DamagedError("its pickle has a name that is not a text")
        self.stack.append(Global(f"{module}.{name}"))

    def instance(self, argument: str) -> None:
        """Push an object of a named class, with all arguments above the mark."""
        self.call(Global(argument.replace(" ", ".", 1)), tuple(self.pop_mark()))

    def old_object(self) -> None:
        """Push an object whose class is the first value above the mark."""
        kind, *arguments = self.pop_mark()
        self.call(kind, tuple(arguments))

    def new_object(self, keywords: bool) -> None:
        """Push an object of a class and its arguments."""
        named = (self.pop(),) if keywords else ()
        arguments, kind = self.pop(), self.pop()
        if not isinstance(arguments, tuple):
            raise DamagedError("its pickle has arguments that are not a tuple")
        self.call(kind, (*arguments, *named))

    def dictionary(self) -> None:
        """Push a dict of all keys and values above the mark."""
        result = Built("dict")
        result.set_items(self.pop_mark())
        self.push_container(result)

    def reduce(self) -> None:
        """Push the result of a function and its arguments."""
        arguments, function = self.pop(), self.pop()
        self.call(function, arguments)

    def pop_or_unmark(self) -> None:
        """Remove the top of the stack, or the mark if it is there."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()


_ACTIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "EMPTY_LIST": lambda m, _: m.push_container([]),
    "EMPTY_DICT": lambda m, _: m.push_container(Built("dict")),
    "EMPTY_SET": lambda m, _: m.push_container(Built("set")),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    "LIST": lambda m, _: m.stack.append(m.pop_mark()),
    "FROZENSET": lambda m, _: m.stack.append(m.pop_mark()),
    "DICT": lambda m, _: m.dictionary(),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "GLOBAL": lambda m, argument: m.stack.append(Global(argument.replace(" ", ".", 1))),
    "STACK_GLOBAL": lambda m, _: m.stack_global(),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
    "INST": lambda m, argument: m.instance(argument),
    "OBJ": lambda m, _: m.old_object(),
    "NEWOBJ": lambda m, _: m.new_object(keywords=False),
    "NEWOBJ_EX": lambda m, _: m.new_object(keywords=True),
    # The registry of extension codes belongs to the process and is not asked.
    "EXT1": lambda m, argument: m.stack.append(Global(f"copyreg.extension_{argument}")),
    "EXT2": lambda m, argument: m.stack.append(Global(f"copyreg.extension_{argument}")),
    "EXT4": lambda m, argument: m.stack.append(Global(f"copyreg.extension_{argument}")),
    "PERSID": lambda m, argument: m.stack.append(m.persistent(argument)),
    "BINPERSID": lambda m, _: m.stack.append(m.persistent(m.pop())),
    "POP": lambda m, _: m.pop_or_unmark(),
    "POP_MARK": lambda m, _: m.pop_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
}
