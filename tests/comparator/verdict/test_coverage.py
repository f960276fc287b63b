"""Missing data makes a comparison partial, unless the surrounding module was compared and agrees."""

from pathlib import Path

import numpy as np
import pytest
from factories import RunFactory

from tapscope.comparator import Report, compare

X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
INNER = "layers.0.mlp.gate_proj:out"


def fused(tmp_path: Path, *, around: bool, harm: float = 1.0) -> Report:
    """Write a target that computes gate and up in one product, so that the tap of gate_proj never fires."""
    for name, is_fused in (("b", False), ("t", True)):
        with RunFactory(tmp_path / name, never_fired=[INNER] if is_fused else []) as run:
            run.step()
            run.put("layers.0.mlp:in[x]", X)
            if not is_fused:
                run.put(INNER, X * 2)
            if around:
                run.put("layers.0.mlp:out", X * np.float32(harm if is_fused else 1.0))
            run.put("norm:out", X)
    return compare(tmp_path / "b", tmp_path / "t")


def test_coverage_tap_that_never_fired_inside_an_agreeing_module_is_complete(tmp_path: Path) -> None:
    report = fused(tmp_path, around=True)
    assert (report.coverage.partial, report.exit_code) == ((), 0)
    assert any(f"{INNER}: tapped in t and never fired" in each for each in report.coverage.warnings)


@pytest.mark.parametrize(("around", "harm"), [(False, 1.0), (True, 1.5)])
def test_coverage_tap_that_never_fired_elsewhere_is_partial(tmp_path: Path, around: bool, harm: float) -> None:
    report = fused(tmp_path, around=around, harm=harm)
    assert report.coverage.partial == (f"{INNER} was tapped in t and never fired",)
    assert report.exit_code == 1
