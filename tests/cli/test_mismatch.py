"""`tapscope mismatch`: a trainer's log-probabilities of a rollout's tokens, on real runs of both."""

import json
from pathlib import Path

import pytest
import torch
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file

from tapscope.cli import main
from tapscope.comparator.mismatch import mismatch
from tapscope.core.errors import ConfigError, NothingInCommonError
from tapscope.run_format.run import Run
from tapscope.sources import open_run

PROMPTS = ["--prompt", "def main():", "--prompt", "x = 1", "--max-new-tokens", "6"]


def dump(model: Path, out: Path, *words: str) -> Path:
    assert main(["dump", str(model), "-o", str(out), "-q", *words]) == 0
    return out


@pytest.fixture(scope="module")
def rollout(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(llama, tmp_path_factory.mktemp("runs") / "rollout", "--dtype", "bfloat16", *PROMPTS)


@pytest.fixture(scope="module")
def trainer(llama: Path, rollout: Path) -> Path:
    return dump(llama, rollout.with_name("trainer"), "--backend", "hf", "--tokens-from", str(rollout))


def _logits(run: Run) -> dict[tuple[str, int], torch.Tensor]:
    """Return (request, position of the next token) -> logits, read record by record."""
    found = {}
    for record in run.select(["lm_head:out"]):
        step = run.steps[record.key.step][0].info
        values = torch.from_numpy(run.array(record).astype("float32"))
        values = values.reshape(-1, values.shape[-1])
        slots = {r.slot + i: (r.request, r.position + i + 1) for r in step.rows for i in range(r.count)}
        named = step.row_sets.get("logits", ())
        order = list(named) if len(values) == len(named) else range(len(values))
        found |= {slots[slot]: values[index] for index, slot in enumerate(order) if slot in slots}
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mismatch_equals_log_softmax_of_the_recorded_logits(trainer: Path, rollout: Path, temperature: float) -> None:
    with open_run(trainer) as left, open_run(rollout) as right:
        sides, tokens, prompts = (_logits(left), _logits(right)), right.tokens(), right.prompts()
        expected = {}
        for request, position in sides[1]:
            if position in tokens[request] and position >= len(prompts[request]):
                token = tokens[request][position]
                logs = [(side[request, position] / temperature).double().log_softmax(0)[token] for side in sides]
                expected[request, position] = (token, logs[0].item(), logs[1].item())
        found = mismatch(left, right, temperature=temperature)
    assert len(expected) == found.total.num_tokens == 10
    for one in found.tokens:
        token, pi, mu = expected[one.request, one.position]
        assert one.token == token
        assert (one.trainer, one.rollout) == pytest.approx((pi, mu), abs=1e-5)
    log_ratio = torch.tensor([pi - mu for _, pi, mu in expected.values()], dtype=torch.float64)
    assert found.total.k1 == pytest.approx(-log_ratio.mean().item(), abs=1e-6)
    assert found.total.k3 == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), abs=1e-6)
    assert found.total.ratio_mean == pytest.approx(log_ratio.exp().mean().item(), abs=1e-5)
    assert found.total.log_ratio_sum == pytest.approx(sum(one.log_ratio_sum for one in found.requests.values()))
    assert 0 < found.total.kl < 1e-3


def test_mismatch_of_rounding_agrees_and_of_a_run_with_itself_is_zero(trainer: Path, rollout: Path) -> None:
    found = mismatch(trainer, rollout)
    assert found.report.exit_code == 0
    assert (found.total.clipped, found.num_unknown) == (0.0, 2)
    same = mismatch(rollout, rollout)
    assert (same.total.mean_abs, same.total.k3, same.total.ratio_min, same.total.kl) == (0.0, 0.0, 1.0, 0.0)


def test_mismatch_prints_the_tokens_and_the_module_of_stale_weights(
    llama: Path, trainer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    for file in llama.iterdir():
        (stale / file.name).write_bytes(file.read_bytes())
    weights = load_file(stale / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 3.0
    save_file(weights, stale / "model.safetensors", metadata={"format": "pt"})
    run = dump(stale, tmp_path / "rollout", "--dtype", "bfloat16", "--tokens-from", str(trainer))
    capsys.readouterr()
    assert main(["mismatch", str(trainer), str(run), "--clip", "0.01", "--top", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tokens    10 generated tokens, without ")
    assert [line.split()[0] for line in lines] == [
        *("tokens", "log", "ratio", "clipped", "KL", "request", "request", "token"),
        *("what", "where", "why", "next"),
    ]
    assert "outside [0.99, 1.01]" in lines[3]
    assert not lines[3].startswith("clipped   0 %")
    assert " model.layers.1.mlp.up_proj " in lines[-4]


def test_mismatch_json_has_requests_tokens_and_a_summary(
    trainer: Path, rollout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mismatch", str(trainer), str(rollout), "--json", "--prompt-tokens"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["schema"] for line in lines} == {"tapscope.mismatch/1"}
    kinds = [line["type"] for line in lines]
    num = lines[-1]["num_tokens"]
    assert kinds == ["request"] * 2 + ["token"] * num + ["summary"]
    assert num > 10
    assert lines[-1]["num_prompt_tokens"] == 0
    assert sum(line["num_tokens"] for line in lines[:2]) == num


def test_mismatch_reports_routers_that_chose_other_experts(tmp_path: Path) -> None:
    model = make_moe(tmp_path / "moe", "qwen3_moe")
    run = dump(model, tmp_path / "rollout", *PROMPTS)
    weights = load_file(model / "model.safetensors")
    gate = next(name for name in weights if name.endswith("layers.2.mlp.gate.weight"))
    weights[gate] = weights[gate].flip(0).contiguous()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    other = dump(model, tmp_path / "trainer", "--tokens-from", str(run))
    routing = mismatch(other, run).routing
    assert routing[0].site.startswith("model.layers.2.mlp.gate:")
    assert routing[0].agreement < 0.5
    assert mismatch(run, run).routing == ()


def test_mismatch_refuses_invalid_arguments_and_runs_without_logits(llama: Path, rollout: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^invalid clip range 2.0: expected a number between 0 and 1$"):
        mismatch(rollout, rollout, clip=2.0)
    with pytest.raises(ConfigError, match="^invalid temperature 0: expected a finite number > 0$"):
        mismatch(rollout, rollout, temperature=0)
    stats = dump(llama, tmp_path / "stats", "--tokens-from", str(rollout), "--keep", "stats")
    with pytest.raises(
        NothingInCommonError, match="^the runs have no logits of a common token row in full; record them"
    ):
        mismatch(rollout, stats)
