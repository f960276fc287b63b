"""Reader for directories of .pt, .npz, .npy and .safetensors files, and for checkpoints, as runs; uses neither torch
nor pickle."""
