"""Two models in one run: findings say whose they are, and what is equal of one is not the other's error."""

from pathlib import Path

import numpy as np
from factories import RunFactory

from tapscope.comparator import Verdict, compare

RNG = np.random.default_rng(2)
HIDDEN = RNG.standard_normal((12, 16)).astype(np.float32)
WEIGHT = (RNG.standard_normal((16, 16)) / 4.0).astype(np.float32)


def write(path: Path, harm: float) -> Path:
    """An actor and its reference, which is the same model; `harm` is what the actor's second layer adds."""
    with RunFactory(path) as run:
        run.site("layers.0.mlp:out", params={"weight": WEIGHT.shape})
        run.site("layers.1.mlp:out", params={"weight": WEIGHT.shape})
        for _ in range(2):
            run.step()
            for model, own in (("actor", harm), ("reference", 0.0)):
                x = HIDDEN
                for layer in range(2):
                    run.put(f"layers.{layer}.mlp:in[x]", x, model=model)
                    x = (x @ WEIGHT * np.float32(1.0 + own * layer)).astype(np.float32)
                    run.put(f"layers.{layer}.mlp:out", x, model=model)
    return path


def test_models_findings_name_their_model(tmp_path: Path) -> None:
    report = compare(write(tmp_path / "b", 0.0), write(tmp_path / "t", 0.3))
    found = {f.site: f for f in report.findings}
    assert len(found) == len(report.findings) == 8
    assert {f.verdict for site, f in found.items() if site.startswith("reference.")} == {Verdict.SAME}
    assert found["actor.layers.1.mlp:out"].verdict is Verdict.DIFFERS
    assert found["actor.layers.0.mlp:out"].verdict is Verdict.SAME
    assert report.first_divergence is not None
    assert report.first_divergence.module == "actor.layers.1.mlp"
    assert [each.module for each in report.divergences] == ["actor.layers.1.mlp"]


def test_models_sites_of_a_single_model_keep_their_names(tmp_path: Path) -> None:
    for name in ("b", "t"):
        with RunFactory(tmp_path / name) as run:
            run.step()
            run.put("layers.0.mlp:out", HIDDEN, model="actor")
    assert [f.site for f in compare(tmp_path / "b", tmp_path / "t").findings] == ["layers.0.mlp:out"]
