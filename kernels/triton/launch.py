"""Kernel launcher, tensor checks and device properties that all kernel wrappers share."""

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
"""Whether kernels may use inline PTX; False under Triton's interpreter."""
launch_kernel: Callable[..., int | None] | None = None
"""Function that launches a kernel through the driver with less overhead than ctypes; None without the C++ library.

The code that loads the C++ library sets this variable, see ``launch_kernel`` in kernels/native/library.py."""
_INTERPRETED_SMS = 2
"""Number of SMs reported under the interpreter, where each program runs in Python: keeps grids small."""


Arguments = tuple[Tensor | float | None, ...]
"""Launch arguments of a kernel, without its constexpr arguments."""


class Launcher:
    """Low-overhead launcher of one kernel, with a cache of its compiled specializations.

    Triton recomputes the specialization key at every launch, argument by argument and by name, which takes longer than
    many kernels run. This launcher builds one tuple from the same properties: constants, dtypes, which pointers and
    integers are multiples of 16, and which integers are 1 or need 64 bits.

    With ``overlaps``, the kernel uses programmatic dependent launch (PDL, compute capability 9.0 and later): it may
    start while the previous kernel of its stream still runs, which hides launch latency. The kernel must call
    :func:`wait_for_previous` with its last constexpr, IS_OVERLAPPED, which this class sets.
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
        """Launch on the current stream of ``device``, the current device; ``constants`` follow ``args``.

        ``options`` are Triton launch options such as ``num_warps``.
        """
        all_constants, all_options = self._with_overlap(device, constants, options)
        if not self._is_compiled:
            self._kernel[grid](*args, **all_constants, **all_options)
            return
        if compiling_threads and get_ident() in compiling_threads:
            self._kernel.warmup(*args, grid=grid, **all_constants, **all_options)
            return
        key = self._key(device, args, all_constants, all_options)
        cached = self._known.get(key)
        if cached is not None:
            if cached.direct is None or not cached.direct(device, grid, args):
                cached.kernel[grid](*args, *cached.constants)
            return
        compiled = self._kernel[grid](*args, **all_constants, **all_options)
        if compiled is not None:
            values = tuple(all_constants[name] for name in self._kernel.arg_names[len(args) :])
            self._known[key] = _Compiled(compiled, values, DirectLaunch.of(compiled, self._kernel.arg_names))

    def direct(
        self, device: torch.device, args: Arguments, constants: Mapping[str, Any], **options: Any
    ) -> "DirectLaunch | None":
        """Return the driver-level launch of the specialization that matches these arguments.

        None if that specialization was not launched yet, or if it needs Triton's own launcher.
        """
        cached = self._known.get(self._key(device, args, *self._with_overlap(device, constants, options)))
        return None if cached is None else cached.direct

    def _with_overlap(
        self, device: torch.device, constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return (constants, options), with IS_OVERLAPPED and ``launch_pdl`` added for a kernel that overlaps."""
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
    """Launch parameters of a compiled kernel for tensors of one dtype and size, for native code without Python."""

    function: int
    """CUfunction handle."""
    programs: int
    """Grid size."""
    threads: int
    """Threads per program (CTA)."""
    shared: int
    """Bytes of dynamic shared memory."""
    overlaps: bool
    """Whether the kernel uses programmatic dependent launch, see :class:`Launcher`."""


