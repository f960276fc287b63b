"""The input gradient of one attention output projection is scaled by 0.9."""

PATCHES = "megatron"
EXPECT = ["model.layers.1.self_attn.o_proj", "decoder.layers.1.self_attention.linear_proj"]
VISIBILITY = "subtle"
BOTH = {"train": True}
BASELINE = [{"framework": "transformers"}, {}]


def patch(model):
    def scaled(module, grads_in, grads_out):
        return tuple(g * 0.9 if g is not None else None for g in grads_in)

    model.decoder.layers[1].self_attention.linear_proj.register_full_backward_hook(scaled)
