"""Launch cache: compiled kernels are reused for arguments with the same traits, and only for these."""

import itertools
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tapscope.kernels.native import library
from tapscope.kernels.triton import compile_ahead, launch
from tapscope.kernels.triton.activation import gated
from tapscope.kernels.triton.launch import Launcher
from tapscope.kernels.triton.linear import few_rows_linear
from tapscope.kernels.triton.norm import add_rms_norm, rms_norm
from tapscope.kernels.triton.quantize import Quantized
from tapscope.kernels.triton.scaled_linear import scaled_linear

E4M3 = torch.float8_e4m3fn
ALIGNED = torch.zeros(64)


class Kernel:
    """Stands in for a Triton kernel: records each compilation, and the arguments of each launch of the result."""

    arg_names = ("x", "step", "scale", "WIDTH", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[list[Any]] = []
        self.warmed_up: list[Any] = []

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        self.warmed_up.append((args, constants))

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*args: Any, **_constants: Any) -> Any:
            launched: list[Any] = [args]
            self.compiled.append(launched)

            class Compiled:
                def __getitem__(self, grid: Any) -> Any:
                    return lambda *args: launched.append(args)

            return Compiled()

        return compile_and_launch


def test_launches_of_one_thread_are_left_out_while_it_compiles_ahead() -> None:
    """This includes kernels that are already compiled, because their inputs may be missing; other threads launch."""
    pytest.importorskip("triton.runtime._async_compile")
    kernel = Kernel()
    run = Launcher(kernel)
    run._is_compiled = True
    cpu, grid, sizes = torch.device("cpu"), (1, 1, 1), {"WIDTH": 5, "BLOCK": 8}
    run(cpu, grid, (ALIGNED, 32, 0.5), sizes)
    with compile_ahead.compiled_ahead():
        run(cpu, grid, (ALIGNED, 32, 0.5), sizes, num_warps=4)
        run(cpu, grid, (ALIGNED, 32, 0.5), sizes)
        other = threading.Thread(target=run, args=(cpu, grid, (ALIGNED, 32, 0.5), sizes))
        other.start()
        other.join()
    assert kernel.warmed_up == [((ALIGNED, 32, 0.5), sizes | more) for more in ({"num_warps": 4}, {})]
    assert [len(launched) for launched in kernel.compiled] == [2]
    run(cpu, grid, (ALIGNED, 32, 0.5), sizes)
    assert [len(launched) for launched in kernel.compiled] == [3]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        ({"x": ALIGNED[16:]}, True),
        ({"x": ALIGNED[1:]}, False),
        ({"x": ALIGNED.half()}, False),
        ({"x": None}, False),
        ({"step": 64}, True),
        ({"step": 8}, False),
        ({"step": 1}, False),
        ({"step": 1 << 40}, False),
        ({"scale": 0.25}, True),
        ({"WIDTH": 6}, False),
        ({"num_warps": 8}, False),
    ],
)
def test_launch_compiles_once_per_specialization(changed: dict[str, Any], is_same: bool) -> None:
    kernel = Kernel()
    run = Launcher(kernel)
    run._is_compiled = True
    for more in ({}, changed):
        values = {"x": ALIGNED, "step": 32, "scale": 1.0, "WIDTH": 5, "BLOCK": 16, "num_warps": 4} | more
        args, sizes = (
            (values["x"], values["step"], values["scale"]),
            {"BLOCK": values["BLOCK"], "WIDTH": values["WIDTH"]},
        )
        run(torch.device("cpu"), (1, 1, 1), args, sizes, num_warps=values["num_warps"])
    assert len(kernel.compiled) == (1 if is_same else 2)
    if is_same:
        assert kernel.compiled[0][1][3:] == (5, 16), "constants follow in the order of the kernel's arguments"


