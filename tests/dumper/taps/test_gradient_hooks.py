"""Gradients of values at taps: correct values under the key of their forward, and no leftover hooks."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tapscope.dumper import Dumper
from tapscope.run_format.record import BACKWARD, Key
from tapscope.run_format.run import Run
from tapscope.sources import open_run

GRADS = {"keep": "off", "rules": ["*:out*.grad=full", "*:in*.grad=full"]}


def model_of(depth: int = 2, width: int = 4) -> nn.Sequential:
    """Build a small model with named layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def gradients(run: Run) -> dict[tuple[str, int, int, int], np.ndarray[Any, Any]]:
    """Return (site, step, micro, occurrence) -> gradient."""
    back = [r for r in run.records if r.key.pass_ == BACKWARD]
    return {(r.key.site, r.key.step, r.key.micro, r.key.occurrence): run.array(r) for r in back}


def test_gradients_are_those_of_autograd_and_carry_the_key_of_their_forward(tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(3, 4, requires_grad=True)
    hidden = model[0](x)
    hidden.retain_grad()
    model[1](hidden).square().sum().backward()
    assert x.grad is not None
    expected_x, expected_hidden = x.grad.clone(), hidden.grad
    assert expected_hidden is not None
    with Dumper(model, tmp_path / "run", keep="stats", rules=GRADS["rules"]) as dumper:
        for _ in range(2):
            with dumper.step(phase="train"), dumper.micro(1):
                model(x).square().sum().backward()
    run = open_run(tmp_path / "run")
    found = gradients(run)
    for step in (0, 1):
        np.testing.assert_array_equal(found[":in[input].grad", step, 1, 0], expected_x.numpy())
        np.testing.assert_array_equal(found["0.0:in[input].grad", step, 1, 0], expected_x.numpy())
        np.testing.assert_array_equal(found["0:out.grad", step, 1, 0], expected_hidden.numpy())
        np.testing.assert_array_equal(found["1:in[input].grad", step, 1, 0], expected_hidden.numpy())
    forwards = {r.key for r in run.records if r.key.pass_ == "forward"}
    for record in run.records:
        if record.key.pass_ == BACKWARD:
            site = record.key.site.removesuffix(".grad")
            assert record.key._replace(site=site, pass_="forward") in forwards
    assert run.ledger().complete


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ops=st.lists(st.sampled_from(["linear", "tanh", "gelu", "double", "view", "norm"]), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_gradients_every_gradient_of_a_random_chain_is_that_of_autograd_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, ops: list[str], seed: int
) -> None:
    torch.manual_seed(seed)
    makers = {
        "linear": lambda: nn.Linear(6, 6),
        "tanh": nn.Tanh,
        "gelu": nn.GELU,
        "double": Twice,
        "view": Transposed,
        "norm": lambda: nn.LayerNorm(6),
    }
    model = nn.Sequential(*(makers[op]() for op in ops))
    x = torch.randn(6, 6, requires_grad=True)
    values = [x]
    for layer in model:
        values.append(layer(values[-1]))
    expected = torch.autograd.grad(values[-1].square().sum(), values)
    path = tmp_path_factory.mktemp("chain") / "run"
    with Dumper(model, path, **GRADS) as dumper, dumper.step():
        model(x).square().sum().backward()
    found = gradients(open_run(path))
    for i, gradient in enumerate(expected[1:]):
        np.testing.assert_array_equal(found[f"{i}:out.grad", 0, 0, 0], gradient.numpy())
    np.testing.assert_array_equal(found[":in[input].grad", 0, 0, 0], expected[0].numpy())


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


def test_gradients_training_is_bit_for_bit_the_same_with_and_without(tmp_path: Path) -> None:
    def train(path: Path | None) -> list[torch.Tensor]:
        model = model_of(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        batches = [torch.randn(5, 4) for _ in range(4)]

        def steps() -> None:
            for batch in batches:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        if path is None:
            steps()
        else:
            with Dumper(model, path, keep="full", grads=True, params=True, buffers=True):
                steps()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain, watched = train(None), train(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert open_run(tmp_path / "run").ledger().complete


def test_gradients_without_a_rule_for_gradients_no_tensor_gets_a_hook(tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(3, 4, requires_grad=True)
    with Dumper(model, tmp_path / "run", keep="full") as dumper, dumper.step():
        out = model(x)
        assert out._backward_hooks is None
        assert x._backward_hooks is None
        out.sum().backward()
    assert not gradients(open_run(tmp_path / "run"))


def test_gradients_only_the_gradient_may_be_asked_for(tmp_path: Path) -> None:
    model = model_of()
    with Dumper(model, tmp_path / "run", keep="off", rules=["0.1:out.grad=full"]) as dumper, dumper.step():
        model(torch.randn(2, 4)).sum().backward()
    assert [r.key for r in open_run(tmp_path / "run").records] == [Key("0.1:out.grad", 0, pass_=BACKWARD)]


def test_gradient_that_comes_after_its_step_is_counted_late_and_the_run_is_complete(tmp_path: Path) -> None:
    model = model_of()
    with Dumper(model, tmp_path / "run", keep="stats", rules=GRADS["rules"]):
        first, second = model(torch.randn(2, 4)), model(torch.randn(2, 4))  # each call is its own step
        second.sum().backward()
        first.sum().backward()
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert (account.complete, account.failed, account.dropped) == (True, 0, 0)
    assert account.seen == len(run.records)
    assert {step for _, step, _, _ in gradients(run)} == {0, 1}
    late = [r.seq for r in run.records if r.key.pass_ == BACKWARD]
    assert min(late) > max(r.seq for r in run.records if r.key.pass_ == "forward")


def test_gradients_backward_in_another_thread_belongs_to_its_forward(tmp_path: Path) -> None:
    model = model_of()
    with Dumper(model, tmp_path / "run", **GRADS) as dumper:
        with dumper.step():
            loss = model(torch.randn(2, 4)).sum()
        with dumper.step():
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
    assert {step for _, step, _, _ in gradients(open_run(tmp_path / "run"))} == {0}


def test_gradients_value_without_gradient_gives_none_and_is_not_counted(tmp_path: Path) -> None:
    model = model_of()
    with Dumper(model, tmp_path / "run", **GRADS) as dumper:
        with dumper.step(), torch.no_grad():
            model(torch.randn(2, 4))
        with dumper.step():
            model(torch.randn(2, 4))  # no backward for this call
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert (len(run.records), account.seen, account.failed) == (0, 0, 0)
    assert account.sentences()[0] == "no records: no site that the rules select fired"


def test_gradients_second_backward_of_one_value_is_numbered_after_the_forwards(tmp_path: Path) -> None:
    model = model_of(1)
    with Dumper(model, tmp_path / "run", keep="off", rules=["0.1:out.grad=full"]) as dumper, dumper.step():
        first, second = model(torch.randn(2, 4)), model(torch.randn(2, 4))
        second.sum().backward(retain_graph=True)
        first.sum().backward()
        (second * 3).sum().backward()
    found = {occurrence: value for (_, _, _, occurrence), value in gradients(open_run(tmp_path / "run")).items()}
    assert {occurrence: float(value.max()) for occurrence, value in found.items()} == {0: 1, 1: 1, 2: 3}


def test_gradients_of_gradients_and_autograd_grad_are_seen_as_they_come(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Tanh())
    x = torch.randn(3, requires_grad=True)
    with Dumper(model, tmp_path / "run", keep="off", rules=[":in[input].grad=full"]) as dumper, dumper.step():
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.sum().backward()
    run = open_run(tmp_path / "run")
    assert [o for _, _, _, o in gradients(run)] == [0, 1]
    np.testing.assert_array_equal(gradients(run)[":in[input].grad", 0, 0, 0], gradient.detach().numpy())
    assert run.ledger().failed == 0


def test_gradients_leaf_that_lives_on_is_attached_for_its_last_forward_only(tmp_path: Path) -> None:
    model, prompt = model_of(1), nn.Parameter(torch.randn(2, 4))
    with Dumper(model, tmp_path / "run", keep="off", rules=["0.0:in[input].grad=full"]) as dumper:
        for _ in range(3):
            with dumper.step():
                model(prompt)  # an evaluation: no backward
                model(prompt).sum().backward()
        assert len(prompt._backward_hooks) == 1
    assert not prompt._backward_hooks
    keys = [(step, occurrence) for _, step, _, occurrence in gradients(open_run(tmp_path / "run"))]
    assert keys == [(0, 1), (1, 1), (2, 1)]


def test_gradient_of_what_is_changed_in_place_later_is_that_of_the_value_as_it_was(tmp_path: Path) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y *= 10
            return y

    model = Changed()
    with Dumper(model, tmp_path / "run", **GRADS) as dumper, dumper.step():
        model(torch.randn(2, 4)).sum().backward()
    found = gradients(open_run(tmp_path / "run"))
    assert (found["inner:out.grad", 0, 0, 0] == 10).all()
    assert (found[":out.grad", 0, 0, 0] == 1).all()


class Nested(nn.Module):
    tap_dims = {"out[a.0]": "b h", "out[b]": "b h", "out[b].grad": "b h[tp:partial]"}

    def forward(self, x: torch.Tensor) -> Any:
        return {"a": [x * 2], "b": x * 3, "n": 5, "none": None, "constant": torch.ones(2)}


def test_gradients_nested_outputs_have_gradients_by_path_and_the_dims_of_their_value(tmp_path: Path) -> None:
    model = Nested()
    with Dumper(model, tmp_path / "run", **GRADS) as dumper, dumper.step():
        out = model(torch.randn(2, 4, requires_grad=True))
        (out["a"][0].sum() + out["b"].sum()).backward()
    run = open_run(tmp_path / "run")
    dims = {r.key.site: r.dims for r in run.records}
    assert dims == {":out[a.0].grad": "b h", ":out[b].grad": "b h[tp:partial]", ":in[x].grad": None}


def test_gradients_hook_that_fires_after_close_or_in_a_later_run_does_nothing(tmp_path: Path) -> None:
    model, leaf = model_of(), torch.randn(2, 4, requires_grad=True)
    with Dumper(model, tmp_path / "one", **GRADS) as dumper, dumper.step():
        left = model(leaf)
    left.sum().backward(retain_graph=True)
    with Dumper(model, tmp_path / "two", **GRADS) as dumper, dumper.step():
        left.sum().backward()
    for name in ("one", "two"):
        run = open_run(tmp_path / name)
        assert (len(run.records), run.ledger().seen) == (0, 0)


def test_gradient_of_a_run_that_was_reset_is_in_no_run(tmp_path: Path) -> None:
    model = model_of()
    with Dumper(model, tmp_path / "one", **GRADS) as dumper:
        with dumper.step():
            left = model(torch.randn(2, 4))
        dumper.reset("two")
        with dumper.step():
            (left.sum() + model(torch.randn(2, 4)).sum()).backward()
    assert not open_run(tmp_path / "one").records
    assert {step for _, step, _, _ in gradients(open_run(tmp_path / "two"))} == {0}
    assert len(open_run(tmp_path / "two").records) == 7 + 4  # one forward: 7 outputs, and 4 inputs without the batch


def test_gradients_graph_keeps_neither_the_model_nor_the_dumper_alive(tmp_path: Path) -> None:
    model = nn.Sequential(nn.GELU())
    x = torch.randn(2, 4, requires_grad=True)
    dumper = Dumper(model, tmp_path / "run", **GRADS).open()
    with dumper.step():
        out = model(x)
    dumper.close()
    gone = weakref.ref(dumper), weakref.ref(model)
    del dumper, model
    gc.collect()
    assert [each() for each in gone] == [None, None]
    out.sum().backward()
    assert x.grad is not None


def test_gradients_conditions_decide_when_the_gradient_comes(tmp_path: Path) -> None:
    model = model_of(1)
    rules = ["0.1:out.grad=full steps=1 pass=backward", "0.1:out=stats pass=forward"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules) as dumper:
        for _ in range(3):
            with dumper.step():
                model(torch.randn(2, 4)).sum().backward()
    run = open_run(tmp_path / "run")
    assert [r.key.step for r in run.records if r.key.pass_ == BACKWARD] == [1]
    assert [r.key.step for r in run.records if r.key.pass_ == "forward"] == [0, 1, 2]
    assert run.ledger().complete


class Overwriting(nn.Module):
    """Overwrites its input in place once or twice, as Megatron does to mask attention scores."""

    def __init__(self, *, is_copied: bool = False) -> None:
        super().__init__()
        self.is_copied = is_copied

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        if self.is_copied:  # as Megatron does by casting bfloat16 first
            scores = scores.clone()
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -9.0)
        scores[..., 0].mul_(2.0)
        return scores.softmax(-1)


@pytest.mark.parametrize(
    ("view", "rules"),
    [
        *((view, GRADS["rules"]) for view in ("whole", "part", "transposed", "none")),
        ("whole", ["softmax:in*.grad=full"]),
    ],
)
def test_gradients_of_an_input_that_its_module_overwrites_are_those_before_it(
    tmp_path: Path, view: str, rules: list[str]
) -> None:
    class Model(nn.Module):
        def __init__(self, *, is_copied: bool) -> None:
            super().__init__()
            self.scorer, self.softmax = nn.Linear(6, 6), Overwriting(is_copied=is_copied)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = self.scorer(x) * 1.0
            total = base.sum()
            views = {"whole": base.view(1, 6, 6), "part": base[2:], "transposed": base.t(), "none": base}
            found: torch.Tensor = self.softmax(views[view])
            return (total + found).square().sum()

    found = []
    for is_copied in (False, True):
        torch.manual_seed(0)
        model, run = Model(is_copied=is_copied), tmp_path / f"copied-{is_copied}"
        with Dumper(model, run, keep="off", rules=rules) as dumper, dumper.step():
            model(torch.randn(6, 6)).backward()
        found.append(gradients(open_run(run)))
    site = ("softmax:in[scores].grad", 0, 0, 0)
    assert found[0].keys() == found[1].keys()
    np.testing.assert_array_equal(found[0][site], found[1][site])
