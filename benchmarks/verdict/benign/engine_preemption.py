"""Prompts in chunks of three tokens; so few pages that requests are preempted; greedy tokens."""

FAMILY = ["llama", "gemma2"]
MODEL = {"num_hidden_layers": 6, "seed": 60}
BOTH = [{}, {"greedy": True}]
TARGET = [
    {"framework": "engine", "engine": {"max_num_batched_tokens": 3}},
    {"framework": "engine", "page_size": 4, "engine": {"num_pages": 9}},
]