@pytest.mark.gpu
def test_overlapping_kernels_wait_for_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of a chain reads the output of the previous one, launched individually and in a graph."""

    def chain_of_codes(states: torch.Tensor) -> torch.Tensor:
        residual, rows = states, len(states)
        for _ in range(8):
            more = [Quantized.empty(rows, size, E4M3, states.device, False) for size in (1024, 3072)]
            _, residual = add_rms_norm(states, residual, weight, 1e-6, quantized=more[0])
            gated(product(more[0], *up_codes), None, "silu", quantized=more[1])
            states = product(more[1], *down_codes)
        return residual

    def product(input: Quantized, codes: torch.Tensor, scales: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        plain = (input.codes, input.scales, codes, scales, by, torch.bfloat16)
        return scaled_linear(*plain, tile=128, is_constant=True)

    def quantized(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outs, ins = dense.shape
        scales = torch.rand(outs // 128, ins // 128, device="cuda") / 50
        return (dense * 50).to(E4M3), scales, (torch.arange(outs, device="cuda") // 128).int()

    def chain(states: torch.Tensor) -> torch.Tensor:
        residual = states
        for _ in range(8):
            normed, residual = add_rms_norm(states, residual, weight, 1e-6)
            states = few_rows_linear(gated(few_rows_linear(normed, up), None, "silu"), down)
        return residual

    torch.manual_seed(0)
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    up, down = (torch.randn(shape, device="cuda").bfloat16() / 50 for shape in ((6144, 1024), (1024, 3072)))
    up_codes, down_codes = quantized(up), quantized(down)
    chains = [chain, chain_of_codes] if torch.cuda.get_device_capability() >= (8, 9) else [chain]
    for run, rows in itertools.product(chains, (1, 16)):
        inputs = torch.randn(20, rows, 1024, device="cuda").bfloat16()
        with monkeypatch.context() as patched:
            patched.setattr(launch, "may_overlap", lambda _: False)
            expected = torch.stack([run(each) for each in inputs])
        assert torch.equal(torch.stack([run(each) for each in inputs]), expected)
        static, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(static)
        for each, wanted in zip(inputs, expected, strict=True):
            static.copy_(each)
            graph.replay()
            assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_launch_accepts_alternating_alignments() -> None:
    memory = torch.randn(1000, device="cuda")
    weight = torch.ones(96, device="cuda")
    for _ in range(3):
        for start, rows, step in ((0, 4, 96), (1, 4, 96), (0, 3, 97), (2, 1, 1), (16, 5, 112)):
            states = memory[start:].as_strided((rows, 96), (step, 1))
            expected = torch.nn.functional.rms_norm(states, (96,), eps=1e-6)
            torch.testing.assert_close(rms_norm(states, weight, 1e-6), expected)


def test_library_launches_with_the_parameters_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    codes = [0, 201, None, 1]
    monkeypatch.setattr(launch, "_driver", lambda: None)
    monkeypatch.setattr(launch, "launch_kernel", lambda *args: (calls.append(args), codes.pop(0))[1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    direct = launch.DirectLaunch(7, 128, 64, (0, 2), overlaps=True)
    device, grid, args = torch.device("cuda", 1), (3, 2, 1), (ALIGNED, None, 5)
    assert direct(device, grid, args)
    assert calls == [(7, 3, 2, 1, 128, 64, True, 41, ALIGNED.data_ptr(), 5, 0, 0)]
    assert not direct(device, grid, args)  # this thread has not used the device yet
    assert not direct(device, grid, args)  # no driver
    with pytest.raises(RuntimeError, match=r"refused to launch a kernel: an unknown error \(1\); a kernel before"):
        direct(device, grid, args)

    class Driver:
        """Stands in for the CUDA driver library."""

        def cuGetErrorName(self, code: int, to: Any) -> int:
            to._obj.value = {701: b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}.get(code)
            return int(to._obj.value is None)

    monkeypatch.setattr(launch, "_driver", Driver)
    for code, name in ((701, r"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES \(701\)"), (12345, r"an unknown error \(12345\)")):
        codes.append(code)
        with pytest.raises(RuntimeError, match=f"^the CUDA driver refused to launch a kernel: {name}; "):
            direct(device, grid, args)


@pytest.mark.skipif(library.functions() is None, reason="needs the C++ library")
def test_library_launches_nothing_with_arguments_that_are_not_a_kernels() -> None:
    functions = library.functions()
    assert functions is not None
    with pytest.raises(TypeError):
        functions.launch_kernel(1, 2, 3)
    with pytest.raises(TypeError):
        functions.launch_kernel(0, 1, 1, 1, 32, 0, False, 0, "x")
