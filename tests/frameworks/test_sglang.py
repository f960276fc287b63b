"""The SGLang plugin with a stub of its model runner, in processes spawned as by its server."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import forkserver_pool as warm
import pytest
import torch
from framework_models import tiny_llama_config
from transformers import LlamaForCausalLM

from tapscope.comparator import compare
from tapscope.core.observe import StepInfo
from tapscope.dumper import Dumper
from tapscope.frameworks.sglang import SGLangPlugin
from tapscope.sources import open_run

SUPPORT = Path(__file__).parents[1] / "support"
CONFIG = tiny_llama_config()
PROMPTS = [list(range(3, 12)), list(range(40, 45))]


def reference(model: LlamaForCausalLM, out: Path) -> None:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0), logits_to_keep=1)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_sglang_server_is_captured_without_a_patch_and_meets_transformers(tmp_path: Path, scale: float) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    weights = {
        name: torch.randn_like(w) * 0.15 + name.endswith("norm.weight") for name, w in model.state_dict().items()
    }
    model.load_state_dict(weights)
    reference(model, tmp_path / "hf")
    weights["model.layers.1.mlp.down_proj.weight"] *= scale
    torch.save((CONFIG, weights), tmp_path / "model.pt")
    path = os.pathsep.join([str(SUPPORT / "sglang_like"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    settings = {"ENABLED": "1", "KEEP": "full", "DIR": str(tmp_path), "EXP_NAME": "served"}
    environment = os.environ | {"PYTHONPATH": path} | {f"TAPSCOPE_{name}": each for name, each in settings.items()}
    words = "-m", "tapscope.frameworks.sglang_server", "--model-path", tmp_path / "model.pt"
    done = warm.run(*words, popen=warm.WarmTree, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "hf") as one, open_run(tmp_path / "served") as two:
        assert (two.manifest["framework"], two.ledger().complete) == ("sglang", True)
        assert [lines[0].info.rows[0].request for lines in two.steps.values()] == ["0", "1"]
        assert not [record.key.site for record in two.records if "kv_cache" in record.key.site]
        report = compare(one, two)
    met = {f.target.site: f.baseline.site for f in report.findings if f.baseline and f.target}
    assert met["logits_processor:out[next_token_logits]"] == "lm_head:out"
    if scale == 1.0:
        assert report.exit_code == 0, str(report)
    else:
        assert report.first_divergence is not None
        assert report.first_divergence.module == "model.layers.1.mlp.down_proj"


class ForwardBatch:
    """Stub with the name of SGLang's class."""

    def __init__(self, mode: str, **fields: object) -> None:
        asks = {f"is_{name}": (lambda name=name: name == mode) for name in ("decode", "idle", "extend")}
        self.forward_mode = type("ForwardMode", (), {k: staticmethod(v) for k, v in asks.items()})()
        self.__dict__.update(fields)


def test_sglang_rows_of_a_decode_batch_are_one_a_request() -> None:
    batch = ForwardBatch("decode", seq_lens=torch.tensor([9, 5]), req_pool_indices=torch.tensor([3, 1]), rids=None)
    found = SGLangPlugin().step_rows(None, StepInfo(step=4), (torch.tensor([7, 8]), None, batch), {})
    assert found is not None
    rows = [(row.request, row.position, row.count, row.slot) for row in found.info.rows]
    assert rows == [("slot3", 8, 1, 0), ("slot1", 4, 1, 1)]
    assert (found.info.phase, found.info.row_sets) == ("decode", {"logits": (0, 1)})


def test_sglang_rows_of_an_extend_batch_follow_the_cached_prefix() -> None:
    batch = ForwardBatch("extend", extend_seq_lens_cpu=[3, 2], extend_prefix_lens_cpu=[4, 0], rids=["a", "b"])
    found = SGLangPlugin().step_rows(None, StepInfo(step=0), (torch.arange(8),), {"forward_batch": batch})
    assert found is not None
    assert [(row.request, row.position, row.count) for row in found.info.rows] == [("a", 4, 3), ("b", 0, 2)]
    assert (found.info.phase, found.info.grid, found.info.row_sets) == ("mixed", (8,), {"logits": (2, 4)})


def test_sglang_rows_of_an_idle_batch_mean_nothing() -> None:
    found = SGLangPlugin().step_rows(None, StepInfo(step=0), (torch.arange(0), ForwardBatch("idle")), {})
    assert found is not None
    assert found.info.kind == "dummy"


def test_sglang_server_without_sglang_is_one_sentence() -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed")
    command = [sys.executable, "-m", "tapscope.frameworks.sglang_server", "--model-path", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "SGLang is not installed" in done.stderr
