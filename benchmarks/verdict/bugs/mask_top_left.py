"""With chunked prefill one layer aligns its causal mask to the top left, as SDPA's `is_causal` does."""

import torch

from benchmarks.verdict.tools import around

EXPECT = "model.layers.1.self_attn"
VISIBILITY = "strong"
CAUSE = r"aligned top-left"
TARGET = {"schedule": "chunks", "attention": "sdpa"}
BASELINE = [{}, {"schedule": "chunks"}]
BOTH = {"workload": "one"}
WHERE = {"step": 1}


def patch(model):
    def call(forward, hidden_states, *, past_key_values, **kwargs):
        length = hidden_states.shape[1]
        if length > 1:
            seen = past_key_values.get_seq_length(1) + length
            kwargs["attention_mask"] = hidden_states.new_ones(length, seen, dtype=torch.bool).tril()[None, None]
        return forward(hidden_states, past_key_values=past_key_values, **kwargs)

    around(model.model.layers[1].self_attn, call)
