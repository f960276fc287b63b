"""Directories of SGLang's dumper are runs: on either side of a comparison, to look at, and as bad as they come."""

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from compare_runs import diff
from sglang_dumps import SglangDump, serve_llama

from tapscope import Dumper, cli
from tapscope.core.errors import RunCorruptError, RunNotFoundError
from tapscope.sglang.filenames import site_of
from tapscope.sources import open_run

PROMPTS = {"0": list(range(3, 20)), "1": list(range(40, 49))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(make_llama(tmp_path_factory.mktemp("model"))).eval()


@pytest.fixture(scope="module")
def base(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "hf"
    length = max(map(len, PROMPTS.values()))
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids in PROMPTS.values()])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in PROMPTS.values()])
    with Dumper(model, path, keep="full"), torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    return path


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_sglang_chunked_serving_agrees_with_a_padded_forward(
    model: Any, base: Path, tmp_path: Path, tp: int, swapped: bool
) -> None:
    dump = serve_llama(model, tmp_path / "dump", PROMPTS, tp=tp, cuts=(6, 15, 16))
    report = diff(dump, base) if swapped else diff(base, dump)
    assert report.num_bad == 0, [f.notes for f in report.findings if f.verdict.is_bad]
    assert report.coverage.num_rows_aligned == 26
    sides = {(f.baseline, f.target)[swapped] for f in report.findings if not f.verdict.is_orphan}
    matched = {side.site for side in sides if side is not None}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        assert f"model.layers.1.{name}:out" in matched
    assert "model.layers.1:out" in matched  # hidden state and residual, added up


@pytest.mark.parametrize("tp", [1, 2])
def test_sglang_bug_in_one_projection_is_named(model: Any, base: Path, tmp_path: Path, tp: int) -> None:
    def bug(name: str, value: torch.Tensor) -> torch.Tensor:
        return value * 1.1 if name == "model.layers.1.self_attn.v_proj" else value

    report = diff(base, serve_llama(model, tmp_path / "dump", PROMPTS, tp=tp, cuts=(6,), bug=bug))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.self_attn.v_proj"


def test_sglang_fused_shards_without_dims_suggest_dims(
    model: Any, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = serve_llama(model, tmp_path / "dump", PROMPTS, tp=2, annotate=False)
    notes = [note for f in diff(base, dump).findings for note in f.notes if "would fit" in note]
    told = sorted({part for note in notes for part in re.findall(r"--dims '([^']+)'", note)})
    assert [text.partition("=")[0].rpartition(".")[2] for text in told] == ["gate_up_proj:out", "qkv_proj:out"]
    assert cli.main(["diff", str(base), str(dump)]) == 1
    reasons = [line for line in capsys.readouterr().out.splitlines() if "more sites: ranks 0-1 hold different" in line]
    assert len(reasons) == 2  # each said once, not once a site
    assert cli.main(["diff", str(base), str(dump), *(word for text in told for word in ("--dims", text))]) == 0
    assert "agrees" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tags", "site"),
    [
        ("non_intrusive__model.layers.3.mlp.output", {}, "model.layers.3.mlp:out"),
        ("non_intrusive__model.layers.3.output.1", {"layer_id": 3}, "model.layers.3:out[1]"),
        ("non_intrusive__model.layers.0.mlp.inputs.0", {}, "model.layers.0.mlp:in[args.0]"),
        ("non_intrusive__model.norm.inputs.hidden_states", {}, "model.norm:in[hidden_states]"),
        ("non_intrusive__inputs.0", {}, ":in[args.0]"),
        ("non_intrusive__output.next_token_logits", {}, ":out[next_token_logits]"),
        ("non_intrusive__bert.layer.0.output.output", {}, "bert.layer.0.output:out"),
        ("non_intrusive__bert.layer.0.output.dense.inputs.0", {}, "bert.layer.0.output.dense:in[args.0]"),
        ("input_ids", {}, ":in[input_ids]"),
        ("grad__non_intrusive__model.norm.output", {}, "model.norm:out.grad"),
        ("param__model.norm.weight", {}, "model.norm:param[weight]"),
        ("grad__param__model.norm.weight", {}, "model.norm:param[weight].grad"),
        ("attn_out", {"layer_id": 5}, "layers.5:tap[attn_out]"),
        ("a[0]:b\n", {}, ":tap[a(0);b?]"),
    ],
)
def test_sglang_names_are_sites(name: str, tags: dict[str, Any], site: str) -> None:
    assert site_of(name, tags) == site


