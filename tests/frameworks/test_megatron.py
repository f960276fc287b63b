"""Rows, dims and stages of the Megatron plugin; tests/comparator/test_megatron.py uses real Megatron-core."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare_runs import diff
from torch import nn

from tapscope import Dumper, open_run
from tapscope.core import dims
from tapscope.core.framework_plugin import ProcessLayout
from tapscope.core.observe import StepInfo
from tapscope.dumper.job.framework_plugins import registry
from tapscope.frameworks.megatron import DIMS, MegatronPlugin


def packed_step(ids: torch.Tensor, bounds: list[int], padded: list[int] | None = None) -> StepInfo:
    """Return the step of a call with PackedSeqParams."""
    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))
    params.cu_seqlens_q_padded = None if padded is None else torch.tensor(padded)
    found = MegatronPlugin().step_rows(None, StepInfo(step=0), (ids,), {"packed_seq_params": params})
    assert found is not None
    assert found.complete is not None
    return found.complete(found.info, {name: tensor.numpy() for name, tensor in found.tensors.items()})


@pytest.mark.parametrize(
    ("num_ids", "bounds", "padded", "rows"),
    [
        (9, [0, 5, 9], None, [("0", 0, 5, 0), ("1", 0, 4, 5)]),
        (12, [0, 5, 9], [0, 6, 12], [("0", 0, 5, 0), ("1", 0, 4, 6)]),
        (12, [0, 5, 5, 9], [0, 6, 6, 12], [("0", 0, 5, 0), ("1", 0, 4, 6)]),
        (12, [0, 5, 9], [0, 5, 9], [("0", 0, 5, 0), ("1", 0, 4, 5)]),
        (12, [0, 5, 9], None, [("0", 0, 5, 0), ("1", 0, 4, 5)]),
        (8, [0, 5, 9], None, []),
    ],
)
def test_megatron_rows_of_packed_sequences_follow_their_bounds(
    num_ids: int, bounds: list[int], padded: list[int] | None, rows: list[tuple[str, int, int, int]]
) -> None:
    step = packed_step(torch.arange(num_ids)[None], bounds, padded)
    assert [(row.request, row.position, row.count, row.slot) for row in step.rows] == rows
    assert list(step.token_ids) == [slot + i for _, _, count, slot in rows for i in range(count)]


def test_megatron_rows_of_a_context_parallel_rank_are_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ProcessLayout(mesh={"cp": 2}, coords={"cp": 1})
    monkeypatch.setattr(MegatronPlugin, "layout", lambda self: layout)
    ids = torch.tensor([[2, 3, 4, 5, 11, 12]])
    rows = [(row.request, row.position, row.count) for row in packed_step(ids, [0, 8, 12]).rows]
    assert rows == [("0", 2, 2), ("0", 4, 2), ("1", 1, 1), ("1", 2, 1)]
    step = packed_step(ids, [0, 5, 7], [0, 8, 12])
    assert [(row.request, row.position, row.count) for row in step.rows] == [("0", 2, 2), ("0", 4, 1), ("1", 1, 1)]
    assert tuple(step.token_ids) == (2, 3, 4, 11)


def test_megatron_rows_of_a_padded_batch_are_left_to_its_arguments() -> None:
    assert MegatronPlugin().step_rows(None, StepInfo(step=0), (torch.zeros(2, 3),), {}) is None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_megatron_dims_are_valid_for_every_module(sequence_parallel: bool, gated: bool) -> None:
    module = nn.Identity()
    module.config = SimpleNamespace(sequence_parallel=sequence_parallel, gated_linear_unit=gated)  # type: ignore[assignment]
    plugin = MegatronPlugin()
    for name in (*DIMS, "decoder.layers.3", "decoder.layers.3.input_layernorm"):
        for text in plugin.module_facts(name, module, None).dims.values():
            dims.parse(text)
    norm = plugin.module_facts("decoder.layers.3.input_layernorm", nn.Identity(), module).dims
    assert norm["out"] == ("s[tp] b h" if sequence_parallel else "s b h # tp:replicated")
    fc1 = plugin.module_facts("decoder.layers.3.mlp.linear_fc1", module, None).dims
    assert fc1["out[0]"] == ("s b (gate+up)[tp]" if gated else "s b f[tp]")
    assert plugin.module_facts("decoder.layers.3.mlp.experts.local_experts.0.linear_fc1", module, None).dims == {}


def test_megatron_scores_of_a_router_are_a_site_where_it_computes_them() -> None:
    plugin, router = MegatronPlugin(), nn.Identity()
    router.gating = lambda rows: rows  # type: ignore[assignment]
    assert plugin.module_facts("decoder.layers.0.mlp.router", router, None).methods == {"gating": "logits"}
    assert plugin.module_facts("decoder.layers.0.mlp.router", nn.Identity(), None).methods == {}


class Layer(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        self.layer_number = number + 1


class Stage(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    class Plugin(MegatronPlugin):
        def owns(self, model: Any) -> bool:
            return isinstance(model, Stage)

    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", Plugin())
    torch.manual_seed(0)
    return [Layer(number) for number in range(4)]


def scheduled(chunks: Sequence[Stage], out: Path) -> Path:
    """Run two microbatches through all stages, setting the microbatch number as Megatron's schedules do."""
    with Dumper(chunks, out, keep="full", params=True) as dumper, dumper.step(phase="train"):
        for number in range(2):
            x = torch.full((1, 3, 4), 1.0 + number)
            for chunk in chunks:
                for layer in chunk.decoder.layers:  # type: ignore[union-attr]
                    layer.current_microbatch = number
                x = chunk(x)
    return out


