"""The causal mask lets every token attend to the next one."""

from unittest import mock

from benchmarks.verdict.families import modeling

EXPECT = "model"
VISIBILITY = "strong"
CAUSE = r"shows 1 place more|next token"


def patch(model):
    module = modeling("llama")
    create = module.create_causal_mask

    def loose(**kwargs):
        mask = create(**kwargs)
        mask[..., :-1, 1:] = mask[..., :-1, 1:].maximum(mask[..., 1:, 1:])
        return mask

    return mock.patch.object(module, "create_causal_mask", loose)