def test_sglang_dump_is_read(tmp_path: Path) -> None:
    dump = SglangDump(tmp_path / "dump", tp=2)
    dump.step(input_ids=[5, 6, 7], positions=[0, 1, 2], rids=["x"])
    whole = torch.arange(24.0).reshape(4, 6)
    dump.dump("t", {0: whole.T, 1: whole[:, ::2]}, dims="a b", layer_id=2, note="mine")
    dump.dump("t", {0: whole.bfloat16(), 1: whole.bfloat16()}, layer_id=2)
    dump.dump("pair", [whole, {"a": whole[1], "b": 3}])
    dump.dump("scales", [0.5, 2])
    with open_run(tmp_path / "dump") as run:
        assert (run.mesh, run.coords(1), run.world_size) == ({"tp": 2, "attn_tp": 2}, {"tp": 1, "attn_tp": 1}, 2)
        assert run.manifest["framework"] == "sglang"
        first, second = run.select(["layers.2:tap*"], ranks=[0])
        assert torch.equal(torch.from_numpy(run.array(first).copy()), whole.T)
        assert (first.dims, first.tags, second.key.occurrence, second.dtype) == ("a b", {"note": "mine"}, 1, "bfloat16")
        (odd,) = [r for r in run.select(["layers.2:tap*"], ranks=[1]) if r.key.occurrence == 0]
        assert torch.equal(torch.from_numpy(run.array(odd).copy()), whole[:, ::2])
        inner = {r.key.site for r in run.select([":tap[pair*"])}
        assert inner == {":tap[pair.0]", ":tap[pair.1.a]", ":tap[pair.1.b]"}
        (rids,) = run.select([":in[rids]"], ranks=[0])
        assert rids.value == {"type": "list", "value": ["x"]}
        (scales,) = run.select([":tap[scales]"], ranks=[0])
        assert scales.value == {"type": "list", "value": ["0.5", 2]}  # as the dumper writes them
        assert run.ledger().complete
        assert "keeps no account" in run.ledger().unknown[0]


def test_sglang_commands_accept_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = SglangDump(tmp_path / "dumps" / "one")
    dump.step(input_ids=[5, 6])
    dump.dump("t", torch.tensor([[1.0, float("nan")]]), dims="t h")
    path = str(tmp_path / "dumps")  # the only dump in it
    assert cli.main(["info", path]) == 1
    assert "1 nan" in capsys.readouterr().out
    assert cli.main(["ls", path]) == 0
    assert "1.0e+00" in capsys.readouterr().out
    assert cli.main(["show", path, ":tap[t]"]) == 0
    assert cli.main(["diff", path, path]) == 0
    for verb in ("compact", "repair"):
        assert cli.main([verb, str(tmp_path / "dumps" / "one")]) == 3
        assert "can be looked at and compared, but not changed" in capsys.readouterr().err
    SglangDump(tmp_path / "dumps" / "two").dump("t", torch.ones(1))
    with pytest.raises(RunNotFoundError, match=r"holds 2 SGLang dumps \(one, two\); give one of them"):
        open_run(path)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_sglang_unreadable_files_are_reported_and_the_rest_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dump = SglangDump(tmp_path / "dump")
    dump.step()
    dump.dump("good", torch.ones(4))
    dump.dump("cut", torch.ones(4000))
    shutil.copytree(tmp_path / "dump", tmp_path / "whole")
    dump.dump("bomb", _Bomb())
    (cut,) = (tmp_path / "dump").glob("*name=cut*")
    cut.write_bytes(cut.read_bytes()[:5000])
    report = diff(tmp_path / "whole", tmp_path / "dump")
    assert report.num_bad == 0
    assert report.exit_code == 3
    assert report.coverage.damaged == report.coverage.partial[:1]
    assert "dump is damaged, 2 files left out" in report.coverage.damaged[0]
    said = " ".join(report.coverage.partial)
    (bomb,) = (tmp_path / "dump").glob("*name=bomb*")
    assert [said.count(file.name) for file in (cut, bomb)] == [1, 1]
    assert "asks for posix.system" in said
    assert "cut off or damaged" in said
    assert not (tmp_path / "executed").exists()
    for file in (tmp_path / "dump").glob("*good*"):
        file.unlink()
    with pytest.raises(RunCorruptError, match="SGLang dump without a readable value"):
        open_run(tmp_path / "dump")


