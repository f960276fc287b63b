"""FP8 KV cache: rounding errors, the source of the scales, and independence of how a prompt is chunked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from engine_helpers import ThreadRanks, reference
from gpu_helpers import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checkpoints import LATENT, make_moe
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine import LLM, EngineConfig, SamplingParams
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.kv_cache.kv_scales import read_scale_file, resolve_kv_dtype

PROMPTS = [[5, 6, 7], list(range(40, 58)), [9, 8, 7, 6, 5, 4, 3]]
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
FILE = "model.safetensors"
Names = dict[str, Any]


def rounded(x: Tensor, dtype: str, scale: float) -> Tensor:
    """Round-trip ``x`` through an FP8 dtype, written out as the reference."""
    kind, most = FP8[dtype]
    return (x / scale).clamp(-most, most).to(kind).to(x.dtype) * scale


class RoundedCache(DynamicCache):
    """transformers' DynamicCache with keys and values rounded to FP8."""

    def __init__(self, dtype: str, scales: list[tuple[float, float]]) -> None:
        super().__init__()
        self.rounding = dtype, scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dtype, scales = self.rounding
        key, value = scales[layer]
        return super().update(rounded(keys, dtype, key), rounded(values, dtype, value), layer, *args, **kwargs)


@torch.no_grad()
def expected_logits(
    path: Path, tokens: list[int], dtype: str, scales: list[tuple[float, float]] | None = None
) -> Tensor:
    """Return the logits [tokens, vocab] of transformers with an FP8 KV cache.

    transformers does not cache MLA latents; a forward hook rounds them instead.
    """
    model = reference(path)
    layers = model.model.layers
    scales = scales or [(1.0, 1.0)] * len(layers)
    hooks = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _m, _a, out, s=scale: rounded(out, dtype, s[0]))
        for layer, scale in zip(layers, scales, strict=True)
        if hasattr(layer.self_attn, "kv_a_layernorm")
    ]
    cache = DynamicCache(config=model.config) if hooks else RoundedCache(dtype, scales)
    logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def add_scales(path: Path, names: Names, quantization: dict[str, Any] | None = None) -> Path:
    """Add tensors to the checkpoint at ``path``, and a quantization_config to its config.json."""
    weights = load_file(path / "model.safetensors")
    extra = {f"model.layers.{name}": torch.as_tensor(value) for name, value in names.items()}
    save_file(weights | extra, path / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path


def in_layers(key: str, value: str, scales: list[tuple[float, float]]) -> Names:
    """Return the key and value scales of every layer by tensor name."""
    both = [((i, key, k), (i, value, v)) for i, (k, v) in enumerate(scales)]
    return {f"{i}.self_attn.{name}": number for pair in both for i, name, number in pair}


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(["fp8_e4m3", "fp8_e5m2"]),
    computed=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.floats(2.0**-10, 2.0**10),
    seed=st.integers(0, 1000),
)
def test_kv_format_roundtrip_error_is_bounded(dtype: str, computed: torch.dtype, scale: float, seed: int) -> None:
    kind, most = FP8[dtype]
    smallest, bound = (2.0**-6, 2.0**-4) if dtype == "fp8_e4m3" else (2.0**-14, 2.0**-3)
    kv_format = KVFormat(kind, computed)
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(500, generator=generator) * 20 - 8
    x = (2.0**powers * torch.randn(500, generator=generator).sign() * scale).to(computed)
    read = kv_format.decode(kv_format.encode(x, scale), scale)
    assert read.dtype == computed
    inside = (x.abs() / scale >= smallest) & (x.abs() / scale <= most)
    error = (read.double() - x.double()).abs() / x.double().abs()
    assert inside.any()
    assert error[inside].max() <= bound + 2.0**-8 * (computed == torch.bfloat16)  # bfloat16 output: rounded again
    edge = (torch.tensor([most, -most]) * scale).to(computed)
    assert torch.equal(read[x.abs() / scale > most].abs(), edge[:1].expand((x.abs() / scale > most).sum()))
    beyond = kv_format.decode(
        kv_format.encode(torch.tensor([1e30, -torch.inf, torch.nan], dtype=computed), scale), scale
    )
    assert torch.equal(beyond[:2], edge)
    assert beyond[2].isnan()


