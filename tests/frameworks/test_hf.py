"""The transformers plugin with real Trainer, generate() and PEFT."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import moe_checkpoints
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tapscope.cli import main
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


def train(folder: Path, name: str, *, scale: float = 1.0, updates: int = 2, seed: int = 0) -> Path:
    """Run a Trainer with two microbatches per update; ``scale`` is a bug in the down_proj of one layer."""
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
        seed=seed,
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
        open_run(train(tmp_path, "shuffled", seed=1)) as shuffled,
    ):
        assert compare(one, same).exit_code == 0
        assert "the runs train on different batches" in str(compare(one, shuffled))
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
    """Generate from two left-padded prompts."""
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


def backward(folder: Path, precision: str = "", *, detached: bool = False) -> Path:
    """Record a forward and a backward pass of a model prepared by accelerate, unless ``precision`` is empty.

    ``detached``: no gradient reaches an MLP.
    """
    model, out = llama(), folder / ("detached" if detached else precision or "plain")
    if detached:
        model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output.detach())
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    accelerator = None
    if precision:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = accelerator.prepare(model)
    try:
        with Dumper(model, out, keep="full", grads=True) as dumper, dumper.step():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward() if accelerator is None else accelerator.backward(loss)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return out


def test_models_that_accelerate_prepared_keep_their_names(tmp_path: Path) -> None:
    """``Accelerator.prepare`` replaces ``forward`` for mixed precision, and casts the outputs after computing the
    loss."""
    with (
        open_run(backward(tmp_path)) as plain,
        open_run(backward(tmp_path, "no")) as prepared,
        open_run(backward(tmp_path, "bf16")) as mixed,
    ):
        assert compare(plain, prepared).exit_code == 0
        sites = {record.key.site for record in plain.select(["*"])}
        assert len(sites) > 100
        assert {record.key.site for record in prepared.select(["*"])} == sites
        assert {record.key.site for record in mixed.select(["*"])} == sites - {":out[logits].grad"}
        assert {r.dtype for r in mixed.select(["model.layers.0.mlp.up_proj:out"])} == {"bfloat16"}
    # The loss was computed from the logits before the cast, so their gradient is recorded at lm_head:out.
    assert main(["diff", str(tmp_path / "plain"), str(tmp_path / "bf16"), "-q"]) == 0
    assert main(["diff", str(tmp_path / "bf16"), str(tmp_path / "plain"), "-q"]) == 0
    with open_run(tmp_path / "plain") as plain, open_run(backward(tmp_path, "bf16", detached=True)) as cut:
        report = compare(plain, cut)
    assert report.exit_code == 1
    assert "model.layers.1.mlp.down_proj:in[input].grad" in {one.site for one in report.findings if one.verdict.is_bad}


@pytest.mark.parametrize("family", ["jamba", "gemma3n", "zamba2", pytest.param("lfm2", marks=pytest.mark.soak)])
def test_modules_that_transformers_does_not_call_are_not_reported(tmp_path: Path, family: str) -> None:
    """Convolutions and the parts they fuse, AltUp, and adapters of other layers are never called; a lost hook is
    reported."""
    config_class, model_class, settings = (checkpoints.FAMILIES | moe_checkpoints.FAMILIES)[family]
    model: Any = model_class(config_class(**(moe_checkpoints.COMMON | settings))).eval()
    lost = next(module for name, module in model.named_modules() if name.endswith(("in_proj", "q_proj")))
    with Dumper(model, out=tmp_path / "run") as dumper, torch.no_grad():
        lost._forward_hooks.clear()
        lost._forward_pre_hooks.clear()
        for _ in range(2):
            with dumper.step():
                model(torch.arange(9)[None])
    with open_run(tmp_path / "run") as run:
        silent = run.ledger().never_fired
    assert len(silent) == 1, silent
    assert silent[0].endswith(("in_proj:in[input]", "q_proj:in[input]", "in_proj:out", "q_proj:out")), silent


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


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [0],
}


def see(out: Path, *, is_flipped: bool = False, is_apart: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """Record a Qwen2.5-VL on an image of 8 × 8 patches; ``is_apart`` calls the vision tower separately before the text
    model."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=55, vision_start_token_id=57)
    model = Qwen2_5_VLForConditionalGeneration(config).eval().to(dtype)
    image = torch.rand(3, 8, 4, 8, 4, generator=torch.Generator().manual_seed(1))
    image = (image.flip(0) if is_flipped else image)[:, None].expand(3, 2, 8, 4, 8, 4)
    pixels = image.permute(2, 4, 0, 1, 3, 5).reshape(64, 96)
    grid, ids = torch.tensor([[1, 8, 8]]), torch.tensor([[3, 57, *[55] * 16, 4, 5]])
    with torch.no_grad(), Dumper(model, out, keep="full"):
        if is_apart:
            model.get_image_features(pixels, grid)
            model.model.language_model(input_ids=ids[:, -2:])
        else:
            model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == 55).int())
    return out


