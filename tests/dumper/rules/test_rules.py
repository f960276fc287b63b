"""Rules: text format, and capture decisions per site and firing."""

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core import dtypes
from tapscope.core.errors import RuleError
from tapscope.core.site import Glob, parse
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.rules.byte_size import parse_size, size_text
from tapscope.dumper.rules.int_ranges import Ranges
from tapscope.dumper.rules.rule import Rule, parse_rule
from tapscope.dumper.rules.rule_options import KINDS
from tapscope.dumper.selection.selection import OFF, CaptureSpec, RuleContext, Selection

# ---- text -----------------------------------------------------------------------------------------------


def test_rules_text_of_the_documentation_is_read_as_it_states() -> None:
    text = (
        "layers.3.*:out=full steps=0-99 every=10 phase=decode rank=0 tag.user='a' cap=64KiB rows=-4: "
        'when=layer_id in (0, 1) and search("attn", name)'
    )
    rule = parse_rule(text.replace("'a'", '"a b"'))
    assert (rule.glob, rule.keep, rule.every, rule.phases, rule.cap) == (
        "layers.3.*:out",
        "full",
        10,
        ("decode",),
        65536,
    )
    assert rule.rows == (-4, None, None)
    assert rule.tags == (("user", ("a b",)),)
    assert rule.when == 'layer_id in (0, 1) and search("attn", name)'
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize("text", ["layers.3.*:out=full", " a = stats ", "a=b=off", "*:tap[x y]=full", ":out*=stats"])
def test_rules_bare_rule_is_still_glob_and_keep(text: str) -> None:
    glob, _, keep = text.rpartition("=")
    assert parse_rule(text) == Rule(glob.strip(), keep.strip())  # type: ignore[arg-type]


def _ranges() -> st.SearchStrategy[Ranges]:
    ends = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)
    span = st.one_of(
        ends.map(lambda p: f"{p[0]}-{p[1]}"), st.integers(0, 60).map(str), st.integers(0, 60).map("{}-".format)
    )
    return st.lists(span, min_size=1, max_size=3).map(Ranges.parse)


_words = st.text(min_size=1, max_size=8)
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)
_several = st.lists(_words, max_size=3).map(tuple)
_number = st.one_of(st.none(), st.integers(1, 30))
_when = st.sampled_from(
    [None, "step < 2", 'search("a;b=c, d", name)', "tag_x == 'when=x' or numel>3", "layer_id in (0, 1)"]
)


@st.composite
def _rules(draw: st.DrawFn) -> Rule:
    optional = lambda each: draw(st.one_of(st.none(), each))  # noqa: E731
    sizes = sorted([draw(st.integers(0, 2**40)), draw(st.integers(0, 4096))])
    names = draw(st.lists(st.from_regex(r"[a-z_][a-z0-9_.]{0,6}", fullmatch=True), max_size=3, unique=True))
    return Rule(
        draw(st.text(min_size=1, max_size=12)),
        draw(st.sampled_from(["off", "stats", "full"])),
        layers=optional(_ranges()),
        steps=optional(_ranges()),
        ranks=optional(_ranges()),
        **{axis: optional(_ranges()) for axis in ("tp", "pp", "dp", "cp", "ep")},
        every=draw(_number),
        first=draw(_number),
        phases=draw(_several),
        requests=draw(_several),
        passes=draw(st.lists(st.sampled_from(["forward", "recompute", "backward"]), max_size=2).map(tuple)),
        ports=draw(st.lists(st.sampled_from(KINDS), max_size=2).map(tuple)),
        dtypes=draw(st.lists(st.sampled_from(dtypes.NAMES), max_size=2).map(tuple)),
        min_bytes=optional(st.just(sizes[0])),
        max_bytes=optional(st.just(sizes[1])),
        cap=optional(st.integers(0, 2**50)),
        rows=optional(
            st.tuples(*[st.one_of(st.none(), st.integers(-9, 9))] * 2, st.one_of(st.none(), st.integers(1, 9)))
        ),
        tags=tuple((name, tuple(draw(st.lists(_scalars, min_size=1, max_size=2)))) for name in names),
        when=draw(_when),
    )


@settings(max_examples=100)
@given(_rules())
def test_rule_prints_what_it_is_parsed_from(rule: Rule) -> None:
    again = parse_rule(str(rule))
    assert again == rule
    assert str(again) == str(rule)
    assert [type(v) for _, values in again.tags for v in values] == [type(v) for _, values in rule.tags for v in values]


