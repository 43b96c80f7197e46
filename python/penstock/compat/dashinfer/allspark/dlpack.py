"""Reads the integers of DLPack capsules, tensors and buffers, without an array library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

__all__ = ["integers"]

#: `DLDeviceType` of memory that the CPU reads: kDLCPU and kDLCUDAHost.
_CPU_DEVICES = (1, 3)
#: `DLDataTypeCode` of signed integers.
_SIGNED = 0
#: Major version of DLPack that has these structures.
_MAJOR_VERSION = 1
_MAX_DIMENSIONS = 2
_MAX_VALUES = 2**31 - 1


class _Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


#: The structure of a capsule by its name. A capsule that another library has taken has another name.
_KINDS: dict[bytes, type[_Managed | _Versioned]] = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}
_capsule_is_valid = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def integers(array: Any) -> list[int]:
    """The values of an array of int32 or int64 in CPU memory, of shape `(n,)` or `(1, n)`.

    The values of a DLPack capsule are copied and it stays as it is, so it can be read again: DashInfer's
    programs start many requests with one capsule. Raises `TypeError` if `array` is not an array, `ValueError`
    for one that is none of these.
    """
    if not _is_capsule(array):
        try:
            view = memoryview(array)
        except TypeError:
            view = None
        if view is not None:
            return _of_buffer(view)
        if not hasattr(array, "__dlpack__"):
            message = f"expected an array of integers or a DLPack capsule, got {type(array).__name__}"
            raise TypeError(message)
        try:
            array = array.__dlpack__()
        except Exception as error:
            message = f"the array cannot be exported: {type(error).__name__}: {error}"
            raise ValueError(message) from error
    return _of_capsule(array)


def _of_buffer(view: memoryview) -> list[int]:
    if view.format not in ("i", "l", "q"):
        message = f"the data type of the array is {view.format!r}; it must be int32 or int64"
        raise ValueError(message)
    _check_shape(view.shape)
    values: list[Any] = view.tolist()
    return values[0] if view.ndim == _MAX_DIMENSIONS else values


def _is_capsule(value: object) -> bool:
    return type(value).__name__ == "PyCapsule"


def _of_capsule(capsule: object) -> list[int]:
    name = next((name for name in _KINDS if _capsule_is_valid(capsule, name)), None)
    if name is None:
        message = "the capsule is not a DLPack tensor, or another library has taken its tensor"
        raise ValueError(message)
    managed = _KINDS[name].from_address(_capsule_pointer(capsule, name))
    if isinstance(managed, _Versioned) and managed.major != _MAJOR_VERSION:
        version = f"{managed.major}.{managed.minor}"
        message = f"the DLPack version of the tensor is {version}; it must be {_MAJOR_VERSION}.x"
        raise ValueError(message)
    return _values(managed.tensor)


def _values(tensor: _Tensor) -> list[int]:
    """A copy of the values."""
    if tensor.device_type not in _CPU_DEVICES:
        message = f"the tensor is on a device of type {tensor.device_type}; it must be on the CPU"
        raise ValueError(message)
    if (tensor.code, tensor.lanes) != (_SIGNED, 1) or tensor.bits not in (32, 64):
        message = (
            f"the data type of the tensor has code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes; "
            "it must be int32 or int64"
        )
        raise ValueError(message)
    if not 0 < tensor.ndim <= _MAX_DIMENSIONS:
        message = f"the tensor has {tensor.ndim} dimensions; its shape must be (n,) or (1, n)"
        raise ValueError(message)
    if not tensor.shape:
        message = "the tensor has dimensions but no shape"
        raise ValueError(message)
    shape = tuple(tensor.shape[: tensor.ndim])
    _check_shape(shape)
    count = shape[-1]
    if count == 0:
        return []
    if count > _MAX_VALUES:
        message = f"the shape of the array is {shape}; it may have at most {_MAX_VALUES} values"
        raise ValueError(message)
    if not tensor.data:
        message = "the tensor has values but no data"
        raise ValueError(message)
    kind = c_int64 if tensor.bits == 64 else c_int32  # noqa: PLR2004
    stride = tensor.strides[tensor.ndim - 1] if tensor.strides else 1
    start = tensor.data + tensor.byte_offset
    if stride == 1:
        return list((kind * count).from_address(start))
    return [kind.from_address(start + index * stride * ctypes.sizeof(kind)).value for index in range(count)]


def _check_shape(shape: tuple[int, ...] | None) -> None:
    if (
        shape is None
        or len(shape) not in (1, _MAX_DIMENSIONS)
        or min(shape) < 0
        or (len(shape) > 1 and shape[0] != 1)
    ):
        message = f"the shape of the array is {shape}; it must be (n,) or (1, n): one request per call"
        raise ValueError(message)
