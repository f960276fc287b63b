import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.dims import AXES, STAGES, Dim, Dims, Section, Shard, Size, parse
from tapscope.core.errors import DimsError

_shard = st.builds(Shard, st.sampled_from(AXES), st.sampled_from([None, "zigzag", "natural"]), st.booleans())
_size = st.builds(Size, st.integers(1, 10**6), st.just(1))


@st.composite
def _dim(draw: st.DrawFn, names: tuple[str, ...]) -> Dim:
    shards = tuple(draw(st.lists(_shard, max_size=2, unique_by=lambda s: s.axis)))
    copies = 1 if not shards or shards[-1].partial else draw(st.integers(1, 8))
    if len(names) > 1 and draw(st.booleans()):
        sized = draw(st.booleans())
        groups = draw(st.integers(0, 9)) if copies == 1 else 0
        sections = tuple(Section(name, Size(draw(st.integers(1, 99)), copies) if sized else None) for name in names)
        return Dim(names, shards, None, sections, groups)
    size = draw(st.none() | st.builds(Size, st.integers(1, 10**6), st.just(copies)))
    return Dim(names, shards, size)


@st.composite
def _dims(draw: st.DrawFn) -> Dims:
    names = draw(st.lists(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), min_size=1, max_size=5, unique=True))
    dims: list[Dim] = []
    while names:
        taken = draw(st.integers(1, min(3, len(names))))
        dims.append(draw(_dim(tuple(names[:taken]))))
        names = names[taken:]
    if draw(st.booleans()):
        dims.append(Dim(("1",)))
    used = {shard.axis for dim in dims for shard in dim.shards}
    free = [axis for axis in (*AXES, *STAGES) if axis not in used]
    replicated = draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []
    rows = draw(st.sampled_from([None, "tap[ids]", "out[1]"]))
    return Dims(tuple(dims), tuple(replicated), draw(st.sampled_from([None, "attn_dp"])), rows)


@given(_dims())
@settings(max_examples=100)
def test_dims_round_trip_through_text(dims: Dims) -> None:
    assert parse(str(dims)) == dims


_scraps = st.sampled_from(
    [*"tbshx1 []()*+/=:,#", " ", "tp", "cp", "zigzag", "partial", "replicated", "dp:=", "rows:=", "=4x2", "(q+k)", "99"]
)


@given(st.lists(_scraps, max_size=14).map("".join) | st.text(max_size=20) | st.text("th[](*+)=x/#:tp 12", max_size=20))
@settings(max_examples=100)
def test_dims_parse_any_string_or_refuse_it_with_a_reason(text: str) -> None:
    try:
        dims = parse(text)
    except DimsError:
        return
    assert parse(str(dims)) == dims
    assert len(dims.dims) == dims.ndim > 0


@pytest.mark.parametrize(
    "text",
    [
        "t h",
        "t h[tp]",
        "t h[tp:partial]",
        "t h # tp:replicated",
        "s[cp:zigzag,sp] b h # tp:replicated ep:replicated",
        "t[cp:zigzag,sp] 1 h",
        "t (num_heads*head_dim)[tp]",
        "t h # tp:replicated dp:=attn_dp",
        "h[cp:zigzag+partial,sp]",
        "t num_heads[attn_tp] head_dim # ep:replicated",
        "b s[cp:natural] 1 1",
        "t h[moe_tp:partial] # tp:replicated recompute_pseudo:replicated",
        "t[cp:zigzag,sp] topk # tp:replicated ep:replicated",
    ],
)
def test_dims_round_trip_sglang_annotations(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "axis", ["tp", "cp", "ep", "sp", "dp", "etp", "edp", "attn_tp", "attn_dp", "moe_ep", "moe_tp", "moe_dp"]
)
def test_dims_know_every_parallel_axis_of_sglang(axis: str) -> None:
    assert parse(f"t h[{axis}]").shards() == ((1, Shard(axis)),)
    assert parse(f"s[attn_cp:zigzag] h # {axis}:replicated").replicated == (axis,)


def test_dims_beyond_sglang() -> None:
    vocabulary, heads, up = (parse(text).dims[1] for text in ("t v=50257[tp]", "t kv=2x4[tp] d", "t (gate+up)[tp]"))
    assert (vocabulary.names, vocabulary.size) == (("v",), Size(50257))
    assert heads.size == Size(2, 4)
    assert up.sections == (Section("gate"), Section("up"))
    fused = parse("s b (q=2048+k=512+v=512)/8[tp]").dims[2]
    assert (fused.sections[0], fused.groups, fused.shards) == (Section("q", Size(2048)), 8, (Shard("tp"),))
    assert parse("t (n*d)=4096[tp]").dims[1].size == Size(4096)
    assert parse("t[ep:partial] h # rows:=tap[ids]").rows == "tap[ids]"
    assert parse("t h # pp:replicated").replicated == ("pp",)


def test_dims_omit_the_default_sharded_modifier() -> None:
    assert parse("t h[tp:sharded]") == parse("t h[tp]")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "no axis"),
        ("t h[pp]", "'pp'"),
        ("t h[tp,tp]", "twice"),
        ("t t", "'t' twice"),
        ("t (a*t)", "'t' twice"),
        ("t h[tp] # tp:replicated", "both sharded and replicated"),
        ("t h[tp:zigzag+natural]", "contradicts"),
        ("t h[tp:partial+sharded]", "contradicts"),
        ("t h[tp:half]", "'half'"),
        ("1[tp] h", "size 1"),
        ("t h # replicated", "'replicated'"),
        ("t h # dp:=xx", "'xx'"),
        ("t h]", "'h]'"),
        ("t h=0[tp]", "'=0'"),
        ("t h=4x2", "copies need shards"),
        ("t (q=4+k)[tp]", "every section"),
        ("t (q=4x2+k=4)/2[tp]", "without groups"),
        ("t (q+k)/0[tp]", "must be at least 1"),
        ("t (q+t)", "'t' twice"),
        ("t 1=3", "size 1"),
        ("t h # rows:=", "has nothing after"),
        ("t h # dp:=tp dp:=tp", "dp twice"),
        ("t h # tp:replicated tp:replicated", "replicated twice"),
        ("   ", "no axis"),
        ("t" * 2000, "2000 characters"),
    ],
)
def test_dims_error_names_the_wrong_part(text: str, names: str) -> None:
    with pytest.raises(DimsError, match=re.escape(names)):
        parse(text)


def test_dims_are_checked_against_a_shape() -> None:
    dims = parse("t 1 h[tp]")
    dims.check((7, 1, 64))
    with pytest.raises(DimsError, match="3 axes but the tensor has 2"):
        dims.check((7, 64))
    with pytest.raises(DimsError, match="axis of size 1 where"):
        dims.check((7, 2, 64))


def test_dims_find_axes_by_name() -> None:
    dims = parse("t (heads*d)[tp] 1 x")
    assert (dims.index("t"), dims.index("x"), dims.index("heads"), dims.names) == (0, 3, None, ("t", "heads", "d", "x"))
    assert [(axis, str(shard)) for axis, shard in dims.shards()] == [(1, "tp")]
