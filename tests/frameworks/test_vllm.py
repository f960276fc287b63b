"""The vLLM plugin with a stub of its worker; benchmarks/frameworks and docs/howto/vllm.md use real vLLM."""

import copy
import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from framework_models import tiny_llama_config
from torch import nn
from transformers import LlamaForCausalLM as Reference
from vllm_worker import (
    FirstRunner,
    LlamaForCausalLM,
    Requests,
    SchedulerOutput,
    SecondRunner,
    Worker,
    WorkerWrapperBase,
    install,
)

from tapscope.comparator import compare
from tapscope.core import dims
from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, StepRows
from tapscope.core.observe import StepInfo
from tapscope.dumper import Dumper, api
from tapscope.dumper.job.framework_plugins import PluginRegistry, registry
from tapscope.dumper.process_dumper import ProcessDumper
from tapscope.dumper.steps.input_rows import host_values
from tapscope.frameworks import host, vllm
from tapscope.sources import open_run

CONFIG = tiny_llama_config(attn_implementation="eager")
PROMPTS = {"0-0a1b2c3d": list(range(3, 12)), "1-deadbeef": list(range(40, 45))}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProcessDumper]:
    """Return a process dumper configured by the test's environment variables."""
    for name, value in {"ENABLED": "1", "KEEP": "full", "DIR": str(tmp_path), "EXP_NAME": "served"}.items():
        monkeypatch.setenv(f"TAPSCOPE_{name}", value)
    dumper = ProcessDumper()
    monkeypatch.setattr(api, "process", dumper)
    monkeypatch.setattr(registry, "_plugins", {})
    yield dumper
    dumper.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = Reference(CONFIG).state_dict()
    return {name: torch.randn_like(w) * 0.15 + name.endswith("norm.weight") for name, w in state.items()}


def serve(
    wrapper: type[WorkerWrapperBase],
    weights: dict[str, torch.Tensor],
    runner: type[FirstRunner] = FirstRunner,
    bug: Any = None,
) -> WorkerWrapperBase:
    """Load, warm up and prefill; whole prompts only, because the stub has no KV cache."""
    model = LlamaForCausalLM(CONFIG).load(weights)
    if bug is not None:
        bug(model)
    worker = wrapper(Worker(model, Requests({name: list(ids) for name, ids in PROMPTS.items()}), runner))
    worker.init_device()
    worker.load_model()
    worker.compile_or_warm_up_model()
    for name, tokens in PROMPTS.items():  # attention covers all packed rows, so one request at a time
        scheduled = SchedulerOutput({name: len(tokens)})
        assert worker.execute_model(scheduled) is None
        worker.sample_tokens(None)
    worker.execute_model(SchedulerOutput({}, finished_req_ids=set(PROMPTS)))
    if (session := vllm.session_of(model)) is not None:
        assert session._requests == {}
    worker.execute_dummy_batch()
    return worker


def reference(weights: dict[str, torch.Tensor], out: Path) -> None:
    model = Reference(CONFIG).eval()
    model.load_state_dict(weights)
    longest = max(map(len, PROMPTS.values()))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS.values()])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS.values()])
    with torch.no_grad(), Dumper(model, out, keep="full", params=True):
        model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0), logits_to_keep=1)


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_vllm_plugin_step_covers_forward_and_logits_with_rows_of_the_scheduler(
    process: ProcessDumper,
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    runner: type[FirstRunner],
) -> None:
    wrapper = install(monkeypatch)
    vllm.register()
    serve(wrapper, weights, runner).shutdown()
    with open_run(tmp_path / "served") as run:
        assert (run.manifest["framework"], run.ledger().complete) == ("vllm", True)
        steps = [info for lines in run.steps.values() if (info := lines[0].info).rows]
        assert [(s.phase, s.kind, s.rows[0].request, s.num_rows) for s in steps] == [
            ("prefill", None, "0", 9),
            ("prefill", None, "1", 5),
        ]
        assert list(steps[1].token_ids) == PROMPTS["1-deadbeef"]
        assert {record.key.step for record in run.select(["model.norm:out[0]"])} == {s.step for s in steps}
        (first, second) = run.select(["logits_processor:out"])
        assert [first.rows, second.rows] == [((8, 1),), ((4, 1),)]
    reference(weights, tmp_path / "hf")
    with open_run(tmp_path / "hf") as one, open_run(tmp_path / "served") as two:
        report = compare(one, two)
    assert report.exit_code == 0, str(report)
    met = {f.target.site: f.baseline.site for f in report.findings if f.baseline and f.target}
    assert met["logits_processor:out"] == "lm_head:out"
    assert met["logits_processor:in[hidden_states]"] == "lm_head:in[input]"


