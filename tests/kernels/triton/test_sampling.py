"""Triton sampling against its reference and against the engine's sampler, draw by draw."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_helpers import DEVICES

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.engine.params.sampling_params import SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.sampling import sampler as sampler_module
from tapscope.engine.sampling.gumbel import gumbel
from tapscope.engine.sampling.sampler import Sampler
from tapscope.kernels.triton.sampling import draw, draw_reference, greedy, noise_reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # hashes overflow in the interpreter's numpy
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]


def rows_of(count, vocab, seed, scale=3.0):
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=noise) * scale
    seeds = torch.tensor([SEEDS[(seed + row) % len(SEEDS)] for row in range(count)], dtype=torch.int64)
    return logits, seeds, torch.arange(count) * 7 + seed % 1000


def agree(found, expected):
    tokens, scores = (tensor.cpu() for tensor in found)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(scores.isinf(), expected[1].isinf())
    torch.testing.assert_close(scores, expected[1], rtol=1e-6, atol=1e-6)


def test_sampling_reference_has_the_engines_noise():
    _, seeds, positions = rows_of(6, 1, 3)
    unsigned = [seed & (1 << 64) - 1 for seed in seeds.tolist()]
    expected = gumbel(unsigned, positions.tolist(), 3000, torch.device("cpu"))
    torch.testing.assert_close(noise_reference(seeds, positions, 3000), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12)
@given(
    count=st.integers(0, 3),
    vocab=st.sampled_from([1, 31, 500, 5000, 9000]),
    names=st.sets(st.sampled_from(["top_k", "top_p", "min_p", "mask"])),
    cold=st.booleans(),
    scale=st.sampled_from([0.01, 3.0, 60.0]),
    tied=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sampling_draw_matches_the_reference(device, count, vocab, names, cold, scale, tied, seed):
    logits, seeds, positions = rows_of(count, vocab, seed, scale)
    if tied:
        logits = logits.round()
        logits[:, vocab // 3 : vocab // 2] = -1e9
    choose = torch.Generator().manual_seed(seed)
    temperature = torch.rand(count, generator=choose) + 0.3
    temperature[: count // 2] = 0.0 if cold else 1.0
    bits = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=choose).int()
    bits[:, 0] |= 1
    every = {
        "top_k": torch.randint(0, 60, (count,), generator=choose).int(),
        "top_p": torch.rand(count, generator=choose) * 1.2,
        "min_p": torch.rand(count, generator=choose) * 0.2,
        "mask": bits,
    }
    filters = {name: every[name] for name in names}
    expected = draw_reference(logits, temperature, seeds, positions, **filters)
    moved = [tensor.to(device) for tensor in (logits, temperature, seeds, positions)]
    agree(draw(*moved, **{name: value.to(device) for name, value in filters.items()}), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sampling_greedy_is_torchs_argmax(device, dtype):
    dtype = torch.float16 if device == "cpu" and dtype == torch.bfloat16 else dtype
    for vocab in (1, 31, 4096, 9001):
        logits = rows_of(7, vocab, vocab)[0].to(dtype)
        logits[1] = logits[1].round()  # ties
        logits[2], logits[3] = -torch.inf, torch.nan
        logits[4, vocab // 2 :] = torch.inf
        logits[5, vocab // 3], logits[5, vocab - 1] = torch.inf, torch.nan
        found = greedy(logits.to(device))
        assert found.dtype == torch.int64
        assert torch.equal(found.cpu(), logits.argmax(-1)), vocab
    padded = torch.zeros(3, 4096, device=device, dtype=dtype)
    padded[:, 4000] = 1
    assert greedy(padded[:, :300]).tolist() == [0, 0, 0]
    assert greedy(padded[:0]).shape == (0,)


class FixedMask:
    """A grammar mask that allows every third token."""

    def mask_after(self, drafts):
        return np.full(22, 0x49249249, dtype=np.int32)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_draw_matches_the_engines_sampler(device, monkeypatch):
    vocab = 700
    more = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.5}, {"repetition_penalty": 1.3}]
    logits, *_ = rows_of(24, vocab, 5)
    found = []
    for kernel, place in ((None, "cpu"), (draw, device)):
        monkeypatch.setattr(sampler_module, "device_draw", lambda _, kernel=kernel: kernel)
        sampler, requests = Sampler(vocab, (1,), 0, torch.device(place)), []
        for row in range(len(logits)):
            params = SamplingParams(temperature=(row % 4) / 3, seed=row - 3, **more[row % len(more)])
            requests.append(Request(id=str(row), prompt_ids=tuple(range(row, row + 9)), params=params))
            sampler.add_request(requests[-1])
            if row % 5 == 4:
                requests[-1].constraint = FixedMask()
        found.append([tensor.cpu() for tensor in sampler.draw(logits.to(place), requests)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1].isinf(), found[1][1].isinf())
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_keeps_ties_and_picks_the_lowest_id(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0, 2.0]], device=device)
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, _ = draw(logits, zero, place, place)
    assert tokens.tolist() == [1]
    for filters, kept in (
        ({"top_k": torch.tensor([1], dtype=torch.int32)}, [1, 2, 4]),
        ({"top_k": torch.tensor([4], dtype=torch.int32)}, [1, 2, 3, 4, 7]),
        ({"top_k": torch.tensor([7], dtype=torch.int32)}, list(range(8))),
        ({"top_p": torch.tensor([0.1])}, [1, 2, 4]),
        ({"top_p": torch.tensor([0.999])}, list(range(8))),
        ({"top_p": torch.tensor([0.0])}, [1, 2, 4]),
        ({"min_p": torch.tensor([1.0])}, [1, 2, 4]),
    ):
        _, scores = draw(logits, one, place, place, **{name: value.to(device) for name, value in filters.items()})
        expected = draw_reference(
            logits.cpu(), one.cpu(), place.cpu(), place.cpu(), **{name: value.cpu() for name, value in filters.items()}
        )[1]
        assert torch.equal(scores.cpu().isfinite(), expected.isfinite())
        assert scores[0].isfinite().nonzero().flatten().tolist() == kept


def test_sampling_refuses_invalid_arguments():
    logits, seeds, positions = rows_of(2, 64, 0)
    good = {"logits": logits, "temperature": torch.ones(2), "seeds": seeds, "positions": positions}
    for wrong in (
        {"logits": logits.mT},
        {"temperature": torch.ones(3)},
        {"seeds": seeds.int()},
        {"top_k": torch.ones(2)},
        {"top_p": torch.ones(2).double()},
        {"mask": torch.ones(2, 3).int()},
        {"mask": torch.ones(2, 2)},
    ):
        with pytest.raises(UsageError):
            draw(**(good | wrong))
