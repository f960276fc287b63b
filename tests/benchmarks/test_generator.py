"""Generated cases of the verdict bench: determined by their number, and judged by an independent oracle."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_packages import package

from tapscope import Dumper
from tapscope.core.observe import RowSpan

package()
main: Any = importlib.import_module("benchmarks.verdict.__main__")
pairing: Any = importlib.import_module("benchmarks.verdict.generator.pairing")
damage: Any = importlib.import_module("benchmarks.verdict.generator.damage")
bugs: Any = importlib.import_module("benchmarks.verdict.generator.bug")
causes: Any = importlib.import_module("benchmarks.verdict.generator.causes")
cases: Any = importlib.import_module("benchmarks.verdict.generator.cases")
oracle: Any = importlib.import_module("benchmarks.verdict.generator.oracle")


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the bench on generated cases; return its exit code and JSON lines."""
    code = main.main(["--json", "--jobs", "1", *words])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def without_time(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "seconds"}


def test_generator_cases_run_end_to_end_and_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    code, (benign, bug, score) = generated(capsys, "--generate", "5", "--cases", "4", "--only", "gen-5-[01]")
    assert (benign["name"], benign["fate"], benign["bug"]) == ("gen-5-0", "clean", None)
    assert (bug["name"], bug["fate"]) == ("gen-5-1", "named")
    assert bug["named"] == bug["bug"]["expect"][0]
    assert bug["seen"]["here"] > oracle.OBSERVABLE
    assert (code, score["exit_code"]) == (0, 0)
    assert any(line.startswith("all") for line in score["lines"])
    _, (again, _) = generated(capsys, "--generate", "5", "--cases", "400", "--only", "gen-5-1")
    assert without_time(again) == without_time(bug), "a case depends on its seed and number alone"


@pytest.mark.soak
def test_generator_case_with_two_ranks_in_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = generated(capsys, "--generate", "6", "--cases", "12", "--only", "gen-6-8", "--only", "gen-6-9")
    assert (code, lines[0]["pair"], lines[0]["dtypes"]) == (0, "engine-engine/tp2", "float32-bfloat16")
    assert lines[0]["fate"] == "clean"
    assert lines[1]["fate"] in ("named", "tolerated", "undecidable")


def test_generator_draws_depend_on_seed_and_cover_the_grammar() -> None:
    drawn = [pairing.draw_pairing(9, number) for number in range(60)]
    assert drawn == [pairing.draw_pairing(9, number) for number in range(60)]
    assert drawn != [pairing.draw_pairing(10, number) for number in range(60)]
    assert {p.target.dtype for p in drawn} == {"float32", "bfloat16", "float16"}
    assert {p.target.framework for p in drawn} == {"transformers", "engine", "megatron"}
    assert {p.target.tp for p in drawn} == {1, 2}
    assert len({p.model.family for p in drawn}) >= 8


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"op": "scale", "amount": 2.0}, [2, 4, 6, 8]),
        ({"op": "scale", "amount": 2.0, "start": 1, "count": 2, "stride": 2}, [1, 4, 3, 8]),
        ({"op": "zero", "start": 3, "count": 2}, [0, 2, 3, 0]),
        ({"op": "negate", "start": 0}, [-1, 2, 3, 4]),
        ({"op": "swap", "start": 0, "count": 2, "other": 2}, [3, 4, 1, 2]),
        ({"op": "copy", "start": 0, "other": 3}, [4, 2, 3, 4]),
        ({"op": "roll", "count": 4}, [4, 1, 2, 3]),
        ({"op": "round", "dtype": "float8_e4m3"}, [1, 2, 3, 4]),
    ],
)
def test_generator_damage_changes_its_part_along_its_axis(fields: dict[str, Any], expected: list[float]) -> None:
    given = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    done = damage.Damage(**fields)
    assert done(given).tolist() == [expected]
    assert damage.Damage(**fields, axis=-2)(given.T).flatten().tolist() == expected
    assert given.tolist() == [[1.0, 2.0, 3.0, 4.0]], "what it is given stays as it is"
    assert done.description.startswith(fields["op"])


def test_cause_is_right_only_with_the_right_number() -> None:
    changed = damage.Damage(op="scale", amount=1.02, start=3)
    bug = bugs.Bug(kind="output", module="m", expect=("m",), damage=changed, shape=(8,))
    assert causes.is_right(bug, "in column 3: target = 1.02 × baseline (removes 100 % of the error)")
    assert not causes.is_right(bug, "in column 3: target = 1.03 × baseline (removes 97 % of the error)")
    assert not causes.is_right(bug, "target = 1.02 × baseline (removes 97 % of the error)")
    assert not causes.is_right(bug, "in column 3: target = −baseline (removes 97 % of the error)")