def test_vllm_plugin_diff_names_the_module_of_a_bug(
    process: ProcessDumper, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def bug(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(1.3)

    wrapper = install(monkeypatch)
    vllm.register()
    serve(wrapper, weights, bug=bug).shutdown()
    reference(weights, tmp_path / "hf")
    with open_run(tmp_path / "hf") as one, open_run(tmp_path / "served") as two:
        report = compare(one, two)
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.down_proj"


class Drafting(FirstRunner):
    """Stub in which the last two rows of a request are drafts and one is accepted; the draft model shares the
    embeddings."""

    def propose_draft_token_ids(self) -> None:
        self.model.model.embed_tokens(torch.tensor([1]))

    def sample_tokens(self, grammar: Any) -> Any:
        self.propose_draft_token_ids()
        names = self.input_batch.req_ids
        return SimpleNamespace(
            sampled_token_ids=[[7, 8] for _ in names], req_id_to_index={name: at for at, name in enumerate(names)}
        )


def test_vllm_plugin_step_tells_drafts_accepted_ones_and_adapters(
    process: ProcessDumper, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wrapper = install(monkeypatch)
    vllm.register()
    model, (name, tokens) = LlamaForCausalLM(CONFIG).load(weights), next(iter(PROMPTS.items()))
    worker = wrapper(Worker(model, Requests({name: tokens}), Drafting))
    worker.init_device()
    worker.load_model()
    lora = SimpleNamespace(lora_name="french")
    worker.worker.model_runner.requests = {name: SimpleNamespace(lora_request=lora)}
    drafts = {name: [-1, -1]}
    worker.execute_model(SchedulerOutput({name: len(tokens)}, scheduled_spec_decode_tokens=drafts))
    worker.sample_tokens(None)
    worker.shutdown()
    with open_run(tmp_path / "served") as run:
        ((line,),) = (list(lines.values()) for lines in run.steps.values())
        assert [record.shape[0] for record in run.select(["model.embed_tokens:out"])] == [len(tokens)]
        assert run.ledger().complete
    assert (line.info.drafts, line.info.adapters, line.info.row_sets) == (
        {"0": 2},
        {"0": "french"},
        {"logits": (6, 7, 8)},
    )
    assert line.counts is not None
    assert line.counts.accepted == {"0": 1}
    assert [span.count for span, _ in line.own_rows()] == [8]


def test_vllm_plugin_does_nothing_unless_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAPSCOPE_ENABLED", "TAPSCOPE_CONTROL"):
        monkeypatch.delenv(name, raising=False)
    wrapper = install(monkeypatch)
    before = wrapper.init_device
    vllm.register()
    assert wrapper.init_device is before


def test_vllm_plugin_reads_no_rows_while_nothing_is_captured(
    process: ProcessDumper, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    rows, read = vllm.WorkerSession.rows, list[int]()
    monkeypatch.setattr(vllm.WorkerSession, "rows", lambda self, info, *call: read.append(1) or rows(self, info, *call))
    wrapper = install(monkeypatch)
    vllm.register()
    worker = serve(wrapper, weights)
    num_read = len(read)
    assert num_read
    process.configure(enabled=False)
    for name in PROMPTS:
        worker.worker.model_runner.running.computed[name] = 0
        worker.execute_model(SchedulerOutput({name: 3}))
        worker.sample_tokens(None)
    assert len(read) == num_read


def test_vllm_plugin_reports_a_missing_worker_in_one_sentence(
    process: ProcessDumper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch)
    monkeypatch.delattr(sys.modules["vllm.v1.worker.worker_base"], "WorkerWrapperBase")
    with caplog.at_level(logging.ERROR, "tapscope"):
        vllm.register()
    assert len(caplog.messages) == 1
    assert "tapscope records nothing of vLLM" in caplog.text


def test_vllm_plugin_error_of_ours_leaves_the_worker_alone(
    process: ProcessDumper,
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(self: object, info: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(host, "reported", set())
    monkeypatch.setattr(ProcessDumper, "step_of", broken)
    wrapper = install(monkeypatch)
    vllm.register()
    worker = serve(wrapper, weights)
    assert worker.worker.model_runner.running.computed == {name: len(ids) for name, ids in PROMPTS.items()}
    assert caplog.text.count("tapscope: opening a step failed (ValueError: boom); vLLM continues") == 1


def test_vllm_plugin_rows_of_recomputed_positions_are_another_visit() -> None:
    request = vllm._Request("a")
    assert [(r.position, r.count, r.visit) for r in request.spans(0, 4, 0)] == [(0, 4, 0)]
    again = list(request.spans(2, 4, 0))
    assert [(r.position, r.count, r.visit, r.slot) for r in again] == [(2, 2, 1, 0), (4, 2, 0, 2)]


def completed(rows: StepRows) -> StepInfo:
    assert rows.complete is not None
    return rows.complete(rows.info, host_values(rows.tensors))


@pytest.mark.parametrize("is_second", [False, True], ids=["first runner", "second runner"])
@pytest.mark.parametrize("is_mrope", [False, True], ids=["positions", "M-RoPE"])
def test_vllm_plugin_rows_after_rejected_drafts_have_the_positions_of_the_device(
    is_second: bool, is_mrope: bool
) -> None:
    """Asynchronous scheduling: each request has 2 drafts; one draft of b is rejected, which is known only on the
    GPU."""
    config = SimpleNamespace(async_scheduling=True)
    runner = SimpleNamespace(num_computed_tokens=torch.tensor([13, 22, 0, 0]))
    runner.req_states = SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=torch.tensor([0, 22, 13, 0])))
    session = vllm.WorkerSession(
        SimpleNamespace(speculative_config=object(), scheduler_config=config, model_runner=runner)
    )
    session._scheduled = SchedulerOutput({"a": 3, "b": 3}, scheduled_spec_decode_tokens={"a": [-1, -1], "b": [-1, -1]})
    optimistic = np.array([13, 23], np.int32)
    if is_second:
        session._batch = SimpleNamespace(
            req_ids=["a", "b"],
            num_scheduled_tokens=np.array([3, 3]),
            num_computed_tokens_np=optimistic,
            idx_mapping=torch.tensor([2, 1]),
        )
    else:
        runner.input_batch = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=optimistic)
    positions = torch.tensor([13, 14, 15, 22, 23, 24, 0, 0])
    positions = positions.expand(3, -1) + 100 if is_mrope else positions
    rows = session.rows(StepInfo(step=4), torch.zeros(8, dtype=torch.long), positions)
    assert rows is not None
    assert [(r.request, r.position, r.count, r.slot) for r in rows.info.rows] == [("a", 13, 3, 0), ("b", 23, 3, 3)]
    found = completed(rows)
    assert [(r.request, r.position, r.count, r.slot) for r in found.rows] == [("a", 13, 3, 0), ("b", 22, 3, 3)]
    assert found.row_sets == rows.info.row_sets == {"logits": (0, 1, 2, 3, 4, 5)}
    assert found.token_ids == [0] * 6


def test_vllm_plugin_rows_count_the_drafts_that_adaptive_verification_kept() -> None:
    """Of 6 scheduled rows, the device keeps 1 draft of a and none of b, which has 2 non-draft tokens."""
    runner = SimpleNamespace(adaptive_verification=object())
    config = SimpleNamespace(async_scheduling=True)
    session = vllm.WorkerSession(
        SimpleNamespace(speculative_config=object(), scheduler_config=config, model_runner=runner)
    )
    session._scheduled = SchedulerOutput({"a": 3, "b": 3}, scheduled_spec_decode_tokens={"a": [-1, -1], "b": [-1]})
    session._batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_scheduled_tokens=np.array([3, 3]),
        num_computed_tokens_np=np.array([13, 23]),
        query_start_loc=torch.tensor([0, 2, 4, 4]),
    )
    rows = session.rows(StepInfo(step=4), torch.zeros(4, dtype=torch.long), torch.tensor([13, 14, 22, 23]))
    assert rows is not None
    found = completed(rows)
    assert [(r.request, r.position, r.count, r.slot) for r in found.rows] == [("a", 13, 2, 0), ("b", 22, 2, 2)]
    assert found.row_sets == rows.info.row_sets == {"logits": (0, 1, 3)}


def test_vllm_plugin_half_of_a_batch_has_unknown_rows(caplog: pytest.LogCaptureFixture) -> None:
    batch = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=np.array([0, 0]))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(input_batch=batch), parallel_config=SimpleNamespace(use_ubatching=True)
    )
    session = vllm.WorkerSession(worker)
    session._scheduled = SchedulerOutput({"a": 3, "b": 3})
    assert session.rows(StepInfo(step=0), torch.zeros(3, dtype=torch.long), torch.arange(3)) is None
    vllm._warn_of_settings(worker)
    assert "start it without --enable-dbo and --ubatch-size" in caplog.text


