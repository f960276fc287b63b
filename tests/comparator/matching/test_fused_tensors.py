"""Fused tensors meet their parts, whatever the order, the ranks and the side; what is not known is said."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import Report, Verdict
from tapscope.comparator.assembly.materialise import materialise
from tapscope.comparator.assembly.read import read
from tapscope.comparator.options.map_file import read_maps
from tapscope.comparator.runs.derived_tensor import FusedLayout, FusedPart
from tapscope.comparator.runs.mesh_coords import mesh_coords_of
from tapscope.comparator.runs.series import derived_series, series_of
from tapscope.core.observe import RowSpan
from tapscope.sources import open_run

Array = np.ndarray[Any, Any]
TOKENS, WIDTH = 5, 6
HF = "model.layers.1.self_attn"
MEGATRON = "decoder.layers.1.self_attention.linear_qkv"


@dataclass(frozen=True)
class Heads:
    """q, k and v of one attention, as [features, tokens] so that a weight, a bias and an output are alike."""

    num: int
    num_kv: int
    dim: int

    def values(self, seed: int = 0, columns: int = TOKENS) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        sizes = {"q": self.num * self.dim, "k": self.num_kv * self.dim, "v": self.num_kv * self.dim}
        return {n: rng.standard_normal((size, columns)).astype(np.float32) for n, size in sizes.items()}

    @property
    def config(self) -> dict[str, int]:
        return {"num_attention_heads": self.num, "num_key_value_heads": self.num_kv, "head_dim": self.dim}


def plain(values: Mapping[str, Array], tp: int) -> list[Array]:
    """[q_r | k_r | v_r] on every rank, a key/value head on several where ranks outnumber them."""
    shards = []
    for rank in range(tp):
        parts = []
        for part in values.values():
            parts.append(np.split(part, tp)[rank])
        shards.append(np.concatenate(parts))
    return shards


def copied(values: Mapping[str, Array], tp: int, heads: Heads) -> list[Array]:
    """As vLLM has it where ranks outnumber key/value heads: neighbours hold the same head."""
    copies = tp // heads.num_kv
    q = np.split(values["q"], tp)
    k, v = (np.split(values[n], heads.num_kv) for n in "kv")
    return [np.concatenate([q[r], k[r // copies], v[r // copies]]) for r in range(tp)]


def grouped(values: Mapping[str, Array], tp: int, heads: Heads) -> list[Array]:
    """Group by group, in whole groups to the ranks."""
    split = [np.split(part, heads.num_kv) for part in values.values()]
    return np.split(np.concatenate([np.concatenate(group) for group in zip(*split, strict=True)]), tp)


def write(path: Path, tp: int, sites: Mapping[str, Any], keep: str = "full", **manifest: Any) -> Path:
    """``sites``: site -> one [features, columns] array a rank; outputs are turned to [tokens, features]."""
    with RunFactory(path, mesh={"tp": tp} if tp > 1 else {}, **manifest) as run:
        run.step(grid=(TOKENS,), rows=[RowSpan("a", 0, TOKENS, 0, 0)], token_ids=range(TOKENS))
        for site, shards in sites.items():
            if ":param[bias]" in site:
                arrays, dims = {r: s[:, 0] for r, s in enumerate(shards)}, "h[tp]"
            elif ":param[" in site:
                arrays, dims = dict(enumerate(shards)), "h[tp] c"
            else:
                arrays, dims = {r: s.T for r, s in enumerate(shards)}, "t h[tp]"
            run.put(site, arrays, dims=dims if tp > 1 else None, keep=keep)
    return path


def parts(values: Mapping[str, Array], tp: int = 1, port: str = "out") -> dict[str, list[Array]]:
    return {f"{HF}.{n}_proj:{port}": np.split(part, tp) for n, part in values.items()}


def verdicts(report: Report) -> dict[str, str]:
    return {f.site: str(f.verdict) for f in report.findings}


HEADS = st.builds(lambda kv, ratio, dim: Heads(kv * ratio, kv, dim), *(st.sampled_from([1, 2, 4]) for _ in "krd"))


@settings(max_examples=30)
@given(heads=HEADS, tp=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])), data=st.data())
def test_fused_tensors_match_parts_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, heads: Heads, tp: tuple[int, int], data: st.DataObject
) -> None:
    tp = (min(tp[0], heads.num_kv), min(tp[1], heads.num_kv))
    how = data.draw(st.sampled_from(["plain", "grouped"]))
    port = data.draw(st.sampled_from(["out", "param[weight]", "param[bias]"]))
    turned, damaged = data.draw(st.booleans()), data.draw(st.sampled_from(["", "q", "k", "v"]))
    root = tmp_path_factory.mktemp("fused")
    values = heads.values()
    other = dict(values)
    if damaged:
        other[damaged] = -values[damaged]
    shards = plain(other, tp[1]) if how == "plain" else grouped(other, tp[1], heads)
    name = f"{HF}.qkv_proj" if how == "plain" else MEGATRON
    one = write(root / "parts", tp[0], parts(values, tp[0], port), model_config=heads.config)
    two = write(root / "fused", tp[1], {f"{name}:{port}": shards})
    report = diff(two, one) if turned else diff(one, two)
    expected = {f"{n}_proj": "differs" if n == damaged else "same" for n in "qkv"}
    found = {next(p for p in expected if p in f.site): str(f.verdict) for f in report.findings}
    assert found == expected, verdicts(report)
    assert len({f.site for f in report.findings}) == 3
    assert {f.matched_by.partition(" (")[0] for f in report.findings} == {"fused qkv"}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4), groups=st.integers(1, 4), seed=st.integers(0, 9))
def test_fused_tensors_joined_after_splitting_restore_the_plain_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], groups: int, seed: int
) -> None:
    values = [np.random.default_rng([seed, i]).standard_normal((n * groups, 3)) for i, n in enumerate(sizes)]
    fused = np.concatenate([np.concatenate(g) for g in zip(*(np.split(v, groups) for v in values), strict=True)])
    names = tuple(f"p{i}" for i in range(len(sizes)))
    anatomy = FusedLayout(names, 0, tuple(len(v) for v in values), groups)
    root = tmp_path_factory.mktemp("joined")
    with RunFactory(root / "run") as run:
        run.step()
        run.put("a:param[w]", fused)
    with open_run(root / "run") as opened:
        (source,) = series_of(opened, opened.records)
        for index, part in enumerate([*values, np.concatenate(values)]):
            recipe = FusedPart(anatomy, index if index < len(values) else None)
            (whole,) = materialise(opened, mesh_coords_of(opened), derived_series("a", recipe, (source,)))
            assert whole.piece is not None
            np.testing.assert_array_equal(read(whole.piece, opened), part)


def test_fused_tensors_of_the_baseline_name_parts_as_ports(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    fused = {
        f"{MEGATRON}:in[input_]": [heads.values(1)["k"]],
        f"{MEGATRON}:out[0]": grouped(values, 1, heads),
        f"{MEGATRON}:param[weight]": grouped(values, 1, heads),
    }
    inputs = {f"{HF}.{n}_proj:in[input]": [heads.values(1)["k"]] for n in "qkv"}
    unfused = inputs | parts(values) | parts(values, port="param[weight]")
    report = diff(
        write(tmp_path / "b", 1, fused, model_config=heads.config), write(tmp_path / "t", 1, unfused), sites=("*",)
    )
    assert verdicts(report) == {
        f"{MEGATRON}:{port}": "same"
        for n in "qkv"
        for port in (f"in[{n}_proj]", f"out[{n}_proj]", f"param[weight.{n}_proj]")
    }
    assert {f.matched_by for f in report.findings} == {"fused input", "fused qkv (grouped)"}
    assert {f.baseline.site for f in report.findings if f.baseline} == set(fused)


@pytest.mark.parametrize("turned", [False, True])
def test_fused_tensors_of_different_orders_match_part_by_part(tmp_path: Path, turned: bool) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    one = write(tmp_path / "a", 2, {f"{HF}.qkv_proj:out": plain(values, 2)}, model_config=heads.config)
    two = write(tmp_path / "b", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)})
    report = diff(two, one) if turned else diff(one, two)
    name = f"{MEGATRON}:out" if turned else f"{HF}.qkv_proj:out"
    assert verdicts(report) == {f"{name}[{n}_proj]": "same" for n in "qkv"}
    assert all("plain" in f.matched_by and "grouped" in f.matched_by for f in report.findings)


def test_fused_tensors_of_different_tp_sizes_match_part_by_part(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    gate, up = np.split(heads.values(3)["q"], 2)
    runs = []
    for tp in (1, 2):
        sites = {
            f"{HF}.qkv_proj:out": plain(values, tp),
            "model.layers.1.mlp.gate_up_proj:out": plain({"g": gate, "u": up}, tp),
        }
        runs.append(write(tmp_path / str(tp), tp, sites, model_config=heads.config | {"intermediate_size": len(gate)}))
    report = diff(*runs)
    assert set(verdicts(report).values()) == {"same"}
    assert len(report.findings) == 5
    same = diff(runs[1], runs[1])
    assert [f.matched_by for f in same.findings] == ["exact", "exact"]


def test_fused_tensors_linear_without_a_gate_is_one_tensor(tmp_path: Path) -> None:
    whole = Heads(4, 2, 4).values()["q"]
    runs = [
        write(
            tmp_path / str(tp),
            tp,
            {"decoder.layers.0.mlp.linear_fc1:out[0]": np.split(whole, tp)},
            model_config={"intermediate_size": len(whole)},
        )
        for tp in (1, 2)
    ]
    assert verdicts(diff(*runs)) == {"decoder.layers.0.mlp.linear_fc1:out[0]": "same"}


def test_fused_tensors_replicated_key_heads_count_once(tmp_path: Path) -> None:
    heads = Heads(8, 2, 4)
    values = heads.values()
    one = write(tmp_path / "b", 1, parts(values), model_config=heads.config)
    two = write(tmp_path / "t", 4, {f"{HF}.qkv_proj:out": copied(values, 4, heads)}, model_config=heads.config)
    assert verdicts(diff(one, two)) == {f"{HF}.{n}_proj:out": "same" for n in "qkv"}
    odd = copied(values, 4, heads)
    odd[3][-1] += 1
    two = write(tmp_path / "o", 4, {f"{HF}.qkv_proj:out": odd}, model_config=heads.config)
    assert verdicts(diff(one, two))[f"{HF}.v_proj:out"] == "differs"


@pytest.mark.parametrize("how", ["plain", "grouped"])
def test_fused_tensors_rank_of_a_bad_part_is_named(tmp_path: Path, how: str) -> None:
    heads = Heads(8, 4, 4)
    values = heads.values()
    shards = plain(values, 2) if how == "plain" else grouped(values, 2, heads)
    shards[1][-1] += 1
    one = write(tmp_path / "b", 1, parts(values), model_config=heads.config)
    name = f"{HF}.qkv_proj:out" if how == "plain" else f"{MEGATRON}:out[0]"
    report = diff(one, write(tmp_path / "t", 2, {name: shards}))
    (finding,) = [f for f in report.findings if f.verdict.is_bad]
    assert finding.site == f"{HF}.v_proj:out"
    assert finding.worst is not None
    assert (finding.worst.rank, finding.worst.index) == (1, (15,))


@pytest.mark.parametrize("swap", ["q and k", "gate and up"])
def test_fused_tensors_wrong_order_differs(tmp_path: Path, swap: str) -> None:
    heads = Heads(4, 4, 4)
    values = heads.values()
    if swap == "q and k":
        fused = {f"{HF}.qkv_proj:out": plain({"k": values["k"], "q": values["q"], "v": values["v"]}, 1)}
        one = write(tmp_path / "b", 1, parts(values), model_config=heads.config)
    else:
        fused = {"layers.1.mlp.gate_up_proj:out": plain({"u": values["k"], "g": values["q"]}, 1)}
        names = {"gate_proj": values["q"], "up_proj": values["k"]}
        one = write(tmp_path / "b", 1, {f"model.layers.1.mlp.{n}:out": [v] for n, v in names.items()})
    report = diff(one, write(tmp_path / "t", 1, fused))
    assert [f.verdict for f in report.findings].count(Verdict.DIFFERS) == 2


def test_fused_tensors_unknown_head_count_is_reported_and_set_by_a_map(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    extra = {"norm:out": [values["q"]]}
    one = write(tmp_path / "b", 1, parts(values) | extra)
    two = write(tmp_path / "t", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)} | extra)
    report = diff(one, two)
    assert report.exit_code == 1
    shaped = [f for f in report.findings if f.verdict is Verdict.SHAPE]
    assert len(shaped) == 3
    assert "the number of heads is unknown" in shaped[0].notes[0]
    assert "heads: [" in shaped[0].notes[0]
    text = "split: {'layers.*.self_attention.linear_qkv': {into: [%s], order: grouped, heads: [%d, %d]}}"
    into = ", ".join(f"layers.*.self_attn.{n}_proj" for n in "qkv")
    for counts, expected in (((4, 2), {"same"}), ((4, 4), {"same", "shape"}), ((2, 1), {"same", "differs"})):
        (tmp_path / "map.yaml").write_text(text % (into, *counts))
        found = verdicts(diff(one, two, mapping=read_maps([tmp_path / "map.yaml"])))
        assert set(found.values()) == expected, found


def test_fused_tensors_ambiguous_order_is_not_guessed(tmp_path: Path) -> None:
    heads = Heads(4, 4, 4)
    values = heads.values()
    one = write(tmp_path / "b", 1, parts(values) | {"norm:out": [values["q"]]}, model_config=heads.config)
    name = "transformer.h.1.self_attention.query_key_value:out"
    two = write(tmp_path / "t", 1, {name: grouped(values, 1, heads), "norm:out": [values["q"]]})
    report = diff(one, two)
    assert "q, k and v in an unknown order (concatenated or by head)" in " ".join(report.findings[0].notes)
    with (two / "rank-00000" / "records.jsonl").open("r+") as file:
        lines = file.read()
        site = f'{{"type": "site", "site": "{name}", "class": "Linear", "params": {{}}, "parent": "BloomAttention"}}\n'
        file.seek(0)
        file.write(lines.replace('{"type":"record"', f'{site}{{"type":"record"', 1))
    assert set(verdicts(diff(one, two)).values()) == {"same"}


def test_fused_tensors_missing_parts_leave_the_others_comparable(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    some = {name: shards for name, shards in parts(values).items() if "v_proj" in name}
    one = write(tmp_path / "b", 1, some, model_config=heads.config)
    two = write(tmp_path / "t", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)})
    assert verdicts(diff(one, two)) == {f"{HF}.v_proj:out": "same"}


def test_fused_tensors_statistics_of_parts_add_up(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    one = write(tmp_path / "b", 2, parts(values, 2), keep="stats", model_config=heads.config)
    two = write(tmp_path / "t", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)}, keep="stats")
    (finding,) = diff(one, two).findings
    assert (finding.basis, finding.verdict.is_bad, finding.matched_by) == (
        "stats",
        False,
        "fused qkv (grouped), joined",
    )
    values["v"] = values["v"] * 1.5
    two = write(tmp_path / "o", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)}, keep="stats")
    (finding,) = diff(one, two).findings
    assert finding.verdict is Verdict.DIFFERS


def test_fused_tensors_statistics_that_cannot_be_split_are_reported(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    some = {name: shards for name, shards in parts(values).items() if "v_proj" not in name}
    extra = {"norm:out": [values["q"]]}
    one = write(tmp_path / "b", 1, some | extra, keep="stats", model_config=heads.config)
    two = write(tmp_path / "t", 1, {f"{MEGATRON}:out[0]": grouped(values, 1, heads)} | extra, keep="stats")
    report = diff(one, two)
    said = [f.notes[0] for f in report.findings if f.verdict is Verdict.SHAPE]
    assert len(said) == 2
    assert "statistics only" in said[0]
    assert "keep=full" in said[0]


def test_fused_tensors_size_mismatch_is_reported_with_its_numbers(tmp_path: Path) -> None:
    heads = Heads(4, 2, 4)
    values = heads.values()
    short = {name: part[:-1] if name == "v" else part for name, part in values.items()}
    one = write(tmp_path / "b", 1, parts(values) | {"norm:out": [values["q"]]}, model_config=heads.config)
    two = write(tmp_path / "t", 1, {f"{HF}.qkv_proj:out": plain(short, 1), "norm:out": [values["q"]]})
    report = diff(one, two)
    notes = [f.notes[0] for f in report.findings if f.verdict is Verdict.SHAPE]
    assert len(notes) == 3
    assert "has 31 features" in notes[0]
    assert "16 + 8 + 8" in notes[0]
