"""Sites meet by name, in passes; each pair remembers the pass that made it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator import CompareOptions, Finding, Report, Verdict, compare
from tapscope.comparator.runs.names import FAMILIES, canonical_name
from tapscope.core.errors import ConfigError, NothingInCommonError, RuleError
from tapscope.core.observe import RowSpan
from tapscope.core.site import parse
from tapscope.sources import open_run

ONES = np.ones((3, 4), np.float32)


def write(path: Path, sites: Mapping[str, Any], steps: int = 1) -> Path:
    with RunFactory(path) as run:
        for step in range(steps):
            run.step(grid=(3,), rows=[RowSpan("a", 3 * step, 3, 0, 0)], token_ids=[1, 2, 3])
            for site, value in sites.items():
                run.put(site, value)
    return path


def diff_sites(tmp_path: Path, left: Any, right: Any, **options: Any) -> Report:
    left, right = (side if isinstance(side, dict) else dict.fromkeys(side, ONES) for side in (left, right))
    return diff(write(tmp_path / "b", left), write(tmp_path / "t", right), **options)


def pairs(report: Report) -> list[tuple[str | None, str | None, str]]:
    def name(side: Any) -> str | None:
        return side.site if side else None

    return [(name(f.baseline), name(f.target), f.matched_by) for f in report.findings]


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def test_match_equal_names_exactly(tmp_path: Path) -> None:
    assert pairs(diff_sites(tmp_path, ["norm:out"], ["norm:out"])) == [("norm:out", "norm:out", "exact")]


@pytest.mark.parametrize(
    ("left", "right", "how"),
    [
        ("model.layers.0.self_attn:out[0]", "model.layers.0.self_attn:out", "hf port"),
        ("model.layers.0.mlp:out", "layers.0.mlp:out", "hf root"),
        ("model.language_model.layers.0:out[0]", "model.layers.0:out", "hf root"),
        ("model:out[last_hidden_state]", ":out[last_hidden_state]", "hf root"),
        ("layers.0.mlp:in[x]", "layers.0.mlp:in[hidden_states]", "only input"),
        ("layers.0.mlp:in[x].grad", "layers.0.mlp:in[hidden_states].grad", "only input"),
        ("model.layers.0.mlp:out", "module.module.model.layers.0._orig_mod.mlp:out", "wrapper"),
        ("layers.0._checkpoint_wrapped_module.mlp:out", "_fsdp_wrapped_module.layers.0.mlp:out", "wrapper"),
        ("model.norm:out", "decoder.final_layernorm:out", "megatron"),
        ("model:out[last_hidden_state]", "decoder:out", "megatron"),
        (":out[logits]", ":out", "megatron"),
        ("model.embed_tokens:param[weight].grad", "embedding.word_embeddings:param[weight].grad", "megatron"),
        ("lm_head:out", "module.output_layer:out[0]", "megatron"),
        ("lm_head:in[input]", "output_layer:in[input_]", "only input"),
        ("model.layers.3.self_attn.o_proj:out", "decoder.layers.3.self_attention.linear_proj:out[0]", "megatron"),
        ("model.layers.3.self_attn.q_norm:out", "decoder.layers.3.self_attention.q_layernorm:out", "megatron"),
        ("model.layers.3.mlp.down_proj:out.grad", "decoder.layers.3.mlp.linear_fc2:out[0].grad", "megatron"),
        ("layers.3.post_attention_layernorm:out", "decoder.layers.3.pre_mlp_layernorm:out", "megatron"),
        ("layers.3.input_layernorm:in[x]", "decoder.layers.3.input_layernorm:in[hidden_states]", "only input"),
        (
            "model.layers.3.input_layernorm:param[weight]",
            "decoder.layers.3.self_attention.linear_qkv:param[layer_norm_weight]",
            "megatron",
        ),
        ("model.layers.3.mlp.gate:param[weight]", "decoder.layers.3.mlp.router:param[weight]", "megatron"),
        (
            "model.layers.3.mlp.experts.5.down_proj:out",
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc2:out[0]",
            "megatron",
        ),
        ("model.layers.0.self_attn.qkv_proj:out[0]", "decoder.layers.0.self_attention.linear_qkv:out", "megatron"),
        ("model:out", "model:out[last_hidden_state]", "hf root"),
        ("model:in[position_ids]", "model:in[positions]", "hf port"),
        ("transformer.wte:out", "embedding.word_embeddings:out", "gpt"),
        ("transformer.h.2.attn.c_proj:out", "decoder.layers.2.self_attention.linear_proj:out[0]", "gpt"),
        ("transformer.h.2.mlp.c_fc:out", "decoder.layers.2.mlp.linear_fc1:out[0]", "gpt"),
        ("transformer.ln_f:out", "decoder.final_layernorm:out", "gpt"),
        ("gpt_neox.layers.2.mlp.dense_4h_to_h:out", "decoder.layers.2.mlp.linear_fc2:out", "gpt"),
        ("transformer.h.2.ln_2:out", "gpt_neox.layers.2.post_attention_layernorm:out", "gpt"),
        ("tok_embeddings:out", "model.embed_tokens:out", "meta"),
        ("layers.1.attention.wo:out", "model.layers.1.self_attn.o_proj:out", "meta"),
        ("layers.1.feed_forward.w2:out", "model.layers.1.mlp.down_proj:out", "meta"),
        ("layers.1.ffn_norm:out", "model.layers.1.post_attention_layernorm:out", "meta"),
    ],
)
def test_match_framework_spellings_of_one_module(tmp_path: Path, left: str, right: str, how: str) -> None:
    assert pairs(diff_sites(tmp_path, [left], [right])) == [(left, right, how)]
    assert pairs(diff_sites(tmp_path / "turned", [right], [left])) == [(right, left, how)]


WORDS = [
    *("model", "module", "_orig_mod", "language_model", "transformer", "gpt_neox", "decoder", "layers", "h", "0", "17"),
    *("self_attn", "attn", "attention", "self_attention", "linear_qkv", "c_attn", "c_proj", "mlp", "linear_fc1", "w1"),
    *("experts", "local_experts", "embedding", "word_embeddings", "norm", "ln_f", "output", "input_layernorm", "x"),
]
PORTS = ["out", "out[0]", "out[0].grad", "in[x]", "in[args.0]", "in[past.3.key]", "param[weight]", "param[weight].grad"]


@settings(max_examples=100)
@given(path=st.lists(st.sampled_from(WORDS), max_size=7), port=st.sampled_from(PORTS))
def test_match_common_spelling_needs_the_same_numbers(path: list[str], port: str) -> None:
    site = f"{'.'.join(path)}:{port}"
    for family in FAMILIES:
        spelling = str(parse(family.common(site)))
        assert [part for part in spelling.rpartition(":")[0].split(".") if part.isdigit()] == [
            part for part in path if part.isdigit()
        ]
        assert spelling.endswith(".grad") == site.endswith(".grad")
    assert canonical_name(site) == FAMILIES[-1].common(site)


def test_match_ambiguous_spelling_matches_neither(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["norm:out", "model.layers.0:out", "layers.0:out"], ["norm:out", "x.y:out"])
    assert pairs(report)[0] == ("norm:out", "norm:out", "exact")
    assert [f.verdict for f in report.findings].count(Verdict.ONLY_BASELINE) == 2


def test_match_reports_the_candidates_of_an_ambiguous_name(tmp_path: Path) -> None:
    report = diff_sites(
        tmp_path, ["norm:out", "model.layers.0:out", "layers.0:out"], ["norm:out", "decoder.layers.0:out"]
    )
    notes = {f.site: f.notes[0] for f in report.findings if f.verdict.is_orphan}
    assert notes["layers.0:out"] == (
        "could be decoder.layers.0:out, and so could model.layers.0:out: state it with rename in --map"
    )
    assert "could be layers.0:out or model.layers.0:out" in notes["decoder.layers.0:out"].replace(
        "model.layers.0:out or layers.0:out", "layers.0:out or model.layers.0:out"
    )
    assert any("3 sites not matched, e.g. " in sentence for sentence in report.coverage.warnings)


def test_match_norm_fused_into_its_linear(tmp_path: Path) -> None:
    hf = {
        "layers.0.input_layernorm:in[hidden_states]": 2 * ONES,
        "layers.0.input_layernorm:out": ONES,
        "layers.0.input_layernorm:param[weight]": ONES[0],
        "layers.0.self_attn.q_proj:in[input]": ONES,
        "n:out": ONES,
    }
    one, two = write(tmp_path / "b", hf), tmp_path / "t"
    with RunFactory(two) as run:
        run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 2, 3])
        for port in ("in[x]", "out"):
            run.site(f"decoder.layers.0.input_layernorm:{port}", "IdentityOp")
            run.put(f"decoder.layers.0.input_layernorm:{port}", 2 * ONES)
        for port, value in (("in[x]", 2 * ONES), ("param[layer_norm_weight]", ONES[0])):
            run.site(f"decoder.layers.0.self_attention.linear_qkv:{port}", "TELayerNormColumnParallelLinear")
            run.put(f"decoder.layers.0.self_attention.linear_qkv:{port}", value)
        run.put("n:out", ONES)
    report = diff(one, two)
    assert {f.site for f in report.findings if f.verdict is Verdict.SAME} == {
        "layers.0.input_layernorm:in[hidden_states]",
        "layers.0.input_layernorm:param[weight]",
        "n:out",
    }
    notes = {f.site: f.notes for f in report.findings if f.verdict is Verdict.ONLY_TARGET}
    assert "a copy of its input" in notes["decoder.layers.0.input_layernorm:out"][0]
    assert "normalizes its input first" in notes["decoder.layers.0.self_attention.linear_qkv:in[x]"][0]


def test_match_excludes_inverted_megatron_masks(tmp_path: Path) -> None:
    for name, framework in (("b", "transformers"), ("t", "megatron")):
        with RunFactory(tmp_path / name, framework=framework) as run:
            run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 2, 3])
            run.put("layers.0:in[attention_mask]", np.eye(3, dtype=bool))
            run.put("n:out", ONES)
    with open_run(tmp_path / "b") as left, open_run(tmp_path / "t") as right:
        report = compare(left, right)
        assert [f.verdict for f in report.findings].count(Verdict.SAME) == 1
        assert "mark hidden positions" in report.findings[0].notes[0]
        assert len(compare(left, left).findings) == 2


def pair_of(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-9, 9, (3, 4)).astype(np.float32) for _ in range(2))


def test_match_hidden_state_and_residual_to_their_sum(tmp_path: Path) -> None:
    (h, r), (x, y) = pair_of(0), pair_of(1)
    serving = {
        "model.layers.1:in[hidden_states]": h,
        "model.layers.1:in[residual]": r,
        "model.layers.1.input_layernorm:in[x]": h,
        "model.layers.1.input_layernorm:in[residual]": r,
        "model.layers.1.input_layernorm:out[0]": x,
        "model.layers.1.input_layernorm:out[1]": h + r,
        "model.layers.1:out[0]": x,
        "model.layers.1:out[1]": y,
    }
    plain = {
        "model.layers.1:in[hidden_states]": h + r,
        "model.layers.1.input_layernorm:in[hidden_states]": h + r,
        "model.layers.1.input_layernorm:out": x,
        "model.layers.1:out": x + y,
    }
    report = diff_sites(tmp_path, plain, serving)
    matched = {f.site: (f.matched_by, str(f.verdict)) for f in report.findings if not f.verdict.is_orphan}
    assert matched == {
        "model.layers.1:in[hidden_states]": ("sum", "same"),
        "model.layers.1.input_layernorm:in[hidden_states]": ("sum", "same"),
        "model.layers.1.input_layernorm:out": ("hf port", "same"),
        "model.layers.1:out": ("sum", "same"),
    }
    assert [f.site for f in report.findings if f.verdict.is_orphan] == ["model.layers.1.input_layernorm:out[1]"]
    broken = serving | {"model.layers.1:out[1]": y * 1.1}
    report = diff_sites(tmp_path / "broken", plain, broken)
    assert [f.site for f in report.findings if f.verdict is Verdict.DIFFERS] == ["model.layers.1:out"]
    both = diff_sites(tmp_path / "both", serving, serving)
    assert {f.matched_by for f in both.findings} == {"exact"}


def test_match_residual_pairs_of_one_framework_by_name(tmp_path: Path) -> None:
    h, r = pair_of(0)
    sites = {"model.layers.1:in[hidden_states]": h, "model.layers.1:in[residual]": r}
    for name, kept in (("b", list(sites)[:1]), ("t", list(sites))):
        with RunFactory(tmp_path / name, framework="vllm") as run:
            run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 2, 3])
            for site in kept:
                run.put(site, sites[site])
    found = {f.site: str(f.verdict) for f in diff(tmp_path / "b", tmp_path / "t").findings}
    assert found == {"model.layers.1:in[hidden_states]": "same", "model.layers.1:in[residual]": "only-target"}


def test_match_positional_arguments_by_their_values(tmp_path: Path) -> None:
    (h, r), ids = pair_of(0), np.arange(3)
    serving = {
        "model.layers.0:in[args.0]": ids,
        "model.layers.0:in[args.1]": h,
        "model.layers.1:in[args.0]": ids,
        "model.layers.1:in[args.1]": h,
        "model.layers.1:in[args.3]": r,
        "model.layers.1.input_layernorm:in[args.0]": h,
        "model.layers.1.input_layernorm:in[args.1]": r,
        "model.norm:in[args.0]": h,
        "model.norm:in[args.1]": r,
    }
    plain = {
        "model.layers.0:in[hidden_states]": h,
        "model.layers.0:in[position_ids]": ids,
        "model.layers.1:in[hidden_states]": h + r,
        "model.layers.1:in[position_ids]": ids,
        "model.layers.1.input_layernorm:in[hidden_states]": h + r,
        "model.norm:in[hidden_states]": h + r,
    }
    report = diff_sites(tmp_path, plain, serving)
    matched = {f.site: (f.matched_by, str(f.verdict)) for f in report.findings if not f.verdict.is_orphan}
    assert matched == {
        "model.layers.0:in[hidden_states]": ("argument", "same"),
        "model.layers.1:in[hidden_states]": ("sum", "same"),
        "model.layers.1.input_layernorm:in[hidden_states]": ("sum", "same"),
        "model.norm:in[hidden_states]": ("sum", "same"),
    }
    assert {f.matched_by for f in diff_sites(tmp_path / "same", serving, serving).findings} == {"exact"}


def test_match_keeps_a_residual_pair_without_a_sum(tmp_path: Path) -> None:
    h, r = pair_of(0)
    report = diff_sites(tmp_path, {"n:out": h}, {"n:out": h, "model.layers.1:out[0]": h, "model.layers.1:out[1]": r})
    assert sorted(f.site for f in report.findings) == ["model.layers.1:out[0]", "model.layers.1:out[1]", "n:out"]


def test_match_selection_applies_to_names_of_one_run(tmp_path: Path) -> None:
    report = diff_sites(
        tmp_path,
        ["model.layers.0.self_attn.o_proj:out", "model.norm:out"],
        ["decoder.layers.0.self_attention.linear_proj:out[0]", "decoder.final_layernorm:out"],
        sites=("*.linear_proj",),
    )
    assert pairs(report)[0][2] == "megatron"
    assert only(report).site == "model.layers.0.self_attn.o_proj:out"
    assert (report.baseline.num_records, report.target.num_records) == (1, 1)


def test_match_arguments_of_different_meaning_do_not_match(tmp_path: Path) -> None:
    ids = np.arange(3)
    report = diff_sites(
        tmp_path, {"n:out": ONES, "model:in[input_ids]": ids}, {"n:out": ONES, ":in[position_ids]": ids}
    )
    assert sorted(f.verdict for f in report.findings) == ["only-baseline", "only-target", "same"]


def test_match_does_not_guess_among_two_inputs(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["n:out", "n:in[a]", "n:in[b]"], ["n:out", "n:in[c]"])
    assert sorted(f.verdict for f in report.findings) == ["only-baseline", "only-baseline", "only-target", "same"]


def test_match_partial_sums_of_one_run_to_the_sum_of_the_other(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["mlp.down:out"], ["mlp.down.partial:out", "mlp.down:out"])
    assert pairs(report) == [
        ("mlp.down:out", "mlp.down.partial:out", "partial sum"),
        ("mlp.down:out", "mlp.down:out", "exact"),
    ]
    assert [f.site for f in report.findings] == ["mlp.down.partial:out", "mlp.down:out"]


def test_match_findings_follow_the_targets_execution_order(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["a:out", "z:out", "b:out", "c:out"], ["c:out", "x:out", "b:out", "a:out"])
    assert [f.site for f in report.findings] == ["c:out", "x:out", "b:out", "a:out", "z:out"]
    assert [f.order for f in report.findings] == [0, 1, 2, 3, 4]


def test_match_selection_applies_to_both_runs(tmp_path: Path) -> None:
    names = ["model.layers.0:out", "model.layers.1:out", "model.layers.1:in[x]", "model.norm:out"]
    report = diff_sites(tmp_path, names, names, layers=frozenset({1}), skip=("*:in[x]",))
    assert [f.site for f in report.findings] == ["model.layers.1:out"]
    report = diff_sites(tmp_path / "glob", names, names, sites=("norm", "layers.0"))
    assert [f.site for f in report.findings] == ["model.layers.0:out", "model.norm:out"]


def test_match_step_selection_applies_to_both_runs(tmp_path: Path) -> None:
    sites = {"norm:out": ONES}
    report = diff(write(tmp_path / "b", sites, steps=3), write(tmp_path / "t", sites, steps=3), steps=frozenset({1, 2}))
    assert only(report).rows.num_compared == 6
    assert report.coverage.is_complete


def test_match_glob_without_a_match_is_an_error_with_suggestions(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"no site matches 'layers\.9' in .*; layers are 0"):
        diff_sites(tmp_path, ["layers.0:out"], ["layers.0:out"], sites=("layers.9",))


def test_match_no_common_site_is_an_error_with_examples(tmp_path: Path) -> None:
    with pytest.raises(NothingInCommonError, match=r"e\.g\. alpha:out against beta:out"):
        diff_sites(tmp_path, ["alpha:out"], ["beta:out"])


@pytest.mark.parametrize("bad", [{"rtol": -1.0}, {"atol": float("nan")}])
def test_match_invalid_tolerance_is_rejected(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="invalid tolerance"):
        CompareOptions(**bad)  # type: ignore[arg-type]


def test_match_missing_layer_is_partial_data(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["layers.0:out", "layers.1:out"], ["layers.0:out"])
    assert report.coverage.partial == ("layer 1 is only in b",)
    assert report.exit_code == 1


def test_match_allow_partial_accepts_partial_data(tmp_path: Path) -> None:
    report = diff_sites(tmp_path, ["layers.0:out", "layers.1:out"], ["layers.0:out"], allow_partial=True)
    assert not report.coverage.is_complete
    assert report.exit_code == 0
