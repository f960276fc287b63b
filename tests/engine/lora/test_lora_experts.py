"""LoRA adapters of experts, stacked (`target_parameters`) and per matrix, match PEFT."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import diff
from engine_helpers import ThreadRanks
from engine_observers import Memory
from lora_adapters import edit_config, make_adapter, make_expert_adapter, peft_logits, peft_model, swap_adapters
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from soak_cases import mostly_soak

from tapscope.cli import main
from tapscope.core.errors import CheckpointError
from tapscope.dumper import make_observer
from tapscope.dumper.config import DumperConfig
from tapscope.engine import LLM, SamplingParams

PROMPTS = [[5, 6, 7], list(range(40, 75)), [5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [300], [5, 6, 7, 8]]
NAMES = ["", "small", "large", "small", "", "large"]
BOTH = ("experts.gate_up_proj", "experts.down_proj")
NUM_NEW = 4


def _check(path: Path, adapters: Mapping[str, Path], tp: int, store: Path, **engine: Any) -> None:
    """Check that the logits of a mixed batch equal PEFT's at every position, and that the adapters change them."""
    numbers = {name: number for number, name in enumerate(adapters, 1)} | {"": 0}
    ranks = ThreadRanks(path, store, tp, page_size=4, enable_lora=True, **engine)
    for name, folder in adapters.items():
        for runner in ranks.runners:
            runner.adapters.load(numbers[name], folder)
    requests = ranks.generate(PROMPTS, NUM_NEW, [numbers[name] for name in NAMES])
    models = {name: peft_model(path, {name: folder}) for name, folder in adapters.items()}
    models[""] = next(iter(models.values()))
    for request, name in zip(requests, NAMES, strict=True):
        logits = peft_logits(models[name], name, request.tokens[:-1])
        for runner in ranks.runners:
            actual = runner.observer.logits_of(request.id)
            assert (actual - logits).abs().max() <= 1e-5, (request.id, name)
    base, small, large = (peft_logits(models[name], name, PROMPTS[0]) for name in ("", "small", "large"))
    assert min((small - base).abs().max(), (large - base).abs().max(), (small - large).abs().max()) > 0.01
    ranks.close()


CASES = [
    ("mixtral", 1, {}),
    ("qwen3_moe", 2, {}),
    ("qwen3_moe", 2, {"ep": 2}),
    ("gpt_oss", 2, {}),
    ("llama4", 2, {}),
    ("nemotron_h", 1, {}),
    ("deepseek_v3", 2, {"batch_invariant": True}),
]
"""Family, ranks and settings."""


@pytest.mark.parametrize(("family", "tp", "engine"), mostly_soak(CASES, default=[CASES[i] for i in (1, 3, 4)]))
def test_lora_logits_of_adapted_stacks_equal_peft(tmp_path: Path, family: str, tp: int, engine: dict[str, Any]) -> None:
    path = make_moe(tmp_path / "model", family, seed=3)
    up = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    both = [f"experts.{up}", "experts.down_proj"]
    alpha = 2 if family == "gpt_oss" else 5  # with 5, PEFT's logits in float32 are 1.6e-5 away from those in float64
    adapters = {
        "small": make_adapter(tmp_path / "small", path, [], seed=1, target_parameters=both[1:]),
        "large": make_adapter(
            tmp_path / "large", path, ["q_proj", "o_proj"], seed=2, r=9, lora_alpha=alpha, use_rslora=True,
            target_parameters=both, rank_pattern={f"experts.{up}": 5}, alpha_pattern={"experts.down_proj": 3},
        ),
    }  # fmt: skip
    _check(path, adapters, tp, tmp_path / "store", **engine)


@pytest.mark.parametrize(("family", "tp", "ep"), [("mixtral", 2, 1), ("qwen3_moe", 2, 2)])
def test_lora_logits_of_experts_adapted_one_by_one_equal_peft(tmp_path: Path, family: str, tp: int, ep: int) -> None:
    path = make_moe(tmp_path / "model", family, seed=3)
    adapters = {
        "small": make_expert_adapter(tmp_path / "small", path, seed=1),
        "large": make_expert_adapter(tmp_path / "large", path, seed=2, rank=9, alpha=5, others=("q_proj", "o_proj")),
    }
    _check(path, adapters, tp, tmp_path / "store", ep=ep)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_moe(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", seed=1)
    make_adapter(path.parent / "a", path, [], seed=1, target_parameters=BOTH)
    make_adapter(path.parent / "b", path, ["v_proj"], seed=2, target_parameters=BOTH[:1])
    return path


def _adapters(path: Path) -> dict[str, Path]:
    return {name: path.parent / name for name in ("a", "b")}


def _logits(
    path: Path, adapters: dict[str, Path], names: list[str], num_new: int = NUM_NEW, **options: Any
) -> list[torch.Tensor]:
    with LLM(path, observer=Memory, logits="all", lora_paths=adapters, **options) as llm:
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=num_new, ignore_eos=True), adapter=names)
        return [llm.observer.logits_of(str(i)) for i in range(len(PROMPTS))]


