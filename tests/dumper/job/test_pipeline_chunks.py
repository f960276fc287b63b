"""Schedules of torch.distributed.pipelining: microbatches have their chunk's number, and stages their place."""

from pathlib import Path

import pytest
from rank_processes import capture_by_ranks

from tapscope.comparator import compare
from tapscope.sources import open_run

WORKER = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from tapscope.dumper import Dumper

how, out, rendezvous, bug = sys.argv[1:]
rank, world, chunks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 4


class Part(nn.Module):
    def __init__(self, layers, first):
        super().__init__()
        self.layers = nn.ModuleDict({str(first + i): layer for i, layer in enumerate(layers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
x, target = torch.randn(8, 8), torch.zeros(8, 8)
if bug:
    layers[2][0].weight.data.mul_(1.2)
loss = nn.functional.mse_loss
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
    model = Part(layers[2 * rank : 2 * rank + 2], 2 * rank)
    stage = pipelining.PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = getattr(pipelining, how)(stage, chunks, loss_fn=loss)
    plain = type(stage).forward_one_chunk
else:
    model = Part(layers, 0)
with Dumper(model, out, keep="full", grads=True) as dumper:
    for _ in range(2):
        with dumper.step():
            if world > 1:
                schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": target}))
                continue
            for number, (rows, wanted) in enumerate(zip(x.chunk(chunks), target.chunk(chunks))):
                with dumper.micro(number):
                    loss(model(rows), wanted).backward()
            for parameter in model.parameters():
                parameter.grad /= chunks
if world > 1:
    assert type(stage).forward_one_chunk is plain, "the stage's method was not given back"
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipelining_chunks_are_microbatches_and_agree_with_one_process(tmp_path: Path, schedule: str) -> None:
    base, pipeline = capture_by_ranks(tmp_path, WORKER, "whole", 1), capture_by_ranks(tmp_path, WORKER, schedule, 2)
    with open_run(base) as one, open_run(pipeline) as two:
        records = [r for r in two.records if r.key.rank == 1 and r.key.site == "layers.3:out"]
        found = sorted((r.key.step, r.key.micro, r.key.occurrence) for r in records)
        assert found == [(step, micro, 0) for step in range(2) for micro in range(4)]
        report = compare(one, two)  # the values by which a stage learns its shapes are not among them
        assert report.exit_code == 0, report
        others = {finding.site for finding in report.findings if finding.verdict not in {"same", "close"}}
        assert others == {":out[stage0]", ":out[stage0].grad", ":in[x.stage1]", ":in[x.stage1].grad"}, (
            "what only a stage has"
        )


def test_pipelining_layer_of_the_last_stage_that_differs_is_named(tmp_path: Path) -> None:
    base, pipeline = (
        capture_by_ranks(tmp_path, WORKER, "whole", 1),
        capture_by_ranks(tmp_path, WORKER, "ScheduleGPipe", 2, bug="bug"),
    )
    with open_run(base) as one, open_run(pipeline) as two:
        found = compare(one, two).first_divergence
        assert found is not None
        assert found.module == "layers.2.0"
