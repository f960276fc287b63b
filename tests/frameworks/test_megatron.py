"""The Megatron plugin's rows and dims; tests/comparator/test_megatron.py runs the real thing."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tapscope.core import dims
from tapscope.core.framework_plugin import ProcessLayout
from tapscope.core.observe import StepInfo
from tapscope.frameworks.megatron import DIMS, MegatronPlugin


def packed(*bounds: int) -> SimpleNamespace:
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds))


def test_megatron_rows_of_packed_sequences_follow_their_bounds() -> None:
    ids = torch.arange(9)[None]
    found = MegatronPlugin().step_rows(None, StepInfo(step=0), (ids,), {"packed_seq_params": packed(0, 5, 9)})
    assert found is not None
    assert [(row.request, row.position, row.count, row.slot) for row in found.info.rows] == [
        ("0", 0, 5, 0),
        ("1", 0, 4, 5),
    ]
    assert list(found.info.token_ids) == list(range(9))


def test_megatron_rows_of_a_context_parallel_rank_are_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ProcessLayout(mesh={"cp": 2}, coords={"cp": 1})
    monkeypatch.setattr(MegatronPlugin, "layout", lambda self: layout)
    ids = torch.tensor([[2, 3, 4, 5, 11, 12]])
    found = MegatronPlugin().step_rows(None, StepInfo(step=0), (ids,), {"packed_seq_params": packed(0, 8, 12)})
    assert found is not None
    rows = [(row.request, row.position, row.count) for row in found.info.rows]
    assert rows == [("0", 2, 2), ("0", 4, 2), ("1", 1, 1), ("1", 2, 1)]


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
