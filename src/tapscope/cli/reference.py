"""Reference run with transformers: greedy decoding, all requests in one left-padded batch, with step information."""

import importlib.util
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tapscope.cli.prompts import Workload
from tapscope.core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from tapscope.dumper import Dumper


def load(model: str, dtype: str, adapter: Path | None = None, attention: str = "eager") -> Any:
    """Load the model with transformers, optionally with a PEFT adapter; raises CheckpointError.

    ``attention`` is the ``attn_implementation`` of transformers.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (Path(model) / "config.json").is_file():
        raise CheckpointError(f"{model} has no config.json; expected the directory of a Hugging Face checkpoint")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except Exception as error:  # noqa: BLE001 - a bad directory raises various errors in transformers
        raise CheckpointError(f"transformers cannot load {model}: {reason(error)}") from None
    if adapter is not None:
        _add_adapter(loaded, adapter)
    return loaded.eval()


def _add_adapter(model: Any, adapter: Path) -> None:
    """Insert the adapter's modules with PEFT, under the names of the adapted modules; raises like :func:`load`."""
    if importlib.util.find_spec("peft") is None:
        raise UsageError("--lora with --backend hf needs the package peft")
    try:
        model.load_adapter(str(adapter))
    except Exception as error:  # noqa: BLE001 - as above
        raise CheckpointError(f"PEFT cannot load {adapter}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Return the first line of the error message, or the type of the error if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def encode(model: str, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return the token ids of every prompt; string prompts require a tokenizer in the checkpoint."""
    if all(not isinstance(prompt, str) for prompt in prompts):
        return [list(map(int, prompt)) for prompt in prompts]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        encoded = [tokenizer(p)["input_ids"] if isinstance(p, str) else list(map(int, p)) for p in prompts]
    except Exception as error:  # noqa: BLE001 - as above; some tokenizers load and cannot encode
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{model} has no usable tokenizer; give token ids instead: --input-ids 1,2,3 (transformers: {reason})"
        ) from None
    empty = next((i for i, ids in enumerate(encoded) if not ids), None)
    if empty is not None:
        raise UsageError(
            f"the tokenizer of {model} makes no tokens of prompt {empty}; give token ids instead: --input-ids 1,2,3"
        )
    return encoded


def generate(
    model: Any, prompts: list[list[int]], work: Workload, dumper: "Dumper", adapter: str = ""
) -> dict[str, list[int]]:
    """Run the workload and return the new token ids of each request. Rows of finished requests count as padding.

    ``adapter`` is the name of the model's LoRA adapter for the step information.
    """
    import torch

    from tapscope.core.token_rows import padded_step

    batch = _Batch(prompts, work, _stop_ids(model))
    cache: Any = None
    parameters = signature(model.forward).parameters  # transformers 5.24 renamed both; Mamba uses cache_params
    cache_name = next((name for name in ("cache_params", "cache") if name in parameters), "past_key_values")
    while any(batch.live):
        ids, positions, valid = batch.next_inputs()
        phase = "prefill" if cache is None else "decode"
        info = padded_step(dumper.next_step, phase, ids, positions, valid, work.request_ids)
        if adapter:
            info = msgspec.structs.replace(info, adapters={run.request: adapter for run in info.rows})
        with torch.inference_mode(), dumper.step_of(info):
            output = model(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(batch.mask),
                position_ids=torch.tensor(positions),
                use_cache=True,
                **{cache_name: cache},
            )
        cache = output[cache_name]
        batch.accept(output.logits[:, -1].argmax(-1).tolist())
    return dict(zip(work.request_ids, batch.new, strict=True))


class _Batch:
    """State of the left-padded batch; ``mask`` covers all inputs so far."""

    def __init__(self, prompts: list[list[int]], work: Workload, stops: frozenset[int]) -> None:
        self._prompts = prompts
        self._work = work
        self._stops = stops
        self._width = max(map(len, prompts))
        self.mask: list[list[int]] = [[] for _ in prompts]
        self.live = [True] * len(prompts)
        self.new: list[list[int]] = [[] for _ in prompts]

    def next_inputs(self) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
        """Return token ids, positions and validity ``[batch, sequence]`` of the next step, and extend the mask."""
        if not self.mask[0]:
            pads = [self._width - len(p) for p in self._prompts]
            ids = [[0] * pad + p for pad, p in zip(pads, self._prompts, strict=True)]
            positions = [[0] * pad + list(range(len(p))) for pad, p in zip(pads, self._prompts, strict=True)]
            valid = [[False] * pad + [True] * len(p) for pad, p in zip(pads, self._prompts, strict=True)]
        else:
            ids = [[new[-1]] for new in self.new]
            positions = [[len(p) + len(new) - 1] for p, new in zip(self._prompts, self.new, strict=True)]
            valid = [[live] for live in self.live]
        for mask, row in zip(self.mask, valid, strict=True):
            mask.extend(map(int, row))
        return ids, positions, valid

    def accept(self, sampled: list[int]) -> None:
        """Append one token per request: the next forced token if any is left, otherwise the sampled token."""
        for i, token in enumerate(sampled):
            if not self.live[i]:
                continue
            forced = self._work.forced[i]
            at = len(self.new[i])
            self.new[i].append(forced[at] if at < len(forced) else token)
            done = len(self.new[i]) >= self._work.max_new_tokens[i]
            self.live[i] = not done and (bool(forced) or self.new[i][-1] not in self._stops)


def _stop_ids(model: Any) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def decode(model: str, tokens: dict[str, list[int]]) -> dict[str, str]:
    """Return the text of the new tokens; without a tokenizer, the token ids."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return {name: " ".join(map(str, ids)) for name, ids in tokens.items()}
    tokenizer = Tokenizer.from_file(str(file))
    return {name: tokenizer.decode(ids) for name, ids in tokens.items()}
