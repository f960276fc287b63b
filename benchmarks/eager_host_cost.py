"""Host cost per value that taps record outside of CUDA graphs, measured on a CPU with a fake CUDA driver.

    python benchmarks/eager_host_cost.py [--rounds 100] [--layers 16] [--everything]

A small transformers Llama whose tensors are reported as CUDA tensors by the DLPack API, and a driver library whose
launches do nothing. What remains are the hooks, the C++ launch code, and the steps; statistics have no values. Models
without hooks, with an empty torch hook, with a Dumper that selects nothing, and with statistics are interleaved; the
figure is CPU time of the forward's thread. Needs a C compiler and the C++ library, and no CUDA driver.
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.dumper import Dumper
from tapscope.dumper.capture import device_capturer
from tapscope.dumper.device import d2h_worker
from tapscope.dumper.device.device_stats import ROW_WORDS
from tapscope.dumper.records import snapshot
from tapscope.dumper.taps import firing_pattern

_DRIVER = """
#include <stdint.h>
typedef struct {
    void *data; int32_t kind, device, ndim; uint8_t code, bits; uint16_t lanes;
    int64_t *shape, *strides; uint64_t offset;
} tensor;
typedef struct {
    uint32_t major, minor; void *unused[4]; int (*view)(void *, tensor *); int (*stream)(int32_t, int32_t, void **);
} exchange;
long long num_launches;
int cuLaunchKernelEx(const void *how, void *function, void **parameters, void **extra) { return num_launches++, 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuStreamIsCapturing(void *stream, int *is_capturing) { return *is_capturing = 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, uint64_t nbytes, void *stream) { return 1; }
int cuEventRecord(void *event, void *stream) { return 1; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 1; }
int cuGetErrorName(int error, const char **name) { return *name = "imitated", 0; }
static int (*view)(void *, tensor *);
static int cuda_view(void *object, tensor *out) {
    int failed = view(object, out);
    return out->kind = 2, out->device = 0, failed;
}
static int cuda_stream(int32_t kind, int32_t device, void **out) { return *out = (void *)7, 0; }
static exchange imitated;
void *imitate(const exchange *plain) {
    return imitated = *plain, view = plain->view, imitated.view = cuda_view, imitated.stream = cuda_stream, &imitated;
}
"""
_NAME = b"dlpack_exchange_api"  # a capsule does not own its name


class _Block:
    """Rows of statistics in host memory, never written."""

    _spare: ClassVar["deque[torch.Tensor]"] = deque()

    def __init__(self) -> None:
        self._rows = self._spare.popleft() if self._spare else torch.zeros(256, ROW_WORDS, dtype=torch.int64)
        self.num_rows, self.is_full = 0, False

    def __del__(self) -> None:
        self._spare.append(self._rows)

    @property
    def place(self) -> tuple[int, ...]:
        return self._rows.data_ptr(), 4096, 8192, 256, 40_000

    def address_of(self, index: int) -> int:
        return self._rows.data_ptr() + 8 * ROW_WORDS * index

    def counters_of(self, index: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Device:
    def enter(self) -> None:
        pass

    def pin(self, ring: Any) -> None:
        pass

    def unpin(self) -> None:
        pass

    def close_rows(self) -> None:
        pass

    def block(self, index: int, stream: int, *, sketches: bool) -> _Block:
        return _Block()


def _driver(folder: Path) -> ctypes.CDLL:
    """Compile the fake driver in ``folder`` and load it, so that the C++ library finds it by name."""
    (folder / "driver.c").write_text(_DRIVER)
    made = folder / "libcuda.so.1"
    command = ["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", made, folder / "driver.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def _imitated(driver: ctypes.CDLL) -> Any:
    """Return torch's DLPack exchange API, modified so that every tensor is on a CUDA device."""
    new, get = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    driver.imitate.restype, driver.imitate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return new(driver.imitate(get(snapshot.EXCHANGE, _NAME)), _NAME, None)


def _pattern_of(exchange: Any, tensor: torch.Tensor, port: Any) -> Any:
    """Replace :func:`firing_pattern._tensor` for tensors on a CUDA device."""
    layout = port.latest
    known = layout.torch_dtype, layout.torch_shape
    if layout.template is None or not port.announced or known != (tensor.dtype, tensor.shape) or tensor.data_ptr() % 16:
        raise firing_pattern.UnknownValue
    layout.template.set_row_launch(exchange, tensor, 1, 4, 128, 96, True)
    return layout.template if port.row_set is None else [layout.template, None, port.row_set, layout.rows]


def _llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 224, "vocab_size": 160, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, **sizes)
    ).eval()


def _measure(args: argparse.Namespace, driver: ctypes.CDLL, out: Path) -> None:
    names = ("plain", "empty hooks", "nothing selected", "statistics")
    models = {name: _llama(args.layers) for name in names}
    for module in models["empty hooks"].modules():
        if type(module).forward is not nn.Module.forward:
            module.register_forward_hook(lambda module, given, output: None)
    ids, times = torch.arange(16)[None], {name: list[float]() for name in names}
    selected: dict[str, Any] = {"keep": "stats"} if args.everything else {"keep": "off", "rules": ["*:out*=stats"]}
    launches = ctypes.c_longlong.in_dll(driver, "num_launches")
    with (
        torch.inference_mode(),
        Dumper(models["statistics"], out / "statistics", **selected),
        Dumper(models["nothing selected"], out / "nothing", keep="off"),
    ):
        for number in range(args.rounds + 5):
            if number == 5:
                times, before = {name: [] for name in names}, launches.value
            for name, model in models.items():
                began = time.thread_time()
                model(input_ids=ids, use_cache=False)
                times[name].append(time.thread_time() - began)
    values = (launches.value - before) / args.rounds
    if not values:
        raise SystemExit("no kernel was launched: the imitated driver or device lacks what the dumper now calls")
    print(f"{values:.0f} values are launched in each forward; CPU time, and µs for each value above plain:")
    for share in (0.02, 0.1, 0.25, 0.5):
        at = {name: sorted(each)[int(share * len(each))] * 1e3 for name, each in times.items()}
        costs = [f"{name} {at[name]:.2f} ms, {(at[name] - at['plain']) / values * 1e3:.2f} µs" for name in names[1:]]
        print(f"  p{100 * share:<3.0f} plain {at['plain']:.2f} ms; {'; '.join(costs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--everything", action="store_true", help="record inputs as well as outputs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> None:
    """Run the measurement with the fake driver; ``folder`` holds the driver and the runs."""
    driver = _driver(folder)
    exchange = _imitated(driver)

    def pattern_of(tensor: torch.Tensor, port: Any) -> Any:
        return _pattern_of(exchange, tensor, port)

    with (
        mock.patch.object(snapshot, "EXCHANGE", exchange),
        mock.patch.object(device_capturer, "CudaDevice", _Device),
        mock.patch.object(d2h_worker, "CudaDevice", _Device),
        mock.patch.object(firing_pattern, "_tensor", pattern_of),
    ):
        _measure(args, driver, folder)


if __name__ == "__main__":
    main()
