"""Map files: the content is validated before any comparison, and every mistake gives one clear error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.cli import main
from tapscope.comparator import Report
from tapscope.comparator.options.map_file import MapFile, read_maps
from tapscope.comparator.runs.names import FAMILIES
from tapscope.core.errors import ConfigError
from tapscope.core.observe import RowSpan
from tapscope.dashboard.finding_detail import measure_lines

WHOLE = """
rename:
  - {from: '^transformer\\.h\\.(\\d+)', to: 'model.layers.\\1', side: target}
split:
  'layers.*.attn.qkv': {into: ['layers.*.attn.q', 'layers.*.attn.k', 'layers.*.attn.v'], heads: [8, 2], order: grouped}
join:
  'layers.*.mlp.w13:out': {from: ['layers.*.mlp.w1:out', 'layers.*.mlp.w3:out'], sizes: [16, 16]}
dims:
  - {site: 'layers.*.mlp:out', dims: 's b h[tp:partial]', side: target}
rules:
  - {site: 'lm_head:.*', require: 'rel < 1e-3'}
"""


def read(path: Path, *texts: str) -> MapFile:
    files = []
    for i, text in enumerate(texts):
        files.append(path / f"map{i}.yaml")
        files[-1].write_text(text)
    return read_maps(files)


def test_map_file_is_read_and_several_are_merged(tmp_path: Path) -> None:
    mapping = read(tmp_path, WHOLE, "rules:\n- {site: '.*', require: 'max_abs < 1'}\n")
    (rename,), (split, join), (dims,), rules = mapping.rename, mapping.fuse, mapping.dims, mapping.rules
    assert rename.apply("transformer.h.3.mlp:out") == "model.layers.3.mlp:out"
    assert rename.side == "target"
    assert (split.parts[0], split.order, split.heads, split.joins) == ("layers.*.attn.q", "grouped", (8, 2), False)
    assert (join.whole, join.sizes, join.joins) == ("layers.*.mlp.w13:out", (16, 16), True)
    assert (dims.site, dims.dims, dims.side) == ("layers.*.mlp:out", "s b h[tp:partial]", "target")
    assert [rule.require for rule in rules] == ["rel < 1e-3", "max_abs < 1"]
    assert rules[1].where.endswith("map1.yaml: rules[0]")
    assert [Path(name).name for name in mapping.files] == ["map0.yaml", "map1.yaml"]
    assert read_maps([]) == MapFile()


def test_map_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/guide/matching.md").read_text()
    mapping = read(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    assert [len(part) for part in (mapping.rename, mapping.fuse, mapping.dims, mapping.rules)] == [1, 3, 1, 1]


def test_map_file_documentation_names_every_matching_pass() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/guide/matching.md").read_text()
    for family in FAMILIES:
        assert f"`{family.name}`" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("renames: []", "unknown key 'renames'; valid keys: rename, split, join, dims, rules"),
        ("- rename", "must hold a mapping of sections, not a list"),
        ("rename: {from: a, to: b}", "rename must be a list"),
        ("rename: 0", "rename must be a list"),
        ("rename: [a]", r"rename\[0\] must be a mapping"),
        ("rename: [{from: '(', to: b}]", r"rename\[0\].from: invalid regular expression '\('"),
        ("rename: [{from: '(a+)+b', to: b}]", "may take too long"),
        (r"rename: [{from: 'a', to: '\1'}]", r"rename\[0\].to: .* does not fit 'a'"),
        ("rename: [{from: 'a', to: 'b', side: left}]", "side='left' is unknown; use baseline, target, both"),
        ("rename: [{from: '', to: 'b'}]", "from must be a non-empty string"),
        ("rename: [{to: 'b'}]", "from must be a non-empty string, not nothing"),
        ("rename: [{from: 'b', to: 3}]", "to must be a string, not 3"),
        ("split: {a: {into: [b]}}", r"split\['a'\].into must be a list of two or more"),
        ("split: {'a.*': {into: [b.*, c.*.*]}}", r"'c.\*.\*' must have one '\*' for each in 'a.\*'"),
        ("split: {'a:out': {into: [b, c]}}", "a port only if that has one"),
        ("split: {a: {into: [b, c], order: shuffled}}", "order='shuffled' is unknown"),
        ("split: {a: {into: [b, c], order: grouped}}", "grouped applies to the three parts"),
        ("split: {a: {into: [b, c], sizes: [1, 2, 3]}}", "sizes has 3 numbers for 2 parts"),
        ("split: {a: {into: [b, c], sizes: [1, true]}}", "list of integers ≥ 1"),
        ("split: {a: {into: [b, c, d], heads: [3, 2]}}", "heads must be"),
        ("split: {a: {into: [b, c], from: [c, d]}}", "unknown key 'from'"),
        ("split: [a]", "split must be a mapping"),
        ("dims: [{site: a}]", r"dims\[0\].dims must be a non-empty string"),
        ("rules: [{site: '[', require: a}]", r"rules\[0\].site: invalid regular expression"),
        ("a: &x [1]\nb: *x", "map0.yaml:1: anchors and aliases"),
        ("a: !!python/object:os.system 1", "tags"),
        ("rename: []\nrename: []", "map0.yaml:2: 'rename' is given twice"),
        ("? [a]\n: b", "a key must be a plain or quoted string"),
        ("a: [", "is not valid YAML"),
        ("a: 2001-99-99", "is not valid YAML"),
        ("a: " + "1" * 5000, "is not valid YAML"),
        ("a: " + "[" * 40 + "]" * 40, "nests deeper than 12"),
        ("[" * 100_000, "nests deeper than 12"),
        ("#" * 300_000, "longer than 256 KiB"),
    ],
)
def test_map_file_error_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, text)
    assert "map0.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_map_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    for name, said in (("none.yaml", "No such file"), (".", "directory"), ("latin.yaml", "is not UTF-8")):
        with pytest.raises(ConfigError, match=said):
            read_maps([tmp_path / name])


def test_map_file_alias_bomb_is_rejected_quickly(tmp_path: Path) -> None:
    bomb = "a: &a [x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(ConfigError, match="anchors"):
        read(tmp_path, bomb)


@settings(max_examples=100)
@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(
            st.sampled_from([*"{}[]:,-&*!|>'\"\n %@`", "rename", "split", "into", "from", " a", "\t"]), max_size=40
        ).map("".join),
    )
)
def test_map_file_any_content_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(text.encode("utf-8", "replace"))
    try:
        said = "any.yaml" if isinstance(read_maps([file]), MapFile) else ""
    except ConfigError as error:
        said = str(error)
    assert "any.yaml" in said


ROWS = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)


def write(path: Path, sites: dict[str, Any]) -> Path:
    with RunFactory(path) as run:
        run.step(grid=(3,), rows=[RowSpan("a", 0, 3, 0, 0)], token_ids=[1, 2, 3])
        for site, value in sites.items():
            run.put(site, value)
    return path


def diff_with_map(path: Path, left: dict[str, Any], right: dict[str, Any], text: str) -> Report:
    mapping = read(path, text)
    return diff(write(path / "b", left), write(path / "t", right), mapping=mapping)


def matched(report: Report) -> dict[str, tuple[str, str]]:
    return {f.site: (f.matched_by, str(f.verdict)) for f in report.findings}


def test_map_file_rename_matches_sites_and_keeps_their_names(tmp_path: Path) -> None:
    text = r"rename: [{from: '^tower\.blk\.(\d+)\.', to: 'model.layers.\1.', side: target}]"
    report = diff_with_map(tmp_path, {"model.layers.2.mlp:out": ROWS}, {"tower.blk.2.mlp:out[0]": ROWS}, text)
    (finding,) = report.findings
    assert (finding.site, finding.matched_by, str(finding.verdict)) == ("model.layers.2.mlp:out", "hf port", "same")
    assert finding.target is not None
    assert finding.target.site == "tower.blk.2.mlp:out[0]"
    (tmp_path / "exact").mkdir()
    exact = diff_with_map(tmp_path / "exact", {"model.layers.2.mlp:out": ROWS}, {"tower.blk.2.mlp:out": ROWS}, text)
    assert exact.findings[0].matched_by == "map"


@pytest.mark.parametrize("turned", [False, True])
def test_map_file_split_divides_a_fused_tensor(tmp_path: Path, turned: bool) -> None:
    parts = {f"enc.0.{n}:out": ROWS[:, i * 4 : i * 4 + 4] for i, n in enumerate("abc")}
    sides = [parts, {"x.enc.0.abc:out[0]": ROWS}][:: -1 if turned else 1]
    report = diff_with_map(tmp_path, *sides, "split: {'enc.*.abc': {into: ['enc.*.a', 'enc.*.b', 'enc.*.c']}}")
    assert set(matched(report).values()) == {("map split", "same")}
    assert len(report.findings) == 3
    names = [f"x.enc.0.abc:out[{n}]" for n in "abc"] if turned else list(parts)
    assert [f.site for f in report.findings] == names


@pytest.mark.parametrize("turned", [False, True])
def test_map_file_join_combines_parts(tmp_path: Path, turned: bool) -> None:
    parts = {"enc.0.a:out": ROWS[:, :5], "enc.0.b:out": ROWS[:, 5:]}
    sides = [parts, {"enc.0.ab:out": ROWS}][:: -1 if turned else 1]
    report = diff_with_map(tmp_path, *sides, "join: {'enc.*.ab': {from: ['enc.*.a', 'enc.*.b']}}")
    assert matched(report) == {"enc.0.ab:out": ("map join", "same")}
    (finding,) = report.findings
    sides = [side.parts for side in (finding.baseline, finding.target) if side is not None]
    assert sides == [tuple(parts), ()][:: -1 if turned else 1]
    shown = "\n".join(line.plain for line in measure_lines(finding, 60))
    assert "fp32 3×12, put together from\n         enc.0.a:out\n         enc.0.b:out\n" in shown


def test_map_file_accepts_sizes_and_a_port(tmp_path: Path) -> None:
    left = {"enc.0.b:out": ROWS[:, 5:], "enc.0.b:tap[x]": ROWS}
    text = "split: {'enc.0.ab:out': {into: ['enc.0.a:out', 'enc.0.b:out'], sizes: [5, 7]}}"
    report = diff_with_map(tmp_path, left, {"enc.0.ab:out": ROWS, "enc.0.ab:tap[x]": ROWS}, text)
    assert matched(report)["enc.0.b:out"] == ("map split", "same")
    assert [str(f.verdict) for f in report.findings].count("only-target") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rename: [{from: 'tower', to: x}]", r"rename\[0\]: 'tower' matches no site of either run"),
        (r"rename: [{from: 'enc\.0\.aa', to: x, side: baseline}]", r"no site of the baseline; near it: enc.0.a:out"),
        ("rename: [{from: 'ab', to: x, side: baseline}]", "matches no site of the baseline"),
        (
            r"rename: [{from: 'enc\.0\.[ab]', to: x, side: baseline}]",
            "a:out and enc.0.b:out of the baseline both become x:out",
        ),
        (
            "split: {'enc.*.abb': {into: [enc.*.a, enc.*.b]}}",
            r"split\['enc.\*.abb'\] matches no site of either run; near it",
        ),
        (
            "split: {'enc.*.ab': {into: [enc.*.c, enc.*.d]}}",
            "enc.0.ab:out exists, but the other run has no enc.0.c:out nor",
        ),
        ("join: {'enc.*.ab': {from: [enc.*.a, enc.*.d]}}", "the other run has no enc.0.d:out; near it: enc.0.[ab]:out"),
    ],
)
def test_map_file_unmatched_entry_is_an_error_with_suggestions(tmp_path: Path, text: str, said: str) -> None:
    left = {"enc.0.a:out": ROWS[:, :6], "enc.0.b:out": ROWS[:, 6:]}
    with pytest.raises(ConfigError, match=said):
        diff_with_map(tmp_path, left, {"enc.0.ab:out": ROWS}, text)


def test_map_file_diff_option_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "b", {"a:out": ROWS}), write(tmp_path / "t", {"b:out": ROWS})
    file = tmp_path / "map.yaml"
    file.write_text("rename: [{from: '^a:', to: 'b:'}]")
    assert main(["diff", str(one), str(two), "--map", str(file), "--json"]) == 0
    header = json.loads(capsys.readouterr().out.splitlines()[0])
    assert header["options"]["mapping"] == [str(file)]
    file.write_text("rename: [{from: '^c:', to: 'b:'}]")
    assert main(["diff", str(one), str(two), "--map", str(file)]) == 2
    assert "matches no site" in capsys.readouterr().err


def test_map_file_very_long_site_name_is_matched_quickly(tmp_path: Path) -> None:
    text = "rename: [{from: 'a.*b.*c.*d', to: x}]\nsplit: {'enc.*.*.*': {into: [enc.*.*.a, enc.*.*.b]}}".replace(
        "enc.*.*.a, enc.*.*.b", "'enc.*.*.*.a', 'enc.*.*.*.b'"
    )
    long = ".".join(["enc", "abc"] * 40_000)
    with pytest.raises(ConfigError, match="matches no site"):
        diff_with_map(tmp_path, {"n:out": ROWS, f"{long}:out": ROWS}, {"n:out": ROWS}, text)
    (tmp_path / "split").mkdir()
    with pytest.raises(ConfigError, match="matches no site"):
        diff_with_map(
            tmp_path / "split", {"n:out": ROWS, f"{long}:out": ROWS}, {"n:out": ROWS}, text.partition("\n")[2]
        )


def test_map_file_names_that_change_places_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries apply in order: a cycle of two gives both sites the same name, a third name swaps them."""
    values = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    for name, order in (("base", (0, 1)), ("target", (1, 0))):
        with RunFactory(tmp_path / name) as run:
            run.step()
            for site, i in zip(("m.a:out", "m.b:out"), order, strict=True):
                run.put(site, {0: values[i]})
    runs = str(tmp_path / "base"), str(tmp_path / "target")
    cycle = (("m.a", "m.b"), ("m.b", "m.a"))
    through = (("m.a", "m.c"), ("m.b", "m.a"), ("m.c", "m.b"))
    for name, pairs in (("cycle", cycle), ("through", through)):
        entries = "".join(f"  - {{from: '^{one}', to: '{other}', side: target}}\n" for one, other in pairs)
        (tmp_path / f"{name}.yaml").write_text(f"rename:\n{entries}")
    assert main(["diff", *runs, "--map", str(tmp_path / "cycle.yaml")]) == 2
    assert capsys.readouterr().err == (
        f"tapscope: error: {tmp_path}/cycle.yaml: rename[0]: m.a:out and m.b:out of the target both become m.a:out; "
        "entries apply in order, each to the result of those before it\n"
    )
    assert main(["diff", *runs, "--map", str(tmp_path / "through.yaml")]) == 0
