"""Tapped modules bypass torch's generic hook handling; other hooks, copies and patches keep working."""

import copy
import functools
import io
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tapscope.dumper import Dumper
from tapscope.kernels.native import library
from tapscope.sources import open_run

pytestmark = pytest.mark.skipif(
    library.functions() is None,
    reason="needs the C++ library",
)


class Block(nn.Module):
    """Records the function that called forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.callers: list[str] = []
        self.act: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.callers.append(sys._getframe(1).f_code.co_name)
        self.act()
        if x.isnan().any():
            raise ValueError("not a number")
        return x * self.weight * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, scale=3.0)  # type: ignore[no-any-return]


_X = torch.tensor([1.0, 2.0])


def _sums(path: Path, site: str) -> list[float]:
    """Return the sums of the values at a site, one per step."""
    run = open_run(path)
    return [float(run.array(record).sum()) for record in run.records if record.key.site == site]


@pytest.mark.parametrize("keep", ["full", "stats"])
def test_module_call_goes_straight_to_forward_and_every_value_is_recorded(tmp_path: Path, keep: str) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep=keep):
        outputs = [model(_X) for _ in range(3)]
    assert model.block.callers == ["_wrapped_call_impl"] * 3
    assert [output.tolist() for output in outputs] == [[3, 6]] * 3
    sites = [record.key.site for record in open_run(tmp_path / "run").records]
    assert [sites.count(f"block:{port}") for port in ("in[x]", "in[scale]", "out")] == [3, 3, 3]
    assert "_call_impl" not in model.block.__dict__
    model(_X)
    assert model.block.callers[-1] == torch_module.Module._call_impl.__name__


def _changed(*given: Any) -> torch.Tensor:
    output: torch.Tensor = given[-1] + 1
    return output


def _changed_input(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 1,)


@pytest.mark.parametrize(
    ("register", "after", "before"),
    [
        (lambda block: block.register_forward_hook(_changed), 11, 11),
        (lambda block: block.register_forward_hook(_changed, with_kwargs=True), 11, 11),
        (lambda block: block.register_forward_pre_hook(_changed_input), 15, 15),
        (
            lambda block: torch_module.register_module_forward_hook(lambda m, *g: _changed(*g) if m is block else None),
            11,
            11,
        ),
    ],
)
def test_module_call_other_hooks_run_whether_they_came_before_or_after_the_taps(
    tmp_path: Path, register: Callable[[Block], Any], after: float, before: float
) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        assert model(_X).sum() == 9
        handle = register(model.block)
        assert model(_X).sum() == after
        handle.remove()
        assert model(_X).sum() == 9
    handle = register(model.block)
    try:
        with torch.no_grad(), Dumper(model, tmp_path / "late", keep="full"):
            assert model(_X).sum() == before
    finally:
        handle.remove()
    assert _sums(tmp_path / "late", "block:out") == [before]


def test_module_call_hook_that_comes_during_the_call_runs_in_it(tmp_path: Path) -> None:
    model = Model()
    handles: list[Any] = []
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model.block.act = lambda: handles.append(model.block.register_forward_hook(_changed))
        assert model(_X).sum() == 11
        handles.pop().remove()
        model.block.act = lambda: handles.append(
            torch_module.register_module_forward_hook(lambda m, *g: _changed(*g) if m is model.block else None)
        )
        assert model(_X).sum() == 11
        handles.pop().remove()
    assert _sums(tmp_path / "run", "block:out") == [9, 11]


def test_module_call_taps_that_are_removed_during_the_call_are_silent(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model.block.act = model.block._forward_hooks.clear
        assert model(_X).sum() == 9
    assert _sums(tmp_path / "run", "block:out") == []


def test_module_call_patched_torch_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = Model(), []
    plain = nn.Module._call_impl

    @functools.wraps(plain)
    def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(module).__name__)
        return plain(module, *args, **kwargs)

    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        monkeypatch.setattr(nn.Module, "_call_impl", patched)
        model(_X)
    assert called == ["Model", "Block"]
    assert _sums(tmp_path / "run", "block:out") == [9]


def test_module_call_error_of_the_model_reaches_its_caller(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        with pytest.raises(ValueError, match="not a number"):
            model(_X / 0 * 0)
        with pytest.raises(TypeError):
            model.block()
        assert model(_X).sum() == 9
    assert _sums(tmp_path / "run", "block:out") == [9]


def test_module_call_gradients_pass(tmp_path: Path) -> None:
    model = Model()
    with Dumper(model, tmp_path / "run", keep="full"):
        model(_X).sum().backward()
        handle = model.block.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))
        x = _X.clone().requires_grad_()
        model(x).sum().backward()
        handle.remove()
    assert model.block.weight.grad is not None
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6]


def _saved(block: Block) -> Any:
    block.act = print  # a lambda cannot be pickled
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _with_all_attributes(block: Block) -> Any:
    """Copy a module by means that are unaware of taps."""
    other = copy.copy(block)
    other.__dict__["_call_impl"] = copy.deepcopy(block.__dict__["_call_impl"], {id(block): other})
    return other


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, _saved, lambda block: block._replicate_for_data_parallel(), _with_all_attributes],
)
def test_module_call_copy_calls_itself(tmp_path: Path, copied: Callable[[Block], Any]) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        other = copied(model.block)
        other.__dict__["_parameters"] = {"weight": nn.Parameter(torch.full((2,), 5.0))}
        assert other(_X).sum() == 15
        assert model(_X).sum() == 9
    assert nn.Module._replicate_for_data_parallel.__qualname__ == "Module._replicate_for_data_parallel"


def test_module_call_module_that_is_dropped_is_freed(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad(), Dumper(model, tmp_path / "run", keep="full"):
        model(_X)
        gone, call = weakref.ref(model.block), model.block.__dict__["_call_impl"]
        model.block = Block()
        assert gone() is None
        with pytest.raises(ReferenceError):
            call(_X)
