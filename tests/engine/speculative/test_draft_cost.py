"""Cost model of draft tokens, fed with given step times: no test reads a clock."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from tapscope.engine import LLM, SamplingParams
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.speculative.draft_cost import DraftCosts


def _running(count: int, *, num_computed: int = 2) -> Sequence[Request]:
    requests = [Request(id=str(i), prompt_ids=(1, 2)) for i in range(count)]
    for request in requests:
        request.num_computed = num_computed
        request.tokens += [3] * (num_computed > 1)
    return requests


def _plan(count: int, num_drafts: int, *, position: int = 2) -> StepPlan:
    tokens = tuple(range(num_drafts + 1))
    rows = {"position": position, "visits": (), "tokens": tokens, "pages": (), "num_drafts": num_drafts}
    each = (ScheduledRequest(request=str(i), prompt_length=2, **rows) for i in range(count))
    return StepPlan(step=0, phase="verify", scheduled=tuple(each), kv_pages_used=0)


def _run(costs: DraftCosts, count: int, acceptance: float, cost: float, steps: int) -> list[bool]:
    """Record ``steps`` steps of ``count`` requests, with 3 drafts each if that pays; return which had drafts."""
    running, found = _running(count), []
    for _ in range(steps):
        found.append(costs.drafting_pays(running, acceptance))
        num_drafts = 3 * found[-1]
        costs.record(_plan(count, num_drafts), 0.01 * count * (1 + cost * num_drafts))
    return found


@pytest.mark.parametrize(("cost", "pays"), [(0.5, True), (0.57, False), (0.7, False)])
def test_drafts_pay_while_the_accepted_share_is_above_their_cost(cost: float, pays: bool) -> None:
    costs = DraftCosts()
    found = _run(costs, 8, 0.6, cost, 40)
    assert found[:4] == [True] * 4, "three are counted: a head computes the prompt in the first"
    assert found[4:8] == [False] * 4, "three are counted: the first one is not launched ahead"
    assert found[8:] == [pays] * 32
    assert costs.state() == {"8": pytest.approx(cost)}
    assert costs.drafting_pays(_running(8), 0.9), "of a request whose drafts are better"
    assert costs.drafting_pays(_running(1), 0.1), "nothing is known of one request"
    assert [costs.drafting_pays(_running(2), share) for share in (0.1, 0.9)] == [False, True], "as of eight"


def test_the_other_kind_of_step_is_measured_again() -> None:
    costs = DraftCosts()
    _run(costs, 8, 0.6, 0.1, 8)
    found = _run(costs, 8, 0.6, 0.1, 2000)
    assert sum(found) == 2000 - 3 * 4, "in steps with drafts a few without"
    assert costs.state() == {"8": pytest.approx(0.1)}


def test_drafts_that_do_not_pay_are_tried_again_after_ever_longer_pauses() -> None:
    """The acceptance rate may have risen, which only steps with drafts reveal."""
    costs = DraftCosts()
    found = _run(costs, 8, 0.6, 0.7, 2000)[4:]
    pauses = [len(list(steps)) for drafts, steps in groupby(found) if not drafts]
    trials = [len(list(steps)) for drafts, steps in groupby(found) if drafts]
    assert pauses[:3] == [128, 256, 512]
    assert trials == [3] * len(trials)
    assert sum(trials) < 0.01 * len(found)
    found = _run(costs, 8, 0.9, 0.7, 600)
    first = found.index(True)
    assert all(found[first : first + 80])
    found = _run(costs, 8, 0.6, 0.7, 300)
    assert [len(list(steps)) for _, steps in groupby(found)][:2] == [128, 3], "they had paid since"


def test_as_many_requests_are_measured_once_their_number_lasts() -> None:
    costs = DraftCosts()
    _run(costs, 8, 0.6, 0.7, 20)
    found = _run(costs, 5, 0.6, 0.1, 40)
    assert not any(found[:16]), "as with eight"
    assert found[16:20] == [True] * 4
    assert all(found[20:])
    assert costs.state() == {"5": pytest.approx(0.1), "8": pytest.approx(0.7)}


def test_steps_that_compute_prompts_are_not_measured() -> None:
    costs = DraftCosts()
    for _ in range(10):
        costs.record(_plan(4, 3, position=1), 9.0)
        costs.record(_plan(4, 3), 9.0)  # the first step after a prompt
    assert costs.state() == {}
    _run(costs, 4, 1.0, 0.2, 20)
    assert costs.state() == {"4": pytest.approx(0.2)}
    costs = DraftCosts()
    _run(costs, 4, 1.0, 0.2, 4)
    assert costs.drafting_pays(_running(4, num_computed=1), 1.0), "steps that are not counted force nothing"


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_engine_pauses_drafts_that_do_not_pay(tmp_path: Path, batch_invariant: bool) -> None:
    """With given step times the cost exceeds 1: no draft is verified, and the state reports why."""
    path = make_checkpoint(tmp_path / "model", "llama", seed=3)
    prompts, params = [[5, 6, 7] * 4 for _ in range(2)], SamplingParams(max_new_tokens=24, ignore_eos=True)
    options = {"speculative_algorithm": "NGRAM", "batch_invariant": batch_invariant}
    with LLM(path, batch_invariant=batch_invariant) as plain, LLM(path, **options) as llm:
        speculator = llm.engine.speculator
        for count in (1, 2):
            for num_drafts in (0, 7):
                for _ in range(20):
                    speculator.record_time(_plan(count, num_drafts), 1e3 * count * (1 + 2 * num_drafts))
        speculator.record_time = lambda plan, seconds: None
        expected, found = (each.generate(prompts, params) for each in (plain, llm))
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        state = llm.engine.state()["speculation"]
    if batch_invariant:  # batch-invariant steps must not depend on a clock
        assert state["num_draft_tokens"] > 0
        assert (state["num_unprofitable_steps"], state["draft_costs"]) == (0, {})
    else:
        assert state["num_draft_tokens"] == 0
        assert state["num_unprofitable_steps"] > 0
        assert state["draft_costs"] == {"1": pytest.approx(2), "2": pytest.approx(2)}


def test_costs_of_few_requests_do_not_mix_with_those_of_more() -> None:
    """With 5 requests a draft token costs twice the time, which must not stop drafting for 8 requests."""
    costs = DraftCosts()
    _run(costs, 8, 0.6, 0.7, 20)
    for _ in range(20):
        costs.record(_plan(5, 0), 0.02 * 5)
    assert not costs.drafting_pays(_running(8), 0.6)
    assert costs.state() == {"8": pytest.approx(0.7)}


def test_numbers_of_requests_that_share_a_cost_differ_by_an_eighth_at_most() -> None:
    costs, counts = DraftCosts(), range(1, 150)
    for count in counts:
        _run(costs, count, 0.6, 0.7, 30)
    shared = sorted(map(int, costs.state()))
    assert shared[:16] == list(range(1, 17))
    assert all(after - before <= before / 8 for before, after in pairwise(shared[15:]))


def test_steps_are_measured_while_the_number_of_requests_changes() -> None:
    """When requests end, the draft model has nothing to catch up on."""
    costs = DraftCosts()
    for _ in range(40):
        for count in (8, 7):
            num_drafts = 3 * costs.drafting_pays(_running(count), 0.6)
            costs.record(_plan(count, num_drafts), 0.01 * count * (1 + 0.7 * num_drafts))
    assert costs.state() == {"7": pytest.approx(0.7), "8": pytest.approx(0.7)}
    assert not costs.drafting_pays(_running(8), 0.6)