@settings(max_examples=40)
@given(st.lists(_rules(), min_size=1, max_size=4))
def test_rules_survive_words_environment_json_pickle_and_copy(rules: list[Rule]) -> None:
    from tapscope.dumper.environment import parse_words

    config = DumperConfig(rules=tuple(rules), tags=("tag_x",))
    text = ";".join(map(str, rules))
    assert DumperConfig().updated(parse_words([f"rules={text}", "tags=tag_x"])) == config
    assert DumperConfig.from_env({"TAPSCOPE_RULES": text.replace(";", ";"), "TAPSCOPE_TAGS": "tag_x"}) == config
    assert DumperConfig().updated(json.loads(json.dumps(config.to_json()))) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"site": "a", "keep": "full", "steps": "0-99"}, "a=full steps=0-99"),
        ({"site": "a", "keep": "full", "steps": 7, "rank": [0, "2-3"]}, "a=full steps=7 rank=0,2-3"),
        ({"site": "a", "keep": "full", "phase": "decode,mixed"}, "a=full phase=decode,mixed"),
        ({"site": "a", "keep": "full", "request": ["a b", "c,d"]}, 'a=full request="a b","c,d"'),
        ({"site": "a", "keep": "full", "cap": 1048576, "min_bytes": "64KiB"}, "a=full cap=1MiB min_bytes=64KiB"),
        ({"site": "a", "keep": "stats", "tag.x": "a,b", "tag.y": [1, None]}, 'a=stats tag.x="a,b" tag.y=1,null'),
        ({"site": "a", "keep": "stats", "every": 10, "rows": ":4"}, "a=stats every=10 rows=:4"),
        ({"site": "a", "keep": "stats", "when": "step < 2"}, "a=stats when=step < 2"),
        ({"site": "a", "keep": "stats", "dtype": "torch.bfloat16"}, "a=stats dtype=bfloat16"),
    ],
)
def test_rules_json_object_states_the_same_as_the_text(content: dict[str, Any], text: str) -> None:
    assert parse_rule(content) == parse_rule(text)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("layers.3", "rule 'layers.3' has no '='; write GLOB=KEEP"),
        ("=full", "does not begin with GLOB=KEEP"),
        ("", "has no '='"),
        ('""=full', "an empty pattern selects nothing"),
        ("a=some", "rule a=some: keep must be one of off, stats, sketch, full"),
        ("a=full stps=3", "stps=3: options are layers, port, rank, tp"),
        ("a=full steps", "'steps' is not OPTION=VALUE"),
        ("a=full steps=", "steps=: must be values joined by commas"),
        ("a=full steps=x", "steps=x: 'x' is not a number or range such as 0-3, 7 or 100-"),
        ("a=full steps=9-3", "range 9-3 ends before it begins"),
        ("a=full steps=1 steps=2", "steps is given twice"),
        ("a=full tag.x=1 tag.x=2", "a tag is given twice"),
        ("a=full every=0", "every=0: must be an integer ≥ 1"),
        ("a=full every=1,2", "every=1,2: must be one value"),
        ("a=full first=1.5", "first=1.5: must be an integer ≥ 1"),
        ("a=full port=outt", "'outt' must be one of in, out, tap"),
        ("a=full pass=fwd", "'fwd' must be one of forward, recompute, backward"),
        ("a=full dtype=bf16", "'bf16' must be one of float64, float32"),
        ("a=full min_bytes=1XB", "'1XB' is not a size; write bytes or e.g. 64KiB"),
        ("a=full cap=-1", "'-1' is not a size"),
        ("a=full min_bytes=2 max_bytes=1", "nothing could match"),
        ("a=full rows=3", "must be START:STOP"),
        ("a=full rows=1:2:0", "STEP from 1"),
        ("a=full rows=::-1", "STEP from 1"),
        ('a=full phase="a', "is not OPTION=VALUE"),
        ('a=full phase=a"b"', "is unexpected after 'a'"),
        ("a=full when=", "the expression is empty"),
        ("a=full when=step <", "column 7: invalid syntax"),
        ("a=full when=__import__('os')", "cannot be called"),
        ("a=full when=layr_id == 0", "did you mean layer_id"),
        ('a=full tag.a"b=1', "is not OPTION=VALUE"),
        ("a=full " + "x" * 20000, "a rule has at most 16384"),
        ({"keep": "full"}, "site \\(a glob\\) and keep"),
        ({"site": "a", "keep": "full", "steps": None}, "steps=null: None is not a number or range"),
        ({"site": "a", "keep": "full", "steps": True}, "True is not a number"),
        ({"site": "a", "keep": "full", "every": True}, "must be an integer ≥ 1"),
        ({"site": "a", "keep": "full", "phase": 3}, "must be strings joined by commas"),
        ({"site": "a", "keep": "full", "tag.x": {}}, "must be a string, a finite number"),
        ({"site": "a", "keep": "full", "when": 3}, "must be a string"),
        ({"site": "a", "keep": "full", "glob": "b"}, "options are layers"),
        (3, "must be a string GLOB=KEEP or an object"),
    ],
)
def test_rules_wrong_rule_is_refused_in_words(rule: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says) as error:
        parse_rule(rule)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"every": 0},
        {"every": True},
        {"layers": "0-3"},
        {"rows": [1, 2, 3]},
        {"ports": ("x",)},
        {"tags": (("a b", (1,)),)},
        {"tags": (("a", ()),)},
        {"ranks": 3},
    ],
)
def test_rule_made_by_hand_is_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match=next(iter(fields)).removesuffix("s")[:3]):
        Rule("a", "full", **fields)


