"""Messages that nobody should send: absurd through and through, or in a field or two of a genuine one."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_SMALL = (0, 1, 2, 3, 4, 7, 8, 255, 65535)
_EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
_NUMBERS = (*_SMALL, *_EDGES)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 1e-308, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "\0", "x", "é\u202e", "%s%n", "../../etc/passwd", "a" * 5000, "-1", "99999999999999999999")
_HOSTS = ("", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", "127.0.0.1:99999", "[::1", ":", "\0", "2.2.2.2", "unix:/x")
"""None of them makes anybody look for a name outside."""
_BYTES = (b"", b"\0", bytes(16), bytes(49), b"\xff" * 64, bytes(4096))


def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Of this type, with absurd values in some of the fields or in all."""
    make = message_factory.GetMessageClass(descriptor)
    fields = {field.name: _values(field) for field in descriptor.fields}
    filled = st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(fields)
    return filled.map(lambda values: make(**values))


def changes(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Of this type, with an absurd value in one or two of the fields, however deep: to be laid over a genuine one."""
    make = message_factory.GetMessageClass(descriptor)
    if not descriptor.fields:
        return st.just(make())
    field = st.sampled_from(list(descriptor.fields)).flatmap(_named_value)
    return st.lists(field, min_size=1, max_size=2).map(lambda drawn: make(**dict(drawn)))


def _named_value(field: FieldDescriptor) -> st.SearchStrategy[tuple[str, Any]]:
    kind = field.message_type
    values = _values(field) if kind is None or field.is_repeated else changes(kind)
    return values.map(lambda value: (field.name, value))


def laid_over(genuine: Message, change: Message) -> Message:
    """The genuine message with every field of the change in place of its own."""
    result = type(genuine)()
    result.CopyFrom(genuine)
    for field, value in change.ListFields():
        if field.message_type is not None and not field.is_repeated and genuine.HasField(field.name):
            getattr(result, field.name).CopyFrom(laid_over(getattr(genuine, field.name), value))
        else:
            result.ClearField(field.name)
            one = type(genuine)()
            one.MergeFrom(change)
            for other, _ in change.ListFields():
                if other.name != field.name:
                    one.ClearField(other.name)
            result.MergeFrom(one)
    return result


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one = _one(field)
    if not field.is_repeated:
        return one
    few = st.lists(one, max_size=4)
    if field.message_type is not None:
        return few
    return few | st.tuples(one, st.sampled_from([17, 3000])).map(lambda drawn: [drawn[0]] * drawn[1])


def _one(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(_BYTES) | st.binary(max_size=64)
    return st.sampled_from(_scalars(field))


def _scalars(field: FieldDescriptor) -> list[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return [*_HOSTS] if "host" in field.name or "address" in field.name else [*_TEXTS]
        case FieldDescriptor.CPPTYPE_BOOL:
            return [False, True]
        case FieldDescriptor.CPPTYPE_ENUM:
            kinds = field.enum_type
            return [-1, 77, *(() if kinds is None else kinds.values_by_number)]
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return [*_FLOATS]
    low, high = _RANGES[field.cpp_type]
    return [number for number in _NUMBERS if low <= number <= high]


_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
