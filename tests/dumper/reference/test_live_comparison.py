"""A live model compared with a recorded run, tensor by tensor, while it runs."""

import copy
import json
import logging
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.cli import main
from tapscope.core.errors import ConfigError, RunNotFoundError
from tapscope.core.observe import RankInfo, RowSpan, StepInfo
from tapscope.dumper import Dumper
from tapscope.run_format.record import Record
from tapscope.sources import open_run

CULPRIT = "model.layers.2.mlp.down_proj"
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(model, tmp_path_factory.mktemp("reference") / "ref", keep="full")


def recorded(model: nn.Module, out: Path, *calls: torch.Tensor, **settings: Any) -> Path:
    with torch.no_grad(), Dumper(model, out, **settings):
        for ids in calls or (IDS,):
            model(ids)
    return out


def compared(model: nn.Module, out: Path, reference: Path, **settings: Any) -> Any:
    with torch.no_grad(), Dumper(model, out, against=str(reference), **({"keep": "stats"} | settings)) as dumper:
        model(IDS)
    return dumper.comparison


def spoiled(model: nn.Module, change: Callable[[torch.Tensor], Any], path: str = CULPRIT) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other.get_submodule(path).weight)
    return other


def test_against_agrees_with_itself_and_with_another_dtype(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    for name, other in (("same", model), ("bf16", copy.deepcopy(model).bfloat16())):
        found = compared(other, tmp_path / name, reference)
        assert (found.verdict, found.num_skipped, found.num_steps) == ("agrees", 0, 1)
        assert found.num_compared > 100


@pytest.mark.parametrize(
    ("change", "dtype", "test"),
    [
        (lambda w: w.mul_(1.02), torch.bfloat16, "scale"),
        (lambda w: w.mul_(1.02), torch.float32, "median_row"),
        (lambda w: w.copy_(w.flip(0)), torch.bfloat16, "median_row"),
        (lambda w: w[3].fill_(float("nan")), torch.bfloat16, "nonfinite"),
    ],
)
def test_against_names_the_first_module_and_keeps_the_rest_in_full(
    model: LlamaForCausalLM,
    reference: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[torch.Tensor], Any],
    dtype: torch.dtype,
    test: str,
) -> None:
    with caplog.at_level(logging.WARNING, "tapscope"):
        found = compared(spoiled(model, change).to(dtype), tmp_path / "run", reference)
    assert (found.first.site, found.first.test, found.verdict) == (f"{CULPRIT}:out", test, "differs")
    assert f"step 0, rank 0: first divergence from ref at {CULPRIT}:out" in caplog.text
    with open_run(tmp_path / "run") as run:
        full = [record.key.site for record in run.records if record.entry is not None]
        kinds = [event.kind for event in run.events()]
        assert full[0] == f"{CULPRIT}:out"
        assert "model.layers.3.mlp:out" in full
        assert "model.layers.1.mlp:out" not in full
        assert {"divergence", "comparison"} <= set(kinds)