@pytest.mark.parametrize("dtype", FP8)
def test_kv_format_table_equals_conversion(dtype: str) -> None:
    kv_format = KVFormat(FP8[dtype][0], torch.bfloat16)
    every = torch.arange(256, dtype=torch.uint8).view(kv_format.stored)
    found = kv_format.table(0.037, torch.device("cpu"))
    assert torch.equal(found.nan_to_num(7.0), (every.float() * 0.037).bfloat16().nan_to_num(7.0))
    assert found.isnan().sum() == every.float().isnan().sum() > 0


@pytest.mark.parametrize("dtype", FP8)
def test_kv_format_keeps_finite_values_finite(dtype: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    kv_format = KVFormat(FP8[dtype][0], torch.float16)
    for scale in (1e-30, 0.01, 1.0, 147.0, 1e30):
        assert kv_format.decode(kv_format.encode(finite, scale), scale).isfinite().all()


CASES: dict[str, tuple[Callable[..., Path], str, dict[str, Any]]] = {
    "llama": (make_checkpoint, "llama", {}),
    "gemma3, some layers slide": (make_checkpoint, "gemma3", {"sliding_window": 9}),
    "gemma4, two sizes of heads": (
        make_checkpoint,
        "gemma4",
        {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    ),
    "mistral, all layers slide": (make_checkpoint, "mistral", {"sliding_window": 9}),
    "latents": (make_moe, "deepseek_v3", {}),
    "latents and exact index keys": (make_moe, "deepseek_v32", {}),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, "fp8_e4m3") for case in CASES), ("llama", "fp8_e5m2")])
def test_fp8_kv_cache_equals_transformers_with_rounded_keys_and_values(tmp_path: Path, case: str, dtype: str) -> None:
    """With chunked prompts, mixed steps and preemption, on two ranks."""
    make, family, config = CASES[case]
    path = make(tmp_path / "model", family, seed=3, num_hidden_layers=2, **config)
    ranks = ThreadRanks(
        path, tmp_path / "store", 2, page_size=4, num_pages=9, max_num_batched_tokens=7, kv_cache_dtype=dtype
    )
    requests = ranks.generate(PROMPTS, 8)
    assert ranks.scheduler.stats.num_preemptions or "all layers" in case
    for request in requests:
        expected = expected_logits(path, request.tokens[:-1], dtype)
        for runner in ranks.runners:
            assert (_last_visit(runner.observer, request.id) - expected).abs().max() <= 1e-4
    exact = reference(path)(torch.tensor([requests[1].tokens[:-1]])).logits[0]
    assert (exact - expected_logits(path, requests[1].tokens[:-1], dtype)).abs().max() > 1e-3
    ranks.close()


def _last_visit(observer: Any, request: str) -> Tensor:
    """Return the logits [positions, vocab] of the last visit of each position of ``request``."""
    rows = {
        run.position + i: logits[run.slot + i]
        for info, logits in zip(observer.steps, observer.logits, strict=True)
        for run in info.rows
        if run.request == request
        for i in range(run.count)
    }
    return torch.stack([rows[position] for position in sorted(rows)])


