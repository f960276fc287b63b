"""Steps padded to a CUDA graph bucket: padding changes no value and is not recorded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, make_llama
from hypothesis import given
from hypothesis import strategies as st
from moe_checkpoints import make_moe
from msgspec import structs
from soak_cases import mostly_soak

from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.cuda_graph_manager import CUDAGraphManager
from tapscope.engine.execution.decode_graphs import DecodeGraphs, buckets
from tapscope.engine.layers import fused
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.kernels import triton
from tapscope.run_format.run import Run
from tapscope.sources import open_run

PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 6
SHOWN = ("qwen3", "gemma2", "olmo2", "falcon_h1", "zamba2")

torch.set_num_threads(1)


def bucket_of(plan: StepPlan, sizes: list[int], max_request_rows: int = 1) -> int | None:
    nothing: Any = torch.nn.Identity()
    return DecodeGraphs(nothing, nothing, sizes, max_request_rows=max_request_rows).bucket_of(plan)


@given(st.integers(1, 2000))
def test_buckets_are_ascending_and_cover_every_batch_size(max_rows: int) -> None:
    sizes = buckets(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in {1, max_rows, max_rows // 2 or 1}:
        size = bucket_of(plan_of([1] * rows), sizes)
        assert size is not None
        assert rows <= size <= max(2 * rows, rows + 32)


def plan_of(counts: list[int], num_logits: int = 1) -> StepPlan:
    scheduled = [
        ScheduledRequest(
            request=str(i),
            row=i,
            position=5,
            visits=((count, 0),),
            tokens=(7,) * count,
            pages=(),
            num_logits=num_logits,
        )
        for i, count in enumerate(counts)
    ]
    return StepPlan(step=0, phase="decode", scheduled=tuple(scheduled), kv_pages_used=0)


def test_bucket_of_needs_single_rows_with_logits() -> None:
    assert bucket_of(plan_of([1, 1, 1]), [1, 2, 4]) == 4
    assert bucket_of(plan_of([1, 2]), [1, 2, 4]) is None
    assert bucket_of(plan_of([1, 1], num_logits=0), [1, 2, 4]) is None
    assert bucket_of(plan_of([1] * 5), [1, 2, 4]) is None
    assert bucket_of(plan_of([1]), []) is None


def test_bucket_of_drafts_counts_rows() -> None:
    assert bucket_of(plan_of([4, 2, 1], num_logits=1), [1, 4, 8, 16], 4) == 8
    assert bucket_of(plan_of([5, 2]), [1, 4, 8, 16], 4) is None
    assert bucket_of(plan_of([4] * 5), [1, 4, 8, 16], 4) is None
    chain = plan_of([3], num_logits=2)
    tree = replace(chain, scheduled=(structs.replace(chain.scheduled[0], tree=(-1, 0, 0)),))
    assert [bucket_of(plan, [4], 4) for plan in (chain, tree)] == [4, None]


def uncaptured(llm: LLM, sizes: list[int]) -> CUDAGraphManager:
    """Install graphs of these sizes without capturing: steps are padded to a size and run eagerly."""
    buffers: Any = None
    max_request_rows = 1 + llm.engine.config.num_drafts
    return CUDAGraphManager(
        TensorParallel(), DecodeGraphs(llm.model, buffers, sizes, max_request_rows=max_request_rows)
    )


def captured(
    model: Path, out: Path, sizes: list[int], new: int = NEW, **options: Any
) -> tuple[list[tuple[int, ...]], Run]:
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    rows: set[int] = set()
    with LLM(model, observer=observer, page_size=2, check_invariants=True, logits="observed", **options) as llm:
        llm.engine.runner.graphs = uncaptured(llm, sizes)
        llm.model.model.register_forward_pre_hook(lambda _module, args: rows.add(len(args[0])))
        tokens = [g.token_ids for g in llm.generate(PROMPTS, max_new_tokens=new)]
        dummy = llm.engine.runner.kv_cache.tensors()[0][:, -1]
        assert bool(dummy.any()) == any(size > len(PROMPTS) for size in sizes)
    assert rows & set(sizes) == {size for size in sizes if size >= len(PROMPTS)}
    return [tuple(ids) for ids in tokens], open_run(out)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_padded_step_is_recorded_without_padding(tmp_path: Path, family: str) -> None:
    """Padding rows come after token rows, even where experts have sorted the rows."""
    model = make(tmp_path / "model", family)
    tokens, plain = captured(model, tmp_path / "plain", [])
    padded_tokens, padded = captured(model, tmp_path / "padded", [8])
    assert padded_tokens == tokens
    assert padded.ledger().complete
    compared = [r for r in padded.records if r.key.site != ":in[logits_to_keep]"]  # lists unpadded rows
    for one, other in zip(plain.records, compared, strict=True):
        assert (one.key, one.rows, one.shape) == (other.key, other.rows, other.shape)
        if one.entry:
            np.testing.assert_allclose(padded.array(other), plain.array(one), rtol=1e-5, atol=1e-5)
    assert [plain.steps[n][0].info for n in plain.steps] == [padded.steps[n][0].info for n in padded.steps]


def test_step_that_verifies_drafts_is_recorded_without_padding(tmp_path: Path) -> None:
    """Each draft row is computed like a single-row request."""
    model = make_llama(tmp_path / "model", num_hidden_layers=2, seed=1)
    (tokens, plain), (padded_tokens, padded) = (
        captured(model, tmp_path / name, sizes, 24, speculative_algorithm="NGRAM")
        for name, sizes in (("plain", []), ("padded", [32]))
    )
    assert padded_tokens == tokens
    infos = [plain.steps[number][0].info for number in plain.steps]
    assert infos == [padded.steps[number][0].info for number in padded.steps]
    assert any(len(info.drafts) > 0 for info in infos)
    compared = [r for r in padded.records if r.key.site != ":in[logits_to_keep]"]
    ours = [r for r in plain.records if r.key.site != ":in[logits_to_keep]"]
    for one, other in zip(ours, compared, strict=True):
        assert (one.key, one.rows) == (other.key, other.rows)
        if one.entry:
            np.testing.assert_allclose(padded.array(other), plain.array(one), rtol=1e-4, atol=1e-4)


def test_model_runner_warns_once_about_foreign_hooks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(make_llama(tmp_path / "model")) as llm:
        llm.engine.runner.graphs = uncaptured(llm, [])
        llm.generate(PROMPTS, max_new_tokens=2)
        assert "run eagerly" not in caplog.text
        llm.model.model.register_forward_hook(lambda *_: None)
        llm.generate(PROMPTS, max_new_tokens=3)
    assert caplog.text.count("a module has a forward hook that is not the observer's") == 1


@pytest.mark.parametrize(
    "family",
    mostly_soak(["llama", "qwen3", "gemma2", "gemma3", "mixtral"], default=["llama", "gemma3", "mixtral"]),
)
def test_fused_kernels_equal_modules(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, in float32."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    model = make(tmp_path / "model", family)
    asked = SamplingParams(max_new_tokens=3, ignore_eos=True, full_logprobs=True)
    called: list[str] = []
    monkeypatch.setattr(fused, "may_run_on", lambda device: True)
    kernels = fused.kernels(torch.device("cpu"))
    assert kernels is not None
    for name in ("rms_norm", "add_rms_norm", "gated"):
        counted = partial(count, called, name, getattr(kernels, name))
        kernels = kernels._replace(**{name: counted})
    with LLM(model) as llm:
        monkeypatch.setattr(fused, "kernels", lambda device: kernels)
        ours = llm.generate(PROMPTS[:2], asked)
        monkeypatch.setattr(fused, "may_run_on", lambda device: False)
        plain = llm.generate(PROMPTS[:2], asked)
    assert set(called) == {"rms_norm", "add_rms_norm", "gated"}
    for one, other in zip(ours, plain, strict=True):
        assert one.token_ids == other.token_ids
        full = [np.array([each.full for each in g.logprobs or ()]) for g in (one, other)]
        np.testing.assert_allclose(full[0], full[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", mostly_soak(["llama", *SHOWN], default=SHOWN))
def test_fused_kernels_show_taps_what_modules_show(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same sites in the same order, with the values of the modules; in Triton's interpreter, in float32."""
    if triton.why_not(torch.device("cpu")) is not None:
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1 and a CPU")
    model = make(tmp_path / "model", family)
    called: list[str] = []
    monkeypatch.setattr(fused, "may_run_on", lambda device: True)
    kernels = fused.kernels(torch.device("cpu"))
    assert kernels is not None
    counted = kernels._replace(
        rms_norm=partial(count, called, "rms_norm", kernels.rms_norm),
        gated=partial(count, called, "gated", kernels.gated),
    )
    monkeypatch.setattr(fused, "kernels", lambda device: counted)
    for name, is_fused in (("fused", True), ("plain", False)):
        monkeypatch.setattr(fused, "may_run_on", lambda device, is_fused=is_fused: is_fused)
        observer = partial(make_observer, out=str(tmp_path / name), config=DumperConfig(keep="full"))
        with LLM(model, observer=observer) as llm:
            llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=2, ignore_eos=True))
    ours, theirs = open_run(tmp_path / "fused"), open_run(tmp_path / "plain")
    assert called
    assert [(r.key, r.shape, r.dims) for r in ours.records] == [(r.key, r.shape, r.dims) for r in theirs.records]
    for one, other in zip(ours.records, theirs.records, strict=True):
        if one.entry is not None:
            np.testing.assert_allclose(ours.array(one), theirs.array(other), rtol=1e-4, atol=1e-4, err_msg=str(one.key))


