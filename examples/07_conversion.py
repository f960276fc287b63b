"""Write a small Llama checkpoint and a faulty conversion of it: one layer's gate and up projections are swapped.

    python examples/07_conversion.py ORIGINAL CONVERTED

The weights are random; nothing is downloaded or trained. docs/howto/compare-frameworks.md locates the fault in the
copy.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

SPOILED = "model.layers.2.mlp"


def make_model(path: Path) -> None:
    """Save a four-layer, byte-level Llama whose weights are spread like those of a trained model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def convert_badly(source: Path, target: Path) -> None:
    """Copy a checkpoint, swapping the names of two tensors."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    gate, up = f"{SPOILED}.gate_proj.weight", f"{SPOILED}.up_proj.weight"
    weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    logging.disable_progress_bar()
    original, converted = map(Path, sys.argv[1:3])
    make_model(original)
    convert_badly(original, converted)
