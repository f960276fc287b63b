"""A tiny random Stable Diffusion pipeline on CPU: fp32 against fp32 and bf16, clean and with seeded bugs.

    python -m benchmarks.frameworks.diffusers_cpu [--dtype float32 bfloat16] [--folder FOLDER]

Needs diffusers (tried with 0.42). No weights are loaded. Prints one line per pair: the exit code of `tapscope diff` and
what it names. Exit code 0 when every clean pair agrees and every bug is named.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from tapscope.frameworks.diffusers import capture

SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def build() -> Any:
    """The pipeline of diffusers' own fast tests, smaller, without a tokenizer."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=2,
    )
    vae = AutoencoderKL(
        block_out_channels=[4, 8],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
        norm_num_groups=2,
    )
    text = CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000
    )
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=None,
        unet=unet,
        scheduler=DDIMScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def schedule(pipeline: Any) -> None:
    pipeline.scheduler = DDIMScheduler(**SCHEDULE | {"beta_schedule": "linear"})


def timesteps(pipeline: Any) -> None:
    pipeline.scheduler = DDIMScheduler(**SCHEDULE | {"timestep_spacing": "trailing"})


def latents(pipeline: Any) -> None:
    """The VAE gets latents of another scale."""
    pipeline.vae.register_to_config(scaling_factor=0.13025)


def text(pipeline: Any) -> None:
    pipeline.text_encoder.get_submodule("encoder.layers.1.mlp.fc2").weight.data.mul_(1.2)


def denoiser(pipeline: Any) -> None:
    pipeline.unet.get_submodule("mid_block.resnets.1.conv2").weight.data.mul_(1.2)


BUGS: dict[str, tuple[str, Callable[[Any], None] | None]] = {
    "clean": ("", None),
    "schedule": ("scheduler.schedule:out[alphas_cumprod]", schedule),
    "timesteps": ("scheduler.schedule:out[timesteps]", timesteps),
    "text": ("text_encoder.encoder.layers.1.mlp.fc2", text),
    "denoiser": ("unet.mid_block.resnets.1.conv2", denoiser),
    "latents": ("vae.post_quant_conv", latents),
}
"""Name -> (part of the site that must be named, what is done to the pipeline)."""


def captured(out: Path, dtype: str, bug: str) -> Path:
    """A run of two denoising steps with classifier-free guidance."""
    pipeline = build()
    if (apply := BUGS[bug][1]) is not None:
        apply(pipeline)
    pipeline = pipeline.to(getattr(torch, dtype))
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    with torch.no_grad(), capture(pipeline, out, keep="full"):
        prompts = [pipeline.text_encoder(ids)[0] for ids in (torch.arange(3, 20)[None], torch.ones(1, 17).long())]
        pipeline(
            prompt_embeds=prompts[0],
            negative_prompt_embeds=prompts[1],
            latents=noise,
            height=16,
            width=16,
            num_inference_steps=2,
            output_type="np",
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("diffusers-cpu-runs"))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--bug", nargs="+", choices=list(BUGS), default=list(BUGS))
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    reference = captured(folder / "reference", "float32", "clean")
    failures = 0
    for dtype in args.dtype:
        for bug in args.bug:
            out = captured(folder / f"{dtype}-{bug}", dtype, bug)
            command = [sys.executable, "-m", "tapscope", "diff", str(reference), str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            (what,) = [line for line in done.stdout.splitlines() if line.startswith("what")] or [done.stderr]
            module, _, port = BUGS[bug][0].partition(":")
            is_right = done.returncode == int(bug != "clean") and module in what and port in what
            failures += not is_right
            print(f"{'ok' if is_right else 'WRONG':5} {dtype:8} {bug:9} exit {done.returncode}  {what}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