@settings(max_examples=100)
@given(
    st.one_of(
        st.text(max_size=60),
        st.text(max_size=40).map("a=full {}".format),
        st.text(max_size=20).map("a=full phase={}".format),
    )
)
def test_rules_any_text_is_a_rule_or_refused(text: str) -> None:
    try:
        rule = parse_rule(text)
    except RuleError:
        return
    assert parse_rule(str(rule)) == rule


@given(st.integers(0, 2**60))
def test_rules_sizes_survive_printing(nbytes: int) -> None:
    assert parse_size(size_text(nbytes)) == nbytes == parse_size(str(nbytes)) == parse_size(nbytes)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64KiB", 65536), ("1 mib", 1 << 20), ("1.5GB", 1_500_000_000), ("12B", 12)]
)
def test_rules_sizes_are_read_in_either_system(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("value", ["", "MiB", "-1", "1.5", "1e3", "1 2", "1XiB", -1, True, 1.5, None])
def test_rules_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_rules_ranges_hold_what_they_were_made_of(numbers: set[int]) -> None:
    ranges = Ranges.parse(sorted(numbers))
    assert {n for n in range(-3, 210) if n in ranges} == numbers
    assert Ranges.parse(ranges.expressions()) == ranges
    assert len(ranges.spans) == sum(n - 1 not in numbers for n in numbers)


# ---- decisions, compared with a plain interpreter -----------------------------------------------------------

_GLOBS = [
    "*",
    "layers.*",
    "layers.0.*:out",
    "*:in[*]",
    "*.mlp",
    "*:out.grad",
    "*.grad",
    "*:param[*]",
    "*:param*",
    "*:buffer*",
    ":out",
    "*:tap[x]",
]
_PORTS = [
    "in[x]",
    "out",
    "out[a.b]",
    "tap[x]",
    "in[x].grad",
    "out.grad",
    "param[weight]",
    "param[weight].grad",
    "buffer[b]",
]
_SITES = [f"{path}:{port}" for path in ("", "layers.0.mlp", "layers.1.mlp", "layers.1") for port in _PORTS]
_CONDITIONS: dict[str, Any] = {
    "step < 3": lambda s, m: m.step < 3,
    "layer_id in (0, 1) and step > 1": lambda s, m: parse(s).layer in (0, 1) and m.step > 1,
    'search("mlp", path) or my_tag == 2': lambda s, m: "mlp" in parse(s).path or m.tags.get("my_tag") == 2,
    "numel > 4 and ndim == 2": lambda s, m: m.shape == (2, 3),
    "tp == 1 or rank == 0": lambda s, m: True,
    "step / 0 == 1": None,  # never true, and counted as a problem
}


@st.composite
def _plain_rules(draw: st.DrawFn) -> str:
    options = {
        "layers": ["0", "1-3"],
        "steps": ["0-2", "2-"],
        "every": ["2"],
        "first": ["2"],
        "phase": ["decode", "prefill,decode"],
        "pass": ["recompute", "forward"],
        "rank": ["0", "1-3"],
        "tp": ["0", "1"],
        "pp": ["0", "1"],
        "port": ["in", "out,tap", "grad", "param", "out.grad", "param.grad"],
        "dtype": ["float32"],
        "min_bytes": ["16"],
        "max_bytes": ["16"],
        "request": ["r1", "r2,r3"],
        "tag.my_tag": ["2", "x,null"],
    }
    names = draw(st.lists(st.sampled_from(list(options)), max_size=2, unique=True))
    words = [f"{draw(st.sampled_from(_GLOBS))}={draw(st.sampled_from(['off', 'stats', 'full']))}"]
    words += [f"{name}={draw(st.sampled_from(options[name]))}" for name in names]
    words += draw(st.sampled_from([[], ["rows=0:2"], ["cap=1KiB"]]))
    when = draw(st.one_of(st.none(), st.sampled_from(list(_CONDITIONS))))
    return " ".join([*words, *([f"when={when}"] if when else [])])


_moments = st.builds(
    RuleContext,
    step=st.integers(0, 4),
    phase=st.sampled_from(["prefill", "decode", "train"]),
    pass_=st.sampled_from(["forward", "recompute", "backward"]),
    age=st.integers(0, 3),
    dtype=st.sampled_from([None, "float32", "bfloat16"]),
    shape=st.sampled_from([(), (2, 3)]),
    nbytes=st.sampled_from([0, 16, 24]),
    tags=st.sampled_from([{}, {"my_tag": 2}, {"my_tag": "x"}, {"my_tag": object()}]),
    requests=st.sampled_from([frozenset(), frozenset({"r1"}), frozenset({"r2", "r4"})]),
)


def _kind(site: str) -> str:
    return parse(site).kind + (".grad" if parse(site).is_grad else "")


def _ordinary(kind: str, config: DumperConfig) -> bool:
    if kind.endswith(".grad") and not config.grads:
        return False
    return {"param": config.params, "buffer": config.buffers}.get(kind.split(".")[0], True)


def _names(rule: Rule, kind: str) -> bool:
    if kind in rule.ports or ("grad" in rule.ports and kind.endswith("grad")):
        return True
    return rule.glob.endswith(".grad") if kind.endswith(".grad") else rule.glob.rpartition(":")[2].startswith(kind)


def _holds(rule: Rule, site: str, m: RuleContext, rank: int, coords: dict[str, int]) -> bool:
    kind, layer = _kind(site), parse(site).layer
    checks = [
        Glob(rule.glob).matches(site),
        rule.layers is None or (layer is not None and layer in rule.layers),
        not rule.ports or kind in rule.ports or ("grad" in rule.ports and kind.endswith(".grad")),
        rule.ranks is None or rank in rule.ranks,
        rule.tp is None or coords.get("tp", 0) in rule.tp,
        rule.pp is None or coords.get("pp", 0) in rule.pp,
        rule.steps is None or m.step in rule.steps,
        rule.every is None or m.step % rule.every == 0,
        rule.first is None or m.age < rule.first,
        not rule.phases or m.phase in rule.phases,
        not rule.passes or m.pass_ in rule.passes,
        not rule.dtypes or m.dtype in rule.dtypes,
        rule.min_bytes is None or m.nbytes >= rule.min_bytes,
        rule.max_bytes is None or m.nbytes <= rule.max_bytes,
        not rule.requests or bool(set(rule.requests) & m.requests),
        all(type(m.tags.get(n)) is not object and m.tags.get(n) in values for n, values in rule.tags),
    ]
    if rule.when is not None:
        holds = _CONDITIONS[rule.when]
        if "rank == 0" in rule.when:
            checks.append(coords.get("tp", 0) == 1 or rank == 0)
        elif "my_tag" in rule.when and type(m.tags.get("my_tag")) is object and "mlp" not in parse(site).path:
            checks.append(False)  # a tag that is not plain data fails the condition
        else:
            checks.append(holds is not None and holds(site, m))
    return all(checks)


def _expected(config: DumperConfig, site: str, m: RuleContext, rank: int, coords: dict[str, int]) -> CaptureSpec:
    kind = _kind(site)
    explicit_value = kind.startswith("tap")
    if not config.enabled or not (config.mode == "all" or explicit_value or (config.mode == "core" and site[0] == ":")):
        return OFF
    if config.filter is not None and not _holds(Rule("*", "full", when=config.filter), site, m, rank, coords):
        return OFF
    for rule in config.rules:
        reaches = rule.keep == "off" or _ordinary(kind, config) or _names(rule, kind)
        if reaches and _holds(rule, site, m, rank, coords):
            rows = None if rule.rows is None else slice(*rule.rows)
            return CaptureSpec(rule.keep, rows, frozenset(rule.requests) or None, rule.cap)
    return CaptureSpec(config.keep) if _ordinary(kind, config) else OFF


_configs = st.builds(
    lambda **fields: DumperConfig(tags=("my_tag",), **fields),
    enabled=st.sampled_from([True, True, True, False]),
    keep=st.sampled_from(["off", "stats", "full"]),
    rules=st.lists(_plain_rules(), max_size=5).map(tuple),
    mode=st.sampled_from(["all", "all", "core", "off"]),
    filter=st.one_of(st.none(), st.sampled_from(list(_CONDITIONS))),
    grads=st.booleans(),
    params=st.booleans(),
    buffers=st.booleans(),
)
_coords = st.sampled_from([{}, {"tp": 1}, {"tp": 0, "pp": 1}])


@settings(max_examples=100)
@given(_configs, st.lists(_moments, min_size=1, max_size=4), st.integers(0, 2), _coords)
def test_rules_first_rule_that_holds_decides(
    config: DumperConfig, moments: list[RuleContext], rank: int, coords: dict[str, int]
) -> None:
    selection = Selection(config, rank=rank, coords=coords)
    for site in _SITES:
        choice = selection.decision(site)
        for moment in moments:
            found, expected = choice.decide(moment), _expected(config, site, moment, rank, coords)
            assert found.keep == expected.keep, site
            if found.keep != "off":
                assert found == expected, site
            if choice.static is not None:
                assert choice.static == found
            if found.keep != "off":
                assert choice.may_keep


@settings(max_examples=100)
@given(_configs, _moments, _coords)
def test_rules_where_something_is_kept_there_is_a_hook(
    config: DumperConfig, moment: RuleContext, coords: dict[str, int]
) -> None:
    selection = Selection(config, coords=coords)
    known = {"in": ["in[x]"], "out": ["out"], "in.grad": ["in[x].grad"], "out.grad": ["out.grad"]}
    known |= {"param": ["param[weight]"], "param.grad": ["param[weight].grad"], "buffer": ["buffer[b]"]}
    for site in _SITES:
        kind = _kind(site)
        if selection.decision(site).decide(moment).keep != "off" and site.rpartition(":")[2] in known.get(kind, []):
            assert selection.may_keep(parse(site).path, kind, known[kind], unnamed=False), site


# ---- expensive kinds are kept only if named ---------------------------------------------------------------

_COSTLY = [
    f"layers.0.mlp:{port}" for port in ("in[x].grad", "out.grad", "param[weight]", "param[weight].grad", "buffer[b]")
]


@pytest.mark.parametrize(
    ("rules", "switches", "kept"),
    [
        (["*=full"], {}, []),
        (["layers.0.mlp=full"], {}, []),
        (["*:out*=full"], {}, []),
        (["*.grad=full"], {}, ["in[x].grad", "out.grad", "param[weight].grad"]),
        (["*:out.grad=full"], {}, ["out.grad"]),
        (["*=full port=grad"], {}, ["in[x].grad", "out.grad", "param[weight].grad"]),
        (["*=full port=out.grad,buffer"], {}, ["out.grad", "buffer[b]"]),
        (["*:param*=full"], {}, ["param[weight]"]),
        (["*=full port=param"], {}, ["param[weight]"]),
        (["*:buffer[*]=full"], {}, ["buffer[b]"]),
        (["*=full"], {"grads": True}, ["in[x].grad", "out.grad"]),
        (["*=full"], {"params": True}, ["param[weight]"]),
        (["*=full"], {"grads": True, "params": True, "buffers": True}, None),
        (["*=off", "*:out.grad=full"], {}, []),
        (["*=stats", "*:out.grad=full"], {}, ["out.grad"]),
        (["layers.0.*=off", "*:out.grad=full"], {"grads": True}, []),
    ],
)
def test_rules_gradients_parameters_and_buffers_are_kept_only_where_named(
    rules: list[str], switches: dict[str, bool], kept: list[str] | None
) -> None:
    selection = Selection(DumperConfig(rules=tuple(rules), **switches))
    found = [site.partition(":")[2] for site in _COSTLY if selection.decision(site).may_keep]
    assert found == ([site.partition(":")[2] for site in _COSTLY] if kept is None else kept)
    hooked = selection.may_keep("layers.0.mlp", "out.grad", ["out.grad"], unnamed=False)
    assert hooked == ("out.grad" in found)


def test_rule_for_a_nested_output_hooks_nothing_else() -> None:
    selection = Selection(DumperConfig(rules=("layers.0:out[a.b]=full layers=0",), keep="off", grads=True))  # type: ignore[arg-type]
    asked = [("layers.0", "out"), ("layers.0", "out.grad"), ("layers.0", "in"), ("layers.1", "out")]
    hooked = [each for each in asked if selection.may_keep(*each, ["out"] if each[1] == "out" else [], unnamed=False)]
    assert hooked == [("layers.0", "out")]
    selection = Selection(DumperConfig(rules=("*:out[a.b]=full layers=0",), keep="off"))  # type: ignore[arg-type]
    assert selection.may_keep("layers.0", "out", ["out"], unnamed=False)
    assert not selection.may_keep("layers.1", "out", ["out"], unnamed=False)


# ---- static and dynamic ---------------------------------------------------------------------------------


def test_rules_what_the_site_settles_needs_no_moment() -> None:
    rules = (
        "layers.3.*=full layers=3 port=out rank=0",
        'layers.4.*=full when=search("attn", name)',
        "*=off when=step < 5",
    )
    selection = Selection(DumperConfig(rules=rules, keep="off"), rank=0)
    assert selection.decision("layers.3.mlp:out").static == CaptureSpec("full")
    assert selection.decision("layers.3.mlp:in[x]").static == OFF
    assert selection.decision("layers.4.self_attn:out").static == CaptureSpec("full")
    assert selection.decision("layers.4.mlp:out").static == OFF
    assert Selection(DumperConfig(rules=rules, keep="off"), rank=1).decision("layers.3.mlp:out").static == OFF
    late = Selection(DumperConfig(rules=("*=full steps=0-3",), keep="off")).decision("a:out")
    assert late.static is None
    assert late.decide(RuleContext(step=3)).keep == "full"
    assert late.decide(RuleContext(step=4)) == OFF


def test_rules_filter_in_the_style_of_sglang_leaves_no_hook_elsewhere() -> None:
    config = DumperConfig(keep="full", filter='layer_id in (0, 1) and search("attn", name)')
    selection = Selection(config)
    assert selection.may_keep("layers.1.self_attn", "out", ["out"], unnamed=False)
    assert not selection.may_keep("layers.2.self_attn", "out", ["out"], unnamed=False)
    assert not selection.may_keep("layers.1.mlp", "out", ["out"], unnamed=False)
    assert selection.decision("layers.1.self_attn:out").static == CaptureSpec("full")


def test_rules_condition_that_cannot_be_decided_does_not_hold_and_is_reported() -> None:
    choice = Selection(
        DumperConfig(rules=("*=full when=my_tag < 3", "*=stats"), tags=("my_tag",), keep="off")
    ).decision("a:out")
    assert choice.decide(RuleContext(tags={"my_tag": 1})).keep == "full"
    assert choice.decide(RuleContext()).keep == "stats"
    assert choice.problem is None
    assert choice.decide(RuleContext(tags={"my_tag": "x"})).keep == "stats"
    assert choice.decide(RuleContext(tags={"my_tag": [object()]})).keep == "stats"
    assert choice.problem is not None
    assert "'my_tag < 3': TypeError: '<' not supported" in choice.problem  # the first problem is kept
    assert choice.num_problems == 2
    assert Selection(DumperConfig(keep="full", filter="step / 0")).decision("a:out").decide(RuleContext()) == OFF


@given(_rules(), st.sampled_from(_SITES))
def test_rules_deciding_never_raises_whatever_the_moment_holds(rule: Rule, site: str) -> None:
    choice = Selection(DumperConfig(rules=(rule,), tags=("tag_x",), keep="off")).decision(site)
    odd = RuleContext(None, 3, None, 4, None, None, 7, None, "x", {"a": object()}, frozenset())  # type: ignore[arg-type]
    assert choice.decide(odd).keep in ("off", "stats", "full")


@pytest.mark.parametrize(
    ("options", "nbytes", "holds"),
    [("min_bytes=16", 15, False), ("min_bytes=16", 16, True), ("max_bytes=16", 16, True), ("max_bytes=16", 17, False)],
)
def test_rules_bounds_of_sizes_are_included(options: str, nbytes: int, holds: bool) -> None:
    choice = Selection(DumperConfig(rules=(f"*=full {options}",), keep="off")).decision("a:out")  # type: ignore[arg-type]
    assert (choice.decide(RuleContext(nbytes=nbytes)).keep == "full") is holds


def test_rules_requests_name_the_rows_that_are_kept() -> None:
    choice = Selection(DumperConfig(rules=("*=full request=r1,r2",), keep="stats")).decision("a:out")
    assert choice.decide(RuleContext(requests=frozenset({"r2", "r9"}))) == CaptureSpec(
        "full", None, frozenset({"r1", "r2"})
    )
    assert choice.decide(RuleContext(requests=frozenset({"r9"}))) == CaptureSpec("stats")


@pytest.mark.parametrize(
    ("mode", "root", "inner", "tap"),
    [("all", True, True, True), ("core", True, False, True), ("off", False, False, True)],
)
def test_rules_mode_bounds_where_taps_stand(mode: Any, root: bool, inner: bool, tap: bool) -> None:
    selection = Selection(DumperConfig(keep="full", mode=mode, rules=("layers.0=full",)))
    assert selection.may_keep("", "out", ["out"], unnamed=False) is root
    assert selection.may_keep("layers.0", "out", ["out"], unnamed=False) is inner
    assert selection.decision("layers.0:tap[x]").may_keep is tap


def test_rules_empty_selection_keeps_nothing() -> None:
    assert Selection.empty().decision("a:out").static == OFF
    assert not Selection.empty().may_keep("a", "in", [], unnamed=True)


# ---- rules that match no site ---------------------------------------------------------------------------

_MODEL = {"": ["in[ids]", "out"], "layers.0": ["in[x]", "out"], "layers.0.mlp": ["in[x]", "out", "param[weight]"]}


@pytest.mark.parametrize(
    "rule",
    [
        "layers.0.*=full",
        "*:out=full layers=0",
        "*.grad=full",
        "*=full port=grad",
        "*:param[weight]=full",
        "*=full port=param",
        "mlp:out[0]=full",
        "*:in[x].grad=full",
        "mlp:out[0].grad=full",
        "layers.0:in[x]=full rank=7 pp=3",
        ":out=full",
        "*:param[weight].grad=off",
        "layers.0:in[x.y]=full",
    ],
)
def test_rules_that_match_something_are_accepted(rule: str) -> None:
    selection = Selection(DumperConfig(rules=(rule,)))
    assert selection.unmatched(_MODEL) == []


@pytest.mark.parametrize(
    "rule",
    [
        "layers.1.*=full",
        "*:out=full layers=1",
        "norm=full",
        "*:param[bias]=full",
        "*=full port=buffer",
        "layers.0:in[y]=full",
        "layers.0=full port=param",
        "layers.0:tap[x]=full",
        ":param[weight]=full",
        "layers.0:in[y].grad=full",
        "layers.[0-1]=full",
        "*:out[0]=full layers=1",
    ],
)
def test_rules_that_match_nothing_are_refused_and_named(rule: str) -> None:
    selection = Selection(DumperConfig(rules=("*=stats", rule, "layers.0=off")))
    assert selection.unmatched(_MODEL) == [parse_rule(rule)]


def test_rules_explicit_values_and_open_modules_may_bring_sites_nobody_knows_yet() -> None:
    selection = Selection(DumperConfig(rules=("layers.0:tap[x]=full", "layers.0:in[y]=full", "norm:in[y]=full")))
    assert [str(rule) for rule in selection.unmatched(_MODEL, ["layers.0"], taps=True)] == ["norm:in[y]=full"]


def test_rules_job_refuses_only_what_no_rank_matches() -> None:
    config = DumperConfig(rules=("layers.0.*=full", "layers.1.*=full", "layers.9.*=full"))
    startup_timer = [{f"layers.{n}.mlp": ["in[x]", "out"]} for n in (0, 1)]
    missing = [Selection(config, coords={"pp": n}).unmatched(startup_timer[n]) for n in (0, 1)]
    assert [[rule.glob for rule in each] for each in missing] == [
        ["layers.1.*", "layers.9.*"],
        ["layers.0.*", "layers.9.*"],
    ]
    assert {str(rule) for rule in missing[0]} & {str(rule) for rule in missing[1]} == {"layers.9.*=full"}
