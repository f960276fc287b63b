"""vLLM (V1 engine): a general plugin that captures every worker, and the framework plugin for its models.

vLLM calls :func:`register` in each of its processes through the entry point group ``vllm.general_plugins``. The call
has no effect unless ``TAPSCOPE_ENABLED`` or ``TAPSCOPE_CONTROL`` is set. Other ``TAPSCOPE_*`` variables are the
settings.
"""

import contextlib
import functools
import importlib
import itertools
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

from msgspec.structs import replace

from tapscope.core.framework_plugin import FrameworkPlugin, ModuleFacts, ProcessLayout, StepRows
from tapscope.core.observe import RowSpan, StepInfo
from tapscope.frameworks.host import guarded, is_wanted
from tapscope.frameworks.parallel_dims import layer_dims, named_forward, without_adapter
from tapscope.frameworks.parallel_state import call

_log = logging.getLogger("tapscope")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_GROUPS = {"tp": "get_tp_group", "pp": "get_pp_group", "dp": "get_dp_group", "dcp": "get_dcp_group"}
_STATE = "vllm.distributed.parallel_state"
_LOGITS = "logits"


class VllmPlugin(FrameworkPlugin):
    """Plugin for vLLM: dims of its layers, rows of its batches, and its process groups."""

    name = "vllm"
    oldest = "0.9"

    def layout(self) -> ProcessLayout | None:
        """Return sizes and ranks of the groups in ``vllm.distributed.parallel_state``."""
        state = sys.modules.get(_STATE)
        mesh, coords = {}, {}
        for axis, name in _GROUPS.items():
            group = call(state, name)
            if group is not None and (axis == "tp" or group.world_size > 1):
                mesh[axis], coords[axis] = int(group.world_size), int(group.rank_in_group)
        group = call(state, "get_ep_group")
        if group is not None and any(each.has_expert_parallelism for model in _sessions if (each := session_of(model))):
            mesh["ep"], coords["ep"] = int(group.world_size), int(group.rank_in_group)
        return ProcessLayout(mesh=mesh, coords=coords, own_steps=("dp",) if "dp" in mesh else ()) if mesh else None

    def module_dims(self, module: Any, parent: Any) -> Mapping[str, str]:
        """Return dims of tensor-parallel linears, embeddings, attention and gated activations."""
        return layer_dims(module, parent, _tp_size)

    def module_facts(self, path: str, module: Any, parent: Any) -> ModuleFacts:
        """Return facts about a module, including modules that vLLM does not call.

        The output head is never called: ``compute_logits`` reads its weight. A rotary embedding calls a function of its
        ``ApplyRotaryEmb``, but multimodal models call the module. LoRA layers do not call the linear layer they wrap.
        """
        facts, name = super().module_facts(path, module, parent), type(module).__name__
        is_optional = name == "ApplyRotaryEmb" or (parent is not None and without_adapter(parent) is module)
        return replace_fields(facts, is_called=name != "ParallelLMHead", is_optional=is_optional)

    def module_row_sets(self, module: Any) -> Mapping[str, str]:
        """Return the row set of logits, computed only for the last row of each request."""
        if type(without_adapter(module)).__name__ != "LogitsProcessor":
            return {}
        return dict.fromkeys(("in[hidden_states]", "out"), _LOGITS)

    def module_forward(self, module: Any) -> Callable[..., Any] | None:
        """Return the function that names the arguments: ``forward_native`` of custom ops, or the wrapped logits
        processor under LoRA."""
        base = without_adapter(module)
        return base.forward if type(base).__name__ == "LogitsProcessor" else named_forward(module)

    def step_rows(
        self, model: Any, info: StepInfo, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> StepRows | None:
        """Return the rows of the scheduled requests, in the order of the worker's batch."""
        session = session_of(model)
        ids = kwargs.get("input_ids", args[0] if args else None)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        return None if session is None else session.rows(info, ids, positions)


_sessions: "weakref.WeakKeyDictionary[Any, weakref.ref[WorkerSession]]" = weakref.WeakKeyDictionary()
"""Model -> session of the worker that runs it. The worker's wrapped methods keep the session alive; a strong reference
here would keep the model alive through its worker."""


def session_of(model: Any) -> "WorkerSession | None":
    """Return the session of the worker that runs ``model``, or None."""
    session = _sessions.get(model)
    return None if session is None else session()


@dataclass(slots=True)
class _Request:
    """A request of a worker and its scheduling progress."""

    name: str
    adapter: str = ""
    """Name of the LoRA adapter; empty for none."""
    end: int = 0
    """Position after the last scheduled row."""
    high: int = 0
    """Position after the highest row ever scheduled."""
    rewinds: int = 0

    def spans(self, start: int, count: int, slot: int) -> Iterator[RowSpan]:
        """Yield the rows of the next step; positions computed before (preemption, rejected drafts) get a new visit
        number."""
        if start < self.end:
            self.rewinds += 1
        again = min(max(self.high - start, 0), count)
        self.end = start + count
        self.high = max(self.high, start + count)
        if again:
            yield RowSpan(self.name, start, again, self.rewinds, slot)
        if again < count:
            yield RowSpan(self.name, start + again, count - again, 0, slot + again)


class WorkerSession:
    """Steps of one vLLM worker. One step covers forward, ``compute_logits`` and sampling of one batch."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._dumper: Any = None
        self._step: Any = None  # context manager of the open step
        self._scheduled: Any = None  # scheduler output of the open step
        self._batch: Any = None  # input batch of the open step (model runner V2)
        self._warming_up = False
        self._requests: dict[str, _Request] = {}  # vLLM's internal id -> request
        self.has_expert_parallelism = bool(
            getattr(getattr(worker, "parallel_config", None), "enable_expert_parallel", False)
        )
        self._assumes_acceptance = getattr(worker, "speculative_config", None) is not None and bool(
            getattr(getattr(worker, "scheduler_config", None), "async_scheduling", False)
        )
        """True with asynchronous scheduling of speculative decoding: vLLM counts all drafts of the previous step as
        accepted until the results arrive; the exact counts are on the device."""

    def install(self) -> None:
        """Wrap the worker's methods by instance attributes; the class is not modified."""
        worker = self._worker
        for name, around in (
            ("load_model", self._load_model),
            ("compile_or_warm_up_model", self._warm_up),
            ("execute_model", self._execute_model),
            ("sample_tokens", self._sample_tokens),
            ("shutdown", self._shutdown),
        ):
            method = getattr(worker, name, None)
            if method is not None:
                setattr(worker, name, _bound(around, method))

    # ---- wrapped methods of the worker

    def _load_model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        with _guarded("attaching to the model"):
            self._attach()
        return result

    def _warm_up(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._warming_up = True
        try:
            return call(*args, **kwargs)
        finally:
            self._warming_up = False
            self._end(None)

    def _execute_model(self, call: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._end(None)  # a batch without sampling
        self._forget(getattr(scheduled, "finished_req_ids", None) or ())
        self._begin(scheduled)
        try:
            output = call(scheduled, *args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        if output is not None:  # None: sample_tokens() follows
            self._end(None, output)
        return output

    def _sample_tokens(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            output = call(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None, output)
        return output

    def _shutdown(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                self._end(None)
            finally:
                with _guarded("closing the run"):
                    if self._dumper is not None:
                        self._dumper.close()
        finally:  # with strict backpressure, close() raises for lost records; vLLM's shutdown must still run
            result = call(*args, **kwargs)
        return result

    # ---- steps

    def _attach(self) -> None:
        from tapscope.dumper import api

        runner = self._worker.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        _sessions[model] = weakref.ref(self)
        if hasattr(runner, "prepare_inputs"):  # model runner V2 keeps its batch in a local variable
            runner.prepare_inputs = _bound(self._prepare_inputs, runner.prepare_inputs)
        for owner, name in ((runner, "propose_draft_token_ids"), (getattr(runner, "speculator", None), "propose")):
            if (method := getattr(owner, name, None)) is not None:
                setattr(owner, name, _bound(self._propose, method))
        api.process.attach(model)
        self._dumper = api.process
        _warn_of_settings(self._worker)

    def _prepare_inputs(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._batch = call(*args, **kwargs)
        return self._batch

    def _propose(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Pause the dumper while a draft model runs: it shares rotary embeddings, and often token embeddings and head,
        with the model."""
        with self._dumper.paused() if self._dumper is not None else contextlib.nullcontext():
            return call(*args, **kwargs)

    def _begin(self, scheduled: Any) -> None:
        if self._dumper is None or not getattr(scheduled, "total_num_scheduled_tokens", 0):
            return
        with _guarded("opening a step"):
            step = self._dumper.step_of(StepInfo(step=self._dumper.next_step))
            step.__enter__()
            self._step, self._scheduled, self._batch = step, scheduled, None

    def _end(self, error: BaseException | None, output: Any = None) -> None:
        """End the open step; ``output`` is the worker's output, or a future of it under asynchronous scheduling."""
        if self._step is None:
            return
        step, self._step, self._scheduled, self._batch = self._step, None, None, None
        with _guarded("ending a step"):
            info = self._dumper.current_step
            if info is not None and info.drafts and isinstance(tokens := getattr(output, "sampled_token_ids", 0), list):
                sampled = {self._request(name).name: tokens[at] for name, at in output.req_id_to_index.items()}
                self._dumper.accept_drafts({name: max(len(sampled.get(name, ())) - 1, 0) for name in info.drafts})
            step.__exit__(None if error is None else type(error), error, None)

    def _forget(self, finished: Iterable[str]) -> None:
        """Remove requests that ended since the previous batch; an empty batch reports them as well."""
        for request in finished:
            self._requests.pop(request, None)

    # ---- rows

    def rows(self, info: StepInfo, ids: Any, positions: Any) -> StepRows | None:
        """Return the rows of the current call.

        ``ids`` [tokens] are the token ids followed by padding, ``positions`` [tokens] their positions ([3, tokens] for
        M-RoPE).
        """
        if self._scheduled is None or self._warming_up:
            return StepRows(info=replace(info, kind="warmup" if self._warming_up else "dummy"))
        names, counts, starts = self._packed_order()
        if ids is not None and ids.ndim == 1 and len(ids) < sum(counts) and not self._drops_drafts:
            return None  # only a part of the batch, see _warn_of_settings
        planned = counts
        if self._drops_drafts:  # synchronize for the rows of each request: rules that select requests slice by them
            counts = self._batch.query_start_loc[: len(counts) + 1].diff().tolist()
        requests = [self._request(name) for name in names]
        drafts, slots, at = dict[str, int](), list[int](), 0
        for name, request, plan, count in zip(names, requests, planned, counts, strict=True):
            num_first = plan - len((getattr(self._scheduled, "scheduled_spec_decode_tokens", None) or {}).get(name, ()))
            slots += range(at + max(num_first - 1, 0), at + count)
            at += count
            if num_first < count:
                drafts[request.name] = count - num_first
        phase = "decode" if all(starts) and max(counts) == 1 else "mixed" if any(starts) else "prefill"
        ids = ids if getattr(ids, "ndim", 0) == 1 else None
        grid = (at,) if ids is None else (len(ids),)
        adapters = {each.name: each.adapter for each in requests if each.adapter}
        row_sets = {_LOGITS: tuple(slots)}
        step = replace(info, phase=phase, grid=grid, row_sets=row_sets, drafts=drafts, adapters=adapters)
        if not self._assumes_acceptance:
            return StepRows(info=replace(step, rows=_spans(requests, counts, starts)), token_ids=ids)
        outline = replace(step, rows=_spans([_Request(each.name) for each in requests], counts, starts))
        tensors = {"ids": ids, **self._positions(len(names), positions)}
        complete = functools.partial(_completed, requests=requests, counts=counts)
        return StepRows(info=outline, tensors={k: v for k, v in tensors.items() if v is not None}, complete=complete)

    def _packed_order(self) -> tuple[Sequence[str], list[int], list[int]]:
        """Return (request ids, rows per request, position of the first row per request), in packed order."""
        batch = self._batch
        if batch is not None:
            return list(batch.req_ids), _integers(batch.num_scheduled_tokens), _integers(batch.num_computed_tokens_np)
        batch = self._worker.model_runner.input_batch
        requests = [request for request in batch.req_ids if request is not None]
        counts = [int(self._scheduled.num_scheduled_tokens[request]) for request in requests]
        return requests, counts, _integers(batch.num_computed_tokens_cpu[: len(requests)])

    @property
    def _drops_drafts(self) -> bool:
        """True if the device drops scheduled drafts before the model runs."""
        return self._batch is not None and getattr(self._worker.model_runner, "adaptive_verification", None) is not None

    def _positions(self, num_requests: int, positions: Any) -> Mapping[str, Any]:
        """Return integer tensors on the device: the position of each row.

        For M-RoPE, whose positions are not sequence positions, the number of computed positions per request instead.
        """
        if getattr(positions, "ndim", 0) == 1:
            return {"positions": positions}
        runner, batch = self._worker.model_runner, self._batch
        if batch is not None:
            return {"computed": runner.req_states.num_computed_tokens.gpu[batch.idx_mapping]}
        return {"computed": runner.num_computed_tokens[:num_requests]}

    def _request(self, request: str) -> _Request:
        """Return the live request under the id given by the client, without the eight random characters vLLM appends.

        If the name is already in use by another live request, the full id is used.
        """
        found = self._requests.get(request)
        if found is None:
            name = _SUFFIX.sub("", request) if _has_suffixes() else request
            if any(name == each.name for each in self._requests.values()):
                name = request
            found = self._requests[request] = _Request(name, self._adapter(request))
        return found

    def _adapter(self, request: str) -> str:
        """Return the name of a request's LoRA adapter, or an empty string."""
        runner = getattr(self._worker, "model_runner", None)
        state = getattr(getattr(runner, "requests", {}).get(request), "lora_request", None)
        lora = state or getattr(getattr(runner, "lora_state", None), "lora_requests", {}).get(request)
        return str(getattr(lora, "lora_name", ""))


def _spans(requests: Sequence[_Request], counts: Sequence[int], starts: Sequence[int]) -> tuple[RowSpan, ...]:
    """Return the packed rows of a step."""
    rows = zip(requests, starts, counts, _firsts(counts), strict=True)
    return tuple([span for request, *where in rows for span in request.spans(*where)])


def _firsts(counts: Sequence[int]) -> list[int]:
    """Return the first slot of each request."""
    return [0, *itertools.accumulate(counts[:-1])]


def _completed(
    outline: StepInfo, values: Mapping[str, Any], *, requests: Sequence[_Request], counts: Sequence[int]
) -> StepInfo:
    """Return the step with the positions computed by the device."""
    positions, ids = values.get("positions"), values.get("ids", ())
    starts = values["computed"] if positions is None else positions[_firsts(counts)]
    tokens = _integers(ids[: sum(counts)]) if len(ids) >= sum(counts) else []
    return replace(outline, rows=_spans(requests, counts, _integers(starts)), token_ids=tokens)


def register() -> None:
    """Entry point of ``vllm.general_plugins``: capture the workers of this process if the environment requests it."""
    if not is_wanted():
        return
    try:
        from tapscope.dumper import api

        if not api.process.may_enable():
            return
        wrapper = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        if not getattr(wrapper.init_device, "tapscope", False):  # vLLM may load a plugin twice
            wrapper.init_device = _init_device(wrapper.init_device)
    except Exception as error:  # noqa: BLE001 - the server must start
        text = "tapscope records nothing of vLLM (%s: %s); it expects the V1 engine of vLLM 0.9 or later"
        _log.error(text, type(error).__name__, error)


def _init_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``WorkerWrapperBase.init_device`` to install a session, when the worker exists but its model does not."""

    def init_device(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(wrapper, *args, **kwargs)
        with _guarded("preparing the worker"):
            WorkerSession(wrapper.worker).install()
        return result

    init_device.tapscope = True  # type: ignore[attr-defined]
    return init_device


def _bound(around: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def bound(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    return bound


_guarded = functools.partial(guarded, "vLLM")


def _warn_of_settings(worker: Any) -> None:
    config = getattr(worker, "model_config", None)
    if config is not None and not getattr(config, "enforce_eager", True):
        text = "tapscope: vLLM compiles this model, so its inner modules do not record; start it with --enforce-eager"
        _log.warning("%s (or LLM(enforce_eager=True))", text)
    if getattr(getattr(worker, "parallel_config", None), "use_ubatching", False):
        text = "tapscope: vLLM splits batches into microbatches, whose requests and positions are not recorded"
        _log.warning("%s; start it without --enable-dbo and --ubatch-size", text)


def _has_suffixes() -> bool:
    envs = sys.modules.get("vllm.envs")
    try:
        return not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION  # type: ignore[union-attr]
    except AttributeError:
        return False  # this version does not append a suffix


def _integers(values: Any) -> list[int]:
    return [int(each) for each in values]


def _tp_size() -> int:
    group = call(sys.modules.get(_STATE), "get_tp_group")
    return int(group.world_size) if group is not None else 1
