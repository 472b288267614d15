"""Is what `torch.save` wrote plain data? Found out before torch makes anything of it.

`torch.load(weights_only=True)` runs no code of a file, and still lets it set attributes of objects
that a process shares (a member of an enumeration), build strings of terabytes, and overflow the
stack with a key that is nested deeply. What is to be loaded is therefore taken apart first, and
every call in it compared with what such calls look like where they are harmless.
"""

from __future__ import annotations

import enum
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.checkpoint.archives import DESCRIPTION, is_archive, open_archive, record_of
from megatron_fsdp_v2.checkpoint.pickles import Call, Mapping, Name, PersistentId, read_pickle
from megatron_fsdp_v2.checkpoint.stored_tensor import STORAGE_DTYPES
from megatron_fsdp_v2.checkpoint.trust import DTYPES, MAX_DIMS, integer

__all__ = ["check_plain_data"]

_MAX_DEPTH = 200
_MAX_KEY_PARTS = 100
_MAX_DESCRIPTION = 1 << 30
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_PYTHON_2 = {
    ("__builtin__", "set"): "builtins.set",
    ("__builtin__", "complex"): "builtins.complex",
    ("__builtin__", "bytearray"): "builtins.bytearray",
}
"""Names that protocol 2 has for what is called otherwise today."""

