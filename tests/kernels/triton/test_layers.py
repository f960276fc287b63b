"""Triton norms, activations, and rotary embedding with the cache write, against references and modules."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soak_cases import mostly_soak
from torch.nn import functional
from triton_helpers import DEVICES, FLOATS, FP8, assert_near, served

pytest.importorskip("triton")

from tapscope.core.errors import UsageError
from tapscope.engine.checkpoint.quantization import INT4, ActivationScheme
from tapscope.engine.execution import batch_invariant
from tapscope.engine.execution.batch_invariant import BatchInvariant
from tapscope.engine.hf_config.rope_config import Rope
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.kv_cache.kv_pool import KVPool
from tapscope.engine.layers import fused as engine_fused
from tapscope.engine.layers import quantized as engine_quantized
from tapscope.engine.layers import rope as engine_rope
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.linear import ReplicatedLinear, quantizer_of
from tapscope.engine.layers.norm import GemmaRMSNorm, RMSNorm, add_norm
from tapscope.engine.layers.quantized import QuantizedWeight, ScaleLayout, ScalePart
from tapscope.engine.layers.rope import rotate
from tapscope.kernels.triton import quantize, why_not
from tapscope.kernels.triton import rope as triton_rope
from tapscope.kernels.triton.activation import KINDS, gated, gated_reference
from tapscope.kernels.triton.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tapscope.kernels.triton.rope import (
    STYLES,
    CachePool,
    HeadNorm,
    rotate_and_store,
    rotate_and_store_reference,
    rotate_reference,
)

ONE_ULP = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""A different order of summation may round to an adjacent value, and multiplying by a weight may double that step."""


