"""Kernel launches of the C++ hook, recorded by a fake driver and then executed in Triton's interpreter."""

import contextvars
import ctypes
import itertools
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tapscope.core.observe import RowSpan, StepInfo
from tapscope.dumper.device.driver_copies import packed_copies
from tapscope.kernels.native import library, summary
from tapscope.kernels.native import sketch as native_sketch
from tapscope.kernels.triton import is_interpreted, sketch, tap
from tapscope.run_format.sketch import SketchIndex, row_keys, sketch_index

_DRIVER = """
#include <string.h>
struct config { unsigned grid[3], block[3], shared; void *stream; const int *attributes; unsigned num_attributes; };
struct launch { long long function, programs, threads, shared, stream, overlaps, parameters[12]; } launches[16];
int num_launches = 0;
int cuLaunchKernelEx(const struct config *how, void *function, void **parameters, void **extra) {
    struct launch *to = &launches[num_launches++ % 16];
    int count = (long long)function == 2 ? 12 : 7;
    to->function = (long long)function, to->programs = how->grid[0], to->threads = how->block[0];
    to->shared = how->shared, to->stream = (long long)how->stream;
    to->overlaps = how->num_attributes == 1 && how->attributes[0] == 6 && how->attributes[2] == 1;
    for (int i = 0; i < count; ++i) memcpy(&to->parameters[i], parameters[i], 8);
    return extra ? 1 : 0;
}
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuStreamIsCapturing(void *stream, int *is_capturing) { return *is_capturing = 0; }
long long done[16][4];
int num_done = 0;
static int note(long long what, long long one, long long two, long long three) {
    long long values[] = {what, one, two, three};
    memcpy(done[num_done++ % 16], values, sizeof values);
    return 0;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t nbytes, void *stream) {
    return to == from ? 1 : note((long long)stream, to, from, nbytes);
}
int cuEventRecord(void *event, void *stream) { return note((long long)stream, (long long)event, 1, 0); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return note((long long)stream, (long long)event, 2, flags);
}
int cuGetErrorName(int error, const char **name) {
    *name = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : 0;
    return !*name;
}
"""
_STREAM = 7
_SUMMARY, _SKETCH = 1, 2  # in place of function handles


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("function", "programs", "threads", "shared", "stream", "overlaps")),
        ("parameters", ctypes.c_int64 * 12),
    )


class _View(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_ViewOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_View))
_StreamOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("unused", ctypes.c_void_p * 4),
        ("view", _ViewOf),
        ("stream", _StreamOf),
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile the fake driver and load it by name, as the library does."""
    compiler = shutil.which("cc")
    if compiler is None or torch.cuda.is_available() or not is_interpreted() or library.functions() is None:
        pytest.skip("needs a C compiler, the C++ library, Triton's interpreter, and no CUDA driver")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(_DRIVER)
    made = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", made, folder / "driver.c"], check=True
    )
    return ctypes.CDLL(str(made))


def _exchange() -> tuple[Any, _Exchange]:
    """Return a DLPack interface that reports every tensor as a CUDA tensor, and the objects to keep alive."""
    kept: dict[int, Any] = {}

    def view(tensor: torch.Tensor, to: Any) -> int:
        sizes = (ctypes.c_int64 * tensor.ndim)(*tensor.shape), (ctypes.c_int64 * tensor.ndim)(*tensor.stride())
        kept[0] = sizes
        shape, strides = map(ctypes.addressof, sizes)
        to[0] = _View(tensor.data_ptr(), 2, 0, tensor.ndim, 2, 32, 1, shape, strides, 0)
        return 0

    def stream(kind: int, device: int, to: Any) -> int:
        to[0] = _STREAM
        return 0

    api = _Exchange(1, 0, (ctypes.c_void_p * 4)(), _ViewOf(view), _StreamOf(stream))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(api), _NAME, None), api


_NAME = b"dlpack_exchange_api"  # a capsule does not keep its name alive


def _int64_at(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


def _run(launch: _Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernel on the memory at the addresses in its parameters."""
    given = list(launch.parameters)
    kernel, arguments, constants = (
        (
            sketch._sketch_kernel,
            given[:10],
            sketch._How.of(torch.zeros(4), sketch.Part(3, 70, 0, 70, 70), 4).constants | {"IS_OVERLAPPED": False},
        )
        if launch.function == _SKETCH
        else (
            tap._summarize_kernel,
            [*given[:2], None, None, *(_int64_at(address, 2048) for address in given[2:5])],
            tap._begun_constants(torch.float32, tap._Share(launch.programs, 1), True),
        )
    )
    kernel[(launch.programs, 1, 1)](*arguments, **constants, num_warps=4)


