"""Selection of the CUDA graph for a step, and the warning if none can be captured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from moe_checkpoints import make_moe
from msgspec import structs

from tapscope.engine import LLM
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.cuda_graph_manager import CUDAGraphManager, can_capture_graphs
from tapscope.engine.execution.decode_graphs import DecodeGraphs
from tapscope.engine.execution.prefill_graphs import PrefillGraphs
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.kernels import triton


def plan_of(*counts: int, **fields: Any) -> StepPlan:
    """Return the plan of one request for each row count in ``counts``; ``fields`` apply to the last request."""
    scheduled = [
        ScheduledRequest(request=str(i), row=i, position=5, visits=((count, 0),), tokens=(7,) * count, pages=())
        for i, count in enumerate(counts)
    ]
    scheduled[-1] = structs.replace(scheduled[-1], **fields)
    return StepPlan(step=0, phase="mixed", scheduled=tuple(scheduled), kv_pages_used=0)


@pytest.mark.parametrize(
    ("plan", "kind", "size"),
    [
        (plan_of(1, 1, 1), "decode", 4),
        (plan_of(1, 3), "decode", 4),
        (plan_of(1, 4), "prefill", 16),
        (plan_of(*[1] * 5), "prefill", 16),
        (plan_of(1, 1, num_logits=0), "prefill", 16),
        (plan_of(33), "prefill", None),
        (plan_of(1, 3, tree=(-1, 0, 0)), "prefill", None),
        (plan_of(1, 1, adapter_slot=0), None, None),
        (plan_of(1, 1, experts="AAAA"), None, None),
    ],
)
def test_step_is_dispatched_to_the_smallest_graph(plan: StepPlan, kind: str | None, size: int | None) -> None:
    nothing: Any = torch.nn.Identity()
    decode = DecodeGraphs(nothing, nothing, [1, 2, 4], max_request_rows=3)
    manager = CUDAGraphManager(TensorParallel(), decode, PrefillGraphs(nothing, nothing, [16, 32]))
    kinds = {None: None, "decode": decode, "prefill": manager.prefill}
    assert manager.dispatch(plan) is kinds[kind]
    assert manager.padded_size(plan) == size
    without = CUDAGraphManager(TensorParallel(), decode)
    assert without.dispatch(plan) is (decode if kind == "decode" else None)
    assert without.padded_size(plan) == (size if kind == "decode" else None)


def test_reason_for_eager_steps_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    nothing: Any = torch.nn.Identity()
    manager = CUDAGraphManager(TensorParallel(), DecodeGraphs(nothing, nothing, [4]))
    plans = plan_of(1), plan_of(1, adapter_slot=0), plan_of(1, experts="AAAA")
    reasons = [manager.why_eager(plan) for plan in plans]
    assert reasons == [None, "requests have LoRA adapters", "requests have recorded experts"]
    for reason in (*reasons[1:], *reasons[1:]):
        assert reason is not None
        manager.warn_of_eager(reason)
    assert [record.message for record in caplog.records] == [
        f"{reason}: steps run eagerly, without CUDA graphs" for reason in reasons[1:]
    ]


@pytest.mark.parametrize(
    ("family", "settings", "what"),
    [
        ("deepseek_v3", {"batch_invariant": True}, "batch_invariant=True with latent attention (MLA)"),
        ("mamba2", {"batch_invariant": True}, "batch_invariant=True with a recurrent state"),
        ("llama", {"batch_invariant": True, "head_dim": 320}, "batch_invariant=True with heads of 320 features"),
    ],
)
def test_warning_says_what_cannot_be_captured(
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CPU models are treated as GPU models."""
    shape = {key: settings.pop(key) for key in ("head_dim",) if key in settings}
    make = make_checkpoint if family in FAMILIES else make_moe
    with LLM(make(tmp_path / "model", family, dtype="bfloat16", **shape)) as llm:
        config = EngineConfig(model="unused", **settings)
        assert not can_capture_graphs(config, llm.model, llm.engine.runner.kv_cache, torch.device("cuda"))
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        f"CUDA graphs are off, steps run eagerly: {what} cannot be captured"
    ]


def test_missing_triton_turns_graphs_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "_is_installed", lambda: False)
    plain, device = SimpleNamespace(is_plain=True, is_fp8=False), torch.device("cuda")
    cache: Any = SimpleNamespace(is_split=False, kv_format=plain, device=device)
    model: Any = torch.nn.Identity()
    model.config = SimpleNamespace(num_layers=0, index=None, chunk=lambda layer: None)
    assert not can_capture_graphs(EngineConfig(model="unused"), model, cache, device)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("CUDA graphs are off, steps run eagerly: Triton is not installed (pip")
