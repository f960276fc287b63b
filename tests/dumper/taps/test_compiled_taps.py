"""Capture inside models compiled by torch.compile with inductor, on a CPU."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from soak_cases import mostly_soak
from torch import nn
from torch._inductor import cpu_vec_isa
from torch.utils.checkpoint import checkpoint

from tapscope.dumper import Dumper
from tapscope.run_format.run import Run
from tapscope.sources import open_run


@pytest.fixture(autouse=True)
def _clean_caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make inductor generate scalar C++ except in soak tests: vectorization first compiles ten probe programs."""
    if not request.node.get_closest_marker("soak"):
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor, scale: int = 1) -> dict[str, Any]:
        inner = torch.relu_(self.up(self.norm(hidden)))
        return {"hidden": hidden + self.down(inner) * scale, "inner": (inner, scale, None), "name": "block"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, scale=2)["hidden"]
        out: torch.Tensor = self.lm_head(hidden)
        return out.mul_(2)


IDS = torch.arange(12)[None]
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def complete(path: Path) -> Run:
    run = open_run(path)
    assert run.ledger().complete, run.ledger().sentences()
    assert not run.ledger().sentences()
    return run


def check_equal(run: Run, other: Run, *, in_order: bool = True) -> None:
    """Assert that two runs have equal keys, steps and values; floats may differ by the effects of fusion."""
    one, two = list(run.records), list(other.records)
    if not in_order:
        one, two = (sorted(each, key=lambda r: (r.key.step, r.key.site, r.key.occurrence)) for each in (one, two))
    assert [r.key for r in one] == [r.key for r in two]
    assert [run.steps[n][0].info for n in sorted(run.steps)] == [other.steps[n][0].info for n in sorted(other.steps)]
    for a, b in zip(one, two, strict=True):
        assert (a.dtype, a.shape, a.value, a.dims) == (b.dtype, b.shape, b.value, b.dims), a.key
        if a.entry is not None:
            np.testing.assert_allclose(run.array(a), other.array(b), rtol=1e-5, atol=1e-6, err_msg=a.key.site)


@pytest.mark.parametrize("mode", mostly_soak(MODES, default=MODES[:1]))
def test_compiled_model_records_what_the_eager_model_records(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="full"):
        expected = [model(IDS), model(IDS + 1)]
    with torch.no_grad(), Dumper(model, tmp_path / "compiled", keep="full"):
        compiled = torch.compile(model, mode=mode, fullgraph=True)
        for ids, value in zip((IDS, IDS + 1), expected, strict=True):
            torch.testing.assert_close(compiled(ids), value)
    eager, run = complete(tmp_path / "eager"), complete(tmp_path / "compiled")
    check_equal(eager, run, in_order=mode != "reduce-overhead")
    assert run.steps[0][0].info.token_ids
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS), expected[0])