def test_native_hook_launches_kernels_that_find_tensors_rows_and_counters(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of one tensor, and statistics plus sketch of another, equal those computed on the host."""
    functions = library.functions()
    assert functions is not None
    capsule, _api = _exchange()
    info = StepInfo(step=3, grid=(3,), rows=(RowSpan("a", 7, 1, 0, 0), RowSpan("b", 0, 2, 0, 1)))
    found = row_keys(info)
    assert found is not None
    values, other = torch.randn(3, 70), torch.randn(5, 1000)
    keys, zero = torch.from_numpy(found.keys.astype(np.int64)), torch.zeros(2, dtype=torch.int64)
    rows, parts = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(64, 12, dtype=torch.int64)
    counters, partial = torch.zeros(4, 256), torch.zeros(16, 256)
    spans = torch.zeros(4, 4, dtype=torch.int64)
    hash_keys = tap.keys_on(torch.device("cpu"))
    asked: list[tuple[int, int, int]] = []

    tags: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("tags", default=())
    none = tags.get()
    writer = functions.record_writer((torch.Tensor,), capsule, lambda _: None, set(), lambda: -1, tags, none)

    def room(device: int, stream: int, sketches: int) -> None:
        asked.append((device, stream, sketches))
        places = [each.data_ptr() for each in (counters, partial, spans)]
        writer.use_rows(device, stream, rows.data_ptr(), parts.data_ptr(), hash_keys.data_ptr(), 4, 64, *places, 16)

    step = SimpleNamespace(announced=True, micro=0, in_full=False, halted=False, info=info)
    known = info, (3,), keys.data_ptr(), zero.data_ptr(), keys, zero
    nothing: Any = lambda *given: None  # noqa: E731
    writer.begin(step, "3", 11, nothing, itertools.count(5), nothing, nothing, {}, room, lambda *place: known)

    templates = []
    for tensor, programs in ((values, 1), (other, 3)):
        about = b',"site":"a:out","step":', b',"dtype":"float32"', torch.float32, tensor.shape, tensor.numel(), 4
        made = functions.record_template(*about, library.CODES["float32"])
        assert made.set_row_launch(capsule, tensor, _SUMMARY, programs, 128, 96, True)
        templates.append(made)
    templates[0].set_sketch_launch(_SKETCH, 1, 64, 4096, False, (3, 70, 0, 70, 70), 0, (3,), ("port", True))
    for template, tensor in zip(templates, (values, other), strict=True):
        fast = functions.fast_path(writer)
        fast.patterns = (template,)
        assert fast(tensor) is True
        assert fast(tensor) is False  # the site has already fired in this step

    launches = (_Launch * 16).in_dll(driver, "launches")[: ctypes.c_int.in_dll(driver, "num_launches").value]
    about = [(each.function, each.programs, each.threads, each.shared, each.stream, each.overlaps) for each in launches]
    assert about == [
        (_SKETCH, 1, 64, 4096, _STREAM, 0),
        (_SUMMARY, 1, 128, 96, _STREAM, 1),
        (_SUMMARY, 3, 128, 96, _STREAM, 1),
    ]
    assert asked == [(0, _STREAM, 1)]
    for launch in launches:
        _run(launch, monkeypatch)
    tap.merge(rows[:2])
    sketch._merge_kernel[(2, 1, 1)](spans, TILE=sketch._TILE)
    for row, tensor in zip(rows, (values, other), strict=False):
        assert summary.tell(row.data_ptr())[1] == summary.take(tensor.data_ptr(), tensor.numel(), "float32")[1]
    index = sketch_index((3, 70), found, dims="t h[tp]", mesh={"tp": 2}, coords={"tp": 1})
    assert isinstance(index, SketchIndex)
    expected = native_sketch.sketch(values.data_ptr(), "float32", index)
    np.testing.assert_allclose(counters[0].numpy(), expected, rtol=1e-5, atol=1e-5)

    heads, _, offsets, first, used, sketches = writer.drain_rows()
    assert (len(heads), first, used, sketches) == (2, 5, 2, (("port", True), None))
    assert memoryview(offsets).cast("q").tolist() == [0, 128]

    writer.begin(step, "4", 12, nothing, itertools.count(7), nothing, nothing, {}, room, lambda *place: known)
    assert fast(other) is True
    assert writer.drain_rows()[3:] == (7, 1, None)  # no sketch


def test_copy_that_the_driver_refuses_raises_its_error(driver: Any) -> None:
    functions = library.functions()
    assert functions is not None
    with pytest.raises(RuntimeError, match=r" refused to start a copy: CUDA_ERROR_INVALID_VALUE \(1\);"):
        functions.copy_async(0, 0, 1, packed_copies([(8, 8, 8)]), None)
    with pytest.raises(RuntimeError, match=r" refused to start a copy: CUDA_ERROR_INVALID_VALUE \(1\);"):
        functions.copy_async(0, 3, 5, packed_copies([(16, 24, 8)]), None, (4, packed_copies([(8, 8, 8)])))


def test_library_starts_no_copy_where_the_current_device_is_another(driver: Any) -> None:
    functions = library.functions()
    assert functions is not None
    assert not functions.copy_async(63, 0, 1, packed_copies([(8, 8, 8)]), None)
    with pytest.raises(TypeError):
        functions.copy_async(0, 0, 1, b"", (1,))
    with pytest.raises(TypeError):
        functions.copy_async(0, 0, 1, b"", None, (1,))


def test_copies_aside_wait_for_those_before(driver: Any) -> None:
    functions = library.functions()
    assert functions is not None
    ctypes.c_int.in_dll(driver, "num_done").value = 0
    copies, more = packed_copies([(64, 32, 16), (96, 48, 8)]), packed_copies([(256, 64, 40)])
    assert functions.copy_async(0, 3, 5, copies, None, (4, more))
    done = ((ctypes.c_longlong * 4) * 16).in_dll(driver, "done")[: ctypes.c_int.in_dll(driver, "num_done").value]
    is_recorded, is_awaited = 1, 2
    assert [tuple(each) for each in done] == [
        (3, 64, 32, 16),
        (3, 96, 48, 8),
        (3, 5, is_recorded, 0),
        (4, 5, is_awaited, 0),
        (4, 256, 64, 40),
        (4, 5, is_recorded, 0),
    ]


def test_library_launches_a_kernel_with_its_parameters(driver: Any) -> None:
    functions = library.functions()
    assert functions is not None
    for overlaps in (False, True):
        ctypes.c_int.in_dll(driver, "num_launches").value = 0
        parameters = (1 << 40, -1, 3, 4, 5, 0, 0)
        assert functions.launch_kernel(_SUMMARY, 6, 1, 1, 128, 96, overlaps, _STREAM, *parameters) == 0
        launch = (_Launch * 16).in_dll(driver, "launches")[0]
        about = launch.function, launch.programs, launch.threads, launch.shared, launch.stream, launch.overlaps
        assert about == (_SUMMARY, 6, 128, 96, _STREAM, overlaps)
        assert tuple(launch.parameters)[:7] == parameters