def test_sglang_files_of_two_processes_and_a_stopped_rank_are_reported(tmp_path: Path) -> None:
    def dumped(name: str) -> SglangDump:
        dump = SglangDump(tmp_path / name, tp=2)
        dump.step()
        for site in ("one", "two", "three"):
            dump.dump(site, torch.ones(4), dims="h # tp:replicated")
        return dump

    whole, stopped = dumped("whole").folder, dumped("stopped").folder
    (last,) = stopped.glob("*rank=1*name=three*")
    last.unlink()
    told = "rank 1 has the first 2 of the 3 values of rank 0 in step 0: it may have been stopped"
    assert any(told in sentence for sentence in diff(whole, stopped).coverage.warnings)
    assert not any("stopped" in sentence for sentence in diff(whole, whole).coverage.warnings)
    again = dumped("mixed")
    again._index = dict.fromkeys(range(2), 0)  # as after reset()
    again.dump("other", torch.ones(4))
    report = diff(whole, again.folder)
    assert report.exit_code == 1
    (said, _) = (sentence for sentence in report.coverage.partial if "two processes, or one after reset()" in sentence)
    assert "rank 0" in said
    assert "1 file with the dump_index of another" in said
    assert "name=one" in said
    assert "name=other" in said


def test_sglang_plain_values_are_compared_on_every_rank(tmp_path: Path) -> None:
    def dumped(name: str, *values: int) -> Path:
        dump = SglangDump(tmp_path / name, tp=len(values))
        dump.step()
        dump.dump("topk", dict(enumerate(values)))
        dump.dump("x", torch.ones(4), dims="h # tp:replicated")
        return dump.folder

    base = dumped("base", 8, 8)
    assert diff(base, dumped("same", 8, 8)).exit_code == 0
    divergence = diff(base, dumped("odd", 8, 6)).first_divergence
    assert divergence is not None
    assert divergence.place is not None
    assert (divergence.site, divergence.place.rank) == (":tap[topk]", 1)
    report = diff(dumped("one", 8), tmp_path / "odd")  # no rank of the baseline corresponds to rank 1
    assert report.exit_code == 0
    assert any("8 on rank 0, 6 on rank 1" in sentence for sentence in report.coverage.warnings)


def test_sglang_dumps_of_arguments_alone_do_not_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        SglangDump(tmp_path / name).step(input_ids=[5, 6], positions=[0, 1], seq_lens=[2], rids=["r"])
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 1
    assert sum("DUMPER_NON_INTRUSIVE_MODE=all" in sentence for sentence in report.coverage.partial) == 2
    assert cli.main(["info", str(tmp_path / "a")]) == 1
    assert "it holds only arguments of the model" in capsys.readouterr().out


def test_sglang_cached_prefix_is_named(tmp_path: Path) -> None:
    def dumped(folder: Path, first: int) -> Path:
        dump = SglangDump(folder)
        ids = torch.arange(first, 12)
        dump.step(input_ids=ids, positions=ids, seq_lens=[12], rids=["r"])
        dump.hook("model.norm", output=ids[:, None] * torch.ones(4))
        return folder

    base, late = dumped(tmp_path / "base", 0), dumped(tmp_path / "late", 5)
    (sentence,) = diff(base, late).coverage.partial
    assert "5 token rows of base were never computed by late (request r begins at position 5 there" in sentence


@pytest.mark.parametrize("names", [{}, {"rids": ["a"]}, {"req_pool_indices": [7]}])
def test_sglang_growing_prompt_without_ids_suggests_a_remedy(tmp_path: Path, names: dict[str, Any]) -> None:
    def dumped(folder: Path, lengths: tuple[int, ...]) -> Path:
        dump = SglangDump(folder)
        for n in lengths:
            dump.step(input_ids=list(range(n)), positions=list(range(n)), seq_lens=[n], **names)
            dump.hook("model.norm", output=torch.arange(n * 4.0).reshape(n, 4))
        return folder

    report = diff(dumped(tmp_path / "once", (7,)), dumped(tmp_path / "grows", (5, 6, 7)))
    said = [sentence for sentence in report.coverage.partial if "record rids or req_pool_indices" in sentence]
    assert len(said) == (not names)
    assert all("requests 0, 1 are only in grows; request 0 is the beginning of request 1" in one for one in said)
    assert (report.num_bad, report.exit_code) == (0, int(not names))


