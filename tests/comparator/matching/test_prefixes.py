"""Names behind wrappers: those of PEFT, DDP, torch.compile and checkpointing, and prefixes removed or suggested."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import diff
from factories import RunFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.cli import main
from tapscope.comparator import Report
from tapscope.core.errors import ConfigError
from tapscope.dumper import Dumper

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


def test_prefixes_unknown_prefix_is_removed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = diff_wrapped(tmp_path, lambda model: Wrapper("policy", Wrapper("inner", model)), scale=1.5)
    assert report.coverage.removed_prefixes == ("target:policy.inner",)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.down_proj"
    paths = [str(tmp_path / "plain"), str(tmp_path / "wrapped")]
    assert main(["diff", *paths, "--json"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["coverage"]["removed_prefixes"] == ["target:policy.inner"]
    assert main(["diff", *paths[::-1]]) == 1
    assert re.search(
        r"note      baseline: \d+ names matched without 'policy.inner.', as with --strip-prefix baseline:policy.inner",
        capsys.readouterr().out,
    )


def test_prefixes_unmatched_strip_prefix_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--strip-prefix 'target:nett'"):
        diff_wrapped(tmp_path / "a", lambda model: model, strip_prefix=("target:nett",))
    with pytest.raises(ConfigError, match="is empty"):
        diff_wrapped(tmp_path / "b", lambda model: model, strip_prefix=("target:",))


NAMES = [f"blocks.{i}.proj:out" for i in range(5)]


def write(path: Path, sites: Iterable[str]) -> Path:
    with RunFactory(path) as run:
        run.step()
        for i, site in enumerate(sites):
            run.put(site, np.full((2, 3), i, np.float32))
    return path


def test_prefixes_of_runs_without_a_common_name(tmp_path: Path) -> None:
    report = diff(write(tmp_path / "a", NAMES), write(tmp_path / "b", [f"actor.net.{name}" for name in NAMES]))
    assert report.exit_code == 0
    assert report.coverage.removed_prefixes == ("target:actor.net",)


def test_prefixes_of_several_models_are_all_removed(tmp_path: Path) -> None:
    other = [f"{part}.{i}:out" for part in ("encoder", "decoder") for i in range(5)]
    left = [*other[:5], *(f"right.{name}" for name in other[5:])]
    right = [*(f"left.{name}" for name in other[:5]), *other[5:]]
    report = diff(write(tmp_path / "a", left), write(tmp_path / "b", right))
    assert sorted(report.coverage.removed_prefixes) == ["baseline:right", "target:left"]
    assert report.coverage.num_sites_matched == 10


@pytest.mark.parametrize(
    ("left", "right", "advice"),
    [
        # two towers have the names of one
        (NAMES, [f"{tower}.{name}" for tower in ("text", "vision") for name in NAMES], "'text.' or 'vision.' is"),
        # neither run's names are all explained
        (
            [*NAMES, "head:out"],
            [*(f"net.{name}" for name in NAMES), "net.tail:out"],
            "is removed: --strip-prefix target:net",
        ),
        # two names would become one
        ([*NAMES, "a.x:out"], [*(f"net.{name}" for name in NAMES), "net.a.x:out", "a.x:out"], "--strip-prefix"),
        # too few
        (NAMES[:3], [f"net.{name}" for name in NAMES[:3]], ""),
    ],
)
def test_prefixes_that_are_not_clear_are_not_removed(
    tmp_path: Path, left: list[str], right: list[str], advice: str
) -> None:
    runs = write(tmp_path / "a", [*left, ":out"]), write(tmp_path / "b", [*right, ":out"])
    report = diff(*runs)
    assert report.coverage.removed_prefixes == ()
    said = [warning for warning in report.coverage.warnings if "--strip-prefix" in warning]
    assert [advice in warning for warning in said] == [True] * bool(advice)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_prefixes_of_any_tree_of_names_change_no_verdict(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    parts = st.sampled_from(["a", "b", "0", "1", "net"])
    paths = st.lists(parts, min_size=1, max_size=3).map(".".join)
    names = data.draw(st.lists(paths, min_size=4, max_size=9, unique=True))
    prefix = data.draw(st.lists(st.sampled_from(["p", "q"]), min_size=1, max_size=2).map(".".join))
    folder = tmp_path_factory.mktemp("names")
    plain = write(folder / "a", [f"{name}:out" for name in names])
    report = diff(plain, write(folder / "b", [f"{prefix}.{name}:out" for name in names]))
    assert report.coverage.removed_prefixes == (f"target:{prefix}",)
    assert all(f.baseline and f.target and f.target.site == f"{prefix}.{f.baseline.site}" for f in report.findings)
    assert report.exit_code == 0