def test_vllm_plugin_two_live_requests_never_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    session = vllm.WorkerSession(SimpleNamespace())
    assert session._request("chat-00000001").name == "chat"
    assert session._request("chat-00000002").name == "chat-00000002"


class _Layer(nn.Module):
    def __init__(self, kind: str, base: str, **attributes: Any) -> None:
        super().__init__()
        self.__class__ = type(kind, (type(base, (_Layer,), {}),), {})
        for name, value in {"tp_size": 2, **attributes}.items():
            setattr(self, name, value)


def attention(kv: int = 2, copies: int = 1) -> nn.Module:
    holder = nn.Module()
    sizes = {"total_num_heads": 6, "total_num_kv_heads": kv, "head_size": 8, "num_kv_head_replicas": copies}
    holder.qkv_proj = _Layer("QKVParallelLinear", "ColumnParallelLinear", **sizes)
    holder.attn = _Layer("Attention", "AttentionLayerBase")
    holder.k_norm = _Layer("RMSNorm", "CustomOp")
    return holder


@pytest.mark.parametrize(
    ("module", "parent", "port", "expected"),
    [
        (_Layer("ColumnParallelLinear", "LinearBase"), None, "out", "t h[tp]"),
        (_Layer("ColumnParallelLinear", "LinearBase", gather_output=True), None, "out", "t h # tp:replicated"),
        (_Layer("RowParallelLinear", "LinearBase"), None, "in[input_]", "t h[tp]"),
        (_Layer("RowParallelLinear", "LinearBase", reduce_results=False), None, "out", "t h[tp:partial]"),
        (
            _Layer("MergedColumnParallelLinear", "ColumnParallelLinear", output_sizes=[80, 80]),
            None,
            "out",
            "t (gate=80+up=80)[tp]",
        ),
        (attention().qkv_proj, None, "param[weight]", "(q=48+k=16+v=16)[tp] d"),
        (attention(1, 2).qkv_proj, None, "out[0]", "t (q=48+k=8x2+v=8x2)[tp]"),
        (_Layer("VocabParallelEmbedding", "PluggableLayer", org_vocab_size=97), None, "param[weight]", "v=97[tp] h"),
    ],
)
def test_vllm_plugin_dims_of_parallel_layers(module: nn.Module, parent: Any, port: str, expected: str) -> None:
    found = vllm.VllmPlugin().module_dims(module, parent)
    assert found[port] == expected
    for text in found.values():
        dims.parse(text)


