"""Taps inside CUDA graphs captured by user code, by torch.compile and by the engine's decoding."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_llama
from graph_observers import Recording, check_equal
from moe_checkpoints import make_moe
from msgspec import structs
from torch import nn

from tapscope.cli import main
from tapscope.dumper import Dumper, make_observer
from tapscope.dumper.capture.device_capturer import DeviceCapturer
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.device import cuda_graphs, graph_memory
from tapscope.engine import LLM, SamplingParams
from tapscope.run_format.run import Run
from tapscope.sources import open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:Not enough SMs:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        inner = torch.relu_(self.up(self.norm(hidden)))
        return {"hidden": hidden + self.down(inner), "inner": inner.t()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids[0])
        for layer in self.layers:
            hidden = layer(hidden)["hidden"]
        out: torch.Tensor = self.lm_head(hidden)
        return out.mul_(2)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.arange(i * 16, (i + 1) * 16, device="cuda")[None] for i in range(count)]


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().cuda().eval()


def complete(path: Path) -> Run:
    run = open_run(path)
    assert run.ledger().complete, run.ledger().sentences()
    return run


def facts(run: Run) -> list[Any]:
    return [(r.key, r.dtype, r.shape, r.hash, r.bag) for r in run.records]


def captured(model: nn.Module, ids: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(ids)
    return graph, output


@pytest.mark.parametrize("keep", ["full", "stats"])
def test_user_graph_replays_record_what_eager_calls_record(tmp_path: Path, keep: str) -> None:
    model, inputs = make_net(), batches(4)
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep=keep):
        for ids in inputs:
            model(ids)
    static = inputs[0].clone()
    with torch.no_grad(), Dumper(model, tmp_path / "graph", keep=keep):
        model(inputs[0])  # step 0
        graph, output = captured(model, static)
        for ids in inputs[1:]:
            static.copy_(ids)
            graph.replay()
        torch.cuda.synchronize()
        expected = output.clone()
    torch.testing.assert_close(model(inputs[-1]), expected)
    eager, run = complete(tmp_path / "eager"), complete(tmp_path / "graph")
    assert facts(run) == facts(eager)
    assert [run.steps[n][0].info for n in range(4)] == [eager.steps[n][0].info for n in range(4)]
    for one, other in zip(eager.records, run.records, strict=True):
        assert (one.entry is None) == (other.entry is None)
        if one.stats is not None and other.stats is not None:
            assert structs.replace(one.stats, sum=0, sumsq=0) == structs.replace(other.stats, sum=0, sumsq=0)


def test_rules_apply_at_every_replay(tmp_path: Path) -> None:
    model, static = make_net(), batches(1)[0].clone()
    rules = ["layers.1:out[hidden]=full steps=2-3", "lm_head:out=stats every=2", "layers.0:in[hidden]=full rows=-1:"]
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=rules):
        model(static)
        graph, _ = captured(model, static)
        for _ in range(4):
            graph.replay()
    run = complete(tmp_path / "run")
    steps: dict[str, list[int]] = {}
    for record in run.records:
        steps.setdefault(record.key.site, []).append(record.key.step)
    assert steps == {"layers.0:in[hidden]": [0, 1, 2, 3, 4], "lm_head:out": [0, 2, 4], "layers.1:out[hidden]": [2, 3]}
    assert {r.shape for r in run.records if r.key.site == "layers.0:in[hidden]"} == {(1, 64)}


def test_trigger_finds_a_nan_in_a_replay(tmp_path: Path) -> None:
    model, static = make_net(), batches(1)[0].clone()
    settings: dict[str, Any] = {"keep": "off", "triggers": ("layers.1.down:out: nan -> keep",)}
    with torch.no_grad(), Dumper(model, tmp_path / "run", **settings) as dumper:
        model(static)
        graph, _ = captured(model, static)
        for step in range(1, 5):
            if step == 3:
                model.layers[1].down.bias.data[7] = float("nan")
            graph.replay()
        dumper.flush()
    run = open_run(tmp_path / "run")
    alarms = [(e.fields["step"], e.fields["site"]) for e in run.events() if e.kind == "trigger"]
    assert alarms[0] == (3, "layers.1.down:out")
    assert {r.key.step for r in run.records if r.entry} == {3, 4}


def test_graph_captured_without_taps_or_with_other_rules_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, static = make_net(), batches(1)[0].clone()
    with torch.no_grad():
        model(static)
        graph, _ = captured(model, static)
        with Dumper(model, tmp_path / "late", keep="full"):
            graph.replay()
        assert "1 replays of CUDA graphs that were captured before the Dumper was opened" in caplog.text
        caplog.clear()
        with Dumper(model, tmp_path / "run", keep="stats") as dumper:
            graph, _ = captured(model, static)
            graph.replay()
            dumper.configure(keep="full")
            graph.replay()
        assert "captured with other taps" in caplog.text
    graph.replay()  # after the Dumper is closed
    torch.cuda.synchronize()
    run = open_run(tmp_path / "run")
    assert {r.key.step for r in run.records} == {0, 1}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("keep", ["full", "stats"])
def test_compiled_model_records_what_the_eager_model_records(tmp_path: Path, mode: str, keep: str) -> None:
    torch.compiler.reset()
    model, inputs = make_net(), batches(6)
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="full"):
        for ids in inputs:
            model(ids)
    replays = 0
    plain = torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> Any:
        nonlocal replays
        replays += 1
        return plain(self)

    torch.cuda.CUDAGraph.replay = counted
    try:
        with torch.no_grad(), Dumper(model, tmp_path / "compiled", keep=keep):
            compiled = torch.compile(model, mode=mode, fullgraph=True)
            for ids in inputs:
                torch.compiler.cudagraph_mark_step_begin()
                compiled(ids)
    finally:
        torch.cuda.CUDAGraph.replay = plain
    eager, run = complete(tmp_path / "eager"), complete(tmp_path / "compiled")
    assert [r.key for r in run.records] == [r.key for r in eager.records]
    assert [run.steps[n][0].info for n in range(6)] == [eager.steps[n][0].info for n in range(6)]
    for one, other in zip(eager.records, run.records, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.entry is not None and other.entry is not None:
            np.testing.assert_allclose(run.array(other), eager.array(one), rtol=1e-3, atol=1e-3)
        elif one.stats is not None and other.stats is not None and one.stats.absmax is not None:
            assert other.stats.absmax == pytest.approx(one.stats.absmax, rel=1e-2)
    assert (replays >= 4) == (mode != "default")
    torch.compiler.reset()


def test_diff_of_a_transformers_model_compiled_with_graphs_passes(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.compiler.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=512
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 512, (2, 32), device="cuda")
    rules = ["*:out=full"]
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="off", rules=rules):
        for _ in range(4):
            model(input_ids=ids, use_cache=False)
    with torch.no_grad(), Dumper(model, tmp_path / "compiled", keep="off", rules=rules):
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(input_ids=ids, use_cache=False)
    assert main(["diff", str(tmp_path / "eager"), str(tmp_path / "compiled")]) == 0
    torch.compiler.reset()


PROMPTS = [[5, 6, 7], list(range(40, 75)), [300], list(range(100, 119)), [9, 8]]
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True)


def serve(path: Path, out: Path, config: DumperConfig, **settings: Any) -> tuple[list[Any], Run, list[int]]:
    """Generate with capture; return the tokens, the run and one entry per replayed graph."""
    observer = partial(make_observer, out=str(out), config=config)
    replays: list[int] = []
    plain = cuda_graphs.GraphCapture.replayed

    def counted(self: Any, launch: Any) -> Any:
        replays.append(1)
        return plain(self, launch)

    cuda_graphs.GraphCapture.replayed = counted  # type: ignore[method-assign]
    try:
        with LLM(path, device="cuda", page_size=4, max_num_seqs=8, observer=observer, **settings) as llm:
            tokens = [g.token_ids for g in llm.generate(PROMPTS, PARAMS)]
            tokens += [g.token_ids for g in llm.generate(PROMPTS[:2], PARAMS)]
    finally:
        cuda_graphs.GraphCapture.replayed = plain  # type: ignore[method-assign]
    return tokens, complete(out), replays


@pytest.mark.parametrize(
    ("family", "keep"), [("llama", "full"), ("llama", "stats"), ("zamba2", "full"), ("lfm2", "full")]
)
def test_engine_graphs_record_what_eager_steps_record(tmp_path: Path, family: str, keep: Any) -> None:
    path = make_checkpoint(tmp_path / "model", family, seed=1)
    config = DumperConfig(keep=keep)
    tokens, eager, none = serve(path, tmp_path / "eager", config, cuda_graphs="off")
    same, run, replays = serve(path, tmp_path / "graph", config)
    assert (tokens, none) == (same, [])
    assert len(replays) >= 12
    ours, theirs = ({r.key: r for r in each.records} for each in (run, eager))
    decodes = {n for n, lines in eager.steps.items() if lines[0].info.phase == "decode"}
    assert len(decodes) >= 12
    padding = {k for k in ours if k.site == ":in[logits_to_keep]"}  # steps without graphs are not padded
    assert {k for k in ours if k.step in decodes} - padding == {k for k in theirs if k.step in decodes} - padding
    for key, record in ours.items():
        if key in padding:
            continue
        other = theirs[key]
        assert (record.dtype, record.shape, record.dims) == (other.dtype, other.shape, other.dims), key
        if record.entry is not None:
            np.testing.assert_allclose(run.array(record), eager.array(other), rtol=1e-3, atol=1e-4, err_msg=str(key))
        elif record.stats is not None and other.stats is not None and other.stats.absmax:
            assert record.stats.count == other.stats.count, key
            assert record.stats.absmax == pytest.approx(other.stats.absmax, rel=1e-3, abs=1e-4), key
            assert record.stats.sumsq == pytest.approx(other.stats.sumsq, rel=1e-2, abs=1e-4), key


@pytest.mark.parametrize(
    ("family", "rules", "is_planned", "waiting"),
    [
        ("llama", ["*:out=sketch"], True, None),
        ("llama", ["*:out=sketch"], True, (1024, 4096)),  # a launch after a few taps, because the model soon waits
        ("llama", ["*=sketch"], False, None),
        ("qwen3_moe", ["*=sketch"], False, None),
    ],
)
def test_graphs_sketch_what_eager_steps_sketch(
    tmp_path: Path,
    family: str,
    rules: list[str],
    is_planned: bool,
    waiting: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph computes the sketches of packed tensors, many per launch.

    The host computes the sketches of sorted (token, expert) pairs.
    """
    from tapscope.kernels.triton import sketch_table  # needs Triton

    make: Any = make_llama if family == "llama" else make_moe
    more: dict[str, Any] = {} if family == "llama" else {"family": family}
    path = make(tmp_path / "model", seed=1, dtype="bfloat16", **more)
    in_graph: list[bool] = []
    inner = DeviceCapturer._sketch_in_graph

    def counted(self: Any, *args: Any) -> None:
        in_graph.append(args[-1] is not None)
        inner(self, *args)

    launched: list[int] = []  # number of tensors of each call
    sketch_many = sketch_table.sketch_many

    def noted(sketches: Any, requests: Any, upload: Any) -> Any:
        launched.append(len(requests))
        return sketch_many(sketches, requests, upload)

    monkeypatch.setattr(DeviceCapturer, "_sketch_in_graph", counted)
    monkeypatch.setattr(sketch_table, "sketch_many", noted)
    if waiting is not None:
        monkeypatch.setattr(graph_memory, "_LAUNCH_BYTES", waiting[0])
        monkeypatch.setattr(graph_memory, "_WAITING_BYTES", waiting[1])
    runs = []
    for name, eager in (("graph", ()), ("eager", (0,))):
        recording = Recording(tmp_path / name, DumperConfig(keep="off", rules=rules), eager)
        with LLM(path, device="cuda", page_size=4, max_num_seqs=8, observer=recording) as llm:
            llm.generate(PROMPTS, PARAMS)
        runs.append(complete(recording.out))
    assert all(in_graph)
    assert (max(launched) > 20) == (waiting is None)
    num_sketches = sum(record.sketch is not None for record in runs[0].records)
    assert num_sketches > 200
    assert (len(in_graph) < num_sketches / 2) == is_planned  # later replays of a plan record all sites in one call
    assert check_equal(*runs) > 200
    if is_planned:  # includes values computed outside the graph: the host sketches only the tokens
        host = {m.step: m.value or 0 for m in runs[0].metrics() if m.name == "host_sketch_bytes"}
        steps = [line[0].info for line in runs[0].steps.values()]
        assert [(info.step, info.phase) for info in steps if host[info.step] > 16 * info.num_rows] == []


