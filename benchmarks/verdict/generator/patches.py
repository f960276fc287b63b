"""Patches: apply a generated bug to a checkpoint's tensors or to a model of any framework."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.grammar import megatron_name
from benchmarks.verdict.patching import Patch
from benchmarks.verdict.tools import after, around
from tapscope.dumper.steps.input_rows import CACHE_ARGUMENTS


def patch_of(bug: Bug) -> Patch:
    """Return the patch of a bug: a function of the checkpoint's tensors (``weight``), or of the model on every rank."""
    if bug.kind == "weight":
        return lambda weights: _weight(bug, weights)
    return lambda model: _in_model(bug, model)


def _weight(bug: Bug, weights: dict[str, Tensor]) -> None:
    assert bug.damage is not None
    weights[bug.module] = bug.damage(weights[bug.module])


def _in_model(bug: Bug, model: Any) -> Any:
    rank = _rank_of(model)
    if bug.rank is not None and bug.rank != rank:
        return None
    return _KINDS[bug.kind](bug, _module(model, bug.module))


def _is_megatron(model: Any) -> bool:
    return any(each.__module__.startswith("megatron.") for each in type(model).__mro__)


def _rank_of(model: Any) -> int:
    if _is_megatron(model):
        from megatron.core import parallel_state

        return int(parallel_state.get_tensor_model_parallel_rank())
    return int(model.tp.rank) if hasattr(model, "tp") and hasattr(model.tp, "rank") else 0


def _module(model: Any, path: str) -> Any:
    return model.get_submodule(megatron_name(path) if _is_megatron(model) else path)


class _Calls:
    """Counter for the calls of one module."""

    def __init__(self, first: int) -> None:
        self._first, self._count = first, 0

    def is_due(self) -> bool:
        """Return whether this call is affected; must be called once per call of the module."""
        self._count += 1
        return self._count > self._first


def _first_tensor(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the first tensor of an output, which is a tensor or a tuple that begins with one."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


def _damaged(bug: Bug, tensor: Tensor) -> Tensor:
    """Return the damaged output: all rows, or only the affected token row."""
    assert bug.damage is not None
    changed = bug.damage(tensor)
    if not bug.rows:
        return changed
    rows = tensor.clone()
    axis = -2 if tensor.ndim > 1 else 0
    at = 0 if bug.rows == "first" else tensor.shape[axis] - 1
    rows.select(axis, at).copy_(changed.select(axis, at))
    return rows


def _output(bug: Bug, module: nn.Module) -> None:
    calls = _Calls(bug.first_call)
    after(module, lambda out: _first_tensor(out, lambda x: _damaged(bug, x)) if calls.is_due() else out)


def _epsilon(bug: Bug, module: Any) -> None:
    name = next(name for name in ("variance_epsilon", "eps", "epsilon") if hasattr(module, name))
    setattr(module, name, bug.value)


def _residual(bug: Bug, module: nn.Module) -> None:
    calls = _Calls(bug.first_call)

    def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        output = forward(*args, **kwargs)
        return _first_tensor(output, lambda x: x + bug.value * given) if calls.is_due() else output

    around(module, call)


def _positions(bug: Bug, module: nn.Module) -> None:
    calls = _Calls(bug.first_call)

    def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not calls.is_due():
            return forward(*args, **kwargs)
        ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        wrong = (ids + int(bug.value)).clamp_min(0) if bug.text == "offset" else ids * bug.value
        return forward(args[0] if args else kwargs.pop("x"), **kwargs | {"position_ids": wrong})

    around(module, call)


def _frequencies(bug: Bug, module: Any) -> None:
    assert bug.damage is not None
    module.inv_freq = bug.damage(module.inv_freq)


def _activation(bug: Bug, module: nn.Module) -> None:
    functional: Any = torch.nn.functional
    functions = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}
    functions["gelu_pytorch_tanh"] = lambda x: functional.gelu(x, approximate="tanh")
    around(module, lambda forward, x: functions[bug.text](x))


