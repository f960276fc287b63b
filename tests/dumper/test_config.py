"""DumperConfig: keywords, JSON, words and the environment give the same config."""

import copy
import json
import logging
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapscope.core.errors import ConfigError, RuleError
from tapscope.core.field_docs import field_docs
from tapscope.dumper.config import RUNTIME_FIELDS, DumperConfig
from tapscope.dumper.environment import out_of, parse_words
from tapscope.dumper.rules.rule import Rule
from tapscope.dumper.rules.trigger import Trigger

_positive = st.one_of(st.none(), st.integers(1, 2**40))
_natural = st.integers(0, 2**40)
_LISTS = ("rules", "triggers", "inject")
_configs = st.builds(
    lambda **settings: DumperConfig(**settings),
    enabled=st.booleans(),
    keep=st.sampled_from(["off", "stats", "full"]),
    rules=st.lists(st.sampled_from(["a=full", "*=stats steps=0-9 when=step < 2", '*:out=off phase="a;b"']), max_size=3),
    backpressure=st.sampled_from(["block", "drop", "strict"]),
    block_timeout_s=st.floats(0.001, 1e6),
    queue_bytes=st.integers(1, 2**40),
    control=st.one_of(st.none(), st.just("127.0.0.1:0")),
    capture_steps=_positive,
    mode=st.sampled_from(["off", "core", "all"]),
    filter=st.one_of(st.none(), st.just("layer_id == 0"), st.just('search("a;b", name)')),
    grads=st.booleans(),
    console=st.booleans(),
    skip_dummy=st.booleans(),
    max_bytes=_positive,
    max_records=_positive,
    min_free_bytes=st.one_of(st.none(), _natural),
    flight_recorder_steps=_natural,
    flight_recorder_bytes=_natural,
    shm_bytes=_natural,
    device_staging_bytes=_natural,
    triggers=st.lists(
        st.sampled_from(["*: nan -> keep", "a: absmax > 1e4 -> stop", "*: nan -> run 'x; y {site}'"]), max_size=2
    ),
    against=st.just("base"),
    against_rtol=st.one_of(st.none(), st.just(0.5)),
    inject=st.lists(st.sampled_from(["a:out", "*.b:in[x] steps=0-3,5", "a:out=b:out request=r,s"]), max_size=2),
    inject_from=st.just("run"),
    fsync=st.sampled_from(["never", "close", "segment", "batch"]),
)


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return ";".join(value)
    if isinstance(value, bool):
        return "yes" if value else "Off"
    return "" if value is None else str(value)