MIXED = ["", "a", "b", "", "", "a"]


def test_lora_of_experts_keeps_the_bits_of_rows_without_adapter(path: Path, tmp_path: Path) -> None:
    """Only the last layer's experts have adapters, and only one step runs.

    Adapted rows would otherwise route to other experts in later layers and steps, which changes the row counts of the
    expert GEMMs, as any other neighbor would.
    """
    kind = {"layers_to_transform": [2], "layers_pattern": "layers"}
    last = [f"layers.2.mlp.{name}" for name in BOTH]
    adapters = {name: make_adapter(tmp_path / name, path, [], target_parameters=last, **kind) for name in "ab"}
    expected = _logits(path, {}, [""] * len(PROMPTS), num_new=1, enable_lora=True)
    for found, plain, name in zip(_logits(path, adapters, MIXED, num_new=1), expected, MIXED, strict=True):
        assert torch.equal(found, plain) == (not name)


def test_lora_of_experts_in_batch_invariant_mode_depends_on_no_other_request(path: Path) -> None:
    alone = {
        name: _logits(path, _adapters(path), [name] * len(PROMPTS), batch_invariant=True) for name in ("", "a", "b")
    }
    found = _logits(path, _adapters(path), MIXED, batch_invariant=True)
    for number, name in enumerate(MIXED):
        assert [torch.equal(found[number], alone[one][number]) for one in alone] == [one == name for one in alone]


def test_lora_of_experts_adapted_one_by_one_may_differ_in_rank_and_scaling(path: Path, tmp_path: Path) -> None:
    """One adapter that gives one expert its own rank and alpha equals the same update written with another rank."""
    plain = make_expert_adapter(tmp_path / "plain", path, seed=4, rank=2, alpha=2)
    other = make_expert_adapter(tmp_path / "other", path, seed=4, rank=2, alpha=2)
    held = load_file(other / "adapter_model.safetensors")
    for name in [name for name in held if ".experts.3.up_proj" in name]:  # two copies, each with half of the scaling
        held[name] = torch.cat((held[name], held[name]), dim=1 if "lora_B" in name else 0).contiguous()
    save_file(held, other / "adapter_model.safetensors")
    edit_config(other, rank_pattern={r"experts\.3\.up_proj": 4}, alpha_pattern={r"experts\.3\.up_proj": 2})
    logits = []
    for folder in (plain, other):
        with LLM(path, observer=Memory, logits="all", lora_paths={"x": folder}) as llm:
            llm.generate(PROMPTS[1:2], max_new_tokens=1, adapter="x")
            logits.append(llm.observer.logits_of("0"))
    assert (logits[0] - logits[1]).abs().max() < 1e-5


@pytest.mark.soak
def test_lora_of_quantized_experts_moves_logits_as_that_of_dense_ones(path: Path) -> None:
    """Equal up to the quantization error and the tokens that it routes to other experts."""
    moved = []
    for quantization in (None, "fp8"):
        sides = [
            _logits(path, _adapters(path), [name] * len(PROMPTS), 1, quantization=quantization) for name in ("", "a")
        ]
        moved.append(torch.cat([after - before for before, after in zip(*sides, strict=True)]))
    assert moved[0].norm() > 1
    assert (moved[1] - moved[0]).norm() < 0.4 * moved[0].norm()