def test_against_keeps_the_steps_before_with_a_flight_recorder(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    bad = spoiled(model, lambda w: w.mul_(2))
    compared(bad, tmp_path / "run", reference, keep="full", flight_recorder_steps=4)
    with open_run(tmp_path / "run") as run:
        assert {"model.embed_tokens:out", f"{CULPRIT}:out"} <= set(run.records.sites)


@pytest.mark.parametrize(("action", "num_full", "steps"), [("report", 0, [0, 1]), ("stop", 1, [0])])
def test_on_divergence_decides_what_follows(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path, action: str, num_full: int, steps: list[int]
) -> None:
    bad = spoiled(model, lambda w: w.mul_(2))
    settings: dict[str, Any] = {"against": str(reference), "on_divergence": action}
    recorded(bad, tmp_path / "run", IDS, IDS, **settings)
    with open_run(tmp_path / "run") as run:
        assert sum(record.entry is not None for record in run.records) >= num_full
        assert (sum(record.entry is not None for record in run.records) == 0) == (num_full == 0)
        assert sorted({record.key.step for record in run.records}) == steps


def test_rtol_0_finds_the_first_value_that_is_not_bit_equal(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    assert compared(model, tmp_path / "same", reference, against_rtol=0.0).verdict == "agrees"
    hashes = recorded(model, tmp_path / "hashes", keep="stats")  # hashes are enough
    bad = spoiled(model, lambda w: w[0, 0].add_(1e-3))
    for name, run in (("values", reference), ("hashes", hashes)):
        found = compared(bad, tmp_path / f"bad-{name}", run, against_rtol=0.0)
        assert (found.first.site, found.first.test) == (f"{CULPRIT}:out", "unequal")
    assert compared(bad, tmp_path / "loose", reference, against_rtol=0.5).verdict == "agrees"


def test_against_finds_rows_by_request_and_position(model: LlamaForCausalLM, reference: Path, tmp_path: Path) -> None:
    def steps(out: str, other: nn.Module, request: str) -> Any:
        with torch.no_grad(), Dumper(other, tmp_path / out, against=str(reference)) as dumper:
            cache = None
            for step, (first, count) in enumerate(((0, 7), (7, 5))):
                tokens = IDS[:, first : first + count]
                rows = (RowSpan(request, first, count, 0, 0),)
                info = StepInfo(step=step, grid=(1, count), rows=rows, token_ids=tuple(tokens[0].tolist()))
                with dumper.step_of(info):
                    cache = other(tokens, past_key_values=cache, use_cache=True).past_key_values
        return dumper.comparison

    found = steps("chunks", model, "cmpl-77")  # a server names requests differently each time
    assert (found.verdict, found.num_steps) == ("agrees", 2)
    found = steps("bad", spoiled(model, lambda w: w.mul_(1.1)), "cmpl-78")
    assert (found.first.site, found.first.request) == (f"{CULPRIT}:out", "cmpl-78")


def test_against_compares_up_to_the_token_where_a_request_forks(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    ids = IDS.clone()
    ids[0, 8:] = 99
    with torch.no_grad(), Dumper(model, tmp_path / "run", against=str(reference)) as dumper:
        model(ids)
    # The rows before the fork agree; those after it are not compared.
    assert dumper.comparison is not None
    assert dumper.comparison.verdict == "agrees"


def test_against_reports_steps_that_the_reference_does_not_have(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    with torch.no_grad(), Dumper(model, tmp_path / "run", against=str(reference)) as dumper:
        model(IDS)
        model(IDS + 100)
    found = dumper.comparison
    assert found is not None
    assert (found.verdict, found.num_steps) == ("agrees", 1)
    assert found.num_skipped > 100
    assert "compared, " in str(found)


def test_against_refuses_what_cannot_be_compared(model: LlamaForCausalLM, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError), Dumper(model, tmp_path / "run", against=str(tmp_path / "absent")):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="against_rtol=0.1: no reference run"):
        Dumper(model, tmp_path / "run", against_rtol=0.1)
    with pytest.raises(ConfigError, match="on_divergence='explode': must be one of report, keep, stop"):
        Dumper(model, tmp_path / "run", on_divergence="explode")


def test_verdict_over_http_and_metrics(
    model: LlamaForCausalLM, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = spoiled(model, lambda w: w.mul_(1.1))
    settings: dict[str, Any] = {"against": str(reference), "control": "127.0.0.1:0", "keep": "stats"}
    with torch.no_grad(), Dumper(bad, tmp_path / "run", **settings) as dumper:
        assert main(["ctl", str(dumper.http), "verdict"]) == 3
        assert json.loads(capsys.readouterr().out)["verdict"] == "unknown"
        bad(IDS)
        dumper.flush()
        assert main(["ctl", str(dumper.http), "verdict"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert answer["first_divergence"]["site"] == f"{CULPRIT}:out"
        assert answer["ranks"][0]["num_diverged_steps"] == 1
        with urllib.request.urlopen(f"http://{dumper.http}/metrics") as reply:
            assert 'tapscope_diverged_steps_total{rank="0"} 1.0' in reply.read().decode()
    with torch.no_grad(), Dumper(model, tmp_path / "plain", control="127.0.0.1:0") as dumper:
        assert main(["ctl", str(dumper.http), "verdict"]) == 2
        assert "nothing is compared: start with against=RUN" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def test_dump_against_compares_shards_with_a_reference_of_one_rank(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--prompt", "def main():", "--max-new-tokens", "3", "--dtype", "float32"]
    golden, live = str(tmp_path / "golden"), str(tmp_path / "live")
    assert main(["dump", str(llama), "-o", golden, *base]) == 0
    assert main(["dump", str(llama), "-o", live, *base, "--tp", "2", "--keep", "stats", "--against", golden]) == 0
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"time')]
    assert [one["verdict"] for one in outcomes] == ["agrees", "agrees"]
    assert all(one["num_compared"] > 100 for one in outcomes)
    with pytest.raises(ConfigError, match="recorded with tp=2, this job has one rank"):
        Dumper(nn.Linear(2, 2), tmp_path / "one", against=live).open()


def test_dump_against_exits_with_1_where_a_weight_differs(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = ["--prompt", "def main():", "--max-new-tokens", "2", "--dtype", "float32"]
    golden, changed = str(tmp_path / "golden"), tmp_path / "changed"
    assert main(["dump", str(llama), "-o", golden, *base]) == 0
    changed.mkdir()
    for file in llama.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = load_file(changed / "model.safetensors")
    name = next(key for key in weights if key.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] = weights[name] * 1.05
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    live = str(tmp_path / "live")
    assert main(["dump", str(changed), "-o", live, *base, "--keep", "stats", "--against", golden]) == 1
    with open_run(live) as run:
        (found,) = [event.fields for event in run.events() if event.kind == "divergence" and event.fields["step"] == 0]
    assert found["site"].startswith("model.layers.1.mlp.down_proj")


def test_rank_info_of_another_mesh_is_refused(reference: Path) -> None:
    from tapscope.dumper.reference.live_comparison import LiveComparison

    info = RankInfo(rank=1, world_size=2, mesh={"tp": 2}, coords={"tp": 1})
    assert LiveComparison.open(reference, info).verdict == "unknown"  # shards of a whole reference


def test_against_compares_equal_bytes_with_each_value_of_the_reference(tmp_path: Path) -> None:
    """The same bytes leave a module that came in; the reference has others there."""

    class Doubled(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(0))
    for keep in ("full", "stats", "sketch"):
        reference = recorded(nn.Sequential(nn.Identity(), Doubled()), tmp_path / f"ref-{keep}", x, keep="full")
        model = nn.Sequential(nn.Identity(), nn.Identity())
        with Dumper(model, tmp_path / keep, against=str(reference), keep=keep) as dumper:
            model(x)
        assert dumper.comparison is not None
        assert dumper.comparison.first is not None
        assert dumper.comparison.first.site == "1:out"
        with open_run(tmp_path / keep) as run:
            assert next(one for one in run.records if one.key.site == "1:out").entry is not None, keep


def test_against_a_reference_that_ends_earlier_compares_what_it_has(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    reference = recorded(model, tmp_path / "ref", x, x, keep="full")
    with Dumper(model, tmp_path / "run", against=str(reference), keep="stats") as dumper:
        for _ in range(4):
            model(x)
    found = dumper.comparison
    assert found is not None
    assert (found.verdict, found.num_steps) == ("agrees", 2)
    assert found.num_skipped == found.num_compared > 0
    assert str(found).endswith(f"{found.num_skipped} not: the reference ends after step 1)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_steps_through_the_native_writer_are_compared_and_recorded_alike(
    model: LlamaForCausalLM, tmp_path: Path, dtype: torch.dtype
) -> None:
    """From the second step on, hooks pass full values to the native writer: it must miss none, and write the same."""
    ids = torch.arange(96)[None]  # long enough for values that are looked up by address
    reference = recorded(model, tmp_path / "whole", ids, ids, ids, keep="full")
    weights = copy.deepcopy(model).to(dtype)
    plain = recorded(weights, tmp_path / "plain", ids, ids, ids, keep="full")
    with Dumper(weights, tmp_path / "compared", keep="full", against=str(reference)) as dumper:
        counts = list[int]()
        for step in range(3):
            if step == 2:
                weights.get_submodule(CULPRIT).weight.data.mul_(2)
            with torch.no_grad(), dumper.step():
                weights(ids)
            assert dumper.comparison is not None
            counts.append(dumper.comparison.num_compared)
    assert counts[0] > 100
    assert counts[1] == 2 * counts[0]
    assert 0 < counts[2] - counts[1] < counts[0]  # up to the first divergence
    first = dumper.comparison.first
    assert first is not None
    assert (first.step, first.site) == (2, f"{CULPRIT}:out")
    with open_run(plain) as one, open_run(tmp_path / "compared") as other:
        before, after = ([record for record in run.records if record.key.step < 2] for run in (one, other))
        assert [_content(record) for record in before] == [_content(record) for record in after]
        # Equal bytes are stored once, compared or not.
        assert len({record.entry for record in before}) == len({record.entry for record in after}) < len(before)


def _content(record: Record) -> tuple[Any, ...]:
    return record.key, record.dtype, record.shape, record.stats, record.hash
