"""After one MLP, every rank continues with its own partial sum."""

PATCHES = "megatron"
EXPECT = ["model.layers.1.mlp.down_proj", "decoder.layers.1.mlp.linear_fc2"]
VISIBILITY = "strong"
CAUSE = r"all-reduce|added up|adds? up|summand"
BASELINE = [{"framework": "transformers"}, {"tp": 2}]
TARGET = [{"tp": 2}, {"tp": 2, "dtype": "bfloat16"}]


def patch(model):
    linear = model.decoder.layers[1].mlp.linear_fc2
    linear.explicit_expert_comm = linear.skip_bias_add = True
