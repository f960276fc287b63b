"""Record a model you already have: every module's inputs and outputs, by name."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper, open_run


def main(out: str = "run") -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256))
    ids = torch.arange(12)[None]

    with torch.no_grad(), Dumper(model, out, keep="full", force=True) as dumper, dumper.step(phase="prefill"):
        model(input_ids=ids)

    run = open_run(out)
    for record in run.select(["layers.1.mlp.*:out"]):
        print(record.key.site, record.shape, f"rms {record.stats.rms:.2e}", run.array(record).dtype)
    print(f"next: tapscope view {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
