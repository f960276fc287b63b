"""The mode of a step follows hooks that are added and removed between steps."""

import torch
from torch import nn

from tapscope.engine.execution.step_mode import StepMode, StepModes


def tap(*args: object) -> None:
    """Hook of an observer."""


tap.tapscope_tap = True  # type: ignore[attr-defined]


def test_step_mode_follows_hooks_that_come_and_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modes = StepModes(model)
    for _ in range(2):
        assert [modes.choose(None), modes.choose(None)] == [StepMode.CLEAN] * 2
        handle = model[1].register_forward_hook(lambda *_: None)
        assert [modes.choose(None), modes.choose(None)] == [StepMode.EAGER] * 2
        handle.remove()
    assert modes.choose(None) == StepMode.CLEAN
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert modes.choose(None) == StepMode.EAGER
    everywhere.remove()
    assert modes.choose(None) == StepMode.CLEAN


def test_foreign_hooks_are_found_among_taps() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modes = StepModes(model)
    model[0].register_forward_hook(tap)
    assert [modes.has_foreign("a"), modes.has_foreign("a"), modes.has_foreign("b")] == [False] * 3
    handle = model[1].register_forward_pre_hook(lambda *_: None)
    assert [modes.has_foreign("b"), modes.has_foreign("b")] == [True, True]
    handle.remove()
    assert not modes.has_foreign("b")
