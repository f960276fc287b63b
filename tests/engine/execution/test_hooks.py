"""Every module has its Hugging Face name, so ordinary hooks receive the same values as in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, make_llama
from engine_helpers import ThreadRanks, reference
from engine_observers import Memory
from gpu_helpers import DEVICES

from tapscope.core import dims
from tapscope.engine import LLM

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, attention_bias=True, mlp_bias=True)


def _copied(output: Any) -> Any:
    """Clone an output tensor: transformers scales a Gemma 3n projection in place."""
    return output.clone() if isinstance(output, torch.Tensor) else output


def _hook_all(model: torch.nn.Module) -> tuple[dict[str, list[Any]], list[Any]]:
    seen: dict[str, list[Any]] = {}
    handles = []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(lambda _, args, out, name=name: seen.setdefault(name, []).append(_copied(out)))
        )
    return seen, handles


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return [getattr(output, name)]
    return [item for item in output if isinstance(item, torch.Tensor)]


def _transformers_values(path: Path) -> dict[str, list[Any]]:
    """Return the outputs of every module of transformers' model, without the attention weights of eager attention."""
    hf = reference(path)
    seen, handles = _hook_all(hf)
    with torch.no_grad():
        hf(torch.tensor([PROMPT]))
    for handle in handles:
        handle.remove()
    return seen | {name: [outputs[0][0]] for name, outputs in seen.items() if name.endswith(".self_attn")}


def _packed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Drop the batch axis of transformers' value and put heads after tokens (Gemma 3 normalizes heads first)."""
    tensor = tensor.squeeze(1 if tensor.ndim == 4 and len(tensor) > 1 else 0)  # Gemma 3n stacks streams on axis 0
    heads_first = name.endswith((".q_norm", ".k_norm")) and tensor.ndim == 3 and tensor.shape[1] == len(PROMPT)
    return tensor.transpose(0, 1) if heads_first else tensor


_OWN_MODULES = {
    "phi3": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "glm": {"qkv_proj", "gate_proj", "up_proj"},
    "glm4": {"qkv_proj", "gate_proj", "up_proj"},
    "starcoder2": {"qkv_proj"},
    "lfm2": {"qkv_proj", "w13"},
    "zamba2": {"qkv_proj"},
    "mamba2": set(),
}
"""Names of modules that exist only in the engine: fused weights, or parts of modules that transformers fuses."""


def _times(family: str, name: str) -> int:
    if family == "gemma3n" and name.endswith((".router_norm", ".modality_router")):
        return 2  # prediction and correction
    return (
        2 if family in ("gemma3", "gemma3n", "gemma4", "olmo3") and name == "model.rotary_emb" else 1
    )  # per layer type


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_hooks_fire_once_per_module_with_transformers_values(tmp_path: Path, family: str, device: str) -> None:
    biases = {"mlp_bias": True, "attention_bias": True} if family == "llama" else {}
    path = make_checkpoint(tmp_path / "model", family, seed=1, **biases)
    expected = _transformers_values(path)
    with LLM(path, logits="all", device=device) as llm:
        actual, _ = _hook_all(llm.model)
        llm.generate([PROMPT], max_new_tokens=1)
        inherits = [name for name, _ in reference(path).named_modules() if name not in dict(llm.model.named_modules())]
    # The engine's convolution includes its activation, which is a module that transformers never calls.
    assert [name for name in inherits if not name.endswith((".mamba.act", ".mixer.act"))] == []
    assert len(expected) > {"falcon_h1": 39, "lfm2": 39, "mamba2": 20}.get(family, 40)
    for name, outputs in expected.items():
        assert len(outputs) == len(actual[name]) == _times(family, name), name or "the root"
        for firing in actual[name]:
            theirs, ours = ([_tensors(out) for out in outputs], _tensors(firing))
            # transformers calls the rotary embedding of Gemma 3 and OLMo 3 per layer type, in set order.
            assert any(_equal(name, values, ours) for values in theirs), name
    extra = {name.rpartition(".")[2] for name in actual} - {name.rpartition(".")[2] for name in expected}
    core = {"partial", "sampler"} if family == "mamba2" else {"attn", "partial", "sampler"}
    if llm.engine.model_config.linear_layers:
        core |= {"conv_state"} if family == "lfm2" else {"conv_state", "recurrent_state"}
    assert extra == core | _OWN_MODULES.get(family, {"qkv_proj", "gate_up_proj"})


