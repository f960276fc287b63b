"""Random LoRA adapters saved by PEFT, and PEFT's own results with them."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tapscope.engine.requests.step_plan import StepPlan

ATTENTION = ("q_proj", "v_proj")
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NOT_ADAPTED = ("lm_head", "kv_b_proj")
_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings: PEFT reads attributes that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def swap_adapters(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Inject a bug: the two rows with an adapter in a step get each other's adapter."""
    right: Any = StepPlan.adapter_rows.fget  # type: ignore[attr-defined]

    def swapped(self: StepPlan) -> Any:
        rows = right(self)
        if self.step != step:
            return rows
        (slot, row), (other, neighbour) = rows
        return (slot, neighbour), (other, row)

    monkeypatch.setattr(StepPlan, "adapter_rows", property(swapped))


def linear_names(path: Path) -> list[str]:
    """Return the last path components of the linear layers that can have an adapter."""
    model = AutoModelForCausalLM.from_pretrained(path)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if hasattr(model.config, "n_routed_experts"):  # the experts have the same names
        names -= set(_EXPERTS)
    if model.config.model_type in ("falcon_h1", "zamba2"):  # PEFT refuses it
        names -= {"out_proj"}
    return sorted(name for name in names - set(_NOT_ADAPTED) if not name.isdecimal())  # such as layer numbers


def make_adapter(folder: Path, model: Path, targets: Sequence[str] | str, *, seed: int = 0, **config: Any) -> Path:
    """Save a random adapter of the linear layers ``targets`` (last path components) to ``folder`` and return
    ``folder``."""
    base = AutoModelForCausalLM.from_pretrained(model)
    names = targets if isinstance(targets, str) else list(targets)
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False} | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _without_warnings():
            made = peft.get_peft_model(base, peft.LoraConfig(target_modules=names, **options))
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, 0.0, 0.3 if "lora_B" in name else 0.1)
    made.save_pretrained(folder)
    return folder


def make_expert_adapter(
    folder: Path, model: Path, *, seed: int = 0, rank: int = 3, alpha: float = 4, others: Sequence[str] = ()
) -> Path:
    """Save a random adapter of each expert's matrices, which were linear layers before transformers 5.

    ``others``: last path components of further adapted linear layers. PEFT converts this format on loading.
    """
    weights = load_file(model / "model.safetensors")
    shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in weights.items()}
    adapted = [name for name in shapes if ".experts." in name or name.rpartition(".")[2] in others]
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name in sorted(adapted):
        outs, ins = shapes[name]
        made[f"base_model.model.{name}.lora_A.weight"] = 0.1 * torch.randn(rank, ins, generator=generator)
        made[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(outs, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(made, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def edit_config(adapter: Path, **changes: Any) -> None:
    """Change fields of the adapter's adapter_config.json."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def peft_model(model: Path, adapters: Mapping[str, Path]) -> peft.PeftModel:
    """Load the model with several adapters through PEFT, in float64: in float32, its own error is as large as the
    engine's."""
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    (first, folder), *others = adapters.items()
    with _without_warnings():
        loaded = peft.PeftModel.from_pretrained(base, folder, adapter_name=first)
        for name, path in others:
            loaded.load_adapter(path, name)
    loaded.get_base_model().set_experts_implementation("eager")  # the other implementations lack float64
    return loaded.eval().double()


@torch.no_grad()
def peft_logits(model: peft.PeftModel, adapter: str, tokens: Sequence[int]) -> Tensor:
    """Return the logits [tokens, vocab] of PEFT's full forward with ``adapter``, or without an adapter if empty."""
    ids = torch.tensor([list(tokens)])
    if not adapter:
        with model.disable_adapter():
            return model(ids).logits[0]
    model.set_adapter(adapter)
    return model(ids).logits[0]
