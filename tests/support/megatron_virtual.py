"""Two virtual pipeline stages on each of two ranks, built by Megatron-core and saved: ``python megatron_virtual.py
CHECKPOINT OUT``. Each parameter is the one of the Hugging Face checkpoint whose layer Megatron says it is; no test in
here."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
STAGES = VIRTUAL = 2


def work(rank: int, checkpoint: str, out: str) -> None:
    """One rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron_llama import _config, read_weights, settings_of, shards
    from save_megatron import args_of

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=STAGES)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, virtual_pipeline_model_parallel_size=VIRTUAL
    )
    settings = settings_of(Path(checkpoint))
    config = replace(_config(settings, torch.float32, False), virtual_pipeline_model_parallel_size=VIRTUAL)
    parts = shards(settings, read_weights(Path(checkpoint)), 1, 0)
    content = {}
    for number in range(VIRTUAL):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=settings["vocab_size"],
            max_sequence_length=settings["max_position_embeddings"],
            position_embedding_type="rope",
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
        content[f"model{number}"] = chunk.state_dict_for_save_checkpoint()
    folder = Path(out) / "iter_0000010" / f"mp_rank_00_{rank:03d}"
    folder.mkdir(parents=True)
    torch.save({"args": args_of(chunk), "checkpoint_version": 3.0, **content}, folder / "model_optim_rng.pt")
    (Path(out) / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    mp.spawn(work, (sys.argv[1], str(Path(sys.argv[2]).absolute())), nprocs=STAGES)  # type: ignore[no-untyped-call]
