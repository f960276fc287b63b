"""Training in 16 bits where the embeddings are the head too, and labels that are next to impossible."""

FAMILY = ["gpt2", "llama-tied"]
BOTH = [{"train": True, "schedule": "whole", "seed": seed} for seed in (1, 2)]
TARGET = [{"dtype": "float16"}, {"dtype": "bfloat16"}]
