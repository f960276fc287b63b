"""Training in 16 bits with tied embeddings, and labels of near-zero probability."""

FAMILY = ["gpt2", "llama-tied"]
BOTH = [{"train": True, "schedule": "whole", "seed": seed} for seed in (1, 2)]
TARGET = [{"dtype": "float16"}, {"dtype": "bfloat16"}]
