"""Find the first module at which two supposedly equal models diverge."""

import copy
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper, open_run
from tapscope.comparator import compare


def main(out: str = "runs") -> None:
    torch.manual_seed(0)
    good = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=256))
    bad = copy.deepcopy(good)
    bad.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-1

    ids = torch.randint(0, 256, (2, 16))
    for name, model in (("good", good), ("bad", bad)):
        with torch.no_grad(), Dumper(model, Path(out) / name, keep="full", force=True):
            model(input_ids=ids)

    report = compare(open_run(Path(out) / "good"), open_run(Path(out) / "bad"))
    divergence = report.first_divergence
    assert divergence is not None, "the two models agree"
    print(f"{divergence.module} is the first to differ: error {divergence.finding.error:.1e}, {divergence.evidence}")


if __name__ == "__main__":
    main(*sys.argv[1:])
