"""One layer uses the normalized hidden state as its first residual."""

from benchmarks.verdict.tools import around

EXPECT = "model.layers.2"
VISIBILITY = "strong"
CAUSE = r"normalised|input_layernorm:out|norm.*residual"


def patch(model):
    layer = model.model.layers[2]

    def call(forward, hidden_states, **kwargs):
        normed = layer.input_layernorm(hidden_states)
        middle = normed + layer.self_attn(hidden_states=normed, **kwargs)[0]
        return middle + layer.mlp(layer.post_attention_layernorm(middle))

    around(layer, call)
