"""Trained weights: attention is sharp, and a few rows have larger errors than the others."""

FAMILY = "qwen2"
MODEL = {"weights": "trained"}
BOTH = [{"train": True, "schedule": "whole"}, {}]
TARGET = {"dtype": "bfloat16"}
