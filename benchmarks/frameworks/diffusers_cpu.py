"""A tiny random Stable Diffusion pipeline of diffusers (tried with 0.42), without weights from the network."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.pair import CLEAN, Pair, Suite

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def build() -> Any:
    """Return the pipeline of diffusers' own fast tests, smaller and without a tokenizer."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

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
        scheduler=EulerDiscreteScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def scheduled(**settings: Any) -> Callable[[Any], None]:
    """Return a bug that replaces the scheduler's settings."""

    def bug(pipeline: Any) -> None:
        pipeline.scheduler = type(pipeline.scheduler)(**SCHEDULE | settings)

    return bug


def latents(pipeline: Any) -> None:
    """Give the VAE latents of a different scale."""
    pipeline.vae.register_to_config(scaling_factor=0.13025)


def text(pipeline: Any) -> None:
    pipeline.text_encoder.get_submodule("encoder.layers.1.mlp.fc2").weight.data.mul_(1.2)


def denoiser(pipeline: Any) -> None:
    pipeline.unet.get_submodule("mid_block.resnets.1.conv2").weight.data.mul_(1.2)


BUGS: dict[str, tuple[str, Callable[[Any], None] | None]] = {
    CLEAN: ("", None),
    "sigma schedule": ("scheduler.schedule (out[", scheduled(use_karras_sigmas=True)),
    "beta schedule": ("scheduler.schedule (out[", scheduled(beta_schedule="linear")),
    "timesteps": ("scheduler.schedule (out[", scheduled(timestep_spacing="trailing")),
    "text encoder": ("text_encoder.encoder.layers.1.mlp.fc2", text),
    "denoiser": ("unet.mid_block.resnets.1.conv2", denoiser),
    "scale of latents": ("vae.post_quant_conv", latents),
}
"""Name -> (module that must be named, change to the pipeline)."""


def captured(out: Path, dtype: str, bug: str) -> Path:
    """Capture a run of three denoising steps with classifier-free guidance."""
    from tapscope.frameworks.diffusers import capture

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
            num_inference_steps=3,
            output_type="np",
        )
    return out


def pairs(folder: Path, dtypes: Sequence[str]) -> Iterator[Pair]:
    """Yield pairs for all bugs in all dtypes."""
    baseline = captured(folder / "diffusers", "float32", CLEAN)
    for dtype in dtypes:
        for bug, (culprit, _) in BUGS.items():
            target = captured(folder / f"diffusers-{dtype}-{bug}".replace(" ", "-"), dtype, bug)
            yield Pair(suite="diffusers", dtype=dtype, bug=bug, culprit=culprit, baseline=baseline, target=target)


SUITES = [Suite(name="diffusers", packages=("diffusers",), pairs=pairs)]
