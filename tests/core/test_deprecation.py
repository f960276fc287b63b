"""Deprecated names are accepted with one warning, and rejected if the current name is given as well."""

import argparse
import dataclasses
import warnings

import pytest

from tapscope.comparator import RowCounts
from tapscope.core.deprecation import (
    deprecated_arguments,
    deprecated_attributes,
    deprecated_flag,
    deprecated_names_of,
    renamed,
)
from tapscope.core.errors import ConfigError, UsageError
from tapscope.engine import EngineConfig, SamplingParams

SETTINGS = [
    ("max_running", "max_num_seqs", 3),
    ("max_tokens_per_step", "max_num_batched_tokens", 5),
    ("kv_bytes", "kv_cache_memory_bytes", 1 << 20),
    ("ageing_steps", "priority_aging_steps", 7),
    ("check", "check_invariants", True),
]


@pytest.mark.parametrize(("old", "new", "value"), SETTINGS)
def test_engine_config_accepts_deprecated_settings(old: str, new: str, value: object) -> None:
    with pytest.warns(FutureWarning, match=f"'{old}' is deprecated, use '{new}'"):
        built = EngineConfig.build("model", {old: value})
    with pytest.warns(FutureWarning, match=new):
        made = EngineConfig(model="model", **{old: value})  # type: ignore[arg-type]
    assert getattr(built, new) == getattr(made, new) == value


@pytest.mark.parametrize(("old", "new", "value"), SETTINGS)
def test_engine_config_reads_deprecated_attributes_with_a_warning(old: str, new: str, value: object) -> None:
    config = EngineConfig.build("model", {new: value})
    with pytest.warns(FutureWarning, match=f"'{old}' is deprecated, use '{new}'") as caught:
        assert getattr(config, old) == value
    assert caught[0].filename == __file__
    assert old not in {field.name for field in dataclasses.fields(config)}


def test_sampling_params_read_deprecated_attributes_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="'include_stop' is deprecated, use 'include_stop_str_in_output'"):
        assert SamplingParams(include_stop_str_in_output=True).include_stop  # type: ignore[attr-defined]


def test_engine_config_refuses_a_setting_under_both_names() -> None:
    with pytest.raises(ConfigError, match="'max_running' is the deprecated name of 'max_num_seqs'"):
        EngineConfig.build("model", {"max_running": 3, "max_num_seqs": 4})


def test_sampling_params_accept_deprecated_names() -> None:
    with pytest.warns(FutureWarning, match="'include_stop' is deprecated, use 'include_stop_str_in_output'"):
        assert SamplingParams.build({"include_stop": True}).include_stop_str_in_output
    with pytest.warns(FutureWarning, match="include_stop_str_in_output"):
        assert SamplingParams(include_stop=True).include_stop_str_in_output  # type: ignore[call-arg]


def test_renamed_leaves_present_names_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert renamed({"new": 1, "other": 2}, {"old": "new"}) == {"new": 1, "other": 2}


def test_deprecated_arguments_warns_at_the_call() -> None:
    @deprecated_arguments({"forced": "forced_token_ids"})
    def submit(prompt: str, forced_token_ids: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]]:
        return prompt, forced_token_ids

    with pytest.warns(FutureWarning, match="'forced' is deprecated") as caught:
        assert submit("a", forced=(1,)) == ("a", (1,))  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.raises(UsageError, match="give 'forced_token_ids' only"):
        submit("a", forced=(1,), forced_token_ids=(2,))  # type: ignore[call-arg]


def test_deprecated_flag_sets_the_present_one() -> None:
    parser = argparse.ArgumentParser()
    deprecated_flag(parser, "--max-running", parser.add_argument("--max-num-seqs", type=int, default=64))
    with pytest.warns(FutureWarning, match="--max-running is deprecated, use --max-num-seqs"):
        assert parser.parse_args(["--max-running", "3"]).max_num_seqs == 3
    assert parser.parse_args([]).max_num_seqs == 64
    assert "--max-running" not in parser.format_help()


def test_deprecated_attributes_return_the_present_ones_with_a_warning() -> None:
    @deprecated_attributes({"count": "num_elements"})
    class Metrics:
        num_elements = 7

    with pytest.warns(FutureWarning, match="'count' is deprecated, use 'num_elements'"):
        assert Metrics().count == 7  # type: ignore[attr-defined]
    assert deprecated_names_of(Metrics) == {"count": "num_elements"}
    assert deprecated_names_of(int) == {}


def test_comparator_classes_accept_deprecated_attributes() -> None:
    with pytest.warns(FutureWarning, match="'compared' is deprecated, use 'num_compared'"):
        assert RowCounts(num_compared=3).compared == 3  # type: ignore[attr-defined]
