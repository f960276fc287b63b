"""Names behind wrappers: PEFT, DDP, torch.compile and checkpointing are seen through, other prefixes are suggested."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.cli import main
from tapscope.comparator import CompareOptions, Report, compare
from tapscope.core.errors import ConfigError, NothingInCommonError
from tapscope.dumper import Dumper
from tapscope.sources import open_run

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=61,
    max_position_embeddings=64,
)
IDS = torch.arange(2, 14)[None]


class LoraLinear(nn.Module):
    """As peft.tuners.lora.Linear: the linear as ``base_layer``, beside it what was trained."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class LoraModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for layer in self.model.model.layers:
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)

    def forward(self, **given: Any) -> Any:
        return self.model(**given)


class PeftModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)

    def forward(self, **given: Any) -> Any:
        return self.base_model.model(**given)


class Wrapper(nn.Module):
    """With a model under a name of its own."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, model)

    def forward(self, *args: Any, **given: Any) -> Any:
        return self.get_submodule(self.name)(*args, **given)


def checkpointed(model: Any) -> nn.Module:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return Wrapper("module", model)


def compiled(model: Any) -> nn.Module:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = Wrapper("_orig_mod", layer)
    return Wrapper("module", model)


def capture(path: Path, wrap: Callable[[Any], nn.Module] = lambda model: model, scale: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(scale)
    wrapped = wrap(model)
    with torch.no_grad(), Dumper(wrapped, path, keep="full", params=True) as dumper, dumper.step():
        wrapped(input_ids=IDS, use_cache=False)
    return path


def diff_wrapped(tmp_path: Path, wrap: Callable[[Any], nn.Module], scale: float = 1.0, **options: Any) -> Report:
    paths = capture(tmp_path / "plain"), capture(tmp_path / "wrapped", wrap, scale)
    return diff(paths[0], paths[1], **options)


@pytest.mark.parametrize(
    ("wrap", "prefix"), [(PeftModel, "base_model.model."), (checkpointed, "module."), (compiled, "module.")]
)
def test_prefixes_of_wrappers_are_removed(tmp_path: Path, wrap: Callable[[Any], nn.Module], prefix: str) -> None:
    report = diff_wrapped(tmp_path / "same", wrap)
    assert report.exit_code == 0
    assert report.coverage.num_sites_only_baseline == 0
    assert any(f"without {prefix!r}" in warning for warning in report.coverage.warnings)
    report = diff_wrapped(tmp_path / "wrong", wrap, scale=1.5)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.down_proj"


def test_prefixes_adapted_linear_is_compared_as_a_whole(tmp_path: Path) -> None:
    def trained(model: Any) -> nn.Module:
        wrapped = PeftModel(model)
        nn.init.normal_(wrapped.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.lora_B.default").weight)
        return wrapped

    report = diff_wrapped(tmp_path, trained)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.self_attn.q_proj"
    weight = next(f for f in report.findings if f.site == "model.layers.1.self_attn.q_proj:param[weight]")
    assert weight.verdict == "same"


def test_prefixes_unknown_prefix_is_suggested_with_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = diff_wrapped(tmp_path, lambda model: Wrapper("policy", Wrapper("inner", model)), scale=1.5)
    assert any("names of the target match when 'policy.inner.' is removed" in w for w in report.coverage.warnings)
    assert main(["diff", str(tmp_path / "plain"), str(tmp_path / "wrapped")]) == 1
    advice = capsys.readouterr().out.splitlines()[-1].removeprefix("next").split(maxsplit=1)[1]
    assert main(shlex.split(advice)) == 1
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj (out) differs" in out
    assert "is removed" not in out


def test_prefixes_unmatched_strip_prefix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--strip-prefix 'target:nett'"):
        diff_wrapped(tmp_path / "a", lambda model: model, strip_prefix=("target:nett",))
    with pytest.raises(ConfigError, match="is empty"):
        diff_wrapped(tmp_path / "b", lambda model: model, strip_prefix=("target:",))


def test_prefixes_runs_without_a_common_name_suggest_the_prefix(tmp_path: Path) -> None:
    for name, prefix in (("plain", ""), ("other", "actor.net.")):
        with RunFactory(tmp_path / name) as run:
            run.step()
            for i in range(5):
                run.put(f"{prefix}blocks.{i}.proj:out", np.full((2, 3), i, np.float32))
    with open_run(tmp_path / "plain") as one, open_run(tmp_path / "other") as two:
        with pytest.raises(NothingInCommonError, match="5 names .* --strip-prefix target:actor.net"):
            compare(one, two)
        assert compare(one, two, CompareOptions(strip_prefix=("target:actor.net",))).exit_code == 0
