import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapscope.dims import AXES, Dim, Dims, Shard, parse
from tapscope.errors import DimsError

_shard = st.builds(Shard, st.sampled_from(AXES), st.sampled_from([None, "zigzag", "natural"]), st.booleans())


@st.composite
def _dims(draw: st.DrawFn) -> Dims:
    names = draw(st.lists(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), min_size=1, max_size=5, unique=True))
    dims: list[Dim] = []
    while names:
        taken = draw(st.integers(1, min(3, len(names))))
        shards = draw(st.lists(_shard, max_size=2, unique_by=lambda s: s.axis))
        dims.append(Dim(tuple(names[:taken]), tuple(shards)))
        names = names[taken:]
    if draw(st.booleans()):
        dims.append(Dim(("1",)))
    used = {shard.axis for dim in dims for shard in dim.shards}
    free = [axis for axis in AXES if axis not in used]
    replicated = draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []
    return Dims(tuple(dims), tuple(replicated), draw(st.sampled_from([None, "attn_dp"])))


@given(_dims())
def test_dims_survive_printing_and_parsing(dims: Dims) -> None:
    assert parse(str(dims)) == dims


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
    ],
)
def test_annotations_written_for_sglang_parse_and_print_unchanged(text: str) -> None:
    assert str(parse(text)) == text


def test_sharded_is_the_default_and_is_not_printed() -> None:
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
    ],
)
def test_a_wrong_annotation_names_its_wrong_part(text: str, names: str) -> None:
    with pytest.raises(DimsError, match=names.replace("(", r"\(")):
        parse(text)


def test_dims_are_checked_against_a_shape() -> None:
    dims = parse("t 1 h[tp]")
    dims.check((7, 1, 64))
    with pytest.raises(DimsError, match="3 axes but the tensor has 2"):
        dims.check((7, 64))
    with pytest.raises(DimsError, match="say 1 where"):
        dims.check((7, 2, 64))


def test_axes_are_found_by_name() -> None:
    dims = parse("t (heads*d)[tp] 1 x")
    assert (dims.index("t"), dims.index("x"), dims.index("heads"), dims.names) == (0, 3, None, ("t", "heads", "d", "x"))
    assert [(axis, str(shard)) for axis, shard in dims.shards()] == [(1, "tp")]
