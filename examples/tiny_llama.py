"""Train a small Llama on Python source code, so that no weights need to be downloaded.

    python examples/tiny_llama.py DIRECTORY [--steps 300]

Trains a BPE tokenizer and a 4-layer model (hidden size 256, 3.4M parameters) on the standard library's own source. The
result depends on the number of steps, not on the speed or load of the machine.
"""

import argparse
import os
import random
import sys
import sysconfig
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Keep freed memory in the process instead of returning it to the system: page faults would take half of the training
# time. Waiting threads must sleep: when other processes need the cores, spinning threads take three times the CPU time.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "OMP_WAIT_POLICY": "passive",
}
SEQUENCE = 64
BATCH = 8
STEPS = 300


def corpus(limit: int = 30) -> list[str]:
    """Return the first ``limit`` sources of the standard library; a small corpus makes a short training effective."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [file.read_text(errors="replace") for file in files[:limit]]


def make_checkpoint(path: Path, *, steps: int = STEPS, seed: int = 0) -> None:
    """Train for ``steps`` and save config, weights and tokenizer in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    documents = corpus()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    ids = torch.tensor([token for text in documents for token in tokenizer.encode(text).ids])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    _train(model, ids, steps, random.Random(seed))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)


def _train(model: "object", ids: "object", steps: int, rng: random.Random) -> None:
    import torch

    assert isinstance(model, torch.nn.Module)
    assert isinstance(ids, torch.Tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps, loss="?")
        for _ in range(steps):
            starts = [rng.randrange(ids.numel() - SEQUENCE) for _ in range(BATCH)]
            batch = torch.stack([ids[s : s + SEQUENCE] for s in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(task, advance=1, loss=f"{loss.item():.2f}")
    print(f"trained {steps} steps, {steps * SEQUENCE * BATCH:,} tokens, last loss {loss.item():.2f}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _ENVIRONMENT)
    make_checkpoint(args.directory, steps=args.steps)


if __name__ == "__main__":
    main()
