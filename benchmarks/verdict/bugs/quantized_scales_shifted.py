"""The scales of a group-quantized 4-bit weight are those of the adjacent group."""

EXPECT = "model.layers.1.mlp.down_proj"
VISIBILITY = "strong"
CAUSE = r"quantized|scales? .*(shift|group)|groups?"
TARGET = [{}, {"dtype": "bfloat16"}]


def patch(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    groups = weight.data.view(weight.shape[0], -1, 16)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    weight.data = ((groups / scales).round().clamp(-8, 7) * scales.roll(1, 1)).view_as(weight)