SPELLINGS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose values exceed the FP8 range without scales."""
    path = make_llama(tmp_path_factory.mktemp("wild") / "model", seed=4, num_hidden_layers=2)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "v_proj" in name:
            weight *= 3000
        if "o_proj" in name:
            weight /= 3000
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def copied(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def logits_of(llm: LLM, prompt: list[int]) -> Tensor:
    seen: list[Tensor] = []
    hook = llm.model.register_forward_hook(lambda _module, _args, out: seen.append(out.logits.clone()))
    llm.generate([prompt], max_new_tokens=1)
    hook.remove()
    return torch.cat(seen).cpu()


@pytest.mark.parametrize(
    ("key", "value", "device"),
    [*((*names, "cpu") for names in SPELLINGS), pytest.param(*SPELLINGS[0], "cuda", marks=ON_GPU)],
)
def test_kv_scales_change_with_the_weights(
    tmp_path: Path, wild: Path, key: str, value: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    scales, prompt = [(0.05, 40.0), (0.02, 25.0)], PROMPTS[1]
    path = add_scales(copied(wild, tmp_path / "model"), in_layers(key, value, scales), KV_ONLY)
    with LLM(path, logits="all", prefix_cache=False, device=device) as llm:  # kv_cache_dtype from config.json
        expected = expected_logits(wild, prompt, "fp8_e4m3", scales)
        assert (logits_of(llm, prompt) - expected).abs().max() <= 1e-4
        unscaled = expected_logits(wild, prompt, "fp8_e4m3")
        assert (unscaled - expected).abs().max() > 0.1
        other = add_scales(copied(wild, tmp_path / "other"), {f"{i}.self_attn.kv_scale": 30.0 + i for i in range(2)})
        llm.engine.update_weights(other)
        expected = expected_logits(wild, prompt, "fp8_e4m3", [(30.0, 30.0), (31.0, 31.0)])
        assert (logits_of(llm, prompt) - expected).abs().max() <= 1e-4
        assert "has no scales" not in caplog.text
        llm.engine.update_weights(wild)
        assert caplog.text.count("has no scales for an FP8 KV cache") == 1
        expected = expected_logits(wild, prompt, "fp8_e4m3")
        assert (logits_of(llm, prompt) - expected).abs().max() <= 1e-4
        llm.engine.update_weights(other)
        part = tmp_path / "part"
        part.mkdir()
        save_file({"model.layers.0.self_attn.k_scale": torch.tensor(0.05)}, part / "model.safetensors")
        llm.engine.update_weights(part, partial=True)
        expected = expected_logits(wild, prompt, "fp8_e4m3", [(0.05, 30.0), (31.0, 31.0)])
        assert (logits_of(llm, prompt) - expected).abs().max() <= 1e-4


def test_kv_scales_of_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Scales are found under each decoder name; a vision tower has its own scales."""
    scales = [(0.0625, 0.5), (0.03125, 0.25)]
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    path = make_checkpoint(tmp_path / "model", "gemma4", seed=4, num_hidden_layers=2, **kinds)
    text = add_scales(copied(path, tmp_path / "text"), in_layers("k_scale", "v_scale", scales), KV_ONLY)
    whole = copied(text, tmp_path / "whole")
    tower = "model.vision_tower.encoder.layers.0.self_attn.k_scale"
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in load_file(text / FILE).items()}
    save_file(weights | {tower: torch.tensor(7.0)}, whole / FILE, metadata={"format": "pt"})
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "float32"}
    inner = json.loads((path / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"text_config": inner, "quantization_config": KV_ONLY}))
    found = []
    for folder in (text, whole):
        with LLM(folder, logits="all", prefix_cache=False) as llm:
            assert [llm.engine.runner.kv_cache.scales(layer) for layer in range(2)] == scales
            found.append(logits_of(llm, PROMPTS[1]))
    assert torch.equal(*found)
    assert (found[0] - expected_logits(path, PROMPTS[1], "fp8_e4m3", scales)).abs().max() <= 1e-4


