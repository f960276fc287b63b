"""gpt-oss: MXFP4 experts, attention sinks, and sites that align with transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import ThreadRanks, reference_logits
from engine_observers import Memory
from moe_checkpoints import make_moe
from quantized_checkpoints import make_mxfp4

from tapscope.cli import main
from tapscope.comparator import Verdict, compare
from tapscope.core.errors import CheckpointError
from tapscope.engine import LLM
from tapscope.engine.checkpoint.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from tapscope.sources import open_run

PROMPTS = [[5, 6, 7], list(range(40, 75)), [300]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_mxfp4(tmp_path_factory.mktemp("gpt_oss"))


def test_mxfp4_quantization_round_trip() -> None:
    values = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 8).view(1, 64) * 2.0**-3
    blocks, scales = quantize_mxfp4(values)
    assert (blocks.shape, scales.tolist()) == ((1, 2, 16), [[124, 124]])
    assert torch.equal(dequantize_mxfp4(blocks, scales), values)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize(("tp", "ep", "layers"), [(1, 1, "auto"), (2, 1, "auto"), (2, 2, "auto"), (2, 1, "dequantize")])
def test_mxfp4_logits_equal_those_of_the_dequantized_weights(
    paths: tuple[Path, Path], tmp_path: Path, tp: int, ep: int, layers: Any
) -> None:
    """The 96 features are three MXFP4 blocks, of which the ranks hold two and one."""
    packed, dense = paths
    ranks = ThreadRanks(packed, tmp_path / "store", tp, ep=ep, page_size=4, quantized_layers=layers)
    experts = [module for module in ranks.runners[0].model.modules() if hasattr(module, "gate_up_proj_bias")]
    assert {module.gate_up_proj.dtype for module in experts} == {torch.uint8 if layers == "auto" else torch.float32}
    for request in ranks.generate(PROMPTS, 4):
        expected = reference_logits(dense, request.tokens[:-1])
        for runner in ranks.runners:
            assert (runner.observer.logits_of(request.id) - expected).abs().max() <= 1e-4
    ranks.close()


def test_sinks_in_batch_invariant_mode_do_not_depend_on_chunks(paths: tuple[Path, Path]) -> None:
    found = []
    for rows in (5, 64):
        settings: dict[str, Any] = {"page_size": 4, "max_num_batched_tokens": rows, "logits": "all"}
        with LLM(paths[1], batch_invariant=True, observer=Memory, **settings) as llm:
            llm.generate(PROMPTS, max_new_tokens=3, ignore_eos=True)
            found.append(llm.observer.logits_of("1"))
    assert torch.equal(*found)
    assert (found[0][: len(PROMPTS[1])] - reference_logits(paths[1], PROMPTS[1])).abs().max() <= 1e-4


def test_gpt_oss_dump_equals_transformers(paths: tuple[Path, Path], tmp_path: Path) -> None:
    base, target = str(tmp_path / "base"), str(tmp_path / "target")
    prompts = ["--prompt", "def main():", "--prompt", "import os, sys"]
    assert main(["dump", str(paths[1]), "-o", base, "--backend", "hf", *prompts, "--max-new-tokens", "3", "-q"]) == 0
    assert main(["dump", str(paths[0]), "-o", target, "--tokens-from", base, "-q"]) == 0
    with open_run(base) as one, open_run(target) as two:
        report = compare(one, two)
    verdicts = {finding.site: finding.verdict for finding in report.findings}
    for site in ("mlp:out[0]", "mlp.router:out[2]", "mlp.experts:out", "self_attn:out[0]"):
        assert verdicts[f"model.layers.1.{site}"] in (Verdict.SAME, Verdict.CLOSE)
    assert not {site for site, verdict in verdicts.items() if verdict in (Verdict.DIFFERS, Verdict.SHAPE)}
    assert main(["diff", base, target, "-q"]) == 0


def test_gpt_oss_config_errors_name_field_and_rule(paths: tuple[Path, Path], tmp_path: Path) -> None:
    path = make_moe(tmp_path / "model", "gpt_oss")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'; the experts of gpt-oss"):
        LLM(path)
