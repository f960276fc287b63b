"""Every example runs as its first lines describe."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import forkserver_pool as warm
import pytest
from checkpoints import make_llama

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _run(*words: object, expect: int = 0) -> str:
    path = os.pathsep.join([str(warm.commands()), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def _python(*words: object) -> str:
    done = warm.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_example_dump_fits_thirty_lines_and_prints_the_mlp_of_layer_1(tmp_path: Path) -> None:
    example = EXAMPLES / "01_dump.py"
    assert len(example.read_text().splitlines()) <= 30
    output = _python(example, tmp_path / "run")
    for name in ("gate_proj", "up_proj", "act_fn", "down_proj"):
        assert f"model.layers.1.mlp.{name}:out (1, 12, " in output


def test_example_find_the_bad_layer_names_the_norm(tmp_path: Path) -> None:
    output = _python(EXAMPLES / "02_find_the_bad_layer.py", tmp_path)
    assert "model.layers.2.post_attention_layernorm" in output


def test_example_explicit_values_in_memory_and_in_a_run(tmp_path: Path) -> None:
    output = _python(EXAMPLES / "05_explicit.py", tmp_path / "runs")
    assert "in memory: ['layers.1:tap[scores]'] (8, 8)" in output
    assert "layers.2:tap[scores].grad backward (8, 8)" in output
    assert ":tap[loss] forward ()" in output


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_example_ci_gate_passes_an_unchanged_model_and_fails_a_changed_one(tmp_path: Path) -> None:
    model, gate, baseline = make_llama(tmp_path / "model"), EXAMPLES / "04_ci_gate.sh", tmp_path / "baseline"
    _run("bash", gate, model, baseline, tmp_path)
    assert "agrees" in _run("bash", gate, model, baseline, tmp_path)
    changed = tmp_path / "changed"
    _python(EXAMPLES / "damage.py", model, changed, "model.layers.1.mlp.up_proj.weight")
    output = _run("bash", gate, changed, baseline, tmp_path, expect=1)
    assert "model.layers.1.mlp.up_proj" in output


@pytest.mark.soak
def test_example_small_llama_trains_the_requested_steps(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert "trained 2 steps, 1,024 tokens" in _python(EXAMPLES / "tiny_llama.py", tmp_path / name, "--steps", 2)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