NORM, BIAS = "layers.0.input_layernorm.weight", "layers.0.k_proj.bias"
ONE = {"start": 7}
ZEROED, DOUBLED = (0.1532, 0.0), (0.923, 1.846)


@pytest.mark.parametrize(
    ("module", "fields", "change", "text", "adds_one", "expected"),
    [
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7: target = baseline − 0.1532 (removes 100 %", False, True),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7 (of rank 1): target = baseline − 0.1532", False, True),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7: target = baseline + 0.1532 (removes 100 %", False, False),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7: target = baseline − 0.2 (removes 100 %", False, False),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 8: target = baseline − 0.1532 (removes 100 %", False, False),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7: target = 1.5 × baseline (removes 93 %", False, False),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "in column 7 of request r0: target = baseline − 0.15", False, False),
        (BIAS, {"op": "zero", **ONE}, ZEROED, "target = baseline − 0.1532 (removes 100 %", False, False),
        (BIAS, {"op": "zero", "start": 0, "count": 8}, None, "in column 0: target = baseline − 0.15", False, False),
        (BIAS, {"op": "swap", "other": 2, **ONE}, ZEROED, "in column 7: target = baseline − 0.15", False, False),
        (NORM, {"op": "scale", "amount": 2.0, **ONE}, DOUBLED, "in column 7: target = 1.48 × baseline", True, True),
        (NORM, {"op": "scale", "amount": 2.0, **ONE}, DOUBLED, "in column 7: target = 1.2 × baseline", True, False),
        (NORM, {"op": "scale", "amount": 2.0, **ONE}, DOUBLED, "in column 7: target = 1.48 × baseline", False, False),
        (NORM, {"op": "scale", "amount": 2.0, **ONE}, DOUBLED, "in column 6: target = 1.48 × baseline", True, False),
        (NORM, {"op": "scale", "amount": 2.0, **ONE}, DOUBLED, "in column 7: target = baseline + 0.3", True, False),
        (NORM, {"op": "add", "amount": 1.0, **ONE}, (1.0, 1.9), "in column 7: target = 1.9 × baseline", False, True),
        (NORM, {"op": "add", "amount": 1.0, **ONE}, (1.0, 1.9), "in column 7: target = 2.1 × baseline", False, False),
        (
            NORM,
            {"op": "round", "dtype": "bfloat16", **ONE},
            (1.0, 1.0021),
            "in column 7: target = (1 + 0.0021) × baseline",
            False,
            True,
        ),
        (
            NORM,
            {"op": "round", "dtype": "bfloat16", **ONE},
            (1.0, 0.9979),
            "in column 7: target = (1 + 0.0021) × baseline",
            False,
            False,
        ),
        ("layers.0.k_proj.weight", {"op": "add", **ONE}, None, "in column 7: target = 1.9 × baseline", False, False),
    ],
)
def test_cause_names_the_channel_of_one_wrong_parameter_value(
    module: str, fields: dict[str, Any], change: tuple[float, float] | None, text: str, adds_one: bool, expected: bool
) -> None:
    bug = bugs.Bug(kind="weight", module=module, expect=(module,), damage=damage.Damage(**fields), change=change)
    bug = replace(bug, adds_one=adds_one)
    assert causes.is_right(bug, text) is expected


