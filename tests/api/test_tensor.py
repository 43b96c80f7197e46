"""`Tensor`: zero-copy access by other libraries, lifetime, read-only and writable memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
#: The name of the capsule for each `max_version`.
CAPSULES = [
    (None, b"dltensor"),
    ((0, 8), b"dltensor"),
    ((1, 0), b"dltensor_versioned"),
    ((2, 5), b"dltensor_versioned"),
]


def make(values: Any = VALUES) -> Any:
    return penstock.Tensor(shape=values.shape, data=values.tobytes())


def is_named(capsule: object, name: bytes) -> bool:
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return bool(is_valid(capsule, name))


@pytest.mark.parametrize("read", [np.asarray, np.from_dlpack, lambda tensor: np.asarray(memoryview(tensor))])
@pytest.mark.parametrize("shape", [(2, 3, 4), (24,), (1, 24), (4, 0), ()])
def test_tensor_is_read_without_a_copy_and_read_only(
    read: Callable[[Any], Any], shape: tuple[int, ...]
) -> None:
    values = VALUES[0, 0, 0] if shape == () else VALUES.ravel()[: int(np.prod(shape))]
    tensor = make(values.reshape(shape))
    array = read(tensor)
    np.testing.assert_array_equal(array, values.reshape(shape))
    assert array.dtype == np.float32
    assert array.shape == tensor.shape == shape
    if array.size:  # NumPy does not keep the memory of an empty array
        assert not array.flags.writeable
        assert array.ctypes.data == np.asarray(tensor).ctypes.data


@pytest.mark.parametrize("read", [np.asarray, np.from_dlpack, memoryview])
def test_reader_keeps_the_memory_alive(read: Callable[[Any], Any]) -> None:
    views = [read(make(VALUES + number)) for number in range(50)]
    gc.collect()
    for number, view in enumerate(views):
        np.testing.assert_array_equal(np.asarray(view), VALUES + number)


def test_unsupported_buffer_request_is_rejected() -> None:
    tensor = make()
    view: Any = memoryview(tensor)
    assert (view.readonly, view.format, view.itemsize, view.nbytes) == (True, "f", 4, 96)
    assert view.strides == (48, 16, 4)
    assert view.c_contiguous
    with pytest.raises(TypeError):
        view[0, 0, 0] = 1.0
    with pytest.raises(TypeError):
        io.BytesIO(bytes(96)).readinto(tensor)
    np.testing.assert_array_equal(np.asarray(tensor), VALUES)


@pytest.mark.parametrize(("max_version", "name"), CAPSULES)
def test_capsule_has_the_requested_dlpack_version(max_version: Any, name: bytes) -> None:
    copied = make().__dlpack__(max_version=max_version, copy=True)
    assert is_named(copied, name)
    if name == b"dltensor_versioned":
        assert is_named(make().__dlpack__(max_version=max_version), name)
    else:
        with pytest.raises(BufferError, match="read-only"):
            make().__dlpack__(max_version=max_version)


@pytest.mark.needs("proc")
def test_unconsumed_capsule_frees_its_memory() -> None:
    values = np.zeros(1 << 20, dtype=np.float32)
    tensor = make(values)
    for _ in range(1000):  # 4 GB if they leaked
        tensor.__dlpack__(max_version=(1, 0), copy=True)
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - a fixed path
        assert int(statm.read().split()[1]) * 4096 < 3 << 30


def test_copy_owns_its_memory() -> None:
    tensor = make()
    array = np.from_dlpack(tensor, copy=True)
    assert array.flags.writeable
    array[0, 0, 0] = 7
    np.testing.assert_array_equal(np.asarray(tensor), VALUES)


@pytest.mark.parametrize("options", [{"stream": 1}, {"dl_device": (2, 0)}])
def test_other_device_is_rejected(options: Any) -> None:
    assert make().__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="CPU"):
        make().__dlpack__(max_version=(1, 0), **options)
    assert make().__dlpack__(max_version=(1, 0), dl_device=(1, 0), stream=None)


def test_equal_tensors_have_equal_shapes_and_bits() -> None:
    tensor = make()
    others = [make(), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))]  # noqa: S301 - made here
    for other in others:
        assert other == tensor
        assert hash(other) == hash(tensor)
    assert tensor != make(VALUES.reshape(6, 4))
    assert tensor != make(VALUES + 1)
    not_a_number = make(np.array([np.nan], dtype=np.float32))
    assert not_a_number == copy.copy(not_a_number)
    assert repr(tensor) == "<Tensor of shape (2, 3, 4)>"
    assert repr(make(VALUES.ravel())) == "<Tensor of shape (24,)>"


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2**63, 2), (0,)])
def test_bytes_that_do_not_match_the_shape_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bytes, which is not a float32 array of shape"):
        penstock.Tensor(shape=shape, data=b"\0" * 9 if shape == (2,) else b"\0" * 4)


@pytest.mark.torch
def test_torch_reads_and_writes_tensors() -> None:
    import torch

    tensor = make()
    read = torch.from_dlpack(tensor)
    assert torch.equal(read, torch.from_numpy(VALUES))
    assert read.data_ptr() == np.asarray(tensor).ctypes.data
    del tensor
    gc.collect()
    assert torch.equal(read, torch.from_numpy(VALUES))


class Endless(tuple[int, ...]):
    """A tuple with a wrong length."""

    __slots__ = ()

    def __len__(self) -> int:
        return 2**62


@pytest.mark.parametrize(
    "shape",
    [(1,) * 65, (2**62, 2**62), (2**40, 0, 2**40), (0, 2**63), (2**32, 2**32, 0), (0, 2**61), (2, 3), (25,)],
    ids=str,
)
def test_shape_that_does_not_match_the_values_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        penstock.Tensor(shape=shape, data=VALUES.tobytes() if 0 not in shape else b"")


def test_invalid_shape_is_rejected_and_misleading_one_read() -> None:
    others: list[Any] = [[24], range(2**62), {24}, None]
    for other in others:
        with pytest.raises(TypeError):
            penstock.Tensor(shape=other, data=VALUES.tobytes())
    outside: list[tuple[int, ...]] = [(-24,), (2**64,), (0, 2**64)]
    for shape in outside:
        with pytest.raises(OverflowError):
            penstock.Tensor(shape=shape, data=VALUES.tobytes())
    assert penstock.Tensor(shape=Endless((24,)), data=VALUES.tobytes()).shape == (24,)