class DirectLaunch:
    """Launch of a compiled kernel directly through the CUDA driver, in a third of the time of Triton's launcher.

    The parameters of a compiled kernel are its non-constexpr arguments in order, then the addresses of two scratch
    buffers (global and profiler), which are null here.
    """

    def __init__(
        self, function: int, threads: int, shared: int, places: Sequence[int], *, overlaps: bool = False
    ) -> None:
        """``places`` are the indices of the launch arguments that are kernel parameters; ``overlaps`` enables PDL."""
        self.function, self.threads, self.shared, self.places = function, threads, shared, tuple(places)
        self.overlaps = overlaps
        self._num_parameters = len(places) + 2
        self._values, self._pointers = ctypes.c_int64 * self._num_parameters, ctypes.c_void_p * self._num_parameters

    @classmethod
    def of(cls, compiled: Any, names: Sequence[str]) -> "DirectLaunch | None":
        """Return the direct launch of a kernel that Triton has launched, or None if it needs more than a plain launch.

        Clusters, cooperative grids, scratch buffers and parameters other than pointers and integers need Triton.
        """
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
        except (AttributeError, KeyError, TypeError):  # other Triton versions
            return None

    def __call__(self, device: torch.device, grid: tuple[int, int, int], args: Arguments) -> bool:
        """Launch on the current stream of ``device``; return False if the caller must launch through Triton instead.

        This is the case if a profiler has hooked Triton's launches, or if this thread has no CUDA context yet. Raises
        RuntimeError if the driver rejects the launch.
        """
        hook = knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):
            return False
        parameters = [args[place] for place in self.places]
        arguments: list[Any] = [each.data_ptr() if isinstance(each, Tensor) else each for each in parameters]
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        if launch_kernel is not None:
            config = self.function, *grid, self.threads, self.shared, self.overlaps, stream
            code = launch_kernel(*config, *arguments, 0, 0)
        else:
            code = self._launch(grid, stream, arguments)
        if code is None or code == _NO_CONTEXT:
            return False
        if code:
            raise RuntimeError(
                f"the CUDA driver refused to launch a kernel: {_error_name(code)} ({code}); a kernel before it may "
                "have failed, which CUDA_LAUNCH_BLOCKING=1 finds"
            )
        return True

    def _launch(self, grid: tuple[int, int, int], stream: int, arguments: Sequence[int]) -> int:
        """Launch through ctypes, without the C++ library, and return the CUresult."""
        values = self._values(*arguments, 0, 0)
        first = ctypes.addressof(values)
        pointers = self._pointers(*range(first, first + 8 * self._num_parameters, 8))
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
    """CUlaunchAttribute: id and a 64-byte union, of which only the int member is used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid and block dimensions, dynamic shared memory, stream and attributes."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_OVERLAP = (_LaunchAttribute * 1)(_LaunchAttribute(6, 0, 1))
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the previous kernel ends."""


@functools.cache
def _driver() -> Any:
    """Return the CUDA driver library (libcuda.so.1), or None if it is not installed."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
    except (OSError, AttributeError):
        return None
    return library


def _error_name(code: int) -> str:
    """Return the driver's name for a CUresult, for example CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES."""
    name, driver = ctypes.c_char_p(), _driver()
    if driver is None or driver.cuGetErrorName(code, ctypes.byref(name)) or not name.value:
        return "an unknown error"
    return name.value.decode()


@functools.lru_cache(maxsize=64)
def may_overlap(device: torch.device) -> bool:
    """Return whether ``device`` supports programmatic dependent launch (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_previous(IS_OVERLAPPED: tl.constexpr):
    """Let the next kernel of the stream start, then wait until the previous kernel has ended (PDL).

    Before this call, a kernel may only read memory that no overlapping kernel writes, for example model parameters.
    """
    if IS_OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_then_let_next(IS_OVERLAPPED: tl.constexpr):
    """Wait until the previous kernel has ended, then let the next kernel of the stream start (PDL).

    Unlike after :func:`wait_for_previous`, the next kernel may read the previous kernel's output without waiting.
    """
    if IS_OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@functools.lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of ``device``; 2 under the interpreter."""
    if is_interpreted():
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return the maximum bytes of shared memory per program (CTA) on ``device``; 227 KiB (as on 9.0) for a CPU."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # incomplete type hints in torch
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@functools.lru_cache(maxsize=64)
def has_small_shared_memory(device: torch.device) -> bool:
    """Return whether a program has little shared memory: 99 KiB on compute capability 8.6, 8.9, 12.0; 8.0 has 163."""
    return shared_memory(device) < 160 << 10


@functools.lru_cache(maxsize=64)
def check_device(device: torch.device) -> None:
    """Raise UsageError if the kernels do not run on ``device``, with the reason."""
    reason = why_not(device)
    if reason is not None:
        raise UsageError(f"no Triton kernel for tensors on {device}: {reason}")


def check_same_device(*tensors: Tensor | None) -> None:
    """Raise UsageError unless all tensors are on one device that the kernels support; None arguments are skipped."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise UsageError(f"expected all tensors on one device, found {', '.join(sorted(map(str, devices)))}")
    check_device(devices.pop())


@functools.lru_cache(maxsize=64)
def check_stored(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError if kernels cannot convert the storage dtype ``dtype`` on ``device`` (FP8 e4m3 before 8.9)."""
    if dtype != torch.float8_e4m3fn or is_interpreted():
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UsageError(f"float8_e4m3fn needs compute capability 8.9, {device} has {capability}; take float8_e5m2")


def next_power(count: int) -> int:
    """Return the smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()
