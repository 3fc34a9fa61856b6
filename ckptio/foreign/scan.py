"""Look through a pickle of `torch.save` before torch makes what it says.

With `weights_only`, torch makes what is on a short list; but of that, a few bytes have it make
gigabytes (`bytearray(2**30)`), a tensor that no file has, or work without end: a tuple that
has another one twice, which has another one twice, as a key, which is hashed.

So the pickle runs here first, with weights in the place of values: how many values there
would be, if each was written out wherever it is referred to. What a pickle calls may be given
as much as the pickle is long, some times over, and nothing that makes more of what it is given.
Of Python's own `pickle` this takes the names of the opcodes alone: nothing is loaded by it.
"""

from __future__ import annotations

import _compat_pickle
import pickle
import re
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from ckptio._gc import without_collection
from ckptio.errors import FormatError
from ckptio.foreign.pickles import UnpicklingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: Values for each byte of a pickle, and more for small ones.
_MAX_EACH, _MAX_MORE = 64, 1 << 18
_CAP = 1 << 60
_MAX_WORD = 20  # digits of the largest address: what storages were once called by
#: Where a reference to a storage has its type, its name, and that of a part of it.
_TYPE, _KEY, _VIEW = 1, 2, 5
#: Pickles that a file of before 1.6 begins with: magic, version, system, state, storages.
NUM_OLD_PICKLES = 5

#: What is called without arguments alone: it would make room for what it is told.
_ROOM = re.compile(r"torch(\.storage|(\.[a-z]+)?(\.sparse)?)?\.\w*(Tensor|Storage)")
#: What copies a tensor, of which one element may stand for many.
_COPIES = "torch._utils._rebuild_device_tensor_"
#: What calls what it is given.
_CALLS = "torch._tensor._rebuild_from_type_v2"
#: What is done to what a class makes: see `Scanned`.
LIST, DICT, TENSOR, MIXED = "list", "dict", "tensor", "mixed"
#: What makes bytes of text, and the encodings that pickles of bytes have.
_ENCODES = {"builtins.bytearray": ("text", "bytes"), "_codecs.encode": ("text",)}
_CODECS = frozenset({"latin1", "latin-1", "ascii", "utf8", "utf-8"})
#: What goes through what it is given: an element of a tensor may stand for many.
_TAKES = frozenset(
    {
        "builtins.set", "builtins.complex", "collections.OrderedDict", "collections.Counter",
        "torch.Size", "torch.device",
    }
)  # fmt: skip


