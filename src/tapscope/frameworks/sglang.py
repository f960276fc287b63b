"""SGLang: capture of its model runners, and the plugin for its models and batches; see also ``sglang_server``."""

import functools
import importlib
import logging
import multiprocessing.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tapscope.core.framework_plugin import FrameworkPlugin, ProcessLayout, StepRows
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.frameworks.host import guarded, is_wanted
from tapscope.frameworks.parallel_dims import layer_dims, named_forward
from tapscope.frameworks.parallel_state import call, layout_of

_log = logging.getLogger("tapscope")
_STATE = "sglang.srt.distributed.parallel_state"
_AXES = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "ep": "moe_expert_parallel"}
_LOGITS = "logits"
_guarded = functools.partial(guarded, "SGLang")


class SGLangPlugin(FrameworkPlugin):
    """Plugin for models and batches of sglang.srt."""

    name = "sglang"
    oldest = "0.4"

    def layout(self) -> ProcessLayout | None:
        """Return sizes and ranks of the groups in ``sglang.srt.distributed.parallel_state``."""
        return layout_of(_STATE, _AXES)

    def module_dims(self, module: Any, parent: Any) -> Mapping[str, str]:
        """Return dims of tensor-parallel linears, embeddings, attention and gated activations."""
        dims = layer_dims(module, parent, _tp_size)
        return {"out[next_token_logits]": dims["out"]} if type(module).__name__ == "LogitsProcessor" and dims else dims

    def module_row_sets(self, module: Any) -> Mapping[str, str]:
        """Return the row set of logits, computed only for the last row of each request.

        The root returns the output of its logits processor.
        """
        has_logits = type(module).__name__ == "LogitsProcessor" or hasattr(module, "logits_processor")
        return {"out[next_token_logits]": _LOGITS} if has_logits else {}

    def module_forward(self, module: Any) -> Callable[..., Any] | None:
        """Return ``forward_native`` of custom ops, which names the arguments."""
        return named_forward(module)

    def opaque_classes(self) -> Sequence[str]:
        """Return the batch classes, which modules pass along whole."""
        return ("ForwardBatch", "LogitsMetadata")

    def step_rows(
        self, model: Any, info: StepInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepRows | None:
        """Return the rows of the requests in the call's ``ForwardBatch``; None if it lacks the number of rows per
        request."""
        batch = next((each for each in (*args, *kwargs.values()) if _is_batch(each)), None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if batch is None:
            return None
        if _is_mode(batch, "is_idle"):
            return StepRows(info=replace(info, kind="dummy"))
        names, spans = _names(batch), _spans(batch)
        if names is None or spans is None or len(names) != len(spans):
            return None
        rows, last, slot = list[RowSpan](), list[int](), 0
        for name, (first, count) in zip(names, spans, strict=True):
            rows.append(RowSpan(name, first, count, 0, slot))
            slot += count
            last.append(slot - 1)
        firsts = [first for first, _ in spans]
        phase = "decode" if _is_mode(batch, "is_decode") else "mixed" if any(firsts) else "prefill"
        grid = (int(ids.shape[0]),) if getattr(ids, "ndim", 0) == 1 else (slot,)
        step = replace(info, phase=phase, grid=grid, rows=tuple(rows), row_sets={_LOGITS: tuple(last)})
        return StepRows(info=step, token_ids=ids)


def register() -> None:
    """Capture the model runners of this process if the environment requests it (see ``tapscope.frameworks.host``).

    SGLang has no plugin entry point: call this function at the top of the script that creates an ``Engine``. Processes
    spawned by SGLang import the script again and therefore call it as well.
    """
    if not is_wanted():
        return
    try:
        from tapscope.dumper import api

        if not api.process.may_enable():
            return
        runner = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
        if not getattr(runner.load_model, "tapscope", False):
            runner.load_model = _load_model(runner.load_model)
    except Exception as error:  # noqa: BLE001 - the server must start
        text = "tapscope records nothing of SGLang (%s: %s); it expects sglang.srt.model_executor.model_runner"
        _log.error(text, type(error).__name__, error)


def _load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ModelRunner.load_model`` to attach the dumper after loading. Each call of the model, including logits, is
    a step."""

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        with _guarded("attaching to the model"):
            _attach(runner)
        return result

    load_model.tapscope = True  # type: ignore[attr-defined]
    return load_model


def _attach(runner: Any) -> None:
    from tapscope.dumper import api

    if getattr(runner, "is_draft_worker", False):
        return
    api.process.attach(runner.model)
    multiprocessing.util.Finalize(None, api.process.close, exitpriority=1)  # forked children do not run atexit handlers
    if not getattr(getattr(runner, "server_args", None), "disable_cuda_graph", True):
        text = "tapscope: SGLang replays CUDA graphs, whose rows are unknown; start it with --disable-cuda-graph"
        _log.warning(text)


def _is_batch(value: Any) -> bool:
    return type(value).__name__ == "ForwardBatch" and hasattr(value, "forward_mode")


def _is_mode(batch: Any, question: str) -> bool:
    ask = getattr(batch.forward_mode, question, None)
    return bool(ask()) if callable(ask) else False


def _names(batch: Any) -> list[str] | None:
    """Return request ids, otherwise the slot numbers of the request pool if they are in host memory, otherwise None."""
    if names := getattr(batch, "rids", None):
        return [str(name) for name in names]
    return (
        None if (slots := _on_host(getattr(batch, "req_pool_indices", None))) is None else [f"slot{n}" for n in slots]
    )


def _spans(batch: Any) -> list[tuple[int, int]] | None:
    """Return (position of the first row, number of rows) of each request; None if not available on the host."""
    if _is_mode(batch, "is_decode"):
        lengths = _on_host(getattr(batch, "seq_lens_cpu", None)) or _on_host(getattr(batch, "seq_lens", None))
        return None if lengths is None else [(length - 1, 1) for length in lengths]
    counts = _on_host(getattr(batch, "extend_seq_lens_cpu", None))
    firsts = _on_host(getattr(batch, "extend_prefix_lens_cpu", None))
    if counts is None:
        return None
    return list(zip(firsts or [0] * len(counts), counts, strict=True))


def _on_host(values: Any) -> list[int] | None:
    """Return integers in host memory; None for a CUDA tensor, which would require a synchronization."""
    if values is None or getattr(values, "is_cuda", False):
        return None
    return [int(each) for each in (values.tolist() if hasattr(values, "tolist") else values)]


def _tp_size() -> int:
    return int(call(sys.modules.get(_STATE), "get_tensor_model_parallel_world_size") or 1)