def test_vllm_plugin_dims_inside_attention_follow_the_key_heads() -> None:
    holder = attention(1, 2)
    plugin = vllm.VllmPlugin()
    assert plugin.module_dims(holder.attn, holder)["in[key]"] == "t h=8x2[tp]"
    assert plugin.module_dims(holder.k_norm, holder)["out"] == "t n=1x2[tp] d"


def test_vllm_plugin_lora_layer_is_described_by_the_layer_inside() -> None:
    holder, plugin = attention(1, 2), vllm.VllmPlugin()
    qkv = holder.qkv_proj
    holder.qkv_proj = wrapped = _Layer("MergedQKVParallelLinearWithLoRA", "BaseLayerWithLoRA", base_layer=qkv)
    assert plugin.module_dims(wrapped, holder)["out[0]"] == "t (q=48+k=8x2+v=8x2)[tp]"
    assert plugin.module_dims(holder.attn, holder)["in[key]"] == "t h=8x2[tp]"
    assert plugin.module_facts("qkv_proj.base_layer", qkv, wrapped).is_optional
    assert not plugin.module_facts("qkv_proj", wrapped, holder).is_optional
    inner = _Layer("LogitsProcessor", "PluggableLayer")
    logits = _Layer("LogitsProcessorWithLoRA", "BaseLayerWithLoRA", base_layer=inner)
    facts = plugin.module_facts("logits_processor", logits, holder)
    assert facts.row_sets == {"in[hidden_states]": "logits", "out": "logits"}
    assert facts.forward == inner.forward