def noise(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12)
@given(
    shape=st.sampled_from([(1, 7), (5, 64), (3, 1000), (2, 4096), (9, 3, 80), (4, 2, 128), (0, 16)]),
    dtype=st.sampled_from(FLOATS),
    is_gemma=st.booleans(),
    with_post=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rms_norm_matches_the_reference(device, shape, dtype, is_gemma, with_post, seed):
    dtype = served(device, dtype)
    states, residual = (noise(*shape, seed=seed + i, dtype=dtype) * 3 for i in range(2))
    weight, post = (noise(shape[-1], seed=seed + i, dtype=dtype) for i in range(2, 4))
    post = post if with_post else None
    expected = add_rms_norm_reference(states, residual, weight, 1e-6, is_gemma=is_gemma, post_weight=post)
    moved = [None if t is None else t.to(device) for t in (states, residual, weight, post)]
    found = add_rms_norm(*moved[:3], 1e-6, is_gemma=is_gemma, post_weight=moved[3])
    if post is None:
        assert torch.equal(found[1].cpu(), expected[1])
    assert_near(found[0], expected[0], 2 * ONE_ULP[dtype])
    assert_near(found[1], expected[1], 2 * ONE_ULP[dtype])
    alone = rms_norm(moved[0], moved[2], 1e-6, is_gemma=is_gemma)
    assert_near(alone, rms_norm_reference(states, weight, 1e-6, is_gemma=is_gemma), ONE_ULP[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_matches_the_module(device, module, dtype):
    dtype = served(device, dtype)
    layer = module(96, 1e-5, dtype)
    layer.weight.data.copy_(noise(96, seed=0))
    states = noise(17, 96, seed=1, dtype=dtype)
    with torch.no_grad():
        expected = layer(states)
    found = rms_norm(states.to(device), layer.weight.data.to(device), 1e-5, is_gemma=module is GemmaRMSNorm)
    assert_near(found, expected, ONE_ULP[dtype])
    assert (found.cpu() == expected).float().mean() > (0.3 if dtype == torch.float32 else 0.97)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_add_norm_adds_to_a_residual_in_float32(device, monkeypatch):
    """The residual of Mamba-2 is in float32, and its final norm reads the sum."""
    monkeypatch.setattr(engine_fused, "may_run_on", lambda device: True)
    norm = RMSNorm(64, 1e-5, torch.float16).to(device)
    norm.weight.copy_(noise(64, seed=0))
    states, residual = noise(5, 64, seed=1, dtype=torch.float16).to(device), noise(5, 64, seed=2).to(device)
    found, summed = add_norm(norm, states, residual)
    assert torch.equal(summed, residual + states)
    assert_near(found, rms_norm_reference(summed.cpu(), norm.weight.cpu().float(), 1e-5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_quantizes_for_the_layer_behind_it(device, monkeypatch, rows):
    """Unless the quantizer is tapped; the layer's input must be the norm's output itself."""
    monkeypatch.setattr(engine_fused, "may_run_on", lambda device: True)
    dtype = FP8[0] if device == "cuda" else torch.int8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0)) if device == "cpu" else None
    norm, layer = RMSNorm(256, 1e-5, torch.float16).to(device), ReplicatedLinear(256, 128, False, torch.float16)
    layout = ScaleLayout.of([ScalePart((128, 256), (0, 0), (128, 128))])
    layer.keep_quantized(QuantizedWeight(dtype, layout), torch.device(device))
    layer.quantize_input(ActivationScheme(dtype, 128), [])
    norm.weight.data.fill_(1.5)
    layer.weight.data.copy_(noise(128, 256, seed=0).mul(30).to(device).to(dtype))
    layer.weight_scale.data.fill_(0.01)
    states, residual = (noise(rows, 256, seed=seed, dtype=torch.float16).to(device) for seed in range(2))
    with torch.no_grad():
        plain, _ = add_norm(norm, states, residual)
        expected, quantizer = layer(plain), quantizer_of(layer)
        normalized, _ = add_norm(norm, states, residual, quantizer=quantizer)
        assert torch.equal(normalized, plain)
        monkeypatch.setattr(engine_quantized, "quantize_reference", None)
        with monkeypatch.context() as patch:
            patch.setattr(quantize, "quantize", None)  # the norm has already quantized the input
            assert torch.equal(layer(normalized), expected)
        normalized, _ = add_norm(norm, states, residual, quantizer=quantizer)
        assert torch.equal(layer(2.0 * normalized), layer(2.0 * plain))
        seen = []
        handle = quantizer.register_forward_hook(lambda _module, _args, output: seen.append(output))
        assert torch.equal(layer(add_norm(norm, states, residual, quantizer=quantizer)[0]), expected)
        codes, scales = quantize.quantize(plain, dtype)
        assert torch.equal(seen[0][0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(seen[0][1], scales)
        handle.remove()
        layer.register_forward_pre_hook(lambda _module, args: (args[0].mul_(2.0),))
        assert quantizer_of(layer) is None


QUANTIZED_LAYERS = {
    "blocks": (FP8[0], (128, 128), ActivationScheme(FP8[0], 128)),
    "blocks, ue8m0": (FP8[0], (128, 128), ActivationScheme(FP8[0], 128, is_ue8m0=True)),
    "blocks, weight-only": (FP8[0], (128, 128), None),
    "channels": (FP8[0], (1, 512), ActivationScheme(FP8[0], None)),
    "tensor, static": (FP8[1], (384, 512), ActivationScheme(FP8[1], None, is_static=True)),
    "int8 groups": (torch.int8, (1, 128), ActivationScheme(torch.int8, 128)),
    "int8 channels": (torch.int8, (1, 512), ActivationScheme(torch.int8, None)),
    "int8 channels, weight-only": (torch.int8, (1, 512), None),
    "int4": (INT4, (1, 32), None),
}
"""Dtype of the codes, (rows, columns) that share a scale, and quantization of the input."""


def outputs_by_number_of_rows(device, kind):
    """Return the outputs of a norm and a quantized linear layer for the first 1, 16, 17 and 40 rows, by row count."""
    dtype, block, scheme = QUANTIZED_LAYERS[kind]
    norm, layer = RMSNorm(512, 1e-5, torch.float32), ReplicatedLinear(512, 384, True, torch.float32)
    layout = ScaleLayout.of([ScalePart((384, 512), (0, 0), block)])
    layer.keep_quantized(QuantizedWeight(dtype, layout, has_zeros=dtype == INT4), torch.device(device))
    if scheme is not None:
        layer.quantize_input(scheme, [0.02] if scheme.is_static else [])
    norm.weight.data.copy_(noise(512, seed=0).abs())
    codes = noise(*layer.weight.shape, seed=1).mul(30)
    layer.weight.data.copy_(codes.abs().to(dtype) if dtype == INT4 else codes.to(dtype))
    layer.weight_scale.data.copy_(noise(*layout.shape, seed=2).abs() * 0.01)
    if layer.weight_zero is not None:
        layer.weight_zero.data.fill_(5)
    layer.bias.data.copy_(noise(384, seed=3))
    norm, layer = norm.to(device), layer.to(device)
    states, residual = (noise(40, 512, seed=seed).to(device) for seed in (4, 5))
    outputs = {}
    with torch.no_grad():
        for rows in (1, 16, 17, 40):
            outputs[rows] = layer(add_norm(norm, states[:rows], residual[:rows], quantizer=quantizer_of(layer))[0])
    return outputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    mostly_soak(
        QUANTIZED_LAYERS, default=["blocks", "channels", "tensor, static", "int8 groups", "int8 channels", "int4"]
    ),
)
def test_batch_invariant_rows_of_quantized_layers_do_not_depend_on_their_number(device, kind, monkeypatch):
    """The kernels choose their launch by the row count; this mode dequantizes the weight instead."""
    for module in (engine_fused, batch_invariant):
        monkeypatch.setattr(module, "may_run_on", lambda device: True)
    with BatchInvariant():
        outputs = outputs_by_number_of_rows(device, kind)
    for rows, output in outputs.items():
        assert torch.equal(output, outputs[40][:rows]), f"{rows} rows have other bits"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_quantized_layers_depend_on_their_number_by_default(device, monkeypatch):
    """Shows that the test above can fail."""
    monkeypatch.setattr(engine_fused, "may_run_on", lambda device: True)
    outputs = outputs_by_number_of_rows(device, "int8 groups")
    assert not all(torch.equal(output, outputs[40][:rows]) for rows, output in outputs.items())


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_accepts_views_and_keeps_nonfinite_values_in_their_row(device):
    fused = noise(6, 10, 64, seed=2).to(device)
    view = fused[:, 3:7]
    weight = noise(64, seed=3).to(device)
    assert torch.equal(rms_norm(view, weight, 1e-6), rms_norm(view.contiguous(), weight, 1e-6))
    rows = fused[:, 0]
    clean = rms_norm(rows, weight, 1e-6)
    for row, special in ((1, torch.nan), (4, torch.inf)):
        rows[row, 5] = special
        found = rms_norm(rows, weight, 1e-6)
        assert found[row].isnan().any()
        assert torch.equal(found[0], clean[0])
        assert_near(found, rms_norm_reference(rows.cpu(), weight.cpu(), 1e-6))
        rows[row, 5] = 0.0
    for wrong in ((rows.mT, weight), (rows, weight[:5]), (rows, weight.half())):
        with pytest.raises(UsageError):
            rms_norm(*wrong, 1e-6)
    with pytest.raises(UsageError):
        add_rms_norm(rows, rows[:2], weight, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12)
@given(
    shape=st.sampled_from([(1, 1), (5, 64), (3, 1000), (2, 2050), (0, 8)]),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
    kv_format=st.sampled_from(["two", "fused", "turned"]),
    seed=st.integers(0, 2**31),
)
def test_activation_matches_the_reference(device, shape, dtype, kind, kv_format, seed):
    dtype = served(device, dtype)
    gate, up = (noise(*shape, seed=seed + i, dtype=dtype) * 4 for i in range(2))
    expected = gated_reference(gate, up, kind)
    if kv_format == "fused":
        found = gated(torch.cat((gate, up), dim=1).to(device), None, kind)
    elif kv_format == "turned":
        found = gated(gate.mT.contiguous().to(device).mT, up.to(device), kind)
    else:
        found = gated(gate.to(device), up.to(device), kind)
    # erf and tanh differ between the libraries; near -1, 1 + erf(x) has the absolute error of 1.
    unit = (gate.float() * up.float()).abs().clamp_min(1.0)
    tolerance = 2e-6 if dtype == torch.float32 else 2 * ONE_ULP[dtype]
    assert_near(found.cpu().float() / unit, expected.float() / unit, tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_of_nonfinite_values_matches_torch(device, kind):
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30, 90.0, -90.0, 1e-30]])
    up = torch.tensor([[1.0, 2.0, 3.0, torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0, 1.0]])
    if kind == "gelu":  # torch's gelu of Inf is NaN on a CPU and Inf on a GPU
        gate[0, 1] = 3.0
    assert_near(gated(gate.to(device), up.to(device), kind), gated_reference(gate, up, kind))
    layer = Activation(kind)
    assert torch.equal(gated_reference(gate, up, kind).isnan(), (layer(gate) * up).isnan())


def test_activation_refuses_invalid_arguments():
    gate = noise(3, 8, seed=0)
    for wrong in (
        (gate, gate[:, :4], "silu"),
        (gate, gate.half(), "silu"),
        (gate, gate, "swish"),
        (gate[0], gate[0], "silu"),
    ):
        with pytest.raises(UsageError):
            gated(*wrong)


def angles(tokens, rotary, dtype, seed):
    turn = torch.randint(0, 5000, (tokens, 1), generator=torch.Generator().manual_seed(seed)).float()
    turn = turn * 10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    both = torch.cat((turn, turn), dim=1)
    return both.cos().to(dtype), both.sin().to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15)
@given(
    tokens=st.integers(0, 6),
    heads=st.sampled_from([(1, 1), (4, 2), (14, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8, 0), (64, 64, 0), (80, 32, 0), (48, 16, 32), (96, 96, 0)]),
    width=st.sampled_from([5, 64, None]),
    style=st.sampled_from(STYLES),
    norm=st.sampled_from([None, "llama", "gemma"]),
    dtype=st.sampled_from(FLOATS),
    page_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 2**31),
)
def test_rope_and_cache_store_match_the_reference(
    device, tokens, heads, dims, width, style, norm, dtype, page_size, seed
):
    dtype, (dim, rotary, offset) = served(device, dtype), dims
    query, key = (noise(tokens, count, dim, seed=seed + count, dtype=dtype) for count in heads)
    value = None if width is None else noise(tokens, heads[1], width, seed=seed + 5, dtype=dtype)
    rotation = angles(tokens, rotary, torch.float32 if style == "interleaved" else dtype, seed)
    slots = torch.randperm(9 * page_size, generator=torch.Generator().manual_seed(seed))[:tokens]
    pools = [
        None if size is None else noise(9, page_size, heads[1], size, seed=seed + 6, dtype=dtype)
        for size in (dim, width)
    ]
    weights = noise(dim, seed=seed + 7, dtype=dtype), noise(dim, seed=seed + 8, dtype=dtype)
    headed = None if norm is None else HeadNorm(*weights, 1e-6, norm == "gemma")
    moved = None if norm is None else HeadNorm(*(w.to(device) for w in weights), 1e-6, norm == "gemma")
    placed = [None if t is None else t.to(device) for t in (query, key, value, *rotation, slots, *pools)]
    kept = CachePool(*(None if p is None else p.clone() for p in placed[-2:]))
    found = rotate_and_store(
        *placed[:3], (placed[3], placed[4]), placed[5], kept, norm=moved, style=style, offset=offset
    )
    host = CachePool(*pools)
    expected = rotate_and_store_reference(
        query, key, value, rotation, slots, host, norm=headed, style=style, offset=offset
    )
    by = 0.0 if norm is None and style != "interleaved" else 4 * ONE_ULP[dtype]
    for one, other in zip((*found, *kept[:2]), (*expected, *host[:2]), strict=True):
        if other is not None:
            assert_near(one, other, by)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_matches_the_module_and_accepts_views(device):
    """Views of a fused projection, stored into a slice of the pool of all layers; the bits equal those of `rotate`."""
    fused = noise(5, 8, 32, seed=1).to(device)
    cos, sin = (t.to(device) for t in angles(5, 32, torch.float32, 2))
    pool = torch.zeros(3, 4, 4, 2, 32, device=device)
    slots = torch.tensor([3, 0, 15, 8, 9], device=device)
    views = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    query, key = rotate_and_store(*views, (cos, sin), slots, CachePool(pool[1], pool[2]))
    assert torch.equal(query.cpu(), rotate(views[0].cpu(), cos.cpu(), sin.cpu()))
    assert torch.equal(key.cpu(), rotate(views[1].cpu(), cos.cpu(), sin.cpu()))
    assert torch.equal(pool[1].flatten(0, 1)[slots], key)
    assert torch.equal(pool[2].flatten(0, 1)[slots], views[2])
    assert not pool[0].any()
    assert int((pool[1:].flatten(1, 2) != 0).any(-1).any(-1).sum()) == 10
    assert torch.equal(rotate_reference(views[0].cpu(), cos.cpu(), sin.cpu()), query.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("stored", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_cache_store_matches_the_kv_cache(stored, scale):
    """All classes of FP8 numbers, against the engine's pool."""
    value = torch.cat((noise(64, 2, 64, seed=3) * 200, noise(64, 2, 64, seed=4) * 1e-2)).bfloat16().cuda()
    value[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    slots = torch.arange(128, device="cuda")
    pool = KVPool((1, 8, 16, 2, 64), KVFormat(stored, torch.bfloat16), "cuda")
    pool.set_scale(0, scale)
    pool.write(0, slots, value)
    kept = torch.zeros_like(pool.layers[0]), torch.zeros_like(pool.layers[0])
    still = torch.ones(128, 64, device="cuda").bfloat16(), torch.zeros(128, 64, device="cuda").bfloat16()
    rotate_and_store(value, value, value, still, slots, CachePool(*kept, (scale, scale)))
    for found in kept[1:]:
        assert torch.equal(found.view(torch.uint8), pool.layers[0].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("half", [1, 24, 64])
def test_angles_match_the_reference(device, dtype, half):
    dtype = served(device, dtype)
    positions = torch.tensor([0, 1, 2, 1023, 32768, 131071, 1 << 20], device=device)
    positions = positions[1:]  # not aligned to 16 bytes
    freq = 1.0 / (10000.0 ** (torch.arange(half, device=device).float() / half))
    for scaling in (1.0, 1.2):
        call = positions, freq, scaling, dtype
        for found, expected in zip(triton_rope.angles(*call), triton_rope.angles_reference(*call), strict=True):
            assert found.dtype == expected.dtype
            assert_near(found, expected, ONE_ULP[dtype])


@pytest.mark.skipif(why_not(torch.device("cpu")) is not None, reason="needs Triton's interpreter")
def test_rotary_embedding_uses_the_kernel_unless_frequencies_depend_on_lengths(monkeypatch):
    called = []
    fused = SimpleNamespace(rope=SimpleNamespace(angles=lambda *call: called.append(call) or triton_rope.angles(*call)))
    monkeypatch.setattr(engine_rope, "fused_for", lambda *_: fused)
    x, places = torch.zeros(3, 8), torch.tensor([0, 5, 900])
    for kind, count in (("default", 1), ("linear", 2), ("dynamic", 2)):
        rope = Rope(theta=10000.0, kind=kind, factor=2.0, original_max_positions=512)
        module = engine_rope.RotaryEmbedding(rope, 16)
        lengths = torch.tensor([900, 900, 900]) if kind == "dynamic" else None
        found, expected = (
            module(x, places, lengths),
            engine_rope.cos_sin(rope, module.inv_freq, 1.0, x.dtype, places, lengths),
        )
        assert len(called) == count
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, 2e-6)


@pytest.mark.skipif(why_not(torch.device("cpu")) is not None, reason="needs Triton's interpreter")
def test_rope_refuses_invalid_arguments():
    query, key = noise(3, 4, 16, seed=0), noise(3, 2, 16, seed=1)
    rotation, slots, pages = angles(3, 16, torch.float32, 0), torch.arange(3), torch.zeros(2, 4, 2, 16)
    pool = CachePool(pages, pages.clone())
    good = {"query": query, "key": key, "value": key, "rotation": rotation, "slots": slots, "pool": pool}
    rotate_and_store(**good)
    for wrong in (
        {"key": key[:, :1]},
        {"key": key.half()},
        {"value": None},
        {"value": key[..., :8]},
        {"slots": slots.int()},
        {"slots": slots[:2]},
        {"rotation": angles(2, 16, torch.float32, 0)},
        {"offset": 4},
        {"style": "gptj"},
        {"norm": HeadNorm(torch.ones(8), torch.ones(8), 1e-6)},
        {"query": query.mT},
        {"pool": CachePool(pages[:, :3], pages[:, :3])},
    ):
        with pytest.raises(UsageError):
            rotate_and_store(**(good | wrong))


def test_layer_references_match_torch():
    """For references that have a torch equivalent."""
    states, weight = noise(4, 32, seed=0), noise(32, seed=1)
    assert_near(rms_norm_reference(states, weight, 1e-6), functional.rms_norm(states, (32,), weight, 1e-6))
