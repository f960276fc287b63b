"""The two ranks have each other's query heads in one layer."""

PATCHES = "engine"
EXPECT = "model.layers.1.self_attn.q_proj"
VISIBILITY = "strong"
CAUSE = r"swapped"
BOTH = {"tp": 2}
BASELINE = [{}, {"framework": "transformers", "tp": 1}]

_seen = []


def patch(model):
    fused = model.model.layers[1].self_attn.qkv_proj
    _seen.append(fused.weight[: fused.widths[0]])
    if len(_seen) == 2:
        one, two = _seen
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)
        _seen.clear()