_TENSORS = frozenset(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
_PARAMETERS = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_STORAGES = frozenset(f"torch.{name}" for name in STORAGE_DTYPES) | {"torch.storage.UntypedStorage"}
_DTYPES = frozenset(f"torch.{name}" for name in DTYPES)

_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")


def check_plain_data(file: Any, safe_globals: Sequence[Any] = ()) -> None:
    """Check that what `torch.save` wrote is made of plain data, tensors and named classes.

    Args:
        file: Its path, or a seekable binary file, which is left at its start.
        safe_globals: Classes and functions it may be made of besides.

    Raises:
        ValueError: It is made of something else, or of these in a way in which they never are.
        zipfile.BadZipFile: It is damaged. See `ARCHIVE_ERRORS` for others.
    """
    checker = _Checker(_named(safe_globals))
    if is_archive(file):
        with open_archive(file) as archive:
            described = record_of(archive, DESCRIPTION)
            if described is None or described.file_size > _MAX_DESCRIPTION:
                raise ValueError(f"the archive has no {DESCRIPTION}, or it is too long")
            content = archive.read(described)

            def length_of(name: str) -> int | None:
                record = record_of(archive, f"data/{name}")
                return None if record is None else record.file_size

            checker.check(read_pickle(content, checker.check_name)[0], length_of)
    else:
        with _bytes_of(file) as content:
            _check_legacy(content, checker)
    if hasattr(file, "seek"):
        file.seek(0)


def _check_legacy(content: Any, checker: _Checker) -> None:
    """What torch wrote before 1.6: five pickles, and the elements after them."""
    magic, at = read_pickle(content, checker.check_name)
    if magic != _LEGACY_MAGIC:
        raise ValueError("it is not a file of torch.save")
    for _ in range(4):
        found, at = read_pickle(content, checker.check_name, at)
        checker.check(found, lambda name: len(content))


@contextmanager
def _bytes_of(file: Any) -> Iterator[Any]:
    if hasattr(file, "read"):
        file.seek(0)
        yield file.read()
        return
    with (
        Path(file).open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as map_,
    ):
        yield map_


def _named(safe_globals: Sequence[Any]) -> dict[str, Any]:
    """Classes and functions by the names pickles have for them, as in torch's own unpickler."""
    named: dict[str, Any] = {}
    for found in (*torch.serialization.get_safe_globals(), *safe_globals):
        if isinstance(found, tuple):
            named[found[1]] = found[0]
        else:
            named[f"{found.__module__}.{found.__qualname__}"] = found
    return named


class _Checker:
    """Rules for every name that plain data may refer to.

    Args:
        named: Classes and functions that are allowed besides, by name.
    """

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named
        self._length_of: Callable[[str], int | None] = lambda name: None
        self._rules: dict[str, Callable[[Call], bool]] = {
            **dict.fromkeys(_TENSORS, self._is_tensor),
            **dict.fromkeys(_PARAMETERS, self._is_parameter),
            _FROM_TYPE: self._is_from_type,
            "collections.OrderedDict": _is_ordered,
            "collections.Counter": _is_counter,
            "torch.Size": lambda call: _is_shape(*call.args),
            "torch.device": _is_device,
            "torch.serialization._get_layout": lambda call: _kinds(call.args) == (str,),
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": self._is_on_device,
            "_codecs.encode": _is_encoded,
            "builtins.bytearray": _is_bytearray,
            "builtins.set": lambda call: _kinds(call.args) == (list,),
            "builtins.complex": lambda call: _kinds(call.args) == (float, float),
        }

    def check_name(self, module: str, name: str) -> None:
        """Reject what plain data does not refer to."""
        full = _full(module, name)
        if full in self._rules or full in self._named or full in _STORAGES | _DTYPES:
            return
        if full not in _TENSOR_TYPES:
            raise ValueError(f"it refers to {full}")

    def check(self, root: Any, length_of: Callable[[str], int | None]) -> None:
        """Check everything that was pickled, however often it is shared.

        Args:
            root: What was pickled.
            length_of: How many bytes there are of a storage; None where it does not exist.
        """
        self._length_of = length_of
        heights: dict[int, int] = {}
        under_way: set[int] = set()
        # A path down and back up again; recursion would end at Python's own limit.
        todo: list[tuple[Any, bool]] = [(root, False)]
        while todo:
            node, is_done = todo.pop()
            parts = _parts(node)
            if parts is None or (not is_done and id(node) in heights):
                continue
            if is_done:
                under_way.discard(id(node))
                height = 1 + max((heights.get(id(part), 0) for part in parts), default=0)
                if height > _MAX_DEPTH:
                    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
                heights[id(node)] = height
                self._check_one(node)
                continue
            if id(node) in under_way:
                raise ValueError("it contains itself")
            under_way.add(id(node))
            todo.append((node, True))
            todo.extend((part, False) for part in parts if _parts(part) is not None)

    def _check_one(self, node: Any) -> None:
        if isinstance(node, Mapping):
            _check_keys(node.pairs)
        elif isinstance(node, PersistentId):
            self._check_storage(node)
        elif isinstance(node, Call):
            full = _full(node.of.module, node.of.name)
            rule = self._rules.get(full)
            is_known = rule(node) if rule is not None else self._is_named(full, node)
            may_have_items = full in ("collections.OrderedDict", "collections.Counter")
            if not is_known or (node.pairs and not may_have_items):
                raise ValueError(f"it calls {full} in a way that no program saves")
            if rule is not None and node.has_state and not _is_state(node.state):
                raise ValueError(f"it changes what {full} returns")
            _check_keys(node.pairs)
            if full == "builtins.set":
                _check_keys([(value, None) for value in node.args[0]])

    def _check_storage(self, node: PersistentId) -> None:
        pid = node.pid
        is_storage = type(pid) is tuple and len(pid) in (5, 6) and pid[0] in ("storage", b"storage")
        if not is_storage or type(pid[1]) is not Name or not _kinds(pid[2:5]) == (str, str, int):
            raise ValueError("it refers to something that is not a storage")
        kind = _full(pid[1].module, pid[1].name)
        if kind not in _STORAGES or (len(pid) == 6 and pid[5] is not None):
            raise ValueError(f"it refers to a storage of {kind}")
        dtype = STORAGE_DTYPES.get(pid[1].name, torch.uint8)
        there = self._length_of(pid[2])
        if there is None or integer(pid[4]) * dtype.itemsize > there:
            raise ValueError(f"the storage {pid[2]!r} is shorter than it is said to be, or missing")

    def _is_tensor(self, call: Call) -> bool:
        args = call.args
        if call.has_state or not 4 <= len(args) <= 8 or type(args[0]) is not PersistentId:
            return False
        storage, first, shape, stride = args[:4]
        if not _is_shape(shape) or not _is_shape(stride) or len(shape) != len(stride):
            return False
        if type(first) is not int or first < 0:
            return False
        pid = storage.pid
        if 0 in shape:
            return True
        # In elements where the storage has a type; those of any other have at least a byte.
        last = first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        return bool(last < pid[4])

    def _is_parameter(self, call: Call) -> bool:
        is_made = len(call.args) in (3, 4) and not call.has_state and not call.is_new
        return is_made and _is_made(call.args[0], _TENSORS) and _is_state(*call.args[3:])

    def _is_from_type(self, call: Call) -> bool:
        if len(call.args) != 4 or call.has_state or call.is_new:
            return False
        rebuild, type_, args, state = call.args
        if type(rebuild) is not Name or type(type_) is not Name or type(args) is not tuple:
            return False
        inner = Call(rebuild, args, False, [])
        rule = {**dict.fromkeys(_TENSORS, self._is_tensor)}.get(rebuild.full)
        is_known = rebuild.full in _PARAMETERS and self._is_parameter(inner)
        if rule is not None:
            is_known = rule(inner)
        return is_known and type_.full in _TENSOR_TYPES and _is_state(state)

    def _is_on_device(self, call: Call) -> bool:
        if len(call.args) != 4 or call.has_state:
            return False
        tensor, dtype, device, requires_grad = call.args
        is_dtype = type(dtype) is Name and dtype.full in _DTYPES
        is_device = type(device) is str and _DEVICE.fullmatch(device) is not None
        return is_dtype and is_device and type(requires_grad) is bool and _is_made(tensor, _TENSORS)

    def _is_named(self, full: str, call: Call) -> bool:
        """Whether a class or function that is allowed by name is called in a harmless way."""
        found = self._named.get(full)
        if found is None:
            return False
        if isinstance(found, enum.EnumMeta):
            # Its members are shared by everybody.
            return not call.has_state and not call.is_new and _kinds(call.args) in ((int,), (str,))
        module = full.partition(".")[0]
        if module == "numpy":
            return _is_numpy(full, call)
        if not isinstance(found, type):
            # Whoever allowed a function allowed to call it, and not to change what it returns.
            return not call.has_state
        if full in ("pathlib.PosixPath", "pathlib._local.PosixPath"):
            return not call.has_state and all(kind is str for kind in _kinds(call.args))
        if full == "_io.BytesIO":
            return _kinds(call.args) in ((), (bytes,)) and _is_buffer(call)
        # A class may have a way of its own to take its state.
        has_own = getattr(found, "__setstate__", None) is not None
        return not call.has_state or has_own or _is_state(call.state)


def _full(module: str, name: str) -> str:
    return _PYTHON_2.get((module, name), f"{module}.{name}")


def _parts(node: Any) -> list[Any] | None:
    """What a value is made of; None where it is made of nothing."""
    kind = type(node)
    if kind is list or kind is tuple:
        return list(node) if node else None
    if kind is Mapping:
        return [part for pair in node.pairs for part in pair]
    if kind is Call:
        inside = [part for pair in node.pairs for part in pair]
        return [*node.args, node.state, *inside]
    return [node.pid] if kind is PersistentId else None


def _kinds(args: Sequence[Any]) -> tuple[type, ...]:
    return tuple(type(arg) for arg in args)


def _check_keys(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Hashing a key takes the stack of as many calls as it is deep, and visits it as a tree."""
    for key, _ in pairs:
        if _key_parts(key, 0) > _MAX_KEY_PARTS:
            raise ValueError(f"a key of a dictionary has more than {_MAX_KEY_PARTS} parts")


def _key_parts(key: Any, depth: int) -> int:
    if type(key) in (str, int, float, bool, bytes, type(None), Name):
        return 1
    if depth > 8:
        return _MAX_KEY_PARTS + 1
    if type(key) is Call:
        # A torch.Size, a device, a member of an enumeration.
        return sum(_key_parts(part, depth + 1) for part in key.args)
    if type(key) is not tuple:
        raise ValueError(f"a key of a dictionary is a {type(key).__name__}")
    count = 1
    for part in key:
        count += _key_parts(part, depth + 1)
        if count > _MAX_KEY_PARTS:
            break
    return count


def _is_shape(*args: Any) -> bool:
    if len(args) != 1 or type(args[0]) is not tuple or len(args[0]) > MAX_DIMS:
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in args[0])


def _is_state(*states: Any) -> bool:
    """Whether attributes are set under plain names, if any are."""
    for state in states:
        if state is None or state == ():
            continue
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if part is None:
                continue
            if type(part) is not Mapping or any(
                type(key) is not str or key.startswith("__") for key, _ in part.pairs
            ):
                return False
    return True


def _is_made(value: Any, names: frozenset[str]) -> bool:
    return type(value) is Call and value.of.full in (*names, _FROM_TYPE)


def _is_ordered(call: Call) -> bool:
    return call.args == () and not call.is_new


def _is_counter(call: Call) -> bool:
    return not call.has_state and all(type(arg) is Mapping for arg in call.args[:1])


def _is_device(call: Call) -> bool:
    is_name = bool(call.args) and type(call.args[0]) is str
    return is_name and not call.has_state and _kinds(call.args[1:]) in ((), (int,))


def _is_encoded(call: Call) -> bool:
    """Whether bytes are written as the string of their numbers, which is how protocol 2 does it."""
    is_latin = _kinds(call.args) == (str, str) and call.args[1] == "latin1"
    return is_latin and not call.has_state and not call.is_new


def _is_bytearray(call: Call) -> bool:
    """Not from a number, which is how many zeros there would be."""
    if call.has_state:
        return False
    if _kinds(call.args) == (str, str):
        return call.args[1] in ("latin-1", "latin1")
    is_encoded = len(call.args) == 1 and _is_bytes(call.args[0])
    return call.args == () or is_encoded


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes or (type(value) is Call and value.of.full == "_codecs.encode")


def _is_buffer(call: Call) -> bool:
    state = call.state
    if not call.has_state:
        return True
    is_state = type(state) is tuple and len(state) == 3 and _is_bytes(state[0])
    return is_state and type(state[1]) is int and (state[2] is None or _is_state(state[2]))


def _is_numpy(full: str, call: Call) -> bool:
    if full == "numpy.dtype":
        return _is_numpy_dtype(call)
    if not full.endswith("._reconstruct") or len(call.args) != 3 or call.is_new:
        return False
    kind, shape, code = call.args
    is_start = type(kind) is Name and kind.full == "numpy.ndarray" and shape == (0,)
    if not is_start or not (_is_bytes(code) or type(code) is str) or not call.has_state:
        return False
    state = call.state
    if type(state) is not tuple or len(state) != 5 or _kinds(state[:1]) != (int,):
        return False
    _, shape, dtype, is_fortran, content = state
    if type(dtype) is not Call or not _is_numpy_dtype(dtype) or type(is_fortran) is not bool:
        return False
    if not _is_shape(shape) or not _is_bytes(content):
        return False
    length = len(content) if type(content) is bytes else len(content.args[0])
    itemsize = int(re.sub(r"\D", "", dtype.args[0]))
    return bool(length == math.prod(shape) * itemsize)


def _is_numpy_dtype(call: Call) -> bool:
    """A dtype of numbers, made as a copy: the others are shared by everybody."""
    if len(call.args) != 3 or type(call.args[0]) is not str or call.is_new:
        return False
    text, align, copy = call.args
    if _NUMPY_DTYPE.fullmatch(text) is None or align not in (0, False) or copy not in (1, True):
        return False
    if not call.has_state:
        return True
    order, *rest = call.state[1:] if type(call.state) is tuple and len(call.state) == 8 else ("",)
    return order in ("<", ">", "|", "=") and rest == [None, None, None, -1, -1, 0]
