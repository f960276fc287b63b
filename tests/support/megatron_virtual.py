"""Two virtual pipeline stages on each of two ranks, built by Megatron-core.

``python megatron_virtual.py CHECKPOINT OUT`` saves them. With ``--capture [LAYER]``, Megatron's interleaved schedule
computes two microbatches, forward and backward, and OUT is the run; the weight of LAYER, if given, is wrong. Each
parameter is loaded from the layer of the Hugging Face checkpoint that Megatron assigns to it; contains no tests.
"""

import argparse
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
STAGES = VIRTUAL = 2
MICROBATCHES = [list(range(3, 19)), list(range(40, 56))]


def work(rank: int, checkpoint: str, out: str, capture: int | None) -> None:
    """Run one rank."""
    from megatron.core import parallel_state
    from megatron_llama import settings_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=STAGES)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=VIRTUAL
    )
    chunks = build(Path(checkpoint), settings_of(Path(checkpoint)))
    if capture is None:
        save(chunks, rank, Path(out))
    else:
        train_step(chunks, out, capture)
    dist.barrier()
    dist.destroy_process_group()


def build(checkpoint: Path, settings: dict[str, Any]) -> list[nn.Module]:
    """Build this rank's model chunks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron_llama import _config, read_weights, shards

    # Megatron selects the GPU only through these names.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    zeros = torch.zeros
    torch.zeros = lambda *size, **given: zeros(*size, **(given | {"device": "cpu"}))  # type: ignore[assignment]
    initialize_rng_tracker(inference_rng_tracker=True)  # without it, dropout requests a CUDA generator
    config = _config(settings, torch.float32, False)
    config = replace(config, virtual_pipeline_model_parallel_size=VIRTUAL, batch_p2p_comm=False)
    parts = shards(settings, read_weights(checkpoint), 1, 0)
    chunks: list[nn.Module] = []
    for number in range(VIRTUAL):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=settings["vocab_size"],
            max_sequence_length=settings["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=settings["rope_theta"],
            parallel_output=False,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            vp_stage=number,
        )
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                its = re.sub(r"layers\.(\d+)", lambda found: f"layers.{layers[int(found[1])]}", name)  # noqa: B023
                parameter.copy_(parts[its])
        chunks.append(chunk)
    return chunks


def save(chunks: list[nn.Module], rank: int, out: Path) -> None:
    """Save the chunks as a Megatron checkpoint."""
    from save_megatron import args_of

    content = {f"model{i}": chunk.state_dict_for_save_checkpoint() for i, chunk in enumerate(chunks)}  # type: ignore[operator]
    folder = out / "iter_0000010" / f"mp_rank_00_{rank:03d}"
    folder.mkdir(parents=True)
    torch.save({"args": args_of(chunks[-1]), "checkpoint_version": 3.0, **content}, folder / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text("10")


def train_step(chunks: list[nn.Module], out: str, spoilt: int) -> None:
    """Run one step of Megatron's schedule, captured by one Dumper."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tapscope import Dumper

    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):  # type: ignore[union-attr]
        if layer.layer_number - 1 == spoilt:  # type: ignore[union-attr]
            layer.mlp.linear_fc2.weight.data.mul_(1.2)  # type: ignore[union-attr,operator]
    length = len(MICROBATCHES[0])
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def forward_step(batches: Any, model: nn.Module) -> Any:
        ids = torch.tensor([next(batches)])
        return model(ids, torch.arange(length)[None], mask), partial(loss, ids)

    def loss(ids: torch.Tensor, logits: torch.Tensor) -> Any:
        value = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        return value, {"loss": value.detach()}

    with Dumper(chunks, out, keep="full", grads=True, params=True) as dumper, dumper.step(phase="train"):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(MICROBATCHES) for _ in chunks],
            model=chunks,
            num_microbatches=len(MICROBATCHES),
            seq_length=length,
            micro_batch_size=1,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--capture", type=int, nargs="?", const=-1, metavar="LAYER")
    given = parser.parse_args()
    os.environ.setdefault("LOCAL_RANK", "0")
    arguments = given.checkpoint, str(given.out.absolute()), given.capture
    mp.spawn(work, arguments, nprocs=STAGES)  # type: ignore[no-untyped-call]
