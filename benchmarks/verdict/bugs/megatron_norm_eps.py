"""One norm of Megatron has an eps of 0.1."""

from benchmarks.verdict.tools import around

PATCHES = "megatron"
FAMILY = ["llama", "qwen3"]
EXPECT = "model.layers.2.post_attention_layernorm"
VISIBILITY = "strong"
CAUSE = r"epsilon is larger by 0\.1\b"
BASELINE = {"framework": "transformers"}
TARGET = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    import torch

    norm = model.decoder.layers[2].pre_mlp_layernorm
    around(norm, lambda forward, x: torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, 0.1))
