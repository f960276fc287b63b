"""Training: recomputation is distinguished from the forward; parameters and the gradients used by the optimizer."""

import importlib.util
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tapscope.dumper import Dumper
from tapscope.run_format.record import BACKWARD, FORWARD, RECOMPUTE, Key
from tapscope.run_format.run import Run
from tapscope.sources import open_run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Two blocks, each recomputed during its backward; with ``shared``, both are the same module."""

    def __init__(self, *, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = Block()
        self.layers = nn.ModuleList([first, first if shared else Block()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def values(run: Run, pass_: str) -> dict[Key, np.ndarray[Any, Any]]:
    """Return the values of one pass by the key of their forward."""
    found = [r for r in run.records if r.key.pass_ == pass_ and r.dtype]
    return {r.key._replace(pass_=FORWARD): run.array(r) for r in found}


def batch(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_training_recomputation_is_a_pass_of_its_own_of_the_same_step(
    tmp_path: Path, reentrant: bool, explicit: bool
) -> None:
    model = Stack(reentrant=reentrant)
    with Dumper(model, tmp_path / "run", keep="full") as dumper:
        for seed in range(3):
            if explicit:
                with dumper.step(phase="train"):
                    model(batch(seed)).sum().backward()
            else:
                model(batch(seed)).sum().backward()
    run = open_run(tmp_path / "run")
    forward, again = values(run, FORWARD), values(run, RECOMPUTE)
    assert {key.step for key in again} == {0, 1, 2}
    assert {"layers.0.up:out", "layers.1:in[x]", "layers.1.down:in[input]"} <= {key.site for key in again}
    for key, value in again.items():
        np.testing.assert_array_equal(value, forward[key])
    assert max(key.occurrence for key in forward) == 0
    assert run.ledger().complete
    closing = [e.fields for e in run.events() if e.kind == "close"]
    assert closing[0]["outside_step"] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_micro_batches_in_flight_keep_their_recomputation_and_gradients(
    tmp_path: Path, reentrant: bool
) -> None:
    """1F1B: the forward of a microbatch precedes the backward of an earlier one, even of an earlier step."""
    model = Stack(reentrant=reentrant)
    batches = [batch(seed) for seed in range(4)]
    with Dumper(model, tmp_path / "run", keep="full", grads=True) as dumper:
        for step in range(2):
            with dumper.step(phase="train"):
                losses = []
                for micro, x in enumerate(batches):
                    with dumper.micro(micro):
                        losses.append(model(x + step).sum())
                    if micro:
                        losses[micro - 1].backward()
                if step:
                    last.backward()  # noqa: F821 - loss of the previous step
                last = losses[3]  # noqa: F841 - its backward runs in the next step
    run = open_run(tmp_path / "run")
    forward, again, back = values(run, FORWARD), values(run, RECOMPUTE), values(run, BACKWARD)
    expected = {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)}
    assert {(key.step, key.micro) for key in again} == expected
    for key, value in again.items():
        np.testing.assert_array_equal(value, forward[key])
    assert {(key.step, key.micro) for key in back} == expected
    for (step, micro), x in ((at, batches[at[1]]) for at in expected):
        whole = Stack(reentrant=False)
        hidden = whole.layers[0]((x + step).detach())
        hidden.retain_grad()
        whole.layers[1](hidden).sum().backward()
        assert hidden.grad is not None
        key = Key("layers.1:in[x].grad", step, micro=micro)
        np.testing.assert_array_equal(back[key], hidden.grad.numpy())
    assert run.ledger().complete


def test_training_reentrant_checkpoint_gradients_have_the_forwards_occurrence(tmp_path: Path) -> None:
    model, x = Stack(reentrant=True, shared=True), batch(0)
    plain = Stack(reentrant=True, shared=True)
    first = plain.layers[0](x)
    second = plain.layers[0](first)
    gradients = torch.autograd.grad(second.square().sum(), [first, second])
    with Dumper(model, tmp_path / "run", keep="off", rules=["layers.0:out.grad=full"]) as dumper, dumper.step():
        model(x).square().sum().backward()
    back = values(open_run(tmp_path / "run"), BACKWARD)
    assert len(back) == 2
    for occurrence, gradient in enumerate(gradients):
        np.testing.assert_array_equal(back[Key("layers.0:out.grad", 0, occurrence=occurrence)], gradient.numpy())


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_checkpoints_add_no_gradient_to_those_of_the_plain_model(tmp_path: Path, reentrant: bool) -> None:
    """A non-reentrant checkpoint recomputes from the same tensor object, which already has the forward's hook."""
    found = {}
    stack = Stack(reentrant=reentrant)
    plain = nn.Sequential(OrderedDict(layers=nn.Sequential(*stack.layers)))
    for name, model in (("checkpointed", stack), ("plain", plain)):
        model.zero_grad()
        with Dumper(model, tmp_path / name, keep="off", rules=["layers.*:in[*].grad=full"]) as dumper, dumper.step():
            model(batch(0)).square().sum().backward()
        found[name] = values(open_run(tmp_path / name), BACKWARD)
    assert found["checkpointed"].keys() == found["plain"].keys()
    for key, value in found["plain"].items():
        np.testing.assert_array_equal(found["checkpointed"][key], value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_model_recomputed_as_a_whole_opens_no_step_of_its_own(tmp_path: Path, reentrant: bool) -> None:
    model, x = Block(), batch(0)
    with Dumper(model, tmp_path / "run", keep="stats"):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    run = open_run(tmp_path / "run")
    assert [r.key.step for r in run.records if r.key.site == "up:out"] == [0, 0, 1, 1]
    assert len(run.steps) == 2
    assert run.ledger().complete


class Whole(nn.Module):
    """A checkpointed stack whose blocks are checkpointed, too."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.stack = Stack(reentrant=inner)
        self.reentrant = outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.stack, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_training_checkpoints_within_checkpoints_belong_to_the_step_of_their_forward(
    tmp_path: Path, outer: bool, inner: bool
) -> None:
    model, batches = Whole(outer, inner), [batch(seed) for seed in range(3)]
    rules = ["*.up:out=full", "*.up:out.grad=full"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules):
        losses = [model(x).sum() for x in batches]  # each call is its own step
        for loss in losses:
            loss.backward()
    run = open_run(tmp_path / "run")
    forward = values(run, FORWARD)
    again = [r for r in run.records if r.key.pass_ == RECOMPUTE]
    assert {(r.key.step, r.key.site) for r in again} == {(key.step, key.site) for key in forward}
    for record in again:
        original = forward[record.key._replace(pass_=FORWARD, occurrence=0)]
        np.testing.assert_array_equal(run.array(record), original)
    back = values(run, BACKWARD)
    assert {key._replace(site=key.site.removesuffix(".grad")) for key in back} == set(forward)
    for step, x in enumerate(batches):
        plain = Stack(reentrant=False).layers[0]
        up = plain.up(x.detach())
        assert np.array_equal(up.detach().numpy(), forward[Key("stack.layers.0.up:out", step)])
    assert run.ledger().complete


def test_training_rule_reports_the_passes_separately(tmp_path: Path) -> None:
    model = Stack(reentrant=False)
    rules = ["layers.*.up:out=full pass=recompute"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules) as dumper, dumper.step():
        model(batch(0)).sum().backward()
    records = open_run(tmp_path / "run").records
    assert sorted(r.key.site for r in records) == ["layers.0.up:out", "layers.1.up:out"]
    assert {r.key.pass_ for r in records} == {RECOMPUTE}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("explicit", [False, True])
def test_training_transformers_training_loop_with_checkpointing_is_complete(tmp_path: Path, explicit: bool) -> None:
    model, steps = llama(), 3
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(8)[None]
    used: list[dict[str, torch.Tensor]] = []

    def iterate() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        used.append(grads)
        optimizer.step()
        optimizer.zero_grad()

    with Dumper(model, tmp_path / "run", keep="full", grads=True, params=True) as dumper:
        for _ in range(steps):
            if explicit:
                with dumper.step(phase="train"):
                    iterate()
            else:
                iterate()
    run = open_run(tmp_path / "run")
    account = run.ledger()
    assert (account.complete, account.failed, account.seen) == (True, 0, len(run.records)), account
    passes = Counter((r.key.step, r.key.pass_) for r in run.records)
    assert all(passes[step, pass_] for step in range(steps) for pass_ in (FORWARD, RECOMPUTE, BACKWARD))
    assert len({passes[step, RECOMPUTE] for step in range(steps)}) == 1
    forward, again, back = values(run, FORWARD), values(run, RECOMPUTE), values(run, BACKWARD)
    for key, value in again.items():
        np.testing.assert_array_equal(value, forward[key])
    for step, grads in enumerate(used):
        for name, gradient in grads.items():
            path, _, own = name.rpartition(".")
            np.testing.assert_array_equal(back[Key(f"{path}:param[{own}].grad", step)], gradient.numpy())
    tied = [r.entry for r in run.records if r.key.site in ("lm_head:param[weight]", "model.embed_tokens:param[weight]")]
    assert len(tied) == 2 * steps
    assert len(set(tied)) == steps
    assert {"model.layers.1:out.grad", "model.layers.0.mlp.down_proj:in[input].grad"} <= {key.site for key in back}


def test_training_gradient_is_what_the_optimiser_uses_accumulated_and_clipped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = ["0:param[weight].grad=full"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules) as dumper, dumper.step():
        for micro in range(3):
            with dumper.micro(micro):
                model(batch(micro)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        expected = model[0].weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert [r.key for r in run.records] == [Key("0:param[weight].grad", 0, pass_=BACKWARD)]
    np.testing.assert_array_equal(run.array(run.records[0]), expected.numpy())


@pytest.mark.parametrize("rules", [["*:param[*].grad=full"], ["*:param[*]=full", "*:param[*].grad=full"]])
def test_training_gradients_that_no_step_waits_for_are_reported_with_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False).requires_grad_(False))
    with Dumper(model, tmp_path / "run", keep="off", rules=rules):
        model(torch.ones(1, 4)).sum().backward()
    run = open_run(tmp_path / "run")
    missing = ["0:param[weight].grad", "0:param[bias].grad"]
    assert set(missing) <= set(run.ledger().never_fired)
    assert "0:out" not in run.ledger().never_fired
    assert all(site in caplog.text for site in missing)
    reasons = [event.fields["reason"] for event in run.events() if event.kind == "failed"]
    assert len(reasons) == 1
    assert "with dumper.step()" in reasons[0]


def test_training_step_without_optimizer_records_accumulated_main_grad(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.main_grad = torch.full((4, 4), 7.0)
    rules = ["*:param*.grad=full"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules) as dumper:
        for _ in range(2):
            with dumper.step():
                model(torch.ones(1, 4)).sum().backward()
    run = open_run(tmp_path / "run")
    found = {(r.key.site, r.key.step): run.array(r) for r in run.records}
    assert len(found) == 4
    np.testing.assert_array_equal(found["0:param[weight].grad", 1], 2 * found["0:param[weight].grad", 0])
    assert (found["1:param[weight].grad", 0] == 7).all()


def test_training_two_uses_in_one_step_are_numbered_and_each_optimiser_brings_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    one, two = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with Dumper(model, tmp_path / "run", keep="off", rules=["*:param*.grad=full"]) as dumper, dumper.step():
        for optimizer in (one, two, one, other):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert [(r.key.site[0], r.key.occurrence) for r in run.records] == [("0", 0), ("1", 0), ("0", 1)]


def test_training_no_hook_stays_on_optimisers(tmp_path: Path) -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    model = nn.Linear(2, 2)
    with Dumper(model, tmp_path / "run", keep="full"):
        assert len(optimizer._global_optimizer_pre_hooks) == before
    with Dumper(model, tmp_path / "run2", keep="full", grads=True, params=True):
        assert len(optimizer._global_optimizer_pre_hooks) == before + 1
    assert len(optimizer._global_optimizer_pre_hooks) == before


def test_training_parameters_and_buffers_are_kept_where_asked_lists_of_them_included(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 2.0))])
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.scales[1]

    model = Holder()
    x = torch.randn(5, 2)
    rules = ["scales:param*=full", "norm:buffer[running_mean]=full steps=1"]
    with Dumper(model, tmp_path / "run", keep="off", rules=rules) as dumper:
        for _ in range(2):
            with dumper.step():
                model(x)
    run = open_run(tmp_path / "run")
    found = {(r.key.site, r.key.step): run.array(r) for r in run.records}
    assert set(found) == {
        *((f"scales:param[{i}]", step) for i in range(2) for step in range(2)),
        ("norm:buffer[running_mean]", 1),
    }
    np.testing.assert_array_equal(found["norm:buffer[running_mean]", 1], model.norm.running_mean.numpy())
    assert run.ledger().never_fired == []


def test_training_model_dumped_by_hand_next_to_the_rules_has_keys_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with Dumper(model, tmp_path / "run", keep="off", rules=["*:param[weight]=full"]) as dumper:
        with dumper.step():
            model(torch.ones(1, 4)).sum().backward()
            assert dumper.dump_model(model, prefix="before") == 1
            assert dumper.dump_model(model) == 1
        assert dumper.dump_model(model) == 1
    run = open_run(tmp_path / "run")
    keys = [r.key for r in run.records]
    assert len(set(keys)) == len(keys) == 4
    assert [key.occurrence for key in keys if key.site == "0:param[weight]"] == [0, 1, 2]
    assert run.ledger().complete


def test_training_model_dumped_after_a_step_in_which_nothing_came_is_in_the_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with Dumper(model, tmp_path / "run", keep="off") as dumper:
        with dumper.step():
            model(torch.ones(1, 4))
        dumper.configure(keep="stats", mode="off")
        assert dumper.dump_model(model) == 1
    run = open_run(tmp_path / "run")
    assert [r.key for r in run.records] == [Key("0:param[weight]", 0)]
    assert run.ledger().complete


def test_training_everything_in_full_leaves_parameters_gradients_and_buffers_alone(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    with Dumper(model, tmp_path / "run", rules=["*=full"]) as dumper, dumper.step():
        model(batch(0)).sum().backward()
    assert {r.key.site for r in open_run(tmp_path / "run").records} == {":in[input]", ":out"}


def test_training_vector_next_to_a_matrix_is_kept_as_any_output_and_can_be_left_out(tmp_path: Path) -> None:
    class Router(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("choice_bias", torch.arange(3.0))
            self.register_buffer("table", torch.zeros(3, 3))
            self.register_buffer("lost", torch.zeros(3), persistent=False)

    model = nn.Sequential(Router(), nn.BatchNorm1d(3))
    for name, rules, sites in (
        ("all", [], {"0:in[input]", "0:out", "0:buffer[choice_bias]", "1:in[input]", "1:out", ":in[input]", ":out"}),
        ("first", ["0:*=full", "*=off"], {"0:in[input]", "0:out", "0:buffer[choice_bias]"}),
        ("without", ["*:buffer[*]=off", "0:*=full", "*=off"], {"0:in[input]", "0:out"}),
    ):
        with Dumper(model, tmp_path / name, rules=rules) as dumper, dumper.step():
            model(torch.randn(5, 4))
        assert {r.key.site for r in open_run(tmp_path / name).records} == sites, name


def test_training_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "03_training.py"
    spec = importlib.util.spec_from_file_location("training_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(tmp_path / "run"))
    said = capsys.readouterr().out
    assert "recompute" in said
    assert "backward" in said
    assert open_run(tmp_path / "run").ledger().complete