def count(called: list[str], name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    called.append(name)
    return kernel(*args, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma2", "mixtral", "deepseek_v3", "qwen3_next", "mamba2", "zamba2", "lfm2", "falcon_h1"],
)
def test_cuda_graphs_give_the_same_tokens(tmp_path: Path, family: str) -> None:
    """With requests that join, end and are preempted."""
    model = make(tmp_path / "model", family)
    asked = SamplingParams(max_new_tokens=64, ignore_eos=True)
    prompts = [[token + shift for token in prompt] for shift in (0, 20, 40) for prompt in PROMPTS]
    answers = []
    for graphs, is_async in (("off", False), ("decode", False), ("decode", True)):
        settings = {"cuda_graphs": graphs, "async_scheduling": is_async, "page_size": 4, "num_pages": 40}
        with LLM(model, device="cuda", max_num_seqs=5, check_invariants=True, **settings) as llm:
            answers.append([g.token_ids for g in llm.generate(prompts, asked)])
            assert llm.engine.scheduler.stats.num_preemptions
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_taps_do_not_change_bits_of_graph_steps(tmp_path: Path, family: str) -> None:
    model = make(tmp_path / "model", family)
    asked = SamplingParams(max_new_tokens=24, ignore_eos=True, full_logprobs=True)
    answers = []
    for keep in ("off", "stats"):
        observer = partial(make_observer, out=str(tmp_path / keep), config=DumperConfig(keep=keep))
        with LLM(model, device="cuda", dtype="bfloat16", observer=observer) as llm:
            answers.append([[each.full for each in g.logprobs or ()] for g in llm.generate(PROMPTS, asked)])
    assert answers[0] == answers[1]


def make(path: Path, family: str) -> Path:
    return make_checkpoint(path, family) if family in FAMILIES else make_moe(path, family)