def test_cause_column_belongs_to_its_rank() -> None:
    changed = damage.Damage(op="add", amount=1.0, **ONE)
    fields = {"module": "layers.0.input_layernorm", "expect": ("m",), "rank": 1, "change": (1.0, 1.9)}
    bug = bugs.Bug(kind="rank_weight", damage=changed, **fields)
    assert causes.is_right(bug, "in column 7 (of rank 1): target = 1.9 × baseline")
    assert not causes.is_right(bug, "in column 7 (of rank 0): target = 1.9 × baseline")


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"kind": "mask", "text": "hide_newest"},
            "a token of target does not see itself",
            "target's mask is lost: later tokens are seen",
        ),
        (
            {"kind": "softmax_scale", "value": 1.1},
            "target scales scores by 0.275, 1.1 × baseline's 0.25",
            "target scales scores by 0.2625, 1.05 × baseline's 0.25",
        ),
        (
            {"kind": "epsilon", "value": 0.1, "change": (1e-5, 0.1)},
            "the norm's epsilon is larger by 0.1 (from the mean square of its input)",
            "the norm's epsilon is smaller by 0.1 (from the mean square of its input)",
        ),
        (
            {"kind": "epsilon", "value": 0.0, "change": (1e-5, 0.0)},
            "the norm's epsilon is smaller by 1e-05 (from the variance of its input)",
            "the norm's epsilon is smaller by 3e-05 (from the variance of its input)",
        ),
        (
            {"kind": "activation", "text": "gelu_pytorch_tanh"},
            "target = gelu (tanh) of its input, baseline = silu",
            "target = gelu of its input, baseline = silu",
        ),
        (
            {"kind": "positions", "text": "offset", "value": -1.0},
            "positions are 1 lower in target's table",
            "positions are 1 higher in target's table",
        ),
        (
            {"kind": "positions", "text": "factor", "value": 0.5},
            "RoPE at positions 0.5 times those of baseline",
            "RoPE at positions 2 times those of baseline",
        ),
        ({"kind": "residual", "value": 1.0}, "target = baseline + m:in[x] (added once more)", "x (left out)"),
        ({"kind": "residual", "value": -1.0}, "target = baseline − m:in[x] (left out)", "x (added once more)"),
    ],
)
def test_cause_of_another_bug_is_wrong(fields: dict[str, Any], right: str, wrong: str) -> None:
    bug = bugs.Bug(module="m", expect=("m",), **fields)
    assert causes.is_right(bug, right)
    assert not causes.is_right(bug, wrong)


ROUTED = {
    "next_expert": "the router takes the expert after the chosen one in target",
    "half": "the router's weights are 0.5 × baseline's",
    "equal": "the router's weights are all equal in target",
    "swapped": "the router's weights are in reverse order in target",
    "last_dropped": "the router's weight of the last chosen expert is zero in target",
}


@pytest.mark.parametrize("way", [*ROUTED, "one_expert"])
def test_cause_of_a_router_is_right_only_for_its_operation(way: str) -> None:
    bug = bugs.Bug(kind="router", module="m", expect=("m",), text=way)
    others = ["the router's weights all go to one expert in target (top-1, not 2)", "in column 1: target is zero"]
    assert [one for one, text in ROUTED.items() if causes.is_right(bug, text)] == [one for one in ROUTED if one == way]
    assert not any(causes.is_right(bug, text) for text in others)


@pytest.mark.parametrize(("way", "position"), [("hide_first", 0), ("hide_third", 2)])
def test_cause_names_a_masked_key_by_position(way: str, position: int) -> None:
    bug = bugs.Bug(kind="mask", module="m", expect=("m",), text=way)
    assert causes.is_right(bug, f"target does not see position {position} (removes 100 % of the error)")
    assert not causes.is_right(bug, f"target does not see position {position + 1} (removes 100 % of the error)")
    assert not causes.is_right(bug, f"target does not see position {position}1 (removes 100 % of the error)")


READ = "as attention reads them in target (KV cache)"


@pytest.mark.parametrize(
    ("kind", "fields", "text", "expected"),
    [
        ("values", {"op": "zero", "start": 7}, f"values are zero in column 7 of each head {READ}", True),
        ("values", {"op": "zero", "start": 7}, f"values are zero in column 8 of each head {READ}", False),
        ("values", {"op": "zero", "start": 7}, f"keys are zero in column 7 of each head {READ}", False),
        ("values", {"op": "zero", "start": 7}, f"values are negated in column 7 of each head {READ}", False),
        ("values", {"op": "zero", "start": 7}, f"values are zero {READ}", False),
        ("values", {"op": "zero"}, f"values are zero {READ}, of position 0", True),
        ("values", {"op": "zero"}, f"values are zero in column 7 of each head {READ}", False),
        ("keys", {"op": "scale", "amount": 0.5}, "target scales scores by 0.125, 0.5 × baseline's 0.25", True),
        ("keys", {"op": "scale", "amount": 0.5}, "target scales scores by 0.25, 2 × baseline's 0.125", False),
        (
            "keys",
            {"op": "scale", "amount": 0.5, "start": 1},
            "target scales scores by 0.1, 0.5 × baseline's 0.2",
            False,
        ),
        ("keys", {"op": "scale", "amount": 0.5}, "target's cache is wrong", False),
        (
            "keys",
            {"op": "scale", "amount": 1.02, "start": 4, "count": 4},
            f"keys are 1.02 × baseline's in columns 4–7 of each head {READ}",
            True,
        ),
        (
            "keys",
            {"op": "scale", "amount": 1.02, "start": 4, "count": 4},
            f"keys are 1.04 × baseline's in columns 4–7 of each head {READ}",
            False,
        ),
        (
            "values",
            {"op": "swap", "start": 0, "other": 16, "count": 2, "stride": 3},
            f"values have columns 0 and 3 and columns 16 and 19 swapped {READ}",
            True,
        ),
        (
            "values",
            {"op": "round", "dtype": "bfloat16", "start": 1, "count": 5, "stride": 3},
            f"values are rounded to bf16 in every third column from 1 to 13 of each head {READ}",
            True,
        ),
    ],
)
def test_cause_of_keys_and_values_names_operation_and_columns(
    kind: str, fields: dict[str, Any], text: str, expected: bool
) -> None:
    bug = bugs.Bug(kind=kind, module="m", expect=("m",), damage=damage.Damage(**fields))
    assert causes.is_right(bug, text) is expected


