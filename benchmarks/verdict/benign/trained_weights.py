"""Weights that were trained: attention is sharp, and a few rows are further off than the others."""

FAMILY = "qwen2"
MODEL = {"weights": "trained"}
BOTH = [{"train": True, "schedule": "whole"}, {}]
TARGET = {"dtype": "bfloat16"}
