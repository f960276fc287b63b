"""Every dtype from a torch tensor to a sealed segment that safetensors can open."""

import numpy as np
import pytest
import safetensors.torch
import torch

from tapscope.core import dtypes
from tapscope.kernels.native import summarize
from tapscope.run_format.segment import SegmentWriter


def a_tensor(name):
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 100, 6 * dtypes.itemsize(name), dtype=np.uint8))
    return (raw & 1 if name == "bool" else raw).view(getattr(torch, name)).reshape(2, 3)


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_dtypes_round_trip_through_a_sealed_segment(name, tmp_path):
    tensor, path = a_tensor(name), tmp_path / "seg-000000.safetensors"
    payload = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    writer = SegmentWriter(path)
    assert writer.place("x", name, (2, 3), payload) is not None
    writer.flush()
    writer.seal()
    found = safetensors.torch.load_file(path)["x"]
    if name == "complex128":  # safetensors has no complex128: real and imaginary parts on the last axis
        assert (found.shape, found.dtype) == ((2, 3, 2), torch.float64)
        found = torch.view_as_complex(found)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == payload


@pytest.mark.parametrize("name", [name for name in dtypes.NAMES if dtypes.is_float(name)])
def test_dtypes_statistics_match_torch_values(name):
    tensor = a_tensor(name)
    stats = summarize(tensor.data_ptr(), tensor.numel(), name).stats
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    finite = values.double()[torch.isfinite(values.double())]
    assert (stats.min, stats.max) == (finite.min().item(), finite.max().item())
    assert stats.nan == torch.isnan(values.double()).sum().item()