def served(folder: Path, order: str, *, cuts: tuple[int, ...] = (7,), scale: float = 1.0, name: str = "") -> Path:
    """A dump of two requests, packed in this order; slots and ids are the server's. ``scale``: of the logits."""
    lengths = {"a": 12, "b": 9}
    dump = SglangDump(folder)
    for first, last in pairwise([0, *cuts, 12]):
        here = {r: range(first, min(last, lengths[r])) for r in order if lengths[r] > first}
        ids = torch.tensor([ord(r) + 3 * i for r, rows in here.items() for i in rows])
        dump.step(
            input_ids=ids,
            positions=[i for rows in here.values() for i in rows],
            seq_lens=[rows.stop for rows in here.values()],
            req_pool_indices=[len(name) + i for i in range(len(here))],
            rids=[name + r for r in here],
        )
        values = torch.sin(ids[:, None] * torch.arange(1.0, 9.0) * 0.37)
        dump.hook("model.norm", output=values)
        ends = torch.tensor([len(rows) for rows in here.values()]).cumsum(0) - 1
        dump.hook("logits_processor", output=None)
        dump.dump("non_intrusive__logits_processor.output.next_token_logits", scale * values[ends].repeat(1, 4))
    return folder


@pytest.mark.parametrize(("order", "cuts"), [("ab", (7,)), ("ba", (7,)), ("ba", (3, 8, 11))])
def test_sglang_two_servings_agree_whatever_the_ids_slots_and_batches(
    tmp_path: Path, order: str, cuts: tuple[int, ...]
) -> None:
    base = served(tmp_path / "base", "ab", name="first-")
    report = diff(base, served(tmp_path / "again", order, cuts=cuts, name="second-run-"))
    assert (report.num_bad, report.exit_code) == (0, 0)
    compared = {f.site for f in report.findings if not f.verdict.is_orphan}
    assert compared >= {"model.norm:out", "logits_processor:out[next_token_logits]"}
    assert not compared & {":in[rids]", ":in[req_pool_indices]"}
    report = diff(base, served(tmp_path / "bug", order, cuts=cuts, name="x-", scale=1.05))
    assert report.first_divergence is not None
    assert report.first_divergence.site == "logits_processor:out[next_token_logits]"
    place = report.first_divergence.place
    assert place is not None
    assert place.request is not None