def capture(out: Path, weight: torch.Tensor, dtype: torch.dtype, padding: float = 0.0) -> Path:
    """Record one linear layer over two rows, the second of which is padding."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)).to(dtype)
    model[0].weight.data = weight.to(dtype)
    given = torch.stack([torch.linspace(-1, 1, 8), torch.full((8,), padding)])[None].to(dtype)
    with (
        Dumper(model, out, keep="full") as dumper,
        dumper.step(grid=(1, 2), rows=[RowSpan("r0", 0, 1, 0, 0)], token_ids=[1]),
    ):
        model(given)
    return out


def test_oracle_measures_a_bug_against_rounding_without_padding(tmp_path: Path) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    wide = capture(tmp_path / "wide", weight, torch.float64)
    clean = capture(tmp_path / "clean", weight, torch.bfloat16)

    def seen(name: str, factor: float, padding: float = 0.0) -> Any:
        target = capture(tmp_path / name, weight * factor, torch.bfloat16, padding)
        return oracle.observe(clean, target, oracle.Noise(clean, wide), ("0",))

    large, small, padded = seen("large", 2.0), seen("small", 1.004), seen("padded", 1.0, padding=3.0)
    assert (large.is_observable, large.is_expected, large.first, large.steps) == (True, True, "0:out", (0,))
    assert math.isclose(large.here * large.rounding, 1.0, rel_tol=0.05), "twice as large: off by once itself"
    assert (small.is_observable, small.is_invisible) == (False, True)
    assert (padded.here, padded.anywhere, padded.first) == (0.0, 0.0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cases", "0"), "must be at least 1"),
        (("--cases", "8", "--only", "gen-5-8"), "the cases are gen-5-0 to gen-5-7"),
        (("--device", "cuda"), "leave out --bugs, --benign and --device"),
    ],
)
def test_generator_refuses_invalid_arguments_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main.main(["--generate", "5", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"module": "q_norm.weight", "shape": (16,)}, "in 16 of 64 columns: target = 2 × baseline", False),
        ({"module": "q_norm.weight", "shape": (16,)}, "in 8 of 64 columns: target = 2 × baseline", True),
        (
            {"module": "q_norm.weight", "shape": (16,)},
            "in columns 2 and 6 of each head of 16: target = 2 × baseline",
            True,
        ),
        (
            {"module": "q_norm.weight", "shape": (16,)},
            "in columns 2 and 7 of each head of 16: target = 2 × baseline",
            False,
        ),
        (
            {"module": "gate.e_score_correction_bias", "shape": (8,)},
            "correction bias differs for experts 2 and 6",
            True,
        ),
        (
            {"module": "gate.e_score_correction_bias", "shape": (8,)},
            "correction bias differs for experts 2 and 5",
            False,
        ),
    ],
)
def test_cause_of_columns_in_each_head_and_of_a_router_bias(fields: dict[str, Any], text: str, expected: bool) -> None:
    some = damage.Damage(op="scale", amount=2.0, start=2, count=2, stride=4)
    bug = bugs.Bug(kind="weight", expect=("m",), damage=some, **fields)
    assert causes.is_right(bug, text) is expected


def test_cause_shard_of_a_rank_or_its_partial_sum() -> None:
    text = (
        "the weight (in columns 16–31 of its input) or the partial sum of rank 1 differs; that accounts for the error"
    )
    some = damage.Damage(op="scale", amount=4.0, start=3, axis=-2)
    for rank, expected in ((1, True), (0, False)):
        bug = bugs.Bug(kind="partial", module="m", expect=("m",), damage=some, rank=rank, shape=(48,))
        assert causes.is_right(bug, text) is expected
    weight = bugs.Bug(kind="weight", module="m", expect=("m",), damage=some, shape=(48, 32), touched=(16, 20))
    assert causes.is_right(weight, text)
    assert not causes.is_right(replace(weight, touched=(3, 20)), text)


@pytest.mark.parametrize(("start", "expected"), [(16, True), (0, False), (15, False)])
def test_cause_shard_of_a_weight_that_is_zero_is_a_partial_sum_of_zero(start: int, expected: bool) -> None:
    some = damage.Damage(op="zero", start=start, count=16, axis=-1)
    bug = bugs.Bug(kind="weight", module="down_proj.weight", expect=("m",), damage=some, shape=(48, 32))
    assert causes.is_right(bug, "the partial sum of rank 1 is zero") is expected


def test_cause_exchanged_inputs_may_be_several_ranges() -> None:
    some = damage.Damage(op="swap", start=93, count=12, other=57, axis=-1)
    bug = bugs.Bug(kind="weight", module="k_proj.weight", expect=("m",), damage=some, shape=(32, 96))
    text = "columns 57–68 of its input are exchanged with columns 93–95 and {} in the weight"
    assert causes.is_right(bug, text.format("0–8"))
    assert not causes.is_right(bug, text.format("1–9"))


@pytest.mark.parametrize(("where", "expected"), [("", True), (" (of rank 1)", False)])
def test_cause_of_a_summand_may_leave_the_rank_open(where: str, expected: bool) -> None:
    claim = "target = baseline + 0.5 (removes 100 % of the error)"
    text = f"in columns 1–3{where}: {claim[:24]} (added to one rank's partial sum, or to the sum){claim[24:]}"
    some = damage.Damage(op="add", amount=1.0, start=1, count=3)
    bug = bugs.Bug(kind="partial", module="m", expect=("m",), damage=some, rank=0, shape=(16,))
    assert causes.is_right(bug, text) is expected
    assert not causes.is_right(bug, f"in columns 1–3: {claim}")


def test_cause_order_of_blocks_is_checked() -> None:
    some = damage.Damage(op="swap", start=12, count=16, other=28)
    bug = bugs.Bug(kind="output", module="q_proj", expect=("m",), damage=some, shape=(32,), shards=2)
    assert causes.is_right(bug, "target has the 4 blocks of 16 columns in the order 1, 0, 3, 2")
    assert not causes.is_right(bug, "target has the 4 blocks of 16 columns in the order 2, 3, 0, 1")


def test_generated_patch_file_of_megatron_defines_its_patch() -> None:
    bug = bugs.Bug(kind="output", module="m", expect=("m",), damage=damage.Damage(op="zero", start=3))
    namespace: dict[str, Any] = {}
    exec(cases._PATCH.format(bug=bug), namespace)
    assert callable(namespace["patch"])


def test_cause_zero_frequencies_are_those_of_the_named_pairs() -> None:
    some = damage.Damage(op="zero", start=0, count=4)
    bug = bugs.Bug(kind="frequencies", module="rotary_emb", expect=("m",), damage=some, shape=(8,))
    assert causes.is_right(bug, "the angles of pairs 0–2 of 8 are zero in target's table: these are not rotated")
    assert not causes.is_right(bug, "the angles of pairs 0–4 of 8 are zero in target's table: these are not rotated")
    assert not causes.is_right(bug, "all angles are zero in target's table: nothing is rotated")


def test_cause_moved_frequencies_are_those_of_the_tables_columns() -> None:
    """A table stores every angle twice."""
    bug = bugs.Bug(kind="frequencies", module="m", expect=("m",), damage=damage.Damage(op="roll", count=8), shape=(4,))
    claim = "target holds baseline's columns 3, 0–1, 3 and 0–1 in columns 0–2 and 4–6"
    assert causes.is_right(bug, f"{claim} (removes 100 % of the error)")
    assert not causes.is_right(bug, claim.replace("columns 3, 0–1, 3", "columns 3, 0–1, 2"))
    assert not causes.is_right(bug, "target holds baseline's columns 1–3 in columns 0–2")
