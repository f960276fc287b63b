"""Draft heads: find the head that an engine's settings select, and check that it fits the target."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine.checkpoint.checkpoint import open_checkpoint
from tapscope.engine.hf_config.config_reader import ConfigReader
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.layer_group import layer_groups
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.models.draft_head import DraftHead
from tapscope.engine.models.eagle import Eagle3Layout, Eagle3Model, EagleModel
from tapscope.engine.models.mtp import LAYOUTS, MtpModel, mtp_config, mtp_prefixes
from tapscope.engine.params.engine_config import EngineConfig

_EAGLE = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
_EAGLE3 = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures in a head's config.json: as written by the training code, by SGLang and by vLLM."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Draft head that fits the target."""

    config: ModelConfig
    build: Callable[[CausalLM, torch.dtype], DraftHead]
    """Creates the head of a target, without weights."""
    aux_layers: tuple[int, ...] = ()
    """See :attr:`.Decoder.aux_layers`."""


def find_head(config: EngineConfig, target: ModelConfig) -> HeadSpec:
    """Return the head that ``config`` selects, from its config.json and the names of its tensors.

    Raises ConfigError if the head does not fit the target, CheckpointError if the head cannot be read.
    """
    setting = f"speculative_algorithm={config.speculative_algorithm!r}"
    window = layer_groups(target)[0].window
    if window is not None:
        raise ConfigError(
            f"{setting}: all layers of {target.architecture} have a window of {window}, and the head attends further; "
            "use 'NGRAM' or 'STANDALONE'"
        )
    _check_tree(config, target)
    path, is_eagle3 = config.speculative_draft_model_path, config.speculative_algorithm == "EAGLE3"
    if path is None:
        return _mtp(Path(config.model), target, setting)
    return _eagle(Path(path), target, f"speculative_draft_model_path={path!r}", is_eagle3=is_eagle3)


def _check_tree(config: EngineConfig, target: ModelConfig) -> None:
    """Raise ConfigError if ``config`` requests draft trees and the target's attention does not support them."""
    if config.has_draft_trees and target.index is not None:
        raise ConfigError(
            f"speculative_eagle_topk={config.speculative_eagle_topk}: trees are not supported with an indexer "
            f"({target.architecture}); use 1"
        )


def _mtp(folder: Path, target: ModelConfig, setting: str) -> HeadSpec:
    if target.architecture not in LAYOUTS:
        raise ConfigError(
            f"{setting}: {target.architecture} has no MTP layer; those that have one: {', '.join(LAYOUTS)}. "
            "Set speculative_draft_model_path for an EAGLE head"
        )
    prefixes = tuple(mtp_prefixes(target))
    with open_checkpoint(folder) as checkpoint:
        if not any(name.startswith(prefixes) for name in checkpoint.names):
            raise ConfigError(f"{setting}: {folder} has no MTP layer: no tensor begins with {prefixes[-1]}")
    head = replace(mtp_config(target), tie_word_embeddings=False)
    return HeadSpec(head, lambda model, dtype: MtpModel(head, model, dtype))


def _eagle(folder: Path, target: ModelConfig, setting: str, *, is_eagle3: bool) -> HeadSpec:
    reader = ConfigReader.open(folder / "config.json")
    known, named = _EAGLE3 if is_eagle3 else _EAGLE, reader.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if architecture not in known:
        raise ConfigError(f"{setting}: its architecture is {architecture!r}; supported: {', '.join(known)}")
    head = ModelConfig.read(folder, architecture="LlamaForCausalLM")
    for what in ("hidden_size", "vocab_size"):
        head_size, target_size = getattr(head, what), getattr(target, what)
        if head_size != target_size:
            mismatch = f"its {what} is {head_size}, but the target's is {target_size}"
            raise ConfigError(f"{setting}: {mismatch}; use a head of this target")
    with open_checkpoint(folder) as checkpoint:
        names = checkpoint.names
        has_hidden_norm = any(name.endswith("hidden_norm.weight") for name in names)
        if has_hidden_norm != is_eagle3:
            kind = "EAGLE3" if has_hidden_norm else "EAGLE"
            raise ConfigError(f"{setting}: its tensors are those of another kind; use speculative_algorithm={kind!r}")
        offsets = checkpoint.integers("d2t") if "d2t" in names else None
    head = replace(head, max_positions=target.max_positions, tie_word_embeddings=False)
    has_bias = "fc.bias" in names
    if not is_eagle3:
        return HeadSpec(head, lambda model, dtype: EagleModel(head, model, dtype, has_fc_bias=has_bias))
    if head.num_layers != 1:
        raise reader.fail("num_hidden_layers", "EAGLE-3 heads of one layer are supported")
    layout = Eagle3Layout(
        has_fc_bias=has_bias,
        token_ids=_token_ids(offsets, reader, target.vocab_size),
        aux_layers=_aux_layers(reader, target, setting),
    )
    return HeadSpec(head, lambda model, dtype: Eagle3Model(head, model, dtype, layout), layout.aux_layers)


def _token_ids(offsets: torch.Tensor | None, reader: ConfigReader, vocab_size: int) -> torch.Tensor | None:
    """Return the target's ids of the tokens that an EAGLE-3 head predicts; None: all tokens.

    ``offsets``: the head's `d2t`, the difference between the target's ids and the head's.
    """
    size = reader.count("draft_vocab_size", vocab_size)
    if offsets is None:
        if size != vocab_size:
            raise reader.fail("draft_vocab_size", "the checkpoint has no d2t, which maps these tokens to the target's")
        return None
    if offsets.shape != (size,):
        raise reader.fail("draft_vocab_size", f"the checkpoint's d2t has shape {list(offsets.shape)}")
    token_ids = offsets + torch.arange(size)
    num_ids = len(set(token_ids.tolist()))
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size or num_ids < size:
        raise CheckpointError(
            f"{reader.path.parent}: d2t must map {size} tokens to different ids below {vocab_size}, but maps them to "
            f"{num_ids} from {int(token_ids.min())} to {int(token_ids.max())}"
        )
    return token_ids


def _aux_layers(reader: ConfigReader, target: ModelConfig, setting: str) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE-3 head reads; config.json lists the layers whose outputs it reads."""
    section = reader.section("eagle_config")
    given = None if section is None else section.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    aux_layers = [2, layers // 2, layers - 3] if given is None else given
    if not isinstance(aux_layers, list) or not aux_layers or any(type(layer) is not int for layer in aux_layers):
        raise reader.fail("eagle_config", "eagle_aux_hidden_state_layer_ids must be a list of layers")
    aux_layers = aux_layers if given is None else [layer + 1 for layer in aux_layers]
    if not all(0 <= layer <= layers for layer in aux_layers):
        raise ConfigError(f"{setting}: it reads the inputs of layers {aux_layers}, but the target has {layers} layers")
    return tuple(aux_layers)