@settings(max_examples=100)
@given(_configs)
def test_config_every_way_in_gives_the_same_value(config: DumperConfig) -> None:
    content = config.to_json()
    assert DumperConfig().updated(json.loads(json.dumps(content))) == config
    assert DumperConfig(**content) == config
    values = {name: _as_text(value) for name, value in content.items()}
    assert DumperConfig().updated(parse_words(f"{name}={text}" for name, text in values.items())) == config
    # A blank variable counts as unset, so the environment cannot set a field to None if its default is not None.
    environ = {f"TAPSCOPE_{name.upper()}": text or "none" for name, text in values.items() if name not in _LISTS}
    environ |= {f"TAPSCOPE_{name.upper()}": values[name] for name in _LISTS}
    assert DumperConfig.from_env(environ) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert copy.deepcopy(config) == config
    assert hash(config) == hash(DumperConfig(**content))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kep": "full"}, r"unknown setting 'kep' \(did you mean keep\?\); settings are enabled, keep, rules"),
        ({"keep": "some"}, "keep='some': must be one of off, stats, sketch, full"),
        ({"keep": None}, "keep=None: must be one of"),
        ({"keep": ["full"]}, r"keep=\['full'\]: must be one of"),
        ({"enabled": 1}, "enabled=1: must be true or false"),
        ({"enabled": None}, "enabled=None: must be true or false"),
        ({"enabled": "yes"}, "enabled='yes': must be true or false"),
        ({"grads": "true"}, "grads='true': must be true or false"),
        ({"flight_recorder_steps": True}, "flight_recorder_steps=True: must be an integer ≥ 0"),
        ({"flight_recorder_steps": "3"}, "flight_recorder_steps='3': must be an integer ≥ 0"),
        ({"flight_recorder_steps": -1}, "flight_recorder_steps=-1: must be an integer ≥ 0"),
        ({"max_steps": 0}, "max_steps=0: must be an integer ≥ 1 or null"),
        ({"max_steps": 1.5}, "max_steps=1.5: must be an integer ≥ 1 or null"),
        ({"max_bytes": "many"}, "max_bytes='many': 'many' is not a size; write bytes or e.g. 64KiB"),
        ({"max_bytes": "0"}, "max_bytes=0: must be an integer ≥ 1 or null"),
        ({"queue_bytes": None}, "queue_bytes=None: must be an integer ≥ 1"),
        ({"block_timeout_s": float("inf")}, "block_timeout_s=inf: must be a finite number > 0"),
        ({"block_timeout_s": float("nan")}, "block_timeout_s=nan: must be a finite number > 0"),
        ({"mode": "some"}, "mode='some': must be one of off, core, all"),
        ({"fsync": "always"}, "fsync='always': must be one of never, close, segment, batch"),
        ({"filter": "step <"}, "filter='step <': 'step <', column 7"),
        ({"filter": "().__class__"}, "filter=.*Attribute is not allowed"),
        ({"filter": True}, "filter=True: must be a string or null"),
        ({"rules": "a=full"}, "rules='a=full': must be a list"),
        ({"rules": {"a": "full"}}, "rules=.*: must be a list"),
        ({"rules": [3]}, "rules: 3 must be a string GLOB=KEEP"),
        ({"rules": None}, "rules=None: must be a list"),
        ({"triggers": "*: nan -> keep"}, "triggers=.*: must be a list of strings GLOB: CONDITION -> ACTION"),
        ({"triggers": [None]}, "triggers: None must be a string"),
        ({"control_token": ""}, "control_token: must not be blank"),
        ({"control_token": 12345678}, "control_token=...: must be a string or null"),
    ],
)
def test_config_wrong_setting_names_field_value_and_rule(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DumperConfig().updated(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"rules": ["a=some"]},
        {"rules": [Trigger("*", "nan", "keep")]},
        {"triggers": [Rule("a", "full")]},
        {"triggers": ["*: nan"]},
    ],
)
def test_config_wrong_rule_or_trigger_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RuleError):
        DumperConfig().updated(settings)


def test_config_sizes_may_be_strings_everywhere() -> None:
    expected = DumperConfig(shm_bytes=1 << 20, max_bytes=3 * 2**30)
    assert DumperConfig(shm_bytes="1MiB", max_bytes="3GiB") == expected  # type: ignore[arg-type]
    assert DumperConfig().updated({"shm_bytes": "1MiB", "max_bytes": "3 gib"}) == expected
    assert DumperConfig().updated(parse_words(["shm_bytes=1MiB", "max_bytes=3GiB"])) == expected
    assert DumperConfig.from_env({"TAPSCOPE_SHM_BYTES": "1MiB", "TAPSCOPE_MAX_BYTES": "3GiB"}) == expected


