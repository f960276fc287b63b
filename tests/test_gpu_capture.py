"""Capture on a CUDA device; skipped, and counted in the summary, where there is none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.dumper import Dumper
from tapscope.run import open_run

pytestmark = pytest.mark.gpu


def test_every_captured_tensor_equals_a_synchronous_copy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=512
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    copies: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _m, _a, out, name=name: copies.update({f"{name}:out": out.detach().cpu()}))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    ]
    with torch.inference_mode(), Dumper(model, tmp_path / "run", keep="full"):
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    run = open_run(tmp_path / "run")
    assert run.ledger().complete, run.ledger().sentences()
    kept = {r.key.site: r for r in run.records}
    assert len(copies) == 4 * 7 + 2
    for site, expected in copies.items():
        assert kept[site].dtype == "bfloat16"
        np.testing.assert_array_equal(run.array(kept[site]).view(np.uint16), expected.view(torch.uint16).numpy())


def test_statistics_on_the_device_equal_those_of_the_full_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device="cuda", dtype=torch.float32)
    x = torch.randn(32, 64, device="cuda")
    for keep in ("full", "stats"):
        with torch.no_grad(), Dumper(model, tmp_path / keep, keep=keep):
            model(x)
    full, stats = (open_run(tmp_path / keep).records for keep in ("full", "stats"))
    assert [(r.key, r.stats, r.hash) for r in full] == [(r.key, r.stats, r.hash) for r in stats]
