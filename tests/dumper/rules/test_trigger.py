"""Triggers: text format, and conditions under which they fire."""

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tapscope.core.errors import EvaluationError, RuleError
from tapscope.dumper.rules.trigger import STATISTICS, Trigger, parse_trigger
from tapscope.run_format.record import Stats

_CLEAN = Stats(6, 0, 0, 0, 1, 0, -3.0, 2.0, 3.0, -1.0, 14.0)
_NAN = replace(_CLEAN, nan=1)
_INF = replace(_CLEAN, posinf=1, neginf=2)
_NOTHING_FINITE = Stats(3, 3, 0, 0, 0, 0, None, None, None, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers.*:out: nan -> keep", Trigger("layers.*:out", "nan", "keep")),
        ("*: absmax > 1e4 -> stop", Trigger("*", "absmax > 1e4", "stop")),
        (
            "lm_head:out: inf or nan -> run 'notify.sh {site}'",
            Trigger("lm_head:out", "inf or nan", "run", "notify.sh {site}"),
        ),
        ("*: nan -> run notify.sh {site} {step}", Trigger("*", "nan", "run", "notify.sh {site} {step}")),
        ("*: nan -> run 'my prog' 'a b'", Trigger("*", "nan", "run", "'my prog' 'a b'")),
        ("*: search('a: b -> c', name) -> keep", Trigger("*", "search('a: b -> c', name)", "keep")),
        ('"a: b": nan->keep', Trigger("a: b", "nan", "keep")),
    ],
)
def test_trigger_text_of_a_trigger_is_read_as_it_states(text: str, expected: Trigger) -> None:
    assert parse_trigger(text) == expected
    assert parse_trigger(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nan -> keep", "must be GLOB: CONDITION -> ACTION"),
        ("*: nan", "must be GLOB: CONDITION -> ACTION"),
        ("*: nan -> save", "the action must be one of keep, stop, run"),
        ("*: nan -> run", "run takes a command"),
        ("*: nan -> keep it", "only run takes a command"),
        ("*: nan -> run 'a {secret}'", r"\{secret\} is unknown; a command may hold \{site\}, \{step\}"),
        ("*: nan -> run a 'b", "No closing quotation"),
        ("*: nans > 3 -> keep", "did you mean nan"),
        ("*: unheard -> keep", "unknown name unheard; names are count, nan"),
        ("*: open('x') -> keep", "open cannot be called"),
        ("*:  -> keep", "the expression is empty"),
        ('"": nan -> keep', "an empty pattern"),
        (3, "must be a string"),
        ("x" * 20000, "must be a string"),
    ],
)
def test_trigger_wrong_trigger_is_refused_in_words(text: Any, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        parse_trigger(text)


@pytest.mark.parametrize(
    ("condition", "stats", "fires"),
    [
        ("nan", _CLEAN, False),
        ("nan", _NAN, True),
        ("inf or nan", _INF, True),
        ("inf == 3 and posinf == 1 and neginf == 2 and nonfinite == 3", _INF, True),
        ("absmax > 2.5", _CLEAN, True),
        ("absmax > 1e4", _CLEAN, False),
        ("min < -2 and max == 2", _CLEAN, True),
        ("max(min, max) == 2", _CLEAN, True),
        ("zeros / count > 0.1 and subnormals == 0", _CLEAN, True),
        ("rms > 1.5 and std > 1.5 and mean < 0 and sum == -1", _CLEAN, True),
        ("nan == count", _NOTHING_FINITE, True),
        ("mean > 0 or mean <= 0 or absmax < 1 or sum < 1 or rms > 0 or std > 0", _NOTHING_FINITE, False),
        ("mean is None", _NOTHING_FINITE, True),
        ("layer_id == 3 and step >= 2 and phase == 'decode'", _CLEAN, True),
        ('search("mlp", name)', _CLEAN, True),
        ("tp == 1", _CLEAN, False),
    ],
)
def test_trigger_fires_when_its_condition_holds(condition: str, stats: Stats, fires: bool) -> None:
    values = {"layer_id": 3, "step": 2, "phase": "decode", "name": "layers.3.mlp:out"}
    trigger = Trigger("*", condition, "keep")
    assert trigger.fires(stats, values) is fires
    assert pickle.loads(pickle.dumps(trigger)).fires(stats, values) is fires  # noqa: S301
    assert copy.deepcopy(trigger) == trigger


def test_trigger_every_statistic_has_a_name() -> None:
    for name, compute in STATISTICS.items():
        expected = 0 if name == "inf" else getattr(_CLEAN, name)
        assert compute(_CLEAN) == expected
        assert math.isfinite(compute(_CLEAN))


def test_trigger_condition_that_cannot_be_decided_is_an_error_the_caller_counts() -> None:
    with pytest.raises(EvaluationError, match="ZeroDivisionError"):
        Trigger("*", "1 / zeros > 3", "stop").fires(replace(_CLEAN, zeros=0), {})


def test_trigger_is_about_the_sites_of_its_glob() -> None:
    trigger = parse_trigger("layers.*:out: nan -> keep")
    assert trigger.matches("model.layers.3:out")
    assert not trigger.matches("model.layers.3:in[x]")


def test_trigger_no_shell_reads_a_command() -> None:
    trigger = Trigger("*", "nan", "run", "notify --site={site} '{step} of {run}' $HOME ; ls")
    values = {"site": "a; rm -rf / $(x) {run}", "step": 3, "run": "r"}
    assert trigger.argv(values) == ["notify", "--site=a; rm -rf / $(x) {run}", "3 of r", "$HOME", ";", "ls"]


_globs = st.text(min_size=1, max_size=12)
_conditions = st.sampled_from(["nan", "absmax > 1e4", "search('x -> y; \"', name)", "inf or mean < -1"])
_commands = st.text(alphabet="ab '\"\\->:;\n$", min_size=1, max_size=15)


@given(_globs, _conditions, st.sampled_from(["keep", "stop", "run"]), _commands)
def test_trigger_prints_what_it_is_parsed_from(glob: str, condition: str, action: Any, command: str) -> None:
    try:
        trigger = Trigger(glob, condition, action, command if action == "run" else None)
    except RuleError:  # unbalanced quotes
        return
    assert parse_trigger(str(trigger)) == trigger


@given(st.text(max_size=60))
def test_trigger_any_text_is_a_trigger_or_refused(text: str) -> None:
    for each in (text, f"*: {text}", f"*: nan -> {text}"):
        with contextlib.suppress(RuleError):
            trigger = parse_trigger(each)
            assert parse_trigger(str(trigger)) == trigger