def _equal(name: str, theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
    """Return whether shapes and values are equal; Gemma 4's cosines have a different shape per layer type."""
    pairs = [(_packed(name, a), b) for a, b in zip(theirs, ours, strict=True)]
    return all(a.shape == b.shape and (a - b.cpu()).abs().max() <= 1e-4 for a, b in pairs)


def _assemble(shards: list[torch.Tensor], annotation: str) -> torch.Tensor:
    """Assemble TP shards according to their dims, checking that replicas are equal."""
    parsed = dims.parse(annotation)
    sharded = parsed.shards()
    if not sharded:
        assert parsed.replicated == ("tp",), f"{annotation} explains no tp axis"
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0]
    ((axis, shard),) = sharded
    return torch.stack(shards).sum(0) if shard.partial else torch.cat(shards, dim=axis)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_hooks_of_two_ranks_assemble_by_dims_to_transformers_values(tmp_path: Path, family: str) -> None:
    biases = {"mlp_bias": True} if family == "llama" else {}
    path = make_checkpoint(tmp_path / "model", family, seed=2, attention_bias=True, vocab_size=523, **biases)
    expected = _transformers_values(path)
    ranks = ThreadRanks(path, tmp_path / "store", 2)
    actual = [_hook_all(runner.model)[0] for runner in ranks.runners]
    ranks.generate([PROMPT], 1)
    model = ranks.runners[0].model
    for name, outputs in expected.items():
        theirs = _tensors(outputs[0])
        ours = [_tensors(seen[name][0]) for seen in actual]
        found = [text for port, text in model.get_submodule(name).tap_dims.items() if port.startswith("out")]
        for i, tensor in enumerate(theirs):
            whole = _assemble([shards[i] for shards in ours], found[i])
            assert (_packed(name, tensor) - whole).abs().max() <= 1e-4, name
    partials = [name for name in actual[0] if name.endswith(".partial")]
    assert len(partials) == 2 * 3
    for name in partials:
        whole = _assemble([seen[name][0] for seen in actual], model.get_submodule(name).tap_dims["out"])
        # Partial sums kept by a hook are unchanged by the all-reduce, and exactly one of them includes the bias.
        assert (whole - actual[0][name.removesuffix(".partial")][0]).abs().max() <= 1e-6
        assert not torch.equal(actual[0][name][0], actual[1][name][0])
    ranks.close()


def test_parameter_names_equal_transformers_unless_fused(path: Path) -> None:
    with LLM(path) as llm:
        ours = {name for name, _ in llm.model.named_parameters()}
    theirs = {name for name, _ in reference(path).named_parameters()}
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert {name for name in theirs if name.split(".")[-2] not in fused} <= ours


def test_hooks_can_replace_outputs(path: Path) -> None:
    with LLM(path) as llm:
        before = llm.generate([PROMPT], max_new_tokens=4, ignore_eos=True)[0].token_ids
        q_proj = llm.model.model.layers[0].self_attn.q_proj
        handle = q_proj.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
        zeroed = llm.generate([PROMPT], max_new_tokens=4, ignore_eos=True)[0].token_ids
        handle.remove()
        after = llm.generate([PROMPT], max_new_tokens=4, ignore_eos=True)[0].token_ids
    assert zeroed != before == after


def test_logits_last_limits_lm_head_to_sampled_rows(path: Path) -> None:
    with LLM(path, observer=Memory) as llm:
        seen, _ = _hook_all(llm.model)
        llm.generate([PROMPT, [3, 4]], max_new_tokens=2, ignore_eos=True)
        infos = llm.observer.steps
    assert infos[0].row_sets == {"logits": (len(PROMPT) - 1, len(PROMPT) + 1)}
    assert infos[1].row_sets == {"logits": (0, 1)}
    assert [out.shape for out in seen["lm_head"]] == [(2, 512), (2, 512)]
    assert [out.shape for out in seen["model.norm"]] == [(9, 64), (2, 64)]


def test_sampler_site_has_the_models_choice_with_forced_tokens(path: Path) -> None:
    with LLM(path) as llm:
        seen, _ = _hook_all(llm.model)
        (generation,) = llm.generate([PROMPT], max_new_tokens=2, forced_token_ids=[[50, 51]])
    assert generation.token_ids == (50, 51)
    chosen = seen["sampler"][0]
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == seen[""][0].logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tap_dims_fit_the_tensors(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "model", family)
    with LLM(path, observer=Memory) as llm:
        checked = set()

        def check(name: str, module: torch.nn.Module, port: str, value: Any) -> None:
            if port in getattr(module, "tap_dims", {}):
                dims.parse(module.tap_dims[port]).check(tuple(value.shape))
                checked.add((name, port))

        for name, module in llm.model.named_modules():

            def hook(module: torch.nn.Module, args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, torch.Tensor):
                    check(name, module, "out", output)
                elif isinstance(output, tuple):
                    for i, item in enumerate(output):
                        check(name, module, f"out[{i}]", item)
                else:
                    field = next(iter(output.__slots__))
                    check(name, module, f"out[{field}]", getattr(output, field))

            module.register_forward_hook(hook)
        llm.generate([PROMPT], max_new_tokens=2)
        declared = {
            (name, port)
            for name, module in llm.model.named_modules()
            for port in getattr(module, "tap_dims", {})
            if port.startswith("out")
        }
        assert declared == checked
        for module in llm.model.modules():
            assert all(rows == "logits" for rows in getattr(module, "tap_rows", {}).values())
