"""A group of named arrays that compiled code receives as one address: ``work.x`` there is the array of that name.

Numba can pass named tuples, but by value: fifty arrays are hundreds of words, copied at every call and compiled into
every function. A ``Group`` is a table in memory instead, with six words for each field: the address and the sizes of
an array, or a number. Numba knows the fields' types, so compiled code reads them as it would a tuple's.
"""

import zlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

WORDS = 6  # of a field: address and up to five sizes
_INT64 = ir.IntType(64)


class GroupType(types.Type):
    """The type of a `Group`: its name, and name and type of every field."""

    def __init__(self, name: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.fields = fields
        # Short, because the names of compiled functions contain those of their arguments' types.
        super().__init__(name=f"{name}{zlib.crc32(repr(fields).encode()):08x}")


class Group:
    """Arrays and numbers under names, for Python as attributes. Arrays are never exchanged, only written.

    Args:
        fields: C-contiguous arrays of up to five dimensions, ints and floats.
    """

    def __init__(self, **fields: np.ndarray | int | float) -> None:
        self._table = np.zeros((len(fields), WORDS), np.int64)
        kinds = []
        for row, (field, value) in zip(self._table, fields.items(), strict=True):
            setattr(self, field, value)
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous and value.ndim < WORDS
                row[0], row[1 : 1 + value.ndim] = value.ctypes.data, value.shape
                kinds.append((field, types.Array(from_dtype(value.dtype), value.ndim, "C")))
            elif isinstance(value, int):
                row[0] = value
                kinds.append((field, types.int64))
            else:
                row[:1].view(np.float64)[0] = value
                kinds.append((field, types.float64))
        self.address = self._table.ctypes.data
        self._numba_type_ = GroupType(type(self).__name__, tuple(kinds))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this group has no {name}")


@register_model(GroupType)
class _GroupModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: GroupType) -> None:
        super().__init__(manager, kind, _INT64.as_pointer())


@infer_getattr
class _GroupAttributes(AttributeTemplate):
    key = GroupType

    def generic_resolve(self, kind: GroupType, name: str) -> Any:
        return dict(kind.fields).get(name)


@lower_getattr_generic(GroupType)
def _read_field(context: Any, builder: Any, kind: GroupType, table: Any, name: str) -> Any:
    names = [field for field, _ in kind.fields]
    first, field_type = WORDS * names.index(name), dict(kind.fields)[name]

    def word(number: int) -> Any:
        loaded = builder.load(builder.gep(table, [_INT64(first + number)]))
        # The table never changes while compiled code runs: it need not be read again after every store.
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if field_type == types.int64:
        return word(0)
    if field_type == types.float64:
        return builder.bitcast(word(0), ir.DoubleType())
    array = context.make_array(field_type)(context, builder)
    element = context.get_data_type(field_type.dtype)
    size = context.get_abi_sizeof(element)
    shape = [word(1 + axis) for axis in range(field_type.ndim)]
    strides = [_INT64(size)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    populate_array(array, builder.inttoptr(word(0), element.as_pointer()), shape, strides, _INT64(size), meminfo=None)
    return array._getvalue()


@unbox(GroupType)
def _unbox(kind: GroupType, group: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(group, "address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.inttoptr(address, _INT64.as_pointer()), is_error=c.pyapi.c_api_error())
