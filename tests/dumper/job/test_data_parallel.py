"""DistributedDataParallel against one process: each rank's loss is the mean over its own tokens."""

from pathlib import Path

from rank_processes import capture_by_ranks

from tapscope.comparator import compare
from tapscope.comparator.options.options import CompareOptions
from tapscope.sources import open_run

WORKER = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tapscope.dumper import Dumper

how, out, rendezvous, bug = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


torch.manual_seed(0)
net = Net()
ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
    net = DistributedDataParallel(net)
with Dumper(net, out, keep="full", grads=True, params=True) as dumper, dumper.step():
    net(ids, ids.roll(1, 1))["loss"].backward()
if world > 1:
    dist.destroy_process_group()
"""


def test_ddp_gradients_of_activations_are_explained_and_next_compares_the_rest(tmp_path: Path) -> None:
    paths = [capture_by_ranks(tmp_path, WORKER, how, world) for how, world in (("one", 1), ("ddp", 2))]
    with open_run(paths[0]) as one, open_run(paths[1]) as two:
        report = compare(one, two)
        assert report.first_divergence is not None
        assert report.first_divergence.explanation is not None
        assert "each of dp=2 ranks averages the loss over its own tokens" in report.first_divergence.explanation.text
        skip = r"re::(in|out|tap).*\.grad$"
        assert str(report).endswith(f"next      tapscope diff {one.path} {two.path} --skip '{skip}'")
        rest = compare(one, two, CompareOptions(skip=(skip,)))
        assert rest.exit_code == 0, rest
        assert "head:param[weight].grad" in {finding.site for finding in rest.findings}
        assert any(":out[loss]: each data-parallel rank has its own" in note for note in rest.coverage.warnings)
