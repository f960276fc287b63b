"""Record a training loop: the forward, recomputation and backward, and the gradients used by the optimizer."""

import sys
from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope import Dumper, open_run

RULES = [
    "model.layers.?.mlp.act_fn:out=stats",  # in the forward, and again when activation checkpointing recomputes it
    "model.layers.?:out.grad=full",  # the gradient of each layer's output
    "model.layers.?.mlp.*:param[weight].grad=stats",  # the weight gradients, as the optimizer used them
]


def main(out: str = "run-training") -> None:
    """Train for three steps and print the recorded sites and gradients."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=100, use_cache=False, **shape)).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(16)[None]

    with Dumper(model, out, keep="off", rules=RULES, force=True) as dumper:
        for _ in range(3):
            with dumper.step(phase="train"):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                dumper.metric("loss", loss.item())

    run = open_run(out)
    passes = Counter((record.key.site, record.key.pass_) for record in run.records if record.key.step == 0)
    for (site, pass_), count in passes.items():
        print(f"{pass_:9}  {count}x  {site}")
    gradients = [record for record in run.records if record.key.site == "model.layers.0:out.grad"]
    print("gradient of layer 0, rms by step:", *(f"{record.stats.rms:.1e}" for record in gradients))
    print(f"next: tapscope ls {out} --site '*.grad'")


if __name__ == "__main__":
    main(*sys.argv[1:])
