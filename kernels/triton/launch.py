"""Launcher, and what else the wrappers of all kernels share: checks of tensors, and sizes of the device."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import is_interpreted, why_not
from tapscope.kernels.triton.compile_ahead import compiling_threads

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
HAS_PTX = tl.constexpr(not is_interpreted())
"""Whether a kernel may contain PTX."""
launch_kernel: Callable[..., int | None] | None = None
"""Asks the driver for a launch faster than ctypes does, see ``launch_kernel`` in kernels/native/library.py; set by
those who have that library."""
_INTERPRETED_SMS = 2
"""Keeps grids small where each program is Python."""


Arguments = tuple[Tensor | float | None, ...]
"""Launch arguments of a kernel besides its constants."""


class Launcher:
    """Launches one kernel, and remembers what Triton compiled for which arguments.

    Triton recomputes that at every launch, which takes longer than many kernels run: it looks at every argument
    by its name. Here the same facts make one key: constants, types, which pointers and numbers are multiples of 16,
    and which numbers are 1 or need 64 bits.

    A kernel that ``overlaps`` may start while the previous one of its stream still runs, which hides the time of its
    launch (programmatic dependent launch, from compute capability 9.0 on). It calls :func:`wait_for_previous` with its
    last constant, IS_OVERLAPPED, which is set here.
    """

    def __init__(self, kernel: Any, *, overlaps: bool = False) -> None:
        self._kernel, self._overlaps = kernel, overlaps
        self._is_compiled = isinstance(kernel, JITFunction)
        self._known: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        args: Arguments,
        constants: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """Launch on the current stream of ``device``, which is the current one; ``constants`` come after ``args``."""
        given, how = self._complete(device, constants, options)
        if not self._is_compiled:
            self._kernel[grid](*args, **given, **how)
            return
        if compiling_threads and get_ident() in compiling_threads:
            self._kernel.warmup(*args, grid=grid, **given, **how)
            return
        key = self._key(device, args, given, how)
        known = self._known.get(key)
        if known is not None:
            if known.direct is None or not known.direct(device, grid, args):
                known.kernel[grid](*args, *known.constants)
            return
        compiled = self._kernel[grid](*args, **given, **how)
        if compiled is not None:
            values = tuple(given[name] for name in self._kernel.arg_names[len(args) :])
            self._known[key] = _Compiled(compiled, values, DirectLaunch.of(compiled, self._kernel.arg_names))

    def direct(
        self, device: torch.device, args: Arguments, constants: Mapping[str, Any], **options: Any
    ) -> "DirectLaunch | None":
        """How to launch through the driver what was launched before with arguments like these."""
        known = self._known.get(self._key(device, args, *self._complete(device, constants, options)))
        return None if known is None else known.direct

    def _complete(
        self, device: torch.device, constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Constants and options with what they are for a kernel that overlaps."""
        if not self._overlaps:
            return constants, options
        is_overlapped = may_overlap(device)
        constants = {**constants, "IS_OVERLAPPED": is_overlapped}
        return constants, {**options, "launch_pdl": True} if is_overlapped else options

    @staticmethod
    def _key(
        device: torch.device, args: Arguments, constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        traits = [
            (arg.dtype, arg.data_ptr() % 16 == 0)
            if isinstance(arg, Tensor)
            else (arg == 1, arg % 16 == 0, arg.bit_length() > 31)
            if isinstance(arg, int)
            else type(arg)
            for arg in args
        ]
        return device, *constants.values(), *options.values(), *traits


class DriverLaunch(NamedTuple):
    """How code without Python launches a compiled kernel for tensors of one type and size."""

    function: int
    """A CUfunction."""
    programs: int
    threads: int
    shared: int
    """Bytes of shared memory."""
    overlaps: bool
    """As of :class:`Launcher`."""


class DirectLaunch:
    """Launches a compiled kernel through the driver, in a third of the time that Triton's launcher takes.

    The parameters of a compiled kernel are its arguments in order, without constants, and the addresses of two scratch
    areas, which are null here.
    """

    def __init__(
        self, function: int, threads: int, shared: int, places: Sequence[int], *, overlaps: bool = False
    ) -> None:
        """``places`` are the indices of the arguments that are parameters; ``overlaps`` as of :class:`Launcher`."""
        self.function, self.threads, self.shared, self.places = function, threads, shared, tuple(places)
        self.overlaps = overlaps
        self._num = len(places) + 2
        self._values, self._pointers = ctypes.c_int64 * self._num, ctypes.c_void_p * self._num

    @classmethod
    def of(cls, compiled: Any, names: Sequence[str]) -> "DirectLaunch | None":
        """For a kernel that Triton has launched; None where it needs more than a plain launch."""
        try:
            metadata, signature = compiled.metadata, compiled.src.signature
            kinds = [signature[name] for name in names]
            is_plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
            has_scratch = metadata.global_scratch_size or metadata.profile_scratch_size
            is_whole = all(kind == "constexpr" or kind[0] in "*iu" for kind in kinds)
            if not (is_plain and is_whole and not has_scratch and _driver() is not None):
                return None
            places = [index for index, kind in enumerate(kinds) if kind != "constexpr"]
            function, threads = int(compiled.function), 32 * metadata.num_warps
            return cls(function, threads, metadata.shared, places, overlaps=bool(metadata.launch_pdl))
        except (AttributeError, KeyError, TypeError):  # another version of Triton
            return None

    def __call__(self, device: torch.device, grid: tuple[int, int, int], args: Arguments) -> bool:
        """Launch on the current stream of ``device``; False where Triton must: a profiler listens to it, or this thread
        has not used the device yet."""
        hook = knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):
            return False
        given = [args[place] for place in self.places]
        numbers: list[Any] = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        if launch_kernel is not None:
            how = self.function, *grid, self.threads, self.shared, self.overlaps, stream
            code = launch_kernel(*how, *numbers, 0, 0)
        else:
            code = self._launch(grid, stream, numbers)
        if code is None or code == _NO_CONTEXT:
            return False
        if code:
            raise RuntimeError(
                f"the CUDA driver refused to launch a kernel: {_error_name(code)} ({code}); a kernel before it may "
                "have failed, which CUDA_LAUNCH_BLOCKING=1 finds"
            )
        return True

    def _launch(self, grid: tuple[int, int, int], stream: int, numbers: Sequence[int]) -> int:
        """Launch without the C++ library; the driver's code."""
        values = self._values(*numbers, 0, 0)
        first = ctypes.addressof(values)
        pointers = self._pointers(*range(first, first + 8 * self._num, 8))
        sizes = *grid, self.threads, 1, 1, self.shared, stream
        if self.overlaps:
            config = _LaunchConfig(*sizes, _OVERLAP, 1)
            code: int = _driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        else:
            code = _driver().cuLaunchKernel(self.function, *sizes, pointers, None)
        return code


