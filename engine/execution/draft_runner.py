"""DraftRunner: runs the draft model or draft head of speculative decoding on this rank."""

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
"""Numbers of rows of the warm-up prompts of a head: different numbers of rows use different kernels."""


def check_draft(config: EngineConfig, target: ModelConfig) -> None:
    """Check the draft checkpoint or head before anything is loaded.

    Raises ConfigError if its vocabulary differs from ``target``'s, and the errors of :meth:`ModelConfig.read` and
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
            difference = "has different tokens than the target's"
        else:
            difference = f"has {draft.vocab_size} tokens, but the target's has {target.vocab_size}"
        raise ConfigError(f"{setting}: its vocabulary {difference}; use a draft with the same tokenizer")
    draft.check_split(config.tp)


def load_runners(
    config: EngineConfig, model_config: ModelConfig, tp: TensorParallel, observer: ObserverFactory | None
) -> "tuple[ModelRunner, DraftRunner | None]":
    """Load this rank's runners of the model and of the draft that passed :func:`check_draft`, None without a draft.

    Raises CheckpointError, ConfigError, RankLostError.
    """
    runner = ModelRunner(config, model_config, tp, observer, measure_draft=partial(_measure_draft, config))
    return runner, _make_draft_runner(config, runner)


def _make_draft_runner(config: EngineConfig, target: ModelRunner) -> "DraftRunner | None":
    """Load the draft model or head, with as many pages as ``target``; None if the settings need no draft.

    The observer of ``target`` observes the draft too.
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
    """Return the memory of the draft that :func:`_make_draft_runner` will create; None without a draft.

    Measured with dummy weights and the target's current number of pages. Other ranks must measure at the same time.
    Raises ConfigError.
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
    """Runner of a draft model or head."""

    hidden_states: HiddenStore | None = None
    """Hidden states of the target, which a head reads; None for a draft model."""
    chains: DraftChains | None = None
    """Draft chains on the device, for a head with CUDA graphs and without draft trees; otherwise None."""

    def recapture_graphs(self) -> None:
        """See :meth:`.ModelRunner.recapture_graphs`."""
        super().recapture_graphs()
        if self.chains is not None:
            self.chains.capture()

    def release_graphs(self) -> None:
        """See :meth:`.ModelRunner.release_graphs`."""
        super().release_graphs()
        if self.chains is not None:
            self.chains.release()

    @torch.inference_mode(False)
    def make_chains(self, num_drafts: int, last_tokens: Tensor) -> None:
        """Create :attr:`chains` of up to ``num_drafts`` drafts, and capture their CUDA graphs.

        ``last_tokens``: the target's buffer of last tokens.
        """
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
        """Compute padding prompts that read hidden states of ``width``: no CUDA graph compiles their kernels."""
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
        """Return whether :meth:`launch_chains` can draft for ``num_requests`` requests of ``plan``."""
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
        """Launch the head's rows of ``plan``, then draft chains for the requests with indices ``chosen``.

        The last rows of each request read the tokens that the target samples from the request's last known token and
        its drafts. Chains begin after the last accepted row and are as long as a step allows. ``sampled``: tokens that
        the target samples, on the device; ``rows``: indices of those that the rows of ``plan`` read. The host does not
        wait. Returns None if a graph could not be captured.
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
        """Return None: observed steps run eagerly, without padding."""
        return None

    def _graph_inputs(self, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return hidden states of the head's width, projected from several layers' for EAGLE-3."""
        if not isinstance(self.model, DraftHead):
            return extra
        with self._numerics():
            return {"hidden_states": self.model.read(extra["hidden_states"])}


def _make_head_runner(config: EngineConfig, draft_config: EngineConfig, target: ModelRunner) -> DraftRunner:
    """Create the runner of a head in the target's dtype, with the target's page tables and hidden states."""
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
    target.after_recapture = runner.recapture_graphs  # the draft's graphs read the target's embedding
    if runner.device.type == "cuda":
        with runner.startup_timer.stage("graphs"):
            runner.warm_up(target.model.config.hidden_size * max(1, len(spec.aux_layers)))
    if runner.has_graphs and not config.has_draft_trees:
        runner.make_chains(config.num_drafts, target.last_tokens)
    return runner


class _SharedObserver:
    """The target's observer, wrapped so that closing the draft's runner does not close it."""

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
        """Do nothing: the target's runner closes the observer."""


def _same_vocabulary(draft: Path, target: Path, draft_size: int, target_size: int) -> bool:
    """Return whether both checkpoints have the same token ids; without tokenizers, whether the sizes are equal."""
    files = draft / "tokenizer.json", target / "tokenizer.json"
    if not all(file.exists() for file in files):
        return draft_size == target_size
    contents = [file.read_text(encoding="utf-8") for file in files]
    return contents[0] == contents[1] or _tokens(contents[0]) == _tokens(contents[1])


def _tokens(text: str) -> tuple[Any, Any]:
    content: Mapping[str, Any] = json.loads(text)
    return content.get("model", {}).get("vocab"), [token.get("content") for token in content.get("added_tokens", ())]
