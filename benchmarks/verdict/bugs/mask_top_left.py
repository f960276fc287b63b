"""With chunked prefill, one layer aligns its causal mask to the top left, as SDPA's `is_causal` does."""

import torch

from benchmarks.verdict.tools import around
from tapscope.dumper.steps.input_rows import cache_of

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"aligned top-left"
TARGET = {"schedule": "chunks", "attention": "sdpa"}
BASELINE = [{}, {"schedule": "chunks"}]
BOTH = {"workload": "one"}
WHERE = {"step": 1}


def patch(model):
    def call(forward, hidden_states, **kwargs):
        length = hidden_states.shape[1]
        if length > 1:
            seen = cache_of(kwargs).get_seq_length(1) + length
            kwargs["attention_mask"] = hidden_states.new_ones(length, seen, dtype=torch.bool).tril()[None, None]
        return forward(hidden_states, **kwargs)

    around(model.model.layers[1].self_attn, call)