def _router(bug: Bug, module: Any) -> None:
    """Damage the routing of ``module``.

    ``module`` returns (logits, weights, experts), or takes (hidden, experts, weights) as DeepSeek's experts do.
    """
    calls = _Calls(bug.first_call)
    if isinstance(getattr(module, "gate_up_proj", None), Tensor) or type(module).__name__ == "Experts":

        def call(forward: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
            if calls.is_due():
                weights, index = _rerouted(bug.text, weights, index, _num_experts(module))
            return forward(hidden, index, weights)

        around(module, call)
        return

    def change(output: Any) -> Any:
        logits, weights, index = output
        return (logits, *_rerouted(bug.text, weights, index, logits.shape[-1])) if calls.is_due() else output

    after(module, change)


def _num_experts(module: Any) -> int:
    return int(module.num_experts if hasattr(module, "num_experts") else module.config.num_experts)


def _rerouted(way: str, weights: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    weights, index = weights.clone(), index.clone()
    if way == "next_expert":
        index = (index + 1) % count
    elif way == "one_expert":
        index[:, 0] = (index[:, -1] + 1) % count
    elif way == "half":
        weights = weights * 0.5
    elif way == "equal":
        weights = weights.mean(-1, keepdim=True).expand_as(weights).clone() * 1.1
    elif way == "swapped":
        weights = weights.flip(-1)
    else:
        weights[:, -1] = 0.0
    return weights, index


class _Cache:
    """A KV cache of transformers whose ``update`` returns damaged keys or values for one layer's call."""

    def __init__(self, cache: Any, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._cache, self._change = cache, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Update the wrapped cache and return damaged keys or values."""
        return self._change(*self._cache.update(keys, values, *args, **kwargs))


def _cached(bug: Bug, module: Any) -> Any:
    """Damage keys or values as attention reads them."""
    calls = _Calls(bug.first_call)

    def change(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (_damaged(bug, keys), values) if bug.kind == "keys" else (keys, _damaged(bug, values))

    if type(module).__name__ == "Attention":  # the engine's core: query, key, value [tokens, heads, features]

        def core(forward: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any) -> Any:
            if calls.is_due():
                key, value = (x.transpose(0, 1) for x in change(key.transpose(0, 1), value.transpose(0, 1)))
            return forward(query, key.contiguous(), value.contiguous(), cache)

        around(module, core)
        return

    def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
        for name in CACHE_ARGUMENTS:
            if kwargs.get(name) is not None and calls.is_due():
                kwargs[name] = _Cache(kwargs[name], change)
        return forward(*args, **kwargs)

    around(module, call)


def _softmax_scale(bug: Bug, module: Any) -> None:
    if hasattr(module, "spec"):
        module.spec = replace(module.spec, scale=module.spec.scale * bug.value)
    else:
        module.scaling = module.scaling * bug.value


def _mask(bug: Bug, module: nn.Module) -> None:
    calls = _Calls(bug.first_call)

    def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if calls.is_due() and mask is not None and mask.ndim == 4:
            kwargs["attention_mask"] = _masked(bug.text, mask)
        return forward(*args, **kwargs)

    around(module, call)


def _masked(way: str, mask: Tensor) -> Tensor:
    mask = mask.clone()
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
    if way == "hide_first":
        mask[..., -1, 0] = hidden
    elif way == "hide_newest":
        queries, keys = mask.shape[-2:]
        at = torch.arange(1, queries) if queries > 1 else torch.arange(queries)
        mask[..., at, at + keys - queries] = hidden
    elif way == "hide_third":
        mask[..., 3:, 2] = hidden
    elif way == "see_next" and mask.shape[-2] > 1:
        mask[..., :-1, 1:] = mask[..., :-1, 1:].maximum(mask[..., 1:, 1:])
    elif way == "see_all":
        mask.copy_(mask[..., -1:, :].expand_as(mask))
    return mask


def _rank_weight(bug: Bug, module: Any) -> None:
    assert bug.damage is not None
    module.weight.data = bug.damage(module.weight.data)


_KINDS: dict[str, Callable[[Bug, Any], Any]] = {
    "output": _output,
    "partial": _output,
    "epsilon": _epsilon,
    "residual": _residual,
    "positions": _positions,
    "frequencies": _frequencies,
    "activation": _activation,
    "router": _router,
    "keys": _cached,
    "values": _cached,
    "softmax_scale": _softmax_scale,
    "mask": _mask,
    "rank_weight": _rank_weight,
}
