"""More processes than a machine can run are refused, and more than its cores cause a warning."""

import logging
from pathlib import Path

import pytest
from checkpoints import make_llama

from tapscope.core.errors import ConfigError
from tapscope.engine import LLM, EngineConfig
from tapscope.engine.execution.num_processes import PER_CORE, check_num_processes, num_cores, shared_cores


def test_num_processes_beyond_the_limit_of_the_machine_are_refused() -> None:
    most = PER_CORE * num_cores()
    check_num_processes(EngineConfig(model="model", dp=most))
    check_num_processes(EngineConfig(model="model", tp=most + 1, launch="external"))  # for several machines
    with pytest.raises(ConfigError, match=f"dp={most + 1}, tp=1: .* at most {PER_CORE} per core"):
        check_num_processes(EngineConfig(model="model", dp=most + 1))


def test_llm_of_too_many_processes_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="1,000,000 processes"):
        LLM(model, device="cpu", dp=1_000_000)
    monkeypatch.setattr("tapscope.engine.execution.num_processes.PER_CORE", 0)
    with pytest.raises(ConfigError, match="dp=1, tp=2: 2 processes"):
        LLM(model, device="cpu", tp=2)


def test_num_processes_that_share_cores_are_reported() -> None:
    cores = num_cores()
    assert shared_cores(EngineConfig(model="model", tp=cores)) == ""
    assert shared_cores(EngineConfig(model="model", tp=cores + 1, launch="external")) == ""
    warning = shared_cores(EngineConfig(model="model", dp=cores, tp=2))
    assert warning.startswith(f"dp={cores}, tp=2: {2 * cores} processes share {cores} CPU cores")


def test_llm_reports_processes_that_share_cores_and_settings_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(tmp_path / "model")
    monkeypatch.setattr("tapscope.engine.execution.num_processes.num_cores", lambda: 1)
    with caplog.at_level(logging.WARNING):
        LLM(model, device="cpu", custom_all_reduce=True).close()
        assert "custom_all_reduce has no effect with tp=1" in caplog.text
        assert "processes share" not in caplog.text
        LLM(model, device="cpu", tp=2).close()
        assert "dp=1, tp=2: 2 processes share 1 CPU core;" in caplog.text
