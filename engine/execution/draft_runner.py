"""The draft checkpoint of speculative decoding on this rank."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapscope.core.errors import ConfigError
from tapscope.core.observe import ModelObserver, StepInfo, StepObserver
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig


def check_draft(config: EngineConfig, target: ModelConfig) -> None:
    """Check the draft checkpoint before anything is loaded.

    Raises ConfigError if it has another vocabulary than ``target`` or recurrent state, and as :meth:`ModelConfig.read`.
    """
    if config.speculative_draft_model_path is None:
        return
    path = Path(config.speculative_draft_model_path)
    draft, setting = ModelConfig.read(path), f"speculative_draft_model_path={str(path)!r}"
    if draft.linear_layers:
        raise ConfigError(f"{setting}: a draft with recurrent state ({draft.architecture}) is not supported")
    if not _same_vocabulary(path, Path(config.model), draft.vocab_size, target.vocab_size):
        if draft.vocab_size == target.vocab_size:
            found = "has other tokens than the target's"
        else:
            found = f"has {draft.vocab_size} tokens, and the target's {target.vocab_size}"
        raise ConfigError(f"{setting}: its vocabulary {found}; use a draft with the same tokenizer")
    draft.check_split(config.tp)


def make_draft_runner(config: EngineConfig, target: ModelRunner, tp: TensorParallel) -> ModelRunner | None:
    """Load the draft checkpoint, which passed :func:`check_draft`, with as many pages as ``target`` has; None if no
    algorithm needs one. The observer of ``target`` watches it too.

    Raises CheckpointError.
    """
    draft_config = config.draft_config(target.num_pages)
    if draft_config is None:
        return None
    runner = ModelRunner(draft_config, ModelConfig.read(Path(draft_config.model)), tp, None)
    if isinstance(target.observer, ModelObserver):
        target.observer.attach(runner.model, name="draft")
        runner.observer = _SharedObserver(target.observer)
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
