"""Program: compile the sampling kernels for a GPU that is absent, in parallel.

Prints why tensors on the CPU are refused, the names of the kernels, and the number of built launchers. Then repeats
this as another rank, with all kernels in Triton's cache.
"""

from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tapscope.core.errors import UsageError
from tapscope.kernels.triton import activation, compile_ahead, launch, sampling

launchers = []
DRIVER = SimpleNamespace(
    launcher_cls=lambda src, metadata: launchers.append(src.name),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)


def draw() -> None:
    ones, longs, logits = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 5000)
    sampling.draw(logits, ones, longs, longs, top_p=ones)


if __name__ == "__main__":
    try:
        activation.gated(torch.ones(2, 4), None, "silu")
    except UsageError as error:
        print(error)
    triton.runtime.driver.set_active(DRIVER)
    with patch.object(launch, "check_device"):
        for rank in range(2):
            with compile_ahead.compiled_ahead(rank, 2) as compiled:
                draw()
            print(*sorted(compiled.names), len(launchers), flush=True)
            for kernel in [each for each in vars(sampling).values() if isinstance(each, JITFunction)]:
                kernel.device_caches.clear()