def test_vision_language_model_diff_names_flipped_channels(tmp_path: Path) -> None:
    reference = see(tmp_path / "reference")
    assert compare(reference, see(tmp_path / "bf16", dtype=torch.bfloat16)).exit_code == 0
    report = compare(reference, see(tmp_path / "flipped", is_flipped=True))
    assert report.first_divergence is not None
    assert report.first_divergence.site == ":in[pixel_values]"
    assert "blocks 0 and 2 of 32 columns swapped" in str(report)


def test_vision_tower_called_by_the_host_is_a_step_of_its_own(tmp_path: Path) -> None:
    with open_run(see(tmp_path / "run", is_apart=True)) as run:
        assert {r.key.step for r in run.select(["model.visual.*"])} == {0}
        assert {r.key.step for r in run.select(["model.language_model.*"])} == {1}
        assert run.ledger().outside_step == 0
    report = compare(tmp_path / "run", see(tmp_path / "flipped", is_apart=True, is_flipped=True))
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.visual:in[hidden_states]"


WHISPER = {
    "vocab_size": 61,
    "d_model": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 12,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def hear(out: Path, *, scale: float = 1.0, bias: int | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Record a Whisper transcribing two sounds.

    ``scale`` is a bug in one value channel of cross-attention; from the third token on, ``bias`` is preferred.
    """
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).eval()
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.v_proj.weight[5] *= scale
    sounds = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)).to(dtype)

    def preferred(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if bias is None or ids.shape[1] < 3 else scores.index_fill(1, torch.tensor([bias]), 99.0)

    with torch.no_grad(), Dumper(model.to(dtype), out, keep="full"):
        model.generate(sounds, max_new_tokens=4, eos_token_id=None, logits_processor=[preferred])
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_encoder_decoder_generate_has_the_rows_of_its_decoder(tmp_path: Path) -> None:
    reference = hear(tmp_path / "reference")
    with open_run(reference) as run:
        rows = [[(span.request, span.position) for span in run.steps[step][0].info.rows] for step in run.steps]
    assert rows == [[], *([("0", n), ("1", n)] for n in range(4))]
    forked = compare(reference, hear(tmp_path / "forked", bias=7, dtype=torch.bfloat16))
    assert [finding.site for finding in forked.findings if finding.verdict.is_bad] == ["sampler:out"]
    assert {(fork.request, fork.position) for fork in forked.coverage.forks} == {("0", 3), ("1", 3)}


def test_cross_attention_of_decoding_steps_is_compared_by_channel(tmp_path: Path) -> None:
    report = compare(hear(tmp_path / "reference"), hear(tmp_path / "wrong", scale=1.3))
    assert report.first_divergence is not None
    assert report.first_divergence.site == "model.decoder.layers.0.encoder_attn.v_proj:out"
    assert "in column 5: target = 1.3 × baseline" in str(report)