def factors(ranks: int, layers: list[Any], **more: Any) -> str:
    by_rank = {rank: dict(enumerate(layers)) for rank in range(ranks)}
    return json.dumps({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": by_rank} | more})


def test_scale_file_takes_precedence_over_the_checkpoint(tmp_path: Path, wild: Path) -> None:
    path = add_scales(copied(wild, tmp_path / "model"), in_layers("k_scale", "v_scale", [(1.0, 1.0)] * 2), KV_ONLY)
    file = tmp_path / "scales.json"
    file.write_text(factors(1, [40, 25.0]))
    expected = expected_logits(wild, PROMPTS[1], "fp8_e4m3", [(40.0, 40.0), (25.0, 25.0)])
    with LLM(path, logits="all", quantization_param_path=str(file)) as llm:
        assert (logits_of(llm, PROMPTS[1]) - expected).abs().max() <= 1e-4
    with pytest.raises(CheckpointError, match="quantization_param_path nowhere.json is not a file"):
        LLM(path, quantization_param_path="nowhere.json")
    with pytest.raises(ConfigError, match=r"requires an FP8 KV cache, but it is float32; set kv_cache_dtype='fp8'"):
        LLM(wild, quantization_param_path=str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no kv_cache.scaling_factor"),
        (factors(1, [0.5, 0.5], dtype="int8"), "dtype is 'int8'"),
        (factors(3, [0.5, 0.5]), "scaling_factor is for ranks 0, 1, 2; it must be for 0, or 0 to 1"),
        (factors(1, [0.5]), "rank 0 must have layers 0 to 1, and only these"),
        (factors(2, [0.5, 0]), "the scale of rank 1, layer 1 is 0; it must be a finite number above 0"),
        (factors(2, ["half", 1.0]), "the scale of rank 1, layer 0 is 'half'"),
    ],
)
def test_scale_file_errors_name_rank_and_layer(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "scales.json"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_scale_file(file, range(2), 1, 2)
    file.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": {"0": 0.5}, "1": {"0": 0.25}}}}))
    assert read_scale_file(file, range(1), 1, 2) == {0: (0.25, 0.25)}


def test_kv_scales_default_to_one_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=2)
    ranks = ThreadRanks(path, tmp_path / "store", 2, kv_cache_dtype="fp8")
    assert [runner.cache_config.dtype for runner in ranks.runners] == ["fp8_e4m3"] * 2
    ranks.close()
    assert caplog.text.count("has no scales for an FP8 KV cache, so 1.0 is used") == 1
    assert "k_scale and v_scale" in caplog.text
    assert "bfloat16" in caplog.text
    caplog.clear()
    with LLM(path, kv_cache_dtype="fp8_e5m2"):
        assert "scales" not in caplog.text  # the range of this dtype needs no scales


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.self_attn.k_scale": 0.0}, r"layers.0.self_attn.k_scale in .* is 0.0; .* above 0"),
        ({"0.self_attn.v_scale": -1.0}, r"v_scale in .* is -1.0"),
        ({"1.self_attn.k_scale": float("nan")}, r"layers.1.self_attn.k_scale in .* is nan"),
        ({"1.self_attn.v_scale": float("inf")}, r"is inf; a KV cache scale must be a finite number"),
        ({"1.self_attn.k_scale": [0.5, 0.5]}, r"k_scale in .* is float32 of shape \[2\]; it must be one float"),
        ({"1.self_attn.k_scale": 3}, r"k_scale in .* is int64 of shape \[\]; it must be one float"),
        ({"1.self_attn.kv_scale": 0.25}, r"kv_scale in .* is 0.25, but .*k_scale, which scales the same .*, is 0.5"),
    ],
)
def test_kv_scales_errors_name_the_tensor(tmp_path: Path, change: Names, message: str) -> None:
    names = in_layers("k_scale", "v_scale", [(0.5, 0.5)] * 2)
    path = add_scales(make_llama(tmp_path / "model", num_hidden_layers=2), names | change, KV_ONLY)
    with pytest.raises(CheckpointError, match=message):
        LLM(path)