def test_megatron_virtual_stages_of_one_dumper_are_one_model(tmp_path: Path, layers: list[Layer]) -> None:
    whole = scheduled([Stage(layers)], tmp_path / "whole")
    parts = scheduled([Stage(layers[:2]), Stage(layers[2:])], tmp_path / "parts")
    with open_run(parts) as run:
        found = {(r.key.model, r.key.site, r.key.micro) for r in run.records if r.key.site.endswith(":out")}
        assert not [event for event in run.events() if event.kind == "failed"]
    outs = {(f"vp{n // 2}", f"decoder.layers.{n}:out") for n in range(4)} | {("vp0", ":out"), ("vp1", ":out")}
    assert found == {(*each, micro) for each in outs for micro in range(2)}
    report = diff(whole, parts)
    assert (report.exit_code, report.coverage.num_sites_matched) == (0, 18)
    assert {f.site for f in report.findings if f.verdict.is_orphan} == {":in[x.stage1]", ":out[stage0]"}
    layers[2].weight.data.mul_(2)
    report = diff(whole, scheduled([Stage(layers[:2]), Stage(layers[2:])], tmp_path / "bug"))
    assert report.first_divergence is not None
    assert report.first_divergence.module == "decoder.layers.2"


def test_megatron_number_of_a_microbatch_that_the_host_gives_takes_precedence(
    tmp_path: Path, layers: list[Layer]
) -> None:
    layers[0].current_microbatch = 5  # left over from a finished schedule
    model = Stage(layers)
    with Dumper(model, tmp_path / "run") as dumper:
        model(torch.ones(1, 3, 4))
        with dumper.step(), dumper.micro(1):
            model(torch.ones(1, 3, 4))
    keys = {(record.key.step, record.key.micro) for record in open_run(tmp_path / "run").records}
    assert keys == {(0, 0), (1, 1)}


def test_virtual_stages_with_the_same_layer_numbers_are_kept_apart(tmp_path: Path) -> None:
    chunks = [Stage([nn.Linear(4, 4)]), Stage([nn.Linear(4, 4)])]
    run = scheduled(chunks, tmp_path / "run")
    report = diff(run, run)
    assert report.exit_code == 0
    assert "run: its virtual stages have the same layer numbers, and were kept separate" in report.coverage.warnings
    assert {f.site.partition(".")[0] for f in report.findings if ".layers." in f.site} == {"vp0", "vp1"}
