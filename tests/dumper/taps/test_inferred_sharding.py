"""Models with tensor-parallel linear layers: the shards can be compared without annotations."""

from pathlib import Path

import pytest
from rank_processes import capture_by_ranks

from tapscope.comparator import compare
from tapscope.sources import open_run

WORKER = """
import logging, os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
import transformers.integrations.accelerate as accelerate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from tapscope.dumper import Dumper

how, out, rendezvous, bug = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
config = LlamaConfig(num_hidden_layers=2, attn_implementation="eager", **sizes)
model = LlamaForCausalLM(config).eval()
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
if how == "transformers":
    accelerate.is_accelerate_available = lambda *version: True  # it is asked for, and not used
    if rank == 0:
        model.save_pretrained(out + ".model")
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(out + ".model", tp_plan="auto", attn_implementation="eager").eval()
elif how == "torch":
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    kinds = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel)
    kinds |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            names = {name for name, _ in block.named_children()}
            parallelize_module(block, mesh, {name: kind() for name, kind in kinds.items() if name in names})
if bug:
    hook = lambda module, args, output: output * 1.05
    model.model.layers[1].mlp.up_proj.register_forward_hook(hook)
ids = torch.arange(12).reshape(2, 6)
with torch.no_grad(), Dumper(model, out, keep="full", params=True) as dumper, dumper.step():
    model(input_ids=ids, use_cache=False, output_attentions=True)
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["torch", "transformers"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sharding_shards_of_a_models_own_plan_are_compared_without_annotations(tmp_path: Path, how: str) -> None:
    base = capture_by_ranks(tmp_path, WORKER, "whole", 1)
    with open_run(base) as one, open_run(capture_by_ranks(tmp_path, WORKER, how, 2)) as two:
        dims = {r.key.site: r.dims for r in two.records if r.key.rank == 1}
        layer = "model.layers.0"
        assert dims[f"{layer}.self_attn.q_proj:out"] == "b s h[tp]"
        assert dims[f"{layer}.self_attn.o_proj:in[input]"] == "b s h[tp]"
        assert dims[f"{layer}.self_attn.o_proj:out"] is None
        assert dims[f"{layer}.self_attn:out[1]"] == dims[":out[attentions.0]"] == "d0 d1[tp] d2 d3"
        assert dims[f"{layer}.mlp.act_fn:in[input]"] == dims[f"{layer}.mlp.act_fn:out"] == "b s h[tp]"
        assert dims[f"{layer}.mlp.down_proj:param[weight]"] == "d0 d1[tp]"
        report = compare(one, two)
        assert report.exit_code == 0, report
        assert {finding.verdict for finding in report.findings} <= {"same", "close"}
    with open_run(base) as one, open_run(capture_by_ranks(tmp_path, WORKER, how, 2, bug="bug")) as two:
        found = compare(one, two).first_divergence
        assert found is not None
        assert found.module == "model.layers.1.mlp.up_proj"