def test_kv_scales_reject_partial_layers(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", num_hidden_layers=2)
    lacking = add_scales(copied(path, tmp_path / "lacking"), {"0.self_attn.kv_scale": 0.5, "1.self_attn.k_scale": 0.5})
    message = r"has KV cache scales, but not model.layers.1.self_attn.v_scale; all layers need them"
    with LLM(path, kv_cache_dtype="fp8") as llm:
        with pytest.raises(CheckpointError, match=message):
            llm.engine.update_weights(lacking)
        assert (logits_of(llm, PROMPTS[0])[-1] - expected_logits(path, PROMPTS[0], "fp8_e4m3")[-1]).abs().max() <= 1e-4
    with LLM(lacking, kv_cache_dtype="bfloat16"):
        pass  # an unquantized cache ignores the scales


@pytest.mark.parametrize(
    ("config", "hf_quant", "expected"),
    [
        (None, None, "float32"),
        (KV_ONLY, None, "fp8_e4m3"),
        (KV_ONLY | {"kv_cache_scheme": None}, None, "float32"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, None, "fp8_e4m3"),
        (None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt"}, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        (KV_ONLY | {"kv_cache_scheme": SCHEME | {"type": "int"}}, None, r"kv_cache_scheme is .*; supported: FP8"),
        (KV_ONLY | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, None, "kv_cache_scheme is .*'dynamic': True"),
        (None, {"kv_cache_quant_algo": "NVFP4"}, "hf_quant_config.json: kv_cache_quant_algo is 'NVFP4'"),
    ],
)  # fmt: skip
def test_resolve_kv_dtype_auto_follows_the_checkpoint(
    tmp_path: Path, config: Any, hf_quant: Any, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    if hf_quant is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": hf_quant}))
    if "is" not in expected:
        assert resolve_kv_dtype(EngineConfig(model=str(tmp_path)), "float32") == expected
    else:
        with pytest.raises(CheckpointError, match=expected):
            resolve_kv_dtype(EngineConfig(model=str(tmp_path)), "float32")
    assert resolve_kv_dtype(EngineConfig(model=str(tmp_path), kv_cache_dtype="bfloat16"), "float32") == "bfloat16"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': must be one of auto, .*fp8_e5m2"):
        EngineConfig(model=str(tmp_path), kv_cache_dtype="int8")


def test_kv_cache_size_scales_with_dtype(tmp_path: Path) -> None:
    plain, latent = make_llama(tmp_path / "plain"), make_moe(tmp_path / "latent", "deepseek_v3")
    sizes = {}
    for dtype in ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        with LLM(plain, kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 19) as llm:
            sizes[dtype] = llm.engine.state()
            cache = llm.engine.runner.kv_cache
            held = sum(pool.numel() * pool.element_size() for pool in cache.tensors())
            page = sizes[dtype]["kv_bytes_per_token"] * 16
            assert held == sizes[dtype]["kv_bytes_total"] + page  # the dummy page belongs to no request
    assert [sizes[d]["kv_bytes_per_token"] for d in sizes] == [3 * 2 * 2 * 16 * b for b in (4, 2, 1, 1)]
    assert [sizes[d]["kv_pages_total"] for d in sizes] == [42, 85, 170, 170]
    assert {sizes[d]["kv_bytes_total"] // (1 << 19) for d in sizes} == {0}
    rank, rope = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    with LLM(latent, kv_cache_dtype="fp8") as llm:
        assert llm.engine.state()["kv_bytes_per_token"] == 3 * (rank + rope * 4)  # the RoPE part stays float32


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "fp8_e4m3"), ("deepseek_v3", "fp8_e4m3"), ("llama", "float16")]
)
def test_fp8_kv_cache_is_bit_identical_for_any_chunking(tmp_path: Path, family: str, dtype: str) -> None:
    make = make_checkpoint if family == "llama" else make_moe
    path = make(tmp_path / "model", family, seed=1, dtype="bfloat16", num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=5, full_logprobs=True, ignore_eos=True)
    prompt = list(range(20, 61))
    found = []
    for cut in ({}, {"max_num_batched_tokens": 5}, {"page_size": 4}):
        with LLM(path, batch_invariant=True, kv_cache_dtype=dtype, **cut) as llm:
            if "page_size" in cut:
                llm.generate([prompt[:30]], max_new_tokens=1)
            generation = llm.generate([prompt], params)[0]
            assert (generation.cached_tokens > 0) == ("page_size" in cut)
            found.append((generation.token_ids, [item.full for item in generation.logprobs]))
    assert found[0] == found[1] == found[2]