class _Compiled(NamedTuple):
    kernel: Any
    constants: tuple[Any, ...]
    direct: DirectLaunch | None


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a union of 64 bytes, of which only a number is used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: blocks, threads, shared memory, stream and attributes."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_OVERLAP = (_LaunchAttribute * 1)(_LaunchAttribute(6, 0, 1))
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel need not wait for the end of the previous one."""


@functools.cache
def _driver() -> Any:
    """The CUDA driver's library; None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
    except (OSError, AttributeError):
        return None
    return library


def _error_name(code: int) -> str:
    """The driver's name of an error, such as CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES."""
    name, driver = ctypes.c_char_p(), _driver()
    if driver is None or driver.cuGetErrorName(code, ctypes.byref(name)) or not name.value:
        return "an unknown error"
    return name.value.decode()


@functools.lru_cache(maxsize=64)
def may_overlap(device: torch.device) -> bool:
    """Whether kernels on ``device`` may start before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(IS_OVERLAPPED: tl.constexpr):
    """Let the next kernel start, and wait until the previous one has ended.

    Before it a kernel may read what no kernel that overlaps writes, such as parameters of the model, and nothing else.
    """
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_let_next(IS_OVERLAPPED: tl.constexpr):
    """As :func:`wait_for_previous`, but the next kernel starts after the end of the previous one: it may read what that
    one has written without waiting itself."""
    if IS_OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@functools.lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    if is_interpreted():
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program on ``device`` can take; without a GPU those of compute capability 9.0."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # not all of it has type hints
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@functools.lru_cache(maxsize=64)
def has_small_shared_memory(device: torch.device) -> bool:
    """Whether a program has 99 KiB of shared memory, as on compute capability 8.6, 8.9 and 12.0; on 8.0 it has 163."""
    return shared_memory(device) < 160 << 10


@functools.lru_cache(maxsize=64)
def check_device(device: torch.device) -> None:
    """Raise UsageError where the kernels do not run on ``device``."""
    reason = why_not(device)
    if reason is not None:
        raise UsageError(f"no Triton kernel for tensors on {device}: {reason}")


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise UsageError unless all tensors are on one device that the kernels run on."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise UsageError(f"expected all tensors on one device, found {', '.join(sorted(map(str, devices)))}")
    check_device(devices.pop())


@functools.lru_cache(maxsize=64)
def check_stored(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError where kernels cannot convert a stored ``dtype`` on ``device``."""
    if dtype != torch.float8_e4m3fn or is_interpreted():
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UsageError(f"float8_e4m3fn needs compute capability 8.9, {device} has {capability}; take float8_e5m2")


def next_power(count: int) -> int:
    """The least power of two that is not less than ``count``."""
    return 1 << max(0, count - 1).bit_length()