class _Thing:
    """Stands for a value.

    Attributes:
        kind: What it is: `plain`, `text`, `tuple`, `container`, `name`, `bytes`, or `made`.
        weight: The values in it, or its length.
        parts: What a tuple has.
        name: What a name names, or a short text says.
        maker: Name of what was called to make it.
    """

    __slots__ = ("kind", "maker", "name", "parts", "weight")

    def __init__(
        self,
        kind: str,
        weight: int = 1,
        parts: Sequence[_Thing] = (),
        name: str = "",
        maker: str = "",
    ) -> None:
        self.kind = kind
        self.weight = weight
        self.parts = parts
        self.name = name
        self.maker = maker


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a look through pickles found.

    Attributes:
        nbytes: Bytes of them.
        kinds: What has to be made in the place of a class, by its name, for what the pickles do
            to it: a `LIST` takes items, a `DICT` takes keys and values, and a `TENSOR` is what a
            tensor is made to be; `MIXED` is what nothing else can be.
        storages: Names of the storages that are referred to; an empty one stands for any that is
            no short text.
        retyped: Names of those that are referred to by more than one type.
        listed: Short texts in the list that the last value is.
    """

    nbytes: int
    kinds: Mapping[str, str]
    storages: frozenset[str] = frozenset()
    retyped: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()


def together(parts: Iterable[Scanned]) -> Scanned:
    """Put what was found in several pickles together."""
    nbytes, kinds = 0, dict[str, str]()
    for part in parts:
        nbytes += part.nbytes
        for name, kind in part.kinds.items():
            kinds[name] = kind if kinds.get(name, kind) == kind else MIXED
    return Scanned(nbytes, kinds)


_PLAIN = _Thing("plain")


def scan_pickle(file: IO[bytes]) -> Scanned:
    """Read a pickle, and leave the file where it ends.

    Raises:
        UnpicklingError: It has what torch does not read.
        FormatError: It is damaged, or would make far more than it has.
    """
    start = file.tell()
    try:
        machine = _Machine(file)
        without_collection(machine.run)()
        made = machine.stack[-1]
    except (IndexError, KeyError, UnicodeDecodeError):
        raise FormatError("it is no whole pickle of torch.save") from None
    return Scanned(
        file.tell() - start,
        machine.kinds,
        frozenset(machine.storages),
        frozenset(machine.retyped),
        frozenset(machine.texts.get(made, ())),
    )


def most_of(nbytes: int) -> int:
    """Give the values that a pickle of so many bytes may have, written out."""
    return _MAX_MORE + _MAX_EACH * nbytes


class _Machine:
    """Runs a pickle without making anything."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start = file.tell()
        self._charged = 0
        self._memo: dict[int, _Thing] = {}
        self.stack: list[_Thing] = []
        self.kinds: dict[str, str] = {}
        self.storages: dict[str, str] = {}  # with the type of each
        self.retyped: set[str] = set()
        self.texts: dict[_Thing, set[str]] = {}  # in lists
        self._below: list[list[_Thing]] = []

    def run(self) -> None:
        """Run until the end."""
        read = self._file.read
        while (code := read(1)) != pickle.STOP:
            found = _STEPS.get(code)
            if found is None:
                if not code:
                    raise IndexError
                raise UnpicklingError(f"Unsupported operand {code!r}")
            size, step = found
            step(self, int.from_bytes(read(size), "little") if size else 0)

    def _charge(self, weight: int) -> None:
        """Count what is made or hashed."""
        self._charged += weight
        if self._charged > _MAX_MORE and self._charged > most_of(self._file.tell() - self._start):
            raise FormatError("it would take far more memory or time than it has bytes")

    def plain(self, _: int) -> None:
        """Push what has no weight."""
        self.stack.append(_PLAIN)

    def text(self, nbytes: int) -> None:
        """Push a text."""
        data = self._take(nbytes)
        word = data.decode("latin1") if nbytes <= _MAX_WORD else ""
        self.stack.append(_Thing("text", nbytes, name=word))

    def number(self, nbytes: int) -> None:
        """Push a number of any length."""
        self._take(nbytes)
        self.stack.append(_PLAIN)

    def _take(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise IndexError
        return data

    def put(self, number: int) -> None:
        """Remember what is on top."""
        self._memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        """Put on top what was remembered."""
        self.stack.append(self._memo[number])

    def skip(self, _: int) -> None:
        """Go on."""

    def mark(self, _: int) -> None:
        """Begin a stack above this one."""
        self._below.append(self.stack)
        self.stack = []

    def above(self) -> list[_Thing]:
        """End the stack that was begun last, and give it."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def name(self, _: int) -> None:
        """Name something."""
        module, name = (self._file.readline()[:-1].decode() for _ in range(2))
        if (module, name) in _compat_pickle.NAME_MAPPING:
            module, name = _compat_pickle.NAME_MAPPING[module, name]
        else:
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        self.stack.append(_Thing("name", name=f"{module}.{name}"))

    def container(self, _: int) -> None:
        """Make an empty list, dict or set."""
        self.stack.append(_Thing("container"))

    def tuple_of(self, parts: list[_Thing]) -> None:
        """Make a tuple."""
        weight = 1
        for part in parts:
            weight += part.weight
        self.stack.append(_Thing("tuple", min(_CAP, weight), parts))

    def last(self, count: int) -> None:
        """Make a tuple of what is on top."""
        if len(self.stack) < count:
            raise IndexError
        parts = self.stack[-count:]
        del self.stack[-count:]
        self.tuple_of(parts)

    def _is_a(self, name: str, kind: str) -> None:
        """Take down what has to be made in the place of a class."""
        if name:
            self.kinds[name] = kind if self.kinds.get(name, kind) == kind else MIXED

    def add(self, items: list[_Thing], kind: str = LIST) -> None:
        """Put items into a list, or keys and values into a dict."""
        target = self.stack[-1]
        if target.kind not in ("container", "made"):
            raise IndexError
        self._is_a(target.maker, kind)
        if kind == LIST:
            texts = [item.name for item in items if item.kind == "text"]
            if texts:
                self.texts.setdefault(target, set()).update(texts)
        target.weight = min(_CAP, target.weight + sum(item.weight for item in items))

    def pair(self) -> list[_Thing]:
        """Take a key and a value from the top."""
        value = self.stack.pop()
        return [self.stack.pop(), value]

    def add_keys(self, items: list[_Thing]) -> None:
        """Put keys, which are hashed, and values into a dict."""
        self._charge(sum(key.weight for key in items[::2] if key.kind != "text"))
        self.add(items, DICT)

    def build(self, _: int) -> None:
        """Give a state to an object."""
        state, target = self.stack.pop(), self.stack[-1]
        self._charge(state.weight)
        filled = self.kinds.get(target.maker)
        if filled == LIST or (filled == DICT and state.kind != "container"):
            self.kinds[target.maker] = MIXED  # torch gives no state to such a thing

    def persistent(self, _: int) -> None:
        """Refer to a storage: "storage", its type, its name, and more.

        Raises:
            FormatError: It is a part of one as one of its own. A tensor that is larger than a
                storage of an old file has it moved, and torch leaves parts where it was.
        """
        parts = self.stack[-1].parts
        if len(parts) > _VIEW and parts[_VIEW] is not _PLAIN:
            raise FormatError("it has a part of a storage as another one, as torch writes none now")
        if parts and parts[0].kind == "text" and parts[0].name != "storage":
            self.stack[-1] = _Thing("made")  # a module's class, which torch refuses by its name
            return
        name, kind = "", ""
        if len(parts) > _KEY and parts[0].name == "storage" and parts[_KEY].kind == "text":
            name, kind = parts[_KEY].name, parts[_TYPE].name
        if self.storages.setdefault(name, kind) != kind:
            self.retyped.add(name)
        self.stack[-1] = _Thing("made")

    def call(self, _: int) -> None:
        """Call something."""
        args = self.stack.pop()
        called = self.stack.pop()
        if args.kind != "tuple":
            raise UnpicklingError("it calls something with what is no tuple")
        self._charge(args.weight)
        name = called.name
        if name == _CALLS:
            function = args.parts[0].name
            if not function.startswith("torch._utils._rebuild_"):
                raise UnpicklingError(f"it has a tensor made by {function or 'a value'}")
            name = function
            self._is_a(args.parts[1].name, TENSOR)
        if _makes_more(name, args.parts):
            raise FormatError(f"it has {name} make what is not in the file")
        kind = "bytes" if name == "_codecs.encode" else "made"
        self.stack.append(_Thing(kind, args.weight, maker=called.name))


def _makes_more(name: str, args: Sequence[_Thing]) -> bool:
    """Whether something that is called makes more of what it is given."""
    if name in _ENCODES:
        is_text = not args or args[0].kind in _ENCODES[name]
        return not is_text or any(arg.name not in _CODECS for arg in args[1:])
    if name in _TAKES:
        return any(arg.kind in ("made", "bytes") for arg in args)
    return name.startswith(_COPIES) or (bool(args) and _ROOM.fullmatch(name) is not None)


#: Bytes of the number that follows, and what is done with it.
_STEPS: dict[bytes, tuple[int, Callable[[_Machine, int], None]]] = {
    pickle.PROTO: (1, _Machine.skip),
    pickle.BINPUT: (1, _Machine.put),
    pickle.LONG_BINPUT: (4, _Machine.put),
    pickle.BINGET: (1, _Machine.get),
    pickle.LONG_BINGET: (4, _Machine.get),
    pickle.NONE: (0, _Machine.plain),
    pickle.NEWTRUE: (0, _Machine.plain),
    pickle.NEWFALSE: (0, _Machine.plain),
    pickle.BININT: (4, _Machine.plain),
    pickle.BININT1: (1, _Machine.plain),
    pickle.BININT2: (2, _Machine.plain),
    pickle.BINFLOAT: (8, _Machine.plain),
    pickle.LONG1: (1, _Machine.number),
    pickle.BINUNICODE: (4, _Machine.text),
    pickle.SHORT_BINSTRING: (1, _Machine.text),
    pickle.GLOBAL: (0, _Machine.name),
    pickle.MARK: (0, _Machine.mark),
    pickle.EMPTY_LIST: (0, _Machine.container),
    pickle.EMPTY_DICT: (0, _Machine.container),
    pickle.EMPTY_SET: (0, _Machine.container),
    pickle.EMPTY_TUPLE: (0, lambda machine, _: machine.tuple_of([])),
    pickle.TUPLE: (0, lambda machine, _: machine.tuple_of(machine.above())),
    pickle.TUPLE1: (0, lambda machine, _: machine.last(1)),
    pickle.TUPLE2: (0, lambda machine, _: machine.last(2)),
    pickle.TUPLE3: (0, lambda machine, _: machine.last(3)),
    pickle.APPEND: (0, lambda machine, _: machine.add([machine.stack.pop()])),
    pickle.APPENDS: (0, lambda machine, _: machine.add(machine.above())),
    pickle.SETITEM: (0, lambda machine, _: machine.add_keys(machine.pair())),
    pickle.SETITEMS: (0, lambda machine, _: machine.add_keys(machine.above())),
    pickle.BUILD: (0, _Machine.build),
    pickle.BINPERSID: (0, _Machine.persistent),
    pickle.REDUCE: (0, _Machine.call),
    pickle.NEWOBJ: (0, _Machine.call),
}
