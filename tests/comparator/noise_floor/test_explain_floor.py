"""`--explain-floor`: the effects that make up the noise floor of a site."""

import json
import math
from pathlib import Path

import pytest
from comparator_toy import Toy, prompts, weights
from compare_runs import diff

from tapscope.cli import main
from tapscope.comparator import Report
from tapscope.comparator.noise_floor.error_model import EFFECTS, OPTIONAL
from tapscope.core import dtypes

TABLES = weights(layers=4)
SITE = "model.layers.1.mlp.down_proj:out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, toy in {"base": Toy(TABLES), "narrow": Toy(TABLES, dtype="bfloat16", tp=2)}.items():
        toy.write(root / name, prompts((11, 7))).close()
    return root


def diff_narrow(runs: Path, **options: object) -> Report:
    return diff(runs / "base", runs / "narrow", **options)  # type: ignore[arg-type]


def test_explain_floor_effects_have_unique_names_and_descriptions() -> None:
    names = [effect.name for effect in EFFECTS]
    assert len(set(names)) == len(names)
    assert all(effect.__doc__ and effect.name == effect.name.lower() for effect in EFFECTS)


def test_explain_floor_finding_lists_its_effects(runs: Path) -> None:
    report = diff_narrow(runs, explain_floor=(SITE,))
    (explained,) = (finding for finding in report.findings if finding.floor_effects)
    assert explained.site == SITE
    effects = {each.effect: each for each in explained.floor_effects}
    rounding = effects["dtype_rounding"]
    assert rounding.contribution == pytest.approx(0.2 * math.sqrt(2.0) * dtypes.epsilon("bfloat16"))
    assert rounding.floor_without is None
    assert effects["rank_sum"].contribution == pytest.approx(math.sqrt(2.0))
    assert effects["rank_sum"].unit == "factor"
    assert "1 rank against 2 ranks" in effects["rank_sum"].explanation
    assert effects["rank_sum"].floor_without is not None
    assert effects["rank_sum"].floor_without < explained.floor
    errors = [effects[name].contribution for name in ("dtype_rounding", "reduction_order")]
    factors = [effects[name].contribution for name in ("rank_sum", "ops_in_sequence")]
    assert effects["local_error"].contribution == pytest.approx(math.prod(factors) * math.hypot(*errors))


def test_explain_floor_changes_no_verdict(runs: Path) -> None:
    plain, explained = diff_narrow(runs), diff_narrow(runs, explain_floor=("*",))
    assert [(f.verdict, f.error, f.floor) for f in plain.findings] == [
        (f.verdict, f.error, f.floor) for f in explained.findings
    ]
    assert all(bool(f.floor_effects) is (f.judged_by == "rounding") for f in explained.findings)


def test_explain_floor_report_has_a_line_per_effect(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "base"), str(runs / "narrow"), "--explain-floor", SITE]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith(f"floor     {SITE}: error "))
    assert lines[at + 1].split()[:2] == ["dtype_rounding", "2.2e-03"]
    assert any(line.split()[:2] == ["rank_sum", "×1.41"] for line in lines[at:])


def test_explain_floor_json_lists_effects_of_the_chosen_site(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "base"), str(runs / "narrow"), "--json", "--explain-floor", SITE]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {line["site"]: line["floor_effects"] for line in lines if line["type"] == "finding"}
    assert {site for site, effects in found.items() if effects} == {SITE}
    assert set(found[SITE][0]) == {"effect", "contribution", "unit", "floor_without", "explanation"}


@pytest.mark.parametrize(
    ("glob", "said"), [("nothing", "matches no compared site"), (":in[*]", "no noise floor to explain")]
)
def test_explain_floor_site_without_a_modelled_floor_is_an_error(
    runs: Path, capsys: pytest.CaptureFixture[str], glob: str, said: str
) -> None:
    assert main(["diff", str(runs / "base"), str(runs / "narrow"), "--explain-floor", glob]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", OPTIONAL)
def test_explain_floor_optional_effects_can_be_disabled(runs: Path, name: str) -> None:
    report = diff_narrow(runs, disabled=frozenset({name}), explain_floor=("*",))
    assert all(each.effect != name for f in report.findings for each in f.floor_effects)
