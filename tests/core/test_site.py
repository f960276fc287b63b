import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapscope.core import formatting
from tapscope.core.errors import SiteError
from tapscope.core.site import Glob, Site, compact_ranges, describe_layers, describe_sites, parse, parse_ranges

_part = st.from_regex(r"[a-z_][a-z0-9_]{0,8}|[0-9]{1,3}", fullmatch=True)
_path = st.lists(_part, max_size=5).map(".".join)
_name = st.from_regex(r"[a-z_][a-z0-9_.]{0,10}", fullmatch=True)
_port = st.one_of(
    st.just("out"),
    st.tuples(st.sampled_from(["in", "out", "tap", "param", "buffer"]), _name).map(lambda p: f"{p[0]}[{p[1]}]"),
)


@given(_path, _port, st.booleans())
def test_site_round_trips_through_text(path: str, port: str, grad: bool) -> None:
    text = f"{path}:{port}{'.grad' if grad else ''}"
    site = parse(text)
    assert str(site) == text
    assert (site.path, site.is_grad) == (path, grad)
    assert site.kind == port.partition("[")[0]


@given(_path, _port)
def test_site_glob_matches_itself_and_star(path: str, port: str) -> None:
    text = f"{path}:{port}"
    assert Glob(text).matches(text)
    assert Glob("*").matches(text)


@pytest.mark.parametrize("text", ["layers.0.mlp", "a:in", "a:b:out", "a:out[", "a:output", "a:param"])
def test_site_error_quotes_the_invalid_string(text: str) -> None:
    with pytest.raises(SiteError, match="site"):
        parse(text)


@pytest.mark.parametrize(
    ("glob", "site", "expected"),
    [
        ("layers.3.*", "model.layers.3.mlp:out", True),
        ("layers.3.*", "model.layers.31.mlp:out", False),
        ("layers.3", "model.layers.3:out", True),
        ("*.mlp:out", "model.layers.3.mlp:in[x]", False),
        ("mlp:out", "model.layers.3.mlp:out", True),
        ("lm_head", "lm_head:in[input]", True),
        ("ayers.3", "model.layers.3:out", False),
        (":out*", ":out[logits]", True),
        (":out*", "model.norm:out", False),
        ("*:out[logits]", ":out[logits]", True),
        ("*hidden_states*", "model.layers.3:in[hidden_states]", True),
        ("*hidden_states*", "model.layers.3:in[mask]", False),
        ("layers.?.mlp", "layers.3.mlp:out", True),
        ("layers.?.mlp", "layers.33.mlp:out", False),
    ],
)
def test_site_glob_matches_at_dots_and_takes_brackets_literally(glob: str, site: str, expected: bool) -> None:
    assert Glob(glob).matches(site) is expected


def test_site_glob_refuses_an_empty_pattern() -> None:
    with pytest.raises(SiteError, match="selects nothing"):
        Glob("")


@pytest.mark.parametrize("path", ["mid_block.attentions.0", "unet.middle_block.1.in_layers.2", "encoder.mid.blocks.1"])
def test_site_middle_block_of_a_diffusion_model_has_no_layer(path: str) -> None:
    assert parse(f"{path}:out").layer is None
    assert parse("down_blocks.2.resnets.0:out").layer == 2


def test_site_layer_is_the_first_number_of_its_path() -> None:
    assert parse("model.layers.12.mlp.experts.3:out").layer == 12
    assert parse("lm_head:out").layer is None
    assert Site("model.layers.12.mlp", "out").parent == "model.layers.12"


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("layer2.k", 2),
        ("layer4.0.conv1", 4),
        ("model.layer_2.k", 2),
        ("Block3", 3),
        ("blocks-3.mlp", 3),
        ("h3.attn", 3),
        ("layers.5.block1.conv", 5),
        ("sublayer2.k", None),
        ("layer2norm", None),
        ("layer123456.k", None),
        ("mid.block_1.conv", None),
    ],
)
def test_site_layer_and_its_number_may_be_one_name(path: str, layer: int | None) -> None:
    assert parse(f"{path}:out").layer == layer


@given(st.sets(st.integers(0, 200), min_size=1))
def test_step_ranges_round_trip_through_text(numbers: set[int]) -> None:
    assert parse_ranges(compact_ranges(numbers)) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "1--2", "-1"])
def test_step_ranges_refuse_invalid_strings(text: str) -> None:
    with pytest.raises(SiteError):
        parse_ranges(text)


def test_site_hint_for_a_typo_names_layers() -> None:
    assert describe_layers([f"model.layers.{i}:out" for i in range(28)]) == "layers are 0-27"
    assert describe_layers(["a:out", ":out"]) == "modules are (root), a"


def test_site_hint_for_a_typo_names_what_the_module_around_it_contains() -> None:
    sites = ["net.mid.conv1:out", "net.mid.conv2:out", "net.mid.act:in[x]"]
    sites += ["net.down.0.conv1:out", "net.down.1.conv1:out"]
    assert describe_sites("mid.conv3:out", sites) == "mid contains act, conv1, conv2"
    assert describe_sites("net.mid.conv3.weight*", sites) == "net.mid contains act, conv1, conv2"
    assert describe_sites("net.mid.conv1:outt", sites) == "net.mid.conv1 has out"
    assert describe_sites("net.down.7.conv1:out", sites) == "layers are 0-1"
    assert describe_sites("up.conv1:out", sites) == "layers are 0-1"
    assert describe_sites("net.up.conv1", sites) == "net contains down, mid"


@given(_path, _port, st.integers(20, 60))
def test_shortened_site_fits_and_keeps_its_layer(path: str, port: str, width: int) -> None:
    site = f"{path}:{port}"
    shown = formatting.site(site, width)
    assert len(shown) <= width
    layer = parse(site).layer
    if len(site) > width and layer is not None and len(str(layer)) < 4:
        assert str(layer) in shown


def test_shortened_site_loses_its_prefix_first() -> None:
    assert formatting.site("model.layers.12.self_attn.o_proj:in[input]", 40) == "…layers.12.self_attn.o_proj:in[input]"
    assert formatting.site("model.layers.12.self_attn.o_proj:in[input]", 33) == "…12.self_attn.o_proj:in[input]"
    assert formatting.site("model.layers.12.self_attn.o_proj:in[input]", 24) == "…12.self_at…oj:in[input]"
