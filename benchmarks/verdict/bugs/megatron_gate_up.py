"""The halves of one fused gate and up projection are swapped."""

PATCHES = "megatron"
EXPECT = ["model.layers.2.mlp.gate_proj", "decoder.layers.2.mlp.linear_fc1"]
VISIBILITY = "strong"
CAUSE = r"baseline of .*up_proj|halves .*swapped"
BASELINE = [{"framework": "transformers"}, {}]
TARGET = [{}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    weight = model.decoder.layers[2].mlp.linear_fc1.weight
    weight.data.copy_(weight.data.roll(len(weight) // 2, 0))