def test_dump_of_peft_with_adapted_experts_agrees_with_the_engine(path: Path, tmp_path: Path) -> None:
    common = ["--lora", str(path.parent / "a"), "-o"]
    assert main(["dump", str(path), *common, str(tmp_path / "hf"), "--backend", "hf", "--prompt", "def main():"]) == 0
    ours = ["dump", str(path), *common, str(tmp_path / "ours"), "--tokens-from", str(tmp_path / "hf"), "--keep", "full"]
    assert main(ours) == 0
    report = diff(tmp_path / "hf", tmp_path / "ours")
    assert report.exit_code == 0, str(report)
    matched = {finding.site for finding in report.findings if finding.baseline and finding.target}
    assert "model.layers.0.mlp.experts:out" in matched


def _record(path: Path, out: Path, tp: int = 1) -> Path:
    """Record a mixed batch with two adapters that have the same targets."""
    if not (path.parent / "c").exists():
        make_adapter(path.parent / "c", path, [], seed=3, target_parameters=BOTH)
    observer = partial(make_observer, out=str(out), config=DumperConfig(keep="full"))
    adapters = {name: path.parent / name for name in ("a", "c")}
    with LLM(path, tp=tp, observer=observer, lora_paths=adapters, logits="all", prefix_cache=False) as llm:
        names, params = ["x", "y", "z"], SamplingParams(max_new_tokens=3, ignore_eos=True)
        llm.generate(PROMPTS[1:4], params, request_ids=names, adapter=["", "a", "c"])
    return out


@pytest.fixture(scope="module")
def recorded(path: Path) -> Path:
    return _record(path, path.parent / "recorded")


@pytest.mark.soak
def test_diff_of_adapted_experts_on_two_ranks_compares_the_updates(path: Path, recorded: Path, tmp_path: Path) -> None:
    report = diff(recorded, _record(path, tmp_path / "tp2", tp=2))
    assert report.exit_code == 0, str(report)
    matched = {finding.site for finding in report.findings if finding.baseline and finding.target}
    experts = "model.layers.0.mlp.experts"
    for site in ("base_layer.lora_A", "lora_A", "lora_B"):  # a rank's rows of gate and up are not contiguous
        assert f"{experts}.{site}.default:out" in matched


def test_diff_names_experts_that_had_a_neighbours_adapter(
    path: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_adapters(monkeypatch, step=2)
    report = diff(recorded, _record(path, tmp_path / "run"))
    assert report.exit_code == 1
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.layers.0.mlp.experts.base_layer.lora_A.default:out", str(report)
    assert report.first_divergence.step == 2


SPOILED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 99}, "has rank 99, but max_lora_rank is 16; raise max_lora_rank"),
    "other rank": ({"r": 3}, r"lora_A.weight in .* has shape \[32, \d+\]; .*\[24, \d+\]"),
    "not named": ({"target_parameters": ["experts.down_proj"]}, r"names 1 parameters of .*experts, but 2 are adapted"),
    "no list": ({"target_parameters": "experts"}, "target_parameters='experts' must be a list of names"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_load_adapter_refuses_experts_that_it_cannot_serve(path: Path, tmp_path: Path, kind: str) -> None:
    changes, message = SPOILED[kind]
    folder = make_adapter(tmp_path / "bad", path, [], target_parameters=BOTH)
    edit_config(folder, **changes)
    _assert_refused(path, folder, message)


def test_load_adapter_names_experts_and_parameters_that_do_not_exist(path: Path, tmp_path: Path) -> None:
    folder = make_expert_adapter(tmp_path / "each", path)
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("experts.7.", "experts.8."): held for name, held in load_file(file).items()}, file)
    _assert_refused(path, folder, r"Qwen3MoeForCausalLM has no module model.layers.0.mlp.experts.8.down_proj")
    router = make_adapter(tmp_path / "router", path, [], target_parameters=["mlp.gate.weight"])
    _assert_refused(path, router, r"gate.lora_A.weight in .*: gate cannot be adapted; supported: down_proj, gate_p")
    gpt_oss = make_moe(tmp_path / "gpt_oss", "gpt_oss")
    bias = make_adapter(tmp_path / "bias", gpt_oss, [], target_parameters=["experts.gate_up_proj_bias"])
    _assert_refused(gpt_oss, bias, "gate_up_proj_bias cannot be adapted; supported: gate_up_proj, down_proj")


def _assert_refused(path: Path, folder: Path, message: str) -> None:
    with LLM(path, enable_lora=True) as llm:
        with pytest.raises(CheckpointError, match=message) as error:
            llm.load_adapter("bad", folder)
        assert "\n" not in str(error.value)
        assert json.loads(json.dumps(llm.engine.state()))["adapters"] == []
