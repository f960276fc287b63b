"""DraftRunner: the draft checkpoint or head of speculative decoding on this rank."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from tapscope.core.errors import ConfigError
from tapscope.core.observe import ModelObserver, ObserverFactory, StepInfo, StepObserver
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.decode_graphs import free_memory
from tapscope.engine.execution.draft_chains import DraftChains, HeadRows, LaunchedDrafts
from tapscope.engine.execution.draft_heads import find_head
from tapscope.engine.execution.hidden_store import MAX_WAITING, HiddenStore
from tapscope.engine.execution.memory_budget import DraftMemory
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.execution.resolved_settings import DTYPES
from tapscope.engine.execution.step_mode import StepMode
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.paged_attention import without_cudnn_attention
from tapscope.engine.models.decoder import Decoder
from tapscope.engine.models.draft_head import DraftHead
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.step_plan import StepPlan
from tapscope.engine.sampling.device_copy import to_device

_WARM_UP_ROWS = (2, 16, 64, 256, 1024)
"""Of prompts that a head computes when it starts: kernels differ with the number of rows."""


def check_draft(config: EngineConfig, target: ModelConfig) -> None:
    """Check the draft checkpoint or head before anything is loaded.

    Raises ConfigError if it has another vocabulary than ``target``, and as :meth:`ModelConfig.read` and
    :func:`.find_head`.
    """
    if config.has_draft_head:
        find_head(config, target).config.check_split(config.tp)
        return
    if config.speculative_draft_model_path is None:
        return
    path = Path(config.speculative_draft_model_path)
    draft, setting = ModelConfig.read(path), f"speculative_draft_model_path={str(path)!r}"
    if not _same_vocabulary(path, Path(config.model), draft.vocab_size, target.vocab_size):
        if draft.vocab_size == target.vocab_size:
            found = "has different tokens than the target's"
        else:
            found = f"has {draft.vocab_size} tokens, but the target's has {target.vocab_size}"
        raise ConfigError(f"{setting}: its vocabulary {found}; use a draft with the same tokenizer")
    draft.check_split(config.tp)


def load_runners(
    config: EngineConfig, model_config: ModelConfig, tp: TensorParallel, observer: ObserverFactory | None
) -> "tuple[ModelRunner, DraftRunner | None]":
    """The runners of this rank: of the model, and of the draft that passed :func:`check_draft`, None without one.

    Raises CheckpointError, ConfigError, RankLostError.
    """
    runner = ModelRunner(config, model_config, tp, observer, measure_draft=partial(_measure_draft, config))
    return runner, _make_draft_runner(config, runner)


def _make_draft_runner(config: EngineConfig, target: ModelRunner) -> "DraftRunner | None":
    """Load the draft checkpoint or head, with as many pages as ``target`` has; None if no algorithm needs one.

    The observer of ``target`` watches it too.
    """
    draft_config = config.draft_config(target.cache_config.num_pages)
    if draft_config is None:
        return None
    if config.has_draft_head:
        runner: DraftRunner = _make_head_runner(config, draft_config, target)
    else:
        draft = ModelConfig.read(Path(draft_config.model))
        runner = DraftRunner(draft_config, draft, target.model.tp, None, max_request_rows=1 + config.num_drafts)
    if isinstance(target.observer, ModelObserver):
        target.observer.attach(runner.model, name="draft")
        runner.observer = _SharedObserver(target.observer)
    return runner


def _measure_draft(config: EngineConfig, target: ModelRunner) -> DraftMemory | None:
    """Memory of the draft that :func:`_make_draft_runner` will make; None without one.

    It is measured with dummy weights and as many pages as ``target`` has now. Other ranks do the same. Raises
    ConfigError.
    """
    changed = "after_forward", "after_keep_rows", "after_recapture"
    kept = {name: getattr(target, name) for name in changed}
    decoders = [module for module in target.model.modules() if isinstance(module, Decoder)]
    layers = [decoder.aux_layers for decoder in decoders]
    before = free_memory()
    try:
        runner = _make_draft_runner(replace(config, load_format="dummy"), target)
        if runner is None:
            return None
        used = before - free_memory()
        runner.release_graphs()
        cached = sum(runner.cache_config.group_bytes)
        return DraftMemory(max(0, used - cached), cached // runner.cache_config.num_pages)
    finally:
        for name, value in kept.items():
            setattr(target, name, value)
        for decoder, aux_layers in zip(decoders, layers, strict=True):
            decoder.aux_layers = aux_layers


class DraftRunner(ModelRunner):
    """The runner of a draft model."""

    hidden_states: HiddenStore | None = None
    """The target's hidden states, which a head reads."""
    chains: DraftChains | None = None
    """Drafts chains on the device; for a head with CUDA graphs on one rank."""

    def recapture_graphs(self) -> None:
        """See ModelRunner."""
        super().recapture_graphs()
        if self.chains is not None:
            self.chains.capture()

    def release_graphs(self) -> None:
        """See ModelRunner."""
        super().release_graphs()
        if self.chains is not None:
            self.chains.release()

    @torch.inference_mode(False)
    def make_chains(self, num_drafts: int, last_tokens: Tensor) -> None:
        """Make :attr:`chains` of up to ``num_drafts`` drafts, and capture their CUDA graphs; ``last_tokens``: the
        target's."""
        assert isinstance(self.model, DraftHead), "only heads have chains"
        with self.startup_timer.stage("graphs"):
            self.chains = DraftChains(
                self.model,
                self._buffers,
                last_tokens=last_tokens,
                max_requests=self._max_requests,
                max_rows=self._max_graph_rows,
                num_drafts=num_drafts,
                dtype=DTYPES[self.dtype],
                numerics=self._numerics,
                stream=self._capture_stream,
            )
            self.chains.capture()

    @torch.inference_mode(False)
    @torch.no_grad()
    def warm_up(self, width: int) -> None:
        """Compute prompts of padding that read hidden states of ``width``: no CUDA graph compiles their kernels."""
        options: dict[str, Any] = {"dtype": DTYPES[self.dtype], "device": self.device}
        for count in _WARM_UP_ROWS:
            inputs = self._buffers.load_prompt_of_padding(min(count, self.max_tokens))
            states = torch.zeros(len(inputs.input_ids), width, **options)
            with without_cudnn_attention(), self._numerics():
                self.model(
                    inputs.input_ids,
                    position_ids=inputs.position_ids,
                    past_key_values=inputs.cache,
                    logits_to_keep=torch.zeros(1, dtype=torch.int64, device=self.device),
                    hidden_states=states,
                )

    def can_chain(self, plan: StepPlan, num_requests: int) -> bool:
        """Whether :meth:`launch_chains` can draft for as many of the requests of ``plan``."""
        return (
            self.chains is not None
            and self.chains.size_of(num_requests) is not None
            and self._has_single_rows(plan)
            and self.mode() is StepMode.CLEAN
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def launch_chains(
        self, plan: StepPlan, chosen: Sequence[int], sampled: Tensor, rows: Sequence[int]
    ) -> LaunchedDrafts | None:
        """Start the rows of ``plan``, of which each request's last ones read what the target samples from its last
        known token and from its drafts; then as many drafts as a step may have for the requests of the indices
        ``chosen``, after the last row that was accepted.

        ``sampled``: tokens that the target samples, on the device, of which ``rows`` are those that the rows of
        ``plan`` read. The host waits for nothing. Returns None where a graph could not be captured.
        """
        assert self.chains is not None, "the caller has asked whether there are chains"
        assert self.graphs is not None, "chains are graphs"
        items, ids = plan.scheduled, [token for item in plan.scheduled for token in item.tokens]
        known = [len(item.tokens) - item.num_drafts - 1 for item in items]
        if any(known) or len(rows) < len(sampled):
            each = zip(plan.slots, items, known, strict=True)
            places = [row for slot, item, count in each for row in range(slot + count, slot + len(item.tokens))]
            index = to_device([places, rows], self.device)
            tokens = to_device(ids, self.device).index_copy_(0, index[0], sampled[index[1]])
        else:
            tokens = sampled
        outputs = self.graphs.decode.run(plan, self._graph_inputs(self.extra_inputs(plan)), tokens)
        if outputs is None:
            return None
        no_pages: dict[str, Any] = {"pages": (), "windowed_pages": ()}
        following = [
            structs.replace(items[index], position=items[index].position + known[index] + 1, tokens=(0,), **no_pages)
            for index in chosen
        ]
        spans = [(plan.slots[index] + known[index], items[index].num_drafts) for index in chosen]
        computed = HeadRows(tokens, outputs, self.last_hidden_state)
        return self.chains.launch(replace(plan, scheduled=tuple(following)), spans, ids, computed)

    def _padded_size(self, plan: StepPlan) -> int | None:
        """None: recorded steps run eagerly, without padding."""
        return None

    def _graph_inputs(self, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hidden states as wide as the head's, also those of several layers for EAGLE-3."""
        if not isinstance(self.model, DraftHead):
            return extra
        with self._numerics():
            return {"hidden_states": self.model.read(extra["hidden_states"])}


def _make_head_runner(config: EngineConfig, draft_config: EngineConfig, target: ModelRunner) -> DraftRunner:
    """A head in the target's dtype, which shares its page tables and reads its hidden states."""
    spec = find_head(config, target.model.config)
    dtype: Any = target.dtype
    draft_config = replace(draft_config, dtype=dtype, kv_cache_dtype=dtype, quantization=None, exclude_modules=())
    runner = DraftRunner(
        draft_config,
        spec.config,
        target.model.tp,
        None,
        build=lambda model_config, tp, dtype: spec.build(target.model, dtype),
        page_tables=target.page_tables,
        max_request_rows=MAX_WAITING + 1 + config.num_drafts,
        extra_widths={"hidden_states": spec.config.hidden_size},
    )
    store = runner.hidden_states = HiddenStore()
    runner.extra_inputs = lambda plan: {"hidden_states": store.take_step(plan)}
    runner.after_forward = lambda plan: store.put_outputs(plan, runner.last_hidden_state)
    target.after_keep_rows = store.keep_rows
    if not spec.aux_layers:
        target.after_forward = lambda plan: store.put_step(plan, target.last_hidden_state)
    else:
        decoder = next(module for module in target.model.modules() if isinstance(module, Decoder))
        decoder.aux_layers = spec.aux_layers
        target.recapture_graphs()
        target.after_forward = lambda plan: store.put_step(plan, torch.cat(decoder.aux_hidden_states, dim=-1))
    target.after_recapture = runner.recapture_graphs  # they read the target's embedding
    if runner.device.type == "cuda":
        with runner.startup_timer.stage("graphs"):
            runner.warm_up(target.model.config.hidden_size * max(1, len(spec.aux_layers)))
    if runner.has_graphs and not config.has_draft_trees:
        runner.make_chains(config.num_drafts, target.last_tokens)
    return runner


class _SharedObserver:
    """The target's observer, which outlives the draft's steps."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    @property
    def epoch(self) -> int:
        return self._observer.epoch

    @property
    def armed(self) -> bool:
        return self._observer.armed

    def before_step(self, info: StepInfo) -> None:
        self._observer.before_step(info)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self._observer.after_step(metrics)

    def close(self) -> None:
        """The target's runner closes it."""


def _same_vocabulary(draft: Path, target: Path, draft_size: int, target_size: int) -> bool:
    """Whether token ids mean the same in both checkpoints; without tokenizers, whether there are as many."""
    files = draft / "tokenizer.json", target / "tokenizer.json"
    if not all(file.exists() for file in files):
        return draft_size == target_size
    contents = [file.read_text(encoding="utf-8") for file in files]
    return contents[0] == contents[1] or _tokens(contents[0]) == _tokens(contents[1])


def _tokens(text: str) -> tuple[Any, Any]:
    content: Mapping[str, Any] = json.loads(text)
    return content.get("model", {}).get("vocab"), [token.get("content") for token in content.get("added_tokens", ())]