def served_dp(folder: Path, shares: list[str], *, tp: int = 1, bug: str = "", dims: bool = True) -> Path:
    """Two requests, each on the data-parallel ranks whose share names it; ``bug``: a module that is off by 5 %.

    Attention has the rows of its own ranks, and its heads are sharded; experts have the rows of all ranks.
    """
    lengths = {"a": 12, "b": 9}
    dump = SglangDump(folder, tp=tp, dp=len(shares))
    share_of = [shares[rank * len(shares) // tp] for rank in range(tp)]

    def scaled(name: str, values: torch.Tensor) -> torch.Tensor:
        return values * 1.05 if name == bug else values

    for first, last in ((0, 7), (7, 12)):
        ids = {r: torch.arange(first, min(last, n)) * 3 + ord(r) for r, n in lengths.items() if n > first}
        own = [[r for r in share if r in ids] for share in share_of]
        none = torch.zeros(0, dtype=torch.int64)
        tokens = [torch.cat([none, *(ids[r] for r in mine)]) for mine in own]
        dump.step(
            input_ids=dict(enumerate(tokens)),
            positions={i: torch.cat([none, *(ids[r] // 3 - ord(r) // 3 for r in mine)]) for i, mine in enumerate(own)},
            seq_lens={i: torch.tensor([first + len(ids[r]) for r in mine]).long() for i, mine in enumerate(own)},
            rids=dict(enumerate(own)),
        )
        everything = torch.cat([ids[r] for share in dict.fromkeys(share_of) for r in share if r in ids])
        width = torch.arange(1.0, 9.0)
        heads = {i: torch.sin(part[:, None] * width * 0.2) for i, part in enumerate(tokens)}
        per_group = tp // len(shares)
        heads = {i: part.chunk(per_group, dim=-1)[i % per_group] for i, part in heads.items()}
        attention = {i: scaled("attention", torch.sin(part[:, None] * width * 0.37)) for i, part in enumerate(tokens)}
        experts = scaled("experts", torch.cos(everything[:, None] * width * 0.37))
        halves = dict(enumerate([experts / 4, experts / 4, experts / 3, experts / 6] if tp == 4 else [experts]))
        norm = {i: torch.sin(part[:, None] * width * 0.3) for i, part in enumerate(tokens)}
        dump.hook("model.layers.0.input_layernorm", output=norm, layer_id=0)
        dump.hook("model.layers.0.self_attn.attn", output=heads, dims="t h[attn_tp]" if dims else None, layer_id=0)
        dump.hook("model.layers.0.self_attn.o_proj", output=attention, layer_id=0)
        dump.dump("router", torch.sin(everything[:, None] * width * 0.5), layer_id=0)
        dump.dump("experts", halves, dims="t h[tp:partial]", layer_id=0)
    return folder


@pytest.mark.parametrize("shares", [["a", "b"], ["ab", ""], ["", "ab"], ["b", "a"]])
def test_sglang_data_parallel_attention_agrees_with_one_rank(tmp_path: Path, shares: list[str]) -> None:
    base = served_dp(tmp_path / "base", ["ab"])
    report = diff(base, served_dp(tmp_path / "dp", shares, tp=4))
    assert (report.num_bad, report.exit_code) == (0, 0), [f.notes for f in report.findings if f.verdict.is_bad]
    compared = {f.site: f for f in report.findings if not f.verdict.is_orphan}
    assert compared.keys() >= {"layers.0:tap[router]", "layers.0:tap[experts]", "model.layers.0.self_attn.o_proj:out"}
    assert compared["layers.0:tap[router]"].rows.num_compared == 21
    for module, site in (("attention", "model.layers.0.self_attn.o_proj:out"), ("experts", "layers.0:tap[experts]")):
        report = diff(base, served_dp(tmp_path / module, shares, tp=4, bug=module))
        assert report.first_divergence is not None
        assert report.first_divergence.site == site


@pytest.mark.parametrize("shares", [["a", "b"], ["ab", ""], ["", "ab"]])
def test_sglang_data_parallel_shards_suggest_the_axis_within_a_group(tmp_path: Path, shares: list[str]) -> None:
    base = served_dp(tmp_path / "base", ["ab"])
    report = diff(base, served_dp(tmp_path / "dp", shares, tp=4, dims=False))
    (bad,) = [f for f in report.findings if f.verdict.is_bad]
    assert "annotate e.g. 't h[attn_tp]'" in bad.notes[0]
    assert "'t h[attn_tp]' would fit (equal values)" in bad.notes[0]
    wrong = served_dp(tmp_path / "wrong", shares, tp=4, dims=False, bug="attention")
    divergence = diff(base, wrong).first_divergence
    assert divergence is not None
    assert (divergence.module, divergence.is_certain) == ("model.layers.0.self_attn.o_proj", False)
    assert divergence.evidence.endswith("self_attn.attn:out upstream of it was recorded but not compared")
    assert "inputs was" not in divergence.evidence


def test_sglang_logits_match_the_last_rows_of_a_reference(model: Any, base: Path, tmp_path: Path) -> None:
    def folder_of(name: str, scale: float) -> Path:
        dump = serve_llama(model, tmp_path / name, {"0": PROMPTS["0"]}, cuts=(6, 16))
        (file,) = dump.glob("step=0*next_token_logits*")
        content = torch.load(file)
        torch.save(content | {"value": content["value"] * scale}, file)
        for old in dump.glob("*name=non_intrusive__output*"):
            old.rename(old.with_name(old.name.replace("__output", "__logits_processor.output")))
        for new in dump.glob("*logits_processor*"):
            content = torch.load(new)
            content["meta"]["name"] = "non_intrusive__logits_processor.output.next_token_logits"
            torch.save(content, new)
        return dump

    finding = next(f for f in diff(base, folder_of("good", 1.0)).findings if f.site == "lm_head:out")
    assert not finding.verdict.is_bad
    finding = next(f for f in diff(base, folder_of("bad", 1.05)).findings if f.site == "lm_head:out")
    assert finding.verdict.is_bad
    assert finding.worst is not None
    assert (finding.worst.position, finding.worst.step) == (5, 0)