@pytest.mark.parametrize("backend", mostly_soak(["aot_eager", "inductor"], default=["aot_eager"]))
def test_compiled_transformers_model_records_what_the_eager_one_records(tmp_path: Path, backend: str) -> None:
    """Only `make soak` uses inductor, whose C++ takes ten seconds to compile."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    call: dict[str, Any] = {"input_ids": IDS, "use_cache": False, "logits_to_keep": 1}
    with torch.no_grad(), Dumper(model, tmp_path / "eager", keep="full"):
        model(**call)
    with torch.no_grad(), Dumper(model, tmp_path / "compiled", keep="full"):
        torch.compile(model, backend=backend, fullgraph=True)(**call)
    eager, run = open_run(tmp_path / "eager"), open_run(tmp_path / "compiled")
    tensors = {r.key.site for r in eager.records if r.entry}
    # When traced, the model creates the optional attention mask.
    assert {r.key.site for r in run.records if r.entry} >= tensors
    found = {r.key.site: run.array(r) for r in run.records if r.entry}
    for record in eager.records:
        if record.entry:
            np.testing.assert_allclose(found[record.key.site], eager.array(record), rtol=1e-4, atol=1e-5)
    assert run.steps[0][0].info == eager.steps[0][0].info
    (logits,) = run.select(["lm_head:out"])
    assert logits.rows == ((11, 1),)


def test_compiled_generate_with_a_static_cache_records_the_eager_steps(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for name in ("eager", "compiled"):
        with torch.no_grad(), Dumper(model, tmp_path / name, keep="stats"):
            if name == "compiled":
                model.forward = torch.compile(model.forward, backend="eager")
            model.generate(IDS, attention_mask=torch.ones_like(IDS), cache_implementation="static", **settings)
    eager, run = open_run(tmp_path / "eager"), open_run(tmp_path / "compiled")
    phases = [run.steps[n][0].info.phase for n in sorted(run.steps)]
    assert phases == ["prefill", "decode", "decode"] == [eager.steps[n][0].info.phase for n in sorted(eager.steps)]
    for step in run.steps:
        assert run.steps[step][0].info.rows == eager.steps[step][0].info.rows
    assert [r.rows for r in run.select(["lm_head:out"])] == [r.rows for r in eager.select(["lm_head:out"])]


def test_compiled_taps_rules_triggers_and_budgets_work_in_compiled_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "keep": "off",
        "rules": ["layers.1:out[hidden]=full steps=1-2", "lm_head:out=stats", "layers.0:in[hidden]=full rows=-1:"],
        "triggers": ["lm_head:out: nan -> keep"],
    }
    model = Net().eval()
    runs = []
    for name in ("eager", "compiled"):
        with torch.no_grad(), Dumper(model, tmp_path / name, **settings):
            call = torch.compile(model, fullgraph=True) if name == "compiled" else model
            for _ in range(4):
                call(IDS)
            model.lm_head.weight.data.fill_(float("nan"))
            call(IDS)
        torch.nn.init.normal_(model.lm_head.weight)
        runs.append(open_run(tmp_path / name))
    keys = [[(r.key.site, r.key.step, r.entry is not None, r.shape) for r in run.records] for run in runs]
    assert keys[0] == keys[1]
    assert ("layers.0:in[hidden]", 0, True, (1, 8)) in keys[1]
    assert ("lm_head:out", 4, True, (1, 12, 32)) in keys[1]
    alarms = [[e.fields["site"] for e in run.events() if e.kind == "trigger"] for run in runs]
    assert alarms == [["lm_head:out"]] * 2
    with torch.no_grad(), Dumper(model, tmp_path / "budget", keep="full", max_records=7):
        torch.compile(model, fullgraph=True)(IDS)
    assert len(open_run(tmp_path / "budget").records) == 7


def test_compiled_taps_recompile_for_other_rules_only(tmp_path: Path) -> None:
    model = Net().eval()
    counts = torch._dynamo.utils.counters["frames"]  # counters of the whole process
    before = counts["ok"]
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="off", rules=["lm_head:out=full"]) as dumper:
        compiled = torch.compile(model, fullgraph=True)
        for rules in (["lm_head:out=full"], ["layers.1:out[*]=full"], [], ["lm_head:out=full"]):
            dumper.configure(rules=rules)
            compiled(IDS)
        frames = counts["ok"] - before
    assert [(r.key.step, r.key.site) for r in open_run(tmp_path / "run").records if r.entry] == [
        (0, "lm_head:out"),
        (1, "layers.1:out[hidden]"),
        (1, "layers.1:out[inner.0]"),
        (3, "lm_head:out"),
    ]
    assert frames <= 3


@pytest.mark.soak
def test_compiled_taps_do_not_change_training(tmp_path: Path) -> None:
    def train(name: str | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Net()
        compiled = torch.compile(model, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            compiled(IDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if name is None:
            for _ in range(3):
                step()
        else:
            with Dumper(model, tmp_path / name, keep="stats") as dumper:
                for _ in range(3):
                    with dumper.step():
                        step()
        return [p.detach().clone() for p in model.parameters()]

    plain, watched = train(None), train("run")
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other)
    run = complete(tmp_path / "run")
    assert {r.key.step for r in run.records if r.key.site == "layers.1.up:out"} == {0, 1, 2}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: Any = checkpoint(self.first, x, use_reentrant=False)
        return self.second(torch.relu(out))


def test_compiled_taps_activation_checkpointing_in_compiled_code_continues(tmp_path: Path) -> None:
    model = Checkpointed()
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with Dumper(model, tmp_path / "run", keep="stats") as dumper, dumper.step():
        compiled = torch.compile(model)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], expected)
    sites = {r.key.site for r in open_run(tmp_path / "run").records}
    assert {"first:out", "second:out", ":out"} <= sites


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        out: torch.Tensor = self.second(hidden)
        return out


def test_compiled_taps_graph_breaks_of_the_model_lose_nothing(tmp_path: Path) -> None:
    model = Broken()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        compiled = torch.compile(model)
        for size in (2, 3, 4):
            compiled(torch.ones(size, 8))
    run = complete(tmp_path / "run")
    sites = [":in[x]", "first:in[input]", "first:out", "second:in[input]", "second:out", ":out"]
    assert [(r.key.step, r.key.site) for r in run.records] == [(step, site) for step in range(3) for site in sites]
    assert [r.shape[0] for r in run.records if r.key.site == ":out"] == [2, 3, 4]


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.first(x)[index]


def test_compiled_call_that_raises_ends_its_step(tmp_path: Path) -> None:
    model = Raises()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        compiled = torch.compile(model, fullgraph=True)
        compiled(torch.ones(2, 8), torch.tensor([0]))
        with pytest.raises(Exception):  # noqa: B017 - inductor raises its own exception class
            compiled(torch.ones(2, 8), torch.tensor([7]))
        compiled(torch.ones(2, 8), torch.tensor([1]))
    run = open_run(tmp_path / "run")
    assert [r.key.step for r in run.records if r.key.site == "first:out"] == [0, 1, 2]


def test_compiled_taps_exported_model_has_no_operator_of_ours(tmp_path: Path) -> None:
    model = Net().eval()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        exported = torch.export.export(model, (IDS,), strict=True)
    assert "tapscope" not in str(exported.graph_module.graph)


@pytest.mark.soak
def test_compiled_code_continues_when_its_dumper_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    with torch.no_grad():
        expected = model(IDS)
        compiled = torch.compile(model, fullgraph=True)
        for name in ("one", "two"):
            with Dumper(model, tmp_path / name, keep="full"):
                torch.testing.assert_close(compiled(IDS), expected)
            torch.testing.assert_close(compiled(IDS), expected)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    check_equal(complete(tmp_path / "one"), complete(tmp_path / "two"))
