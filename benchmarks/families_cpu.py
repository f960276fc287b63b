"""The engine on a CPU against transformers' generate, by model family: batch 1 and 8, same weights, interleaved.

    python benchmarks/families_cpu.py [mamba2 jamba nemotron_h ...] [--new 32] [--rounds 3]
    python benchmarks/families_cpu.py mamba2 --contexts 1024 32768

One process, one torch thread, random float32 weights, prompts of 64 tokens. A ratio is transformers' time over the
engine's: above 1, the engine is faster. Median of rounds; the number of equal outputs is printed. transformers runs its
PyTorch code, because the kernels of mamba-ssm need CUDA. With `--contexts`, only the engine is measured: CPU time of a
decode step after a prompt of each length, for models of 4 layers, and the part of the recurrent layers.
"""

import argparse
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_cpu import by_engine, by_generate, cases, compare
from transformers import AutoConfig, AutoModelForCausalLM

from tapscope.engine import LLM
from tapscope.engine.layers.recurrent_layer import RecurrentLayer

_VOCAB = 4096
_COMMON: dict[str, Any] = {"vocab_size": _VOCAB, "hidden_size": 512, "num_hidden_layers": 8, "pad_token_id": 0}
_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_DENSE = _ATTENTION | {"intermediate_size": 1024}
_SPARSE = _DENSE | {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
_DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
_LATENT = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 192,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "index_topk": 48, "index_head_dim": 64, "index_n_heads": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1},
    "jamba": _ATTENTION | {"intermediate_size": 512, "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "bamba": _ATTENTION | _MAMBA2 | {"intermediate_size": 1024, "attn_layer_indices": [2, 6]},
    "nemotron_h": _ATTENTION
    | {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"] * 2,
        "head_dim": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "n_routed_experts": 8,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
    },
    "deepseek_v32": _LATENT,
    "kimi_linear": {
        name: value for name, value in _LATENT.items() if not name.startswith(("index", "q_lora", "n_routed"))
    }
    | {"num_local_experts": 8, "linear_num_heads": 8, "linear_head_dim": 64},
    "zamba2": {"num_attention_heads": 8, "intermediate_size": 1024, "n_mamba_heads": 16, "num_mem_blocks": 1}
    | {"layers_block_type": (["linear_attention"] * 3 + ["hybrid"]) * 2, "adapter_rank": 16},
    "gemma3n_text": _ATTENTION
    | {
        "intermediate_size": 1024,
        "head_dim": 64,
        "num_kv_shared_layers": 3,
        "sliding_window": 48,
        "vocab_size_per_layer_input": _VOCAB,
        "hidden_size_per_layer_input": 64,
        "laurel_rank": 32,
    },
    "gemma4_text": _ATTENTION
    | {
        "intermediate_size": 1024,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "sliding_window": 48,
        "vocab_size_per_layer_input": _VOCAB,
        "hidden_size_per_layer_input": 64,
    },
    **dict.fromkeys(("smollm3", "granite", "olmo2", "olmo3", "starcoder2", "cohere2"), _DENSE),
    "phi3": _DENSE | {"partial_rotary_factor": 1.0},
    "glm4": _DENSE | {"head_dim": 64},
    "gemma3_text": _DENSE | {"head_dim": 64, "sliding_window": 48},
    "qwen2_moe": _SPARSE | {"num_experts": 8, "shared_expert_intermediate_size": 256},
    "minimax_m2": _SPARSE | {"num_local_experts": 8, "head_dim": 64, "intermediate_size": 256},
    "glm4_moe": _SPARSE | {"n_routed_experts": 8, "head_dim": 64, "first_k_dense_replace": 1},
    "gpt_oss": _SPARSE | {"num_local_experts": 8, "head_dim": 64, "intermediate_size": 256, "sliding_window": 48},
    "llama4_text": _SPARSE
    | {"num_local_experts": 8, "head_dim": 64, "intermediate_size": 512, "intermediate_size_mlp": 1024},
    "qwen3_next": _SPARSE | _DELTA | {"num_experts": 8, "head_dim": 64, "shared_expert_intermediate_size": 256},
    "qwen3_5_text": _DENSE | _DELTA | {"head_dim": 64},
    "falcon_h1": _DENSE | _MAMBA2 | {"head_dim": 64, "mamba_d_ssm": 1024},
    "lfm2": _DENSE | {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
}
"""model_type -> config of a model with about ten million weights."""


def save(family: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Return a random model and save it to ``folder``; ``changes`` override config fields."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_COMMON | FAMILIES[family] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def first_layers(family: str, count: int) -> dict[str, Any]:
    """Return the config changes for a model with only the first ``count`` layers.

    List fields have an entry per layer, or contain layer indices.
    """
    lists = {name: value for name, value in FAMILIES[family].items() if isinstance(value, list)}
    return {"num_hidden_layers": count} | {
        name: value[:count] if isinstance(value[0], str) else [layer for layer in value if layer < count]
        for name, value in lists.items()
    }


def compare_contexts(llm: LLM, contexts: list[int], new: int) -> None:
    """Print the median CPU time of a decode step and of its recurrent layers at each context length, and both ratios to
    the first context length."""
    dice = random.Random(0)
    times: dict[int, list[tuple[float, float]]] = {}
    recurrent = 0.0

    def count(sign: int, *_: Any) -> None:
        nonlocal recurrent
        recurrent += sign * time.process_time()

    for module in llm.engine.runner.model.modules():
        if isinstance(module, RecurrentLayer):
            module.register_forward_pre_hook(partial(count, -1))
            module.register_forward_hook(partial(count, 1))
    for length in contexts:
        prompt = [dice.randrange(2, _VOCAB) for _ in range(length)]
        llm.submit(prompt, max_new_tokens=new + 1, ignore_eos=True)
        while not any(output.token_ids for output in llm.advance()):
            pass  # prefill of the prompt, in chunks
        times[length] = []
        while llm.has_work:
            begin, recurrent = time.process_time(), 0.0
            llm.advance()
            times[length].append((time.process_time() - begin, recurrent))
    first, first_recurrent = map(statistics.median, zip(*times[contexts[0]], strict=True))
    for length, taken in times.items():
        step, own = map(statistics.median, zip(*taken, strict=True))
        said = f"recurrent layers {1e3 * own:6.2f} ms, {own / first_recurrent:4.2f}" if own else "no recurrent layers"
        ratios = f"{step / first:4.2f} of context {contexts[0]}; {said}"
        print(f"context {length:<6} {1e3 * step:6.2f} ms a step, {ratios}", flush=True)


def main() -> None:
    """Print one row per family and batch size, or context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS", help="measure decoding after such prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = cases(_VOCAB, options.new)
    for family in options.families or FAMILIES:
        if options.contexts:
            longest = max(options.contexts) + options.new + 1
            with tempfile.TemporaryDirectory() as folder:
                save(family, Path(folder), max_position_embeddings=longest, **first_layers(family, 4))
                with LLM(folder, max_num_seqs=1, prefix_cache=False) as llm:
                    print(f"{family}, 4 layers", flush=True)
                    compare_contexts(llm, options.contexts, options.new)
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = save(family, Path(folder))
            with LLM(folder, max_num_seqs=8, prefix_cache=False) as llm:
                print(f"{family}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million weights", flush=True)
                for name in ("equal-1", "equal-8"):
                    ways = {
                        "engine": partial(by_engine, llm, every[name]),
                        "generate": partial(by_generate, model, every[name]),
                    }
                    compare(name, every[name], ways, options.rounds)


if __name__ == "__main__":
    main()
