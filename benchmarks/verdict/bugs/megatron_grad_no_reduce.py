"""The input gradient of one fused qkv projection is not all-reduced: each rank keeps its own."""

PATCHES = "megatron"
EXPECT = ["model.layers.1.self_attn", "model.layers.1.self_attn.?_proj", "decoder.layers.1.self_attention.linear_qkv"]
VISIBILITY = "strong"
CAUSE = r"all-reduce|added up|summand|adds? up"
BOTH = {"train": True}
BASELINE = [{"framework": "transformers"}, {"tp": 2}]
TARGET = {"tp": 2}


def patch(model):
    linear = model.decoder.layers[1].self_attention.linear_qkv
    linear.allreduce_dgrad, linear.disable_grad_reduce = False, True