@pytest.mark.parametrize("keep", ["full", "stats"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", "llama4"])
def test_graphs_of_experts_record_what_eager_steps_record(tmp_path: Path, family: str, keep: Any) -> None:
    """Compares steps in a graph, eager steps with the same rows, and eager steps without padding."""
    path = make_moe(tmp_path / "model", family, seed=1, dtype="bfloat16")
    tokens, runs = [], []
    for name, eager, graphs in (("graph", (), "decode"), ("padded", (0,), "decode"), ("plain", (0,), "off")):
        recording = Recording(tmp_path / name, DumperConfig(keep=keep), eager)
        with LLM(path, device="cuda", page_size=4, max_num_seqs=8, observer=recording, cuda_graphs=graphs) as llm:
            assert llm.engine.runner.has_graphs == (graphs == "decode")
            tokens.append([g.token_ids for g in llm.generate(PROMPTS, PARAMS)])
        assert (recording.replays(1)[0] >= 8) == (name == "graph")
        runs.append(complete(recording.out))
    assert tokens[0] == tokens[1]
    assert check_equal(runs[0], runs[1]) > 500
    shapes = [{r.key: (r.dtype, r.shape, r.dims) for r in run.records} for run in (runs[0], runs[2])]
    kept = [{k: v for k, v in each.items() if k.site != ":in[logits_to_keep]"} for each in shapes]  # only if padded
    assert kept[0] == kept[1]


def test_engine_falls_back_to_eager_steps_for_foreign_hooks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    observer = partial(make_observer, out=str(tmp_path / "run"), config=DumperConfig(keep="stats"))
    seen = []
    with LLM(path, device="cuda", max_num_seqs=4, observer=observer) as llm, caplog.at_level(logging.WARNING):
        handle = llm.model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        llm.generate(PROMPTS[:2], PARAMS)
        handle.remove()
    assert len(seen) >= 10
    assert "steps run eagerly" in caplog.text


def test_trigger_finds_a_nan_in_a_model_served_in_graphs(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "model", seed=1)
    config = DumperConfig(keep="off", triggers=("model.layers.1.mlp:out: nan -> keep",))
    observer = partial(make_observer, out=str(tmp_path / "run"), config=config)
    with LLM(path, device="cuda", max_num_seqs=4, prefix_cache=False, observer=observer) as llm:
        llm.generate(PROMPTS[:2], PARAMS)
        llm.model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
        llm.generate([[5, 6]], PARAMS, forced_token_ids=[[1, 2, 3, 4]])
    run = open_run(tmp_path / "run")
    assert {e.fields["site"] for e in run.events() if e.kind == "trigger"} == {"model.layers.1.mlp:out"}
