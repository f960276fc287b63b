"""Reads directories of .pt, .npz, .npy and .safetensors files, and checkpoints, as runs; without torch or pickle."""