def test_registry_plugin_that_raises_is_reported_once_and_capture_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(vllm.FrameworkPlugin):
        name = "broken"

        def owns(self, model: Any) -> bool:
            return True

        def module_dims(self, module: Any, parent: Any) -> Any:
            raise KeyError("no such layer")

        def step_rows(self, *call: Any) -> Any:
            raise RuntimeError

    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", Broken())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        for _ in range(2):
            with dumper.step():
                model(torch.ones(2, 4))
    warnings = [text for text in caplog.messages if "plugin failed" in text]
    assert warnings == [
        "tapscope: the broken plugin failed in module_facts (KeyError: 'no such layer'); "
        "capture continues without its answer",
        "tapscope: the broken plugin failed in step_rows (RuntimeError); capture continues without its answer",
    ]
    with open_run(tmp_path / "run") as run:
        assert len(list(run.select(["1:out"]))) == 2


@pytest.mark.parametrize(
    ("version", "warning"),
    [
        ("0.5.1+cpu", "vllm 0.5.1+cpu is older than the versions tested (0.9 and later); rows or dims may be missing"),
        ("dev", "vllm has version 'dev', which has no number (tested: 0.9 and later); rows or dims may be missing"),
        ("0.10.0rc1", None),
        ("0.9rc10", None),
        ("", None),
    ],
)
def test_registry_version_is_one_warning_at_most_and_the_plugin_is_used(
    version: str, warning: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    fresh = PluginRegistry()
    fresh.active()
    assert "vllm" in [plugin.name for plugin in fresh.active()]
    assert caplog.messages == ([f"tapscope: {warning}"] if warning else [])


def test_registry_answer_of_another_type_is_reported_and_capture_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(vllm.FrameworkPlugin):
        name = "forgetful"

        def owns(self, model: Any) -> bool:
            return True

        def nothing(self, *call: Any) -> Any:
            return None

        module_dims = opaque_classes = step_modules = nothing

    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", Forgetful())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Dumper(model, tmp_path / "run", keep="full"):
        model(torch.ones(2, 4))
    reported = {
        text.partition(" failed in ")[2].partition(" ")[0] for text in caplog.messages if "plugin failed" in text
    }
    assert reported == {"module_facts", "opaque_classes", "step_modules"}
    with open_run(tmp_path / "run") as run:
        assert len(list(run.select(["1:out"]))) == 1


class Chooser(nn.Module):
    """A router that returns only the largest score."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4) / 12)

    def gating(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.T

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.gating(rows).max(-1).values


@pytest.mark.parametrize("mode", ["all", "core"])
def test_plugin_method_of_a_module_is_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    class Scored(FrameworkPlugin):
        name = "scored"

        def owns(self, model: Any) -> bool:
            return True

        def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
            return ModuleFacts(methods={"gating": "logits"} if isinstance(module, Chooser) else {})

    monkeypatch.setattr(registry, "_plugins", {})
    registry.add("torch", Scored())
    model = nn.Sequential(nn.Linear(4, 4), Chooser())
    rows = torch.eye(2, 4)
    with Dumper(model, tmp_path / "run", keep="full", grads=True, mode=mode) as dumper, dumper.step():
        model(rows).sum().backward()
        copy.deepcopy(model)(rows)
        assert "gating" not in copy.copy(model[1]).__dict__
        pickle.loads(pickle.dumps(model))(rows)  # noqa: S301 - our own bytes
    assert "gating" not in model[1].__dict__
    expected = model[1].weight @ model[0](rows).T
    with open_run(tmp_path / "run") as run:
        found = {record.key.site: record for record in run.select() if ":tap[" in record.key.site}
        assert sorted(found) == (["1:tap[logits]", "1:tap[logits].grad"] if mode == "all" else [])
        if found:
            assert np.allclose(run.array(found["1:tap[logits]"]), expected.T.detach().numpy(), atol=1e-6)


def test_vllm_plugin_does_not_keep_the_model_alive(
    process: ProcessDumper, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    wrapper = install(monkeypatch)
    vllm.register()
    worker = serve(wrapper, weights)
    model = weakref.ref(worker.worker.model_runner.model)
    assert vllm.session_of(model()) is not None
    worker.shutdown()
    del worker
    gc.collect()
    assert model() is None
