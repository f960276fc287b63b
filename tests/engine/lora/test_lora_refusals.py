"""Unsupported adapters and requests: each is refused with one sentence, and the engine keeps running."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_llama
from lora_adapters import ATTENTION, edit_config, make_adapter
from safetensors.torch import load_file, save_file

from tapscope.core.errors import CheckpointError, ConfigError, TapscopeError, UsageError
from tapscope.engine import LLM

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", seed=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, lora_paths={"good": make_adapter(path.parent / "good", path, ATTENTION)}) as made:
        yield made


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file)


def _moved(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if old in name]:
            held[name.replace(old, new)] = held.pop(name)

    return change


def _truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing; expected the"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not readable JSON"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must contain a JSON object"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
    "truncated": (_truncate, "is truncated: .* ends at byte"),
    "method": (lambda f: edit_config(f, peft_type="LOHA"), "peft_type='LOHA' is not supported; expected 'LORA'"),
    "rank": (lambda f: edit_config(f, r=0), "r=0 must be an integer ≥ 1"),
    "alpha": (lambda f: edit_config(f, lora_alpha="x"), "lora_alpha='x' must be a finite number above 0"),
    "pattern": (
        lambda f: edit_config(f, rank_pattern={"(": 2}),
        "rank_pattern has the invalid regular expression '\\('",
    ),
    "DoRA": (lambda f: edit_config(f, use_dora=True), "use_dora=True is not supported"),
    "bias": (lambda f: edit_config(f, bias="all"), "bias='all' is not supported; expected 'none'"),
    "PiSSA": (lambda f: edit_config(f, init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "modules": (lambda f: edit_config(f, modules_to_save=["lm_head"]), "modules_to_save=\\['lm_head'\\] is not supp"),
    "large": (lambda f: edit_config(f, r=99), "has rank 99, but max_lora_rank is 16; raise max_lora_rank"),
    "other rank": (
        lambda f: edit_config(f, r=3),
        "has shape \\[4, 64\\]; the model and the rank in adapter_config\\.json require \\[3, 64\\]",
    ),
    "other width": (
        lambda f: _tensors(f, lambda held: held.update({A: torch.zeros(4, 32)})),
        "q_proj.lora_A.weight in .* has shape \\[4, 32\\]",
    ),
    "half": (
        lambda f: _tensors(f, lambda held: held.pop(A)),
        "has no lora_A.weight of model.layers.0.self_attn.q_proj",
    ),
    "no layer": (lambda f: _tensors(f, _moved("layers.0", "layers.7")), "has no module model.layers.7.self_attn"),
    "head": (
        lambda f: _tensors(f, _moved("model.layers.0.self_attn.q_proj", "lm_head")),
        "lm_head cannot be adapted; supported: down_proj, gate_proj,",
    ),
    "embedding": (
        lambda f: _tensors(
            f, lambda h: h.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1)})
        ),
        "embed_tokens.lora_embedding_A in .* is not supported: an adapter consists of",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_load_adapter_refuses_what_it_cannot_serve(llm: LLM, path: Path, tmp_path: Path, kind: str) -> None:
    spoil, message = BROKEN[kind]
    spoil(make_adapter(tmp_path / "adapter", path, ATTENTION))
    with pytest.raises(CheckpointError, match=message) as error:
        llm.load_adapter("bad", tmp_path / "adapter")
    assert str(error.value).startswith("adapter 'bad': ")
    assert "\n" not in str(error.value)
    assert [adapter["name"] for adapter in llm.engine.state()["adapters"]] == ["good"]
    assert len(llm.engine.runner.adapters._loaded) == 1
    assert llm.generate([[5, 6, 7]], max_new_tokens=2, adapter="good")[0].finish_reason == "length"


def test_adapter_names_are_checked(llm: LLM, path: Path) -> None:
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.load_adapter("good", path), "adapter 'good' is loaded already; unload it first"),
        (lambda: llm.load_adapter("", path), "invalid adapter name ''"),
        (lambda: llm.unload_adapter("none"), "adapter 'none' cannot be unloaded: it is not loaded; loaded: good"),
        (
            lambda: llm.generate([[5]], adapter="nope"),
            "request '.*' asks for adapter 'nope': it is not loaded; loaded: ",
        ),
        (lambda: llm.generate([[5], [6]], adapter=["good"]), "adapter has 1 entries for 2 prompts"),
    ]
    for call, message in refusals:
        with pytest.raises(UsageError, match=message):
            call()
    assert not llm.has_work


def test_adapters_need_an_engine_that_serves_them(path: Path, tmp_path: Path) -> None:
    with LLM(path) as llm:
        with pytest.raises(
            UsageError, match="adapter 'a' cannot be loaded: this engine serves no adapters; start it with"
        ):
            llm.load_adapter("a", tmp_path)
        with pytest.raises(UsageError, match="asks for adapter 'a': this engine serves no adapters"):
            llm.generate([[5]], adapter="a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_paths": ["a"]}, "lora_paths.*must be NAME=DIR"),
        ({"lora_paths": ["a=x", "a=y"]}, "lora_paths: 'a' is given twice"),
        ({"max_lora_rank": 8}, "max_lora_rank=8: needs enable_lora or lora_paths"),
        ({"lora_paths": ["a=nowhere"]}, "nowhere/adapter_config.json is missing"),
    ],
)
def test_adapter_settings_are_checked_before_the_model_is_loaded(
    path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TapscopeError, match=message):
        LLM(path, **settings)


def test_max_lora_rank_names_the_adapter_that_exceeds_it(path: Path, tmp_path: Path) -> None:
    large = make_adapter(tmp_path / "large", path, ["q_proj"], r=24)
    with pytest.raises(ConfigError, match="max_lora_rank=8: adapter 'large' has rank 24; raise max_lora_rank"):
        LLM(path, lora_paths={"large": large}, max_lora_rank=8)
    with LLM(path, lora_paths={"large": large}) as llm:  # by default the maximum rank is that of the adapter
        assert json.loads(json.dumps(llm.engine.state()))["adapters"] == [
            {"name": "large", "path": str(large), "num_live": 0}
        ]