# ---- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("enabled=TRUE", {"enabled": True}),
        ("enabled=0", {"enabled": False}),
        ("capture_steps=3", {"capture_steps": 3}),
        ("capture_steps=null", {"capture_steps": None}),
        ("block_timeout_s=2", {"block_timeout_s": 2.0}),
        ("filter=a == b", {"filter": "a == b"}),
        ("filter=1", {"filter": "1"}),
        ("filter=", {"filter": None}),
        ("control_token=123", {"control_token": "123"}),
        ("rules=a=full", {"rules": ["a=full"]}),
        ("rules=a=full,b=stats", {"rules": ["a=full", "b=stats"]}),
        ("rules=a=full layers=0,3", {"rules": ["a=full layers=0,3"]}),
        ("rules=a=full layers=0,b=full", {"rules": ["a=full layers=0,b=full"]}),
        ("rules=a=full; b=stats when=search(';', name);", {"rules": ["a=full", "b=stats when=search(';', name)"]}),
        ('rules=["a=full", "b=stats"]', {"rules": ["a=full", "b=stats"]}),
        ("rules=[0-9]*=full", {"rules": ["[0-9]*=full"]}),
        ("rules=", {"rules": []}),
        ("triggers=*: nan -> keep; a: inf -> run 'x; y'", {"triggers": ["*: nan -> keep", "a: inf -> run 'x; y'"]}),
        ("steps=4", {"steps": 4}),
        ("unheard=x", {"unheard": "x"}),
    ],
)
def test_config_words_are_read_by_the_type_of_their_setting(word: str, changes: dict[str, Any]) -> None:
    assert parse_words([word]) == changes


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("keep", "is not a setting; write NAME=VALUE"),
        ("enabled=2", "enabled='2': must be true or false"),
        ("enabled=", "enabled='': must be true or false"),
        ("rules=[{'site': '*', 'keep': 'full'}]", "starts like a JSON list but is not one: Expecting property name"),
        ('triggers=["nan -> stop"', "starts like a JSON list but is not one"),
    ],
)
def test_config_wrong_word_is_refused(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_words([word])


# ---- environment ----------------------------------------------------------------------------------------


def test_config_blank_variables_are_unset_and_others_are_not_ours() -> None:
    environ = {"TAPSCOPE_KEEP": " ", "TAPSCOPE_RULES": "", "KEEP": "full", "TAPSCOPE_NATIVE": "0", "DUMPER_ENABLE": "0"}
    assert DumperConfig.from_env(environ) == DumperConfig()
    assert DumperConfig.from_env({"X_KEEP": "full"}, prefix="X_") == DumperConfig(keep="full")


@pytest.mark.parametrize("text", ["true", "1", "YES", " on "])
def test_config_yes_in_the_environment(text: str) -> None:
    assert DumperConfig.from_env({"TAPSCOPE_GRADS": text}).grads is True


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TAPSCOPE_ENABLED": "maybe"}, "TAPSCOPE_ENABLED: enabled='maybe': must be true or false"),
        ({"TAPSCOPE_KEEP": "some"}, "TAPSCOPE_KEEP: keep='some': must be one of"),
        ({"TAPSCOPE_MAX_STEPS": "x"}, "TAPSCOPE_MAX_STEPS: max_steps='x': must be an integer ≥ 1 or null"),
        ({"TAPSCOPE_FILTER": "a b"}, "TAPSCOPE_FILTER: filter='a b'"),
    ],
)
def test_config_error_names_the_variable(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DumperConfig.from_env(environ)


def test_config_slip_in_a_variable_s_name_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tapscope"):
        environ = {
            "TAPSCOPE_RULE": "a=full",
            "TAPSCOPE_NATIVE": "1",
            "TAPSCOPE_DIR": "y",
            "TAPSCOPE_EXP_NAM": "x",
            "TAPSCOPE_KEPE": "y",
        }
        DumperConfig.from_env(environ)
    assert [record.getMessage() for record in caplog.records] == [
        "tapscope: TAPSCOPE_RULE is not a setting and is ignored; did you mean TAPSCOPE_RULES?",
        "tapscope: TAPSCOPE_EXP_NAM is not a setting and is ignored; did you mean TAPSCOPE_EXP_NAME?",
        "tapscope: TAPSCOPE_KEPE is not a setting and is ignored; did you mean TAPSCOPE_KEEP?",
    ]


def test_config_environment_wins_over_defaults() -> None:
    environ = {"TAPSCOPE_KEEP": "full", "TAPSCOPE_RULES": " "}
    config = DumperConfig.with_defaults(environ, keep="off", rules=["a=stats"], grads=True)
    assert config == DumperConfig(keep="full", rules=(Rule("a", "stats"),), grads=True)
    with pytest.raises(ConfigError, match="unknown setting 'kep'"):
        DumperConfig.with_defaults(environ, kep="off")


def test_config_sglang_s_variables_count_only_when_asked_and_ours_win(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "DUMPER_ENABLE": "1",
        "DUMPER_FILTER": 'layer_id in (0, 1) and search("attn", name)',
        "DUMPER_NON_INTRUSIVE_MODE": "core",
        "DUMPER_SERVER_PORT": "40000",
        "DUMPER_DIR": "/somewhere",
        "DUMPER_EXP_NAME": "mine",
        "DUMPER_COLLECTIVE_TIMEOUT": "3",
        "TAPSCOPE_MODE": "all",
    }
    assert DumperConfig.from_env(environ) == DumperConfig(mode="all")
    with caplog.at_level(logging.WARNING, "tapscope"):
        config = DumperConfig.from_env(environ, sglang=True)
    assert config == DumperConfig(enabled=True, mode="all", control="127.0.0.1:40000", filter=environ["DUMPER_FILTER"])
    assert [record.getMessage() for record in caplog.records] == [
        "tapscope: DUMPER_COLLECTIVE_TIMEOUT has no counterpart in tapscope and is ignored"
    ]
    assert out_of(environ) == Path("/somewhere/mine")
    assert out_of({}) is None
    assert DumperConfig.from_env({"DUMPER_SERVER_PORT": "-1"}, sglang=True).control is None
    with pytest.raises(ConfigError, match="DUMPER_SERVER_PORT='x': must be a port"):
        DumperConfig.from_env({"DUMPER_SERVER_PORT": "x"}, sglang=True)
    with pytest.raises(ConfigError, match="DUMPER_NON_INTRUSIVE_MODE: mode='some'"):
        DumperConfig.from_env({"DUMPER_NON_INTRUSIVE_MODE": "some"}, sglang=True)


# ---- runtime settings and secrets ------------------------------------------------------------------------


def test_config_what_is_fixed_at_start_is_refused_at_run_time() -> None:
    known = {each.name for each in fields(DumperConfig)}
    assert set(RUNTIME_FIELDS) < known
    for name in known - set(RUNTIME_FIELDS):
        with pytest.raises(ConfigError, match=f"'{name}' is fixed when the dumper starts"):
            DumperConfig().updated({name: None}, allowed=RUNTIME_FIELDS)


def test_config_command_is_never_set_from_outside() -> None:
    command = "*: nan -> run 'rm {site}'"
    config = DumperConfig(triggers=(command,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="runs a command, which cannot be set over HTTP; set it where"):
        DumperConfig().updated({"triggers": [command]}, allowed=RUNTIME_FIELDS)
    with pytest.raises(ConfigError, match="runs a command"):
        config.updated({"triggers": [command, "*: nan -> run other"]}, allowed=RUNTIME_FIELDS)
    assert (
        config.updated({"triggers": [command, "*: inf -> keep"]}, allowed=RUNTIME_FIELDS).triggers[0]
        == config.triggers[0]
    )
    assert config.updated({"keep": "full"}, allowed=RUNTIME_FIELDS).triggers == config.triggers
    assert DumperConfig().updated({"triggers": ["*: nan -> stop"]}, allowed=RUNTIME_FIELDS).triggers[0].action == "stop"


def test_config_token_is_never_shown() -> None:
    config = DumperConfig(control_token="s3cret")
    assert "s3cret" not in repr(config) + str(config) + json.dumps(config.to_json())
    assert "control_token" not in config.to_json()
    for wrong in ({"control_token": ["s3cret"]}, {"control_token": 53}):
        with pytest.raises(ConfigError) as error:
            DumperConfig().updated(wrong)
        assert "s3cret" not in str(error.value)
        assert "53" not in str(error.value)
    assert DumperConfig.from_env({"TAPSCOPE_CONTROL_TOKEN": "s3cret"}).control_token == "s3cret"


def test_config_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        DumperConfig().keep = "full"  # type: ignore[misc]


def test_config_every_field_states_what_it_means() -> None:
    assert field_docs(DumperConfig).keys() == {field.name for field in fields(DumperConfig)}
