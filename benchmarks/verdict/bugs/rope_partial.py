"""One layer does not rotate the high-frequency half of each head's channels."""

from benchmarks.verdict.tools import around

EXPECT = "model.layers.2.self_attn"
VISIBILITY = "strong"
CAUSE = r"partial|channels .*not rotated|cos|(one|1)\b.*(in|for) .*columns"
TARGET = [{}, {"dtype": "bfloat16"}]


def partial(forward, *args, position_embeddings, **kwargs):
    cos, sin = (t.clone() for t in position_embeddings)
    half = cos.shape[-1] // 4
    cos[..., :half], cos[..., 2 * half : 3 * half] = 1, 1
    sin[..., :half], sin[..., 2 * half : 3 * half] = 0, 0
    return forward(*args, position_embeddings=(cos, sin), **kwargs)


def patch(model):
    around(model.model.layers[2].self_attn, partial)
