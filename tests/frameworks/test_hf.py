"""The transformers plugin: Trainer, generate() and PEFT, run for real."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tapscope.comparator import compare
from tapscope.dumper import Dumper
from tapscope.dumper.job.framework_plugins import registry
from tapscope.frameworks.hf import TapscopeCallback, TransformersPlugin
from tapscope.sources import open_run

peft = pytest.importorskip("peft")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def train(folder: Path, name: str, *, scale: float = 1.0, updates: int = 2) -> Path:
    """A Trainer with two microbatches an update; ``scale`` is a bug in one layer's down_proj."""
    model, rows = llama(), torch.randint(0, 61, (8 * updates, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    if scale != 1.0:
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: out * scale)
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=updates,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model, args, train_dataset=data)  # type: ignore[arg-type]
    trainer.add_callback(TapscopeCallback(folder / name, keep="full", grads=True, params=True))
    trainer.train()
    return folder / name


def test_trainer_callback_update_is_a_step_with_microbatches_and_gradients(tmp_path: Path) -> None:
    with open_run(train(tmp_path, "run")) as run:
        assert run.ledger().complete
        assert [lines[0].info.phase for lines in run.steps.values()] == ["train", "train"]
        forward = [(r.key.step, r.key.micro) for r in run.select(["model.norm:out"])]
        assert forward == [(0, 0), (0, 1), (1, 0), (1, 1)]
        gradients = [r.key.step for r in run.select(["model.layers.1.mlp.down_proj:param[weight].grad"])]
        assert gradients == [0, 1]


def test_trainer_callback_diff_of_two_trainings_names_the_module(tmp_path: Path) -> None:
    with (
        open_run(train(tmp_path, "one")) as one,
        open_run(train(tmp_path, "same")) as same,
        open_run(train(tmp_path, "other", scale=1.1)) as other,
    ):
        assert compare(one, same).exit_code == 0
        report = compare(one, other)
    assert report.first_divergence is not None
    assert report.first_divergence.module == "model.layers.1.mlp.down_proj"


def test_callback_without_transformers_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tapscope.core.errors import MissingExtraError\n"
        "try:\n    from tapscope.frameworks.hf import TapscopeCallback\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("TapscopeCallback needs transformers, which is not installed; install the extra")


def generate(model: Any, out: Path) -> Path:
    """Two prompts, padded on the left."""
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    mask = (torch.arange(5) >= torch.tensor([[2], [0]])).long()
    with torch.no_grad(), Dumper(model, out, keep="full"):
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out


def test_generate_left_padding_and_kept_logits_have_token_rows(tmp_path: Path) -> None:
    with open_run(generate(llama(), tmp_path / "run")) as run:
        first = run.steps[0][0].info
        assert [(span.request, span.position, span.count, span.slot) for span in first.rows] == [
            ("0", 0, 3, 2),
            ("1", 0, 5, 5),
        ]
        assert {r.rows for r in run.select(["lm_head:out"]) if r.key.step == 0} == {((4, 1), (9, 1))}
        assert {r.rows for r in run.select([":out[logits]"]) if r.key.step == 0} == {((4, 1), (9, 1))}
        assert run.manifest["framework"] == "transformers"


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_peft_model_meets_the_merged_model(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(llama(), config).eval()
    served = generate(adapted, tmp_path / "peft")
    merged = adapted.merge_and_unload()
    with open_run(generate(merged, tmp_path / "merged")) as one, open_run(served) as two:
        assert two.manifest["framework"] == "transformers"
        report = compare(one, two)
    assert report.exit_code == 0, str(report)
    matched = [f for f in report.findings if f.baseline and f.target]
    assert len(matched) > 30
    assert {f.target.site for f in matched if f.target} >= {"base_model.model.lm_head:out"}


def test_transformers_plugin_owns_wrapped_models() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert TransformersPlugin().owns(DistributedDataParallel(llama()))
    assert not TransformersPlugin().owns(nn.Linear(2, 2))
    owner = registry.owner_of(DistributedDataParallel(llama()))
    assert owner is not None
    assert owner.name == "transformers"
