"""Map files: what is in them is checked before anything is compared, and every fault is one clear error."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.comparator.mapfile import MapFile, read_maps
from tapscope.errors import ConfigError

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


def test_a_map_file_is_read_whole_and_files_add_up(tmp_path: Path) -> None:
    mapping = read(tmp_path, WHOLE, "rules:\n- {site: '.*', require: 'max_abs < 1'}\n", "")
    (rename,), (split, join), (dims,), rules = mapping.rename, mapping.fuse, mapping.dims, mapping.rules
    assert rename.apply("transformer.h.3.mlp:out") == "model.layers.3.mlp:out"
    assert rename.side == "target"
    assert (split.parts[0], split.order, split.heads, split.joins) == ("layers.*.attn.q", "grouped", (8, 2), False)
    assert (join.whole, join.sizes, join.joins) == ("layers.*.mlp.w13:out", (16, 16), True)
    assert (dims.site, dims.dims, dims.side) == ("layers.*.mlp:out", "s b h[tp:partial]", "target")
    assert [rule.require for rule in rules] == ["rel < 1e-3", "max_abs < 1"]
    assert rules[1].where.endswith("map1.yaml: rules[0]")
    assert [Path(name).name for name in mapping.files] == ["map0.yaml", "map1.yaml", "map2.yaml"]
    assert read_maps([]) == MapFile()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("renames: []", "'renames' is unknown; known: rename, split, join, dims, rules"),
        ("- rename", "must hold a mapping of sections, not a list"),
        ("rename: {from: a, to: b}", "rename must be a list"),
        ("rename: [a]", r"rename\[0\] must be a mapping"),
        ("rename: [{from: '(', to: b}]", r"rename\[0\].from: '\(' is no regular expression"),
        ("rename: [{from: '(a+)+b', to: b}]", "may take too long"),
        (r"rename: [{from: 'a', to: '\1'}]", r"rename\[0\].to: .* does not fit 'a'"),
        ("rename: [{from: 'a', to: 'b', side: left}]", "side='left' is unknown; use baseline, target, both"),
        ("rename: [{from: '', to: 'b'}]", "from must be a text that is not empty"),
        ("rename: [{to: 'b'}]", "from must be a text that is not empty, not nothing"),
        ("rename: [{from: 'b', to: 3}]", "to must be a text, not 3"),
        ("split: {a: {into: [b]}}", r"split\['a'\].into must be a list of two or more"),
        ("split: {'a.*': {into: [b.*, c.*.*]}}", r"'c.\*.\*' must have a '\*' for each of 'a.\*'"),
        ("split: {'a:out': {into: [b, c]}}", "a port just where that has one"),
        ("split: {a: {into: [b, c], order: shuffled}}", "order='shuffled' is unknown"),
        ("split: {a: {into: [b, c], order: grouped}}", "grouped is about the three parts"),
        ("split: {a: {into: [b, c], sizes: [1, 2, 3]}}", "sizes has 3 numbers for 2 parts"),
        ("split: {a: {into: [b, c], sizes: [1, true]}}", "list of whole numbers from 1"),
        ("split: {a: {into: [b, c, d], heads: [3, 2]}}", "heads must be"),
        ("split: {a: {into: [b, c], from: [c, d]}}", "'from' is unknown"),
        ("split: [a]", "split must be a mapping"),
        ("dims: [{site: a}]", r"dims\[0\].dims must be a text"),
        ("rules: [{site: '[', require: a}]", r"rules\[0\].site: .* is no regular expression"),
        ("a: &x [1]\nb: *x", "map0.yaml:1: anchors and aliases"),
        ("a: !!python/object:os.system 1", "tags"),
        ("rename: []\nrename: []", "map0.yaml:2: 'rename' is given twice"),
        ("? [a]\n: b", "a key must be a plain word"),
        ("a: [", "is no YAML that can be read"),
        ("a: 2001-99-99", "is no YAML that can be read"),
        ("a: " + "1" * 5000, "is no YAML that can be read"),
        ("a: " + "[" * 40 + "]" * 40, "nests deeper than 12"),
        ("[" * 100_000, "nests deeper than 12"),
        ("#" * 300_000, "longer than 256 KiB"),
    ],
)
def test_a_bad_map_is_one_error_that_names_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(tmp_path, text)
    assert "map0.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    for name, said in (("none.yaml", "No such file"), (".", "directory"), ("latin.yaml", "is no UTF-8")):
        with pytest.raises(ConfigError, match=said):
            read_maps([tmp_path / name])


def test_a_bomb_of_aliases_costs_nothing(tmp_path: Path) -> None:
    bomb = "a: &a [x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(ConfigError, match="anchors"):
        read(tmp_path, bomb)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(
            st.sampled_from([*"{}[]:,-&*!|>'\"\n %@`", "rename", "split", "into", "from", " a", "\t"]), max_size=40
        ).map("".join),
    )
)
def test_whatever_stands_in_a_map_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(text.encode("utf-8", "replace"))
    try:
        said = "any.yaml" if isinstance(read_maps([file]), MapFile) else ""
    except ConfigError as error:
        said = str(error)
    assert "any.yaml" in said
