"""MTP layers and EAGLE heads: their predictions match the references, and outputs equal the plain engine's."""

import copy
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from draft_heads import edit_config, make_eagle, make_eagle3, make_llama, make_mtp
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from soak_cases import mostly_soak
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm

from tapscope.core.errors import CheckpointError, ConfigError
from tapscope.engine import LLM, Generation, SamplingParams
from tapscope.engine.execution.hidden_store import HiddenStore
from tapscope.engine.execution.model_runner import ModelRunner
from tapscope.engine.models.decoder import Decoder
from tapscope.engine.requests.drafts import Drafts
from tapscope.engine.requests.kept_rows import KeptRows
from tapscope.engine.requests.request import Request
from tapscope.engine.requests.step_plan import ScheduledRequest, StepPlan
from tapscope.engine.speculative import draft_head_proposer, speculator

PROMPTS = [[5, 6, 7] * 4, [(7 * i + i // 3) % 500 for i in range(24)], [300], [9, 8, 7, 6, 5]]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=10),
    "sampled": SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        max_new_tokens=10, temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, min_new_tokens=6
    ),
    "grammar": SamplingParams(max_new_tokens=10, regex="(ab|cd)*[0-9]x", temperature=0.5, seed=1),
    "stop": SamplingParams(max_new_tokens=10, stop=["a", "e"], temperature=1.0, seed=9, ignore_eos=True),
}
MTP = ("deepseek_v3", "glm4_moe", "qwen3_next")
HEADS = (*MTP, "eagle", "eagle3")

Result = tuple[Any, ...]


def _result(generation: Generation) -> Result:
    given = generation
    return given.token_ids, given.text, given.finish_reason, given.matched, given.reason, given.logprobs


class Heads:
    """The target, the settings of the head and the plain engine's results for each of HEADS."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019  (one object for the module)
    def target(self, head: str) -> Path:
        name = "llama" if head.startswith("eagle") else head
        path = self._folder / name
        if not path.exists():
            return make_llama(path) if name == "llama" else make_mtp(path, head)
        return path

    @cache  # noqa: B019
    def settings(self, head: str) -> dict[str, Any]:
        path = self._folder / f"{head}-head"
        if head == "eagle":
            return {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(make_eagle(path))}
        if head == "eagle3":
            made = make_eagle3(path, self.target(head))
            return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(made)}
        return {"speculative_algorithm": "NEXTN"}

    @cache  # noqa: B019
    def plain(self, head: str, params: str) -> list[Result]:
        """Return the plain engine's result for each of PROMPTS."""
        with LLM(self.target(head), batch_invariant=True) as llm:
            return [_result(generation) for generation in llm.generate(PROMPTS, PARAMS[params])]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(tmp_path_factory.mktemp("heads"))


def _drafted(path: Path, **options: Any) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return states of the rows of PROMPTS[1] and the first draft, logits of the first two drafts, and the tokens."""
    with LLM(path, **options) as llm:
        model, states, logits = llm.engine.draft_runner.model, [], []

        def see(module: Any, inputs: Any, output: Any) -> None:
            states.append(module.last_hidden_state.clone())
            logits.append(output.logits.clone())

        model.register_forward_hook(see)
        (found,) = llm.generate(PROMPTS[1:2], SamplingParams(max_new_tokens=8, ignore_eos=True))
    first = next(step for step, rows in enumerate(logits) if len(rows))  # prompts may be chunked
    return [torch.cat(states[: first + 1]), states[first + 1]], logits[first:], [*PROMPTS[1], *found.token_ids]


@pytest.mark.parametrize("family", MTP)
@torch.no_grad()
def test_mtp_layer_predicts_what_that_of_transformers_does(heads: Heads, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(heads.target(family)).eval()
    if family == "qwen3_next":
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    else:
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
    mtp = MtpModel.from_pretrained(model)
    states, logits, tokens = _drafted(heads.target(family), **heads.settings(family))
    length = len(PROMPTS[1])
    hidden = model.model(torch.tensor([tokens[:length]])).last_hidden_state
    mtp_cache = MtpCache(config=model.config.get_mtp_config())
    positions = torch.arange(length)[None]
    expected = mtp.forward_layer(0, hidden, positions, mtp_cache, input_ids=torch.tensor([tokens[1 : length + 1]]))
    torch.testing.assert_close(states[0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0][0], mtp._project_to_logits(expected[0, -1]), atol=1e-4, rtol=1e-4)
    draft = torch.tensor([[int(logits[0][0].argmax())]])
    following = mtp.forward_layer(0, expected[:, -1:], positions[:, -1:] + 1, mtp_cache, input_ids=draft)
    torch.testing.assert_close(states[1], following[0], atol=1e-4, rtol=1e-4)
    names = {name for name, _ in mtp.named_modules()}
    with LLM(heads.target(family), **heads.settings(family)) as llm:
        own = {name for name, _ in llm.engine.draft_runner.model.named_modules()}
    assert {name for name in names if "experts." not in name} <= own


class _Reference(nn.Module):
    """Reference EAGLE head built from transformers' Llama modules, computed for all rows at the same time."""

    def __init__(self, target: LlamaForCausalLM, folder: Path, *, is_eagle3: bool) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers, self.is_eagle3 = 1, is_eagle3
        layer, size = LlamaDecoderLayer(config, 0), config.hidden_size
        weights = load_file(folder / "model.safetensors")
        if is_eagle3:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(
                    layer.self_attn, name, nn.Linear(2 * size, getattr(layer.self_attn, name).out_features, bias=False)
                )
            self.midlayer, self.norm = layer, LlamaRMSNorm(size, config.rms_norm_eps)
            layer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
            self.fc = nn.Linear(3 * size, size, bias=False)
            self.ids = weights.pop("d2t") + torch.arange(len(weights["lm_head.weight"]))
            self.lm_head = nn.Linear(size, len(self.ids), bias=False)
            del weights["t2d"]
        else:
            layer.input_layernorm, self.fc = nn.Identity(), nn.Linear(2 * size, size)
            self.layers = nn.ModuleList([layer])
            del weights["embed_tokens.weight"]
        self.load_state_dict(weights)
        self._target = (target,)

    def forward(self, input_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Map token ids [rows] and hidden states [rows, hidden], after ``fc``, to states and logits."""
        (target,) = self._target
        embeds = target.model.embed_tokens(input_ids)[None]
        positions = torch.arange(len(input_ids))[None]
        inputs = {
            "position_embeddings": target.model.rotary_emb(embeds, position_ids=positions),
            "attention_mask": torch.full((len(input_ids),) * 2, -torch.inf).triu(1)[None, None],
        }
        if not self.is_eagle3:
            states = self.layers[0](self.fc(torch.cat((embeds, hidden[None]), dim=-1)), **inputs)[0]
            return states, target.lm_head(states)
        layer, hidden = self.midlayer, hidden[None]
        both = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), dim=-1)
        states = hidden + layer.self_attn(both, **inputs)[0]
        states = (states + layer.mlp(layer.post_attention_layernorm(states)))[0]
        known = self.lm_head(self.norm(states))
        return states, known.new_full((len(known), 512), -torch.inf).index_copy(1, self.ids, known)


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
@torch.no_grad()
def test_eagle_head_predicts_what_its_reference_does(heads: Heads, head: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(heads.target(head), attn_implementation="eager").eval()
    options = heads.settings(head)
    reference = _Reference(target, Path(options["speculative_draft_model_path"]), is_eagle3=head == "eagle3")
    states, logits, tokens = _drafted(heads.target(head), **options)
    length = len(PROMPTS[1])
    seen = target.model(torch.tensor([tokens[:length]]), output_hidden_states=True)
    hidden = seen.last_hidden_state[0]
    if head == "eagle3":  # with three layers: the inputs of layers 2, 3 // 2 and 3 - 3
        hidden = reference.fc(torch.cat([seen.hidden_states[layer][0] for layer in (2, 1, 0)], dim=-1))
    input_ids = torch.tensor(tokens[1 : length + 1])
    expected, scores = reference(input_ids, hidden)
    torch.testing.assert_close(states[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0][0], scores[-1], atol=1e-4, rtol=1e-4)
    input_ids = torch.cat((input_ids, logits[0][0].argmax()[None]))
    expected, scores = reference(input_ids, torch.cat((hidden, expected[-1:])))
    torch.testing.assert_close(states[1], expected[-1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1][0], scores[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "zamba2"])
@torch.no_grad()
def test_eagle3_head_reads_the_inputs_of_layers(tmp_path: Path, family: str) -> None:
    make = make_moe if family == "gemma4_moe" else make_checkpoint
    path, layers = make(tmp_path / "model", family, seed=1), [0, 1, 2]
    head = make_eagle3(
        tmp_path / "head", path, eagle_config={"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    )
    options = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head), "batch_invariant": True}
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with LLM(path, batch_invariant=True) as plain, LLM(path, **options) as llm:
        decoder = next(each for each in llm.engine.runner.model.modules() if isinstance(each, Decoder))
        seen: list[Tensor] = []
        decoder.register_forward_hook(lambda *_: seen.append(torch.cat(decoder.aux_hidden_states, dim=-1)))
        found, expected = (each.generate([PROMPTS[1]], params)[0] for each in (llm, plain))
        assert llm.engine.state()["speculation"]["num_draft_tokens"] > 0
    assert found.token_ids == expected.token_ids
    length = len(PROMPTS[1])
    states = target(torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(torch.cat(seen)[:length], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_eagle3_head_of_gemma_3n_reads_the_active_stream(tmp_path: Path) -> None:
    path, layers = make_checkpoint(tmp_path / "model", "gemma3n", seed=1), [0, 2, 4]
    head = make_eagle3(
        tmp_path / "head", path, eagle_config={"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    )
    options = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head), "batch_invariant": True}
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    wanted: list[Tensor] = []
    for layer in layers[:-1]:
        target.model.layers[layer].register_forward_pre_hook(lambda _module, args: wanted.append(args[0][0, 0]))
    target.model.norm.register_forward_pre_hook(lambda _module, args: wanted.append(args[0][0]))
    target(torch.tensor([PROMPTS[1]]))
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=heat, seed=2) for heat in (0.0, 0.9)]
    with LLM(path, batch_invariant=True) as plain, LLM(path, check_invariants=True, **options) as llm:
        decoder = next(each for each in llm.engine.runner.model.modules() if isinstance(each, Decoder))
        seen: list[Tensor] = []
        decoder.register_forward_hook(lambda *_: seen.append(torch.cat(decoder.aux_hidden_states, dim=-1)))
        found, expected = (each.generate([PROMPTS[1]] * 2, params) for each in (llm, plain))
        assert llm.engine.state()["speculation"]["num_draft_tokens"] > 0
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    torch.testing.assert_close(seen[0][: len(PROMPTS[1])], torch.cat(wanted, dim=-1), atol=1e-4, rtol=1e-4)


def test_every_decoder_keeps_the_inputs_of_its_layers() -> None:
    """Heads read the layer inputs, so every forward must keep them."""
    decoders = [Decoder]
    for each in decoders:
        decoders += each.__subclasses__()
        assert {"start_layer", "end_layers"} <= set(each.forward.__code__.co_names), each


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, len(PROMPTS) - 1), st.sampled_from(list(PARAMS))),
    min_size=1,
    max_size=16,
)


SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 16, "max_num_batched_tokens": 13, "batch_invariant": True}
"""Few pages and rows: prompts are chunked and requests preempted."""


def _check_schedule(llm: LLM, heads: Heads, head: str, arrivals: list[tuple[int, int, str]]) -> None:
    """Submit each (steps to wait, prompt, parameters) in turn and check its result; later calls hit cached prefixes."""
    done: dict[str, Generation] = {}
    asked: dict[str, tuple[str, int]] = {}
    for wait, which, name in arrivals:
        asked[llm.submit(PROMPTS[which], PARAMS[name])] = (name, which)
        for _ in range(wait):
            done |= {generation.request: generation for generation in llm.step()}
    while llm.has_work:
        done |= {generation.request: generation for generation in llm.step()}
    for request, (name, which) in asked.items():
        assert _result(done[request]) == heads.plain(head, name)[which]
    assert llm.engine.scheduler.kv_cache_manager.num_used == 0


def _rows_of_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int, int]]:
    """Count how often the head computes each (request, position, visit) from now on."""
    proposer, rows = llm.engine.speculator.proposer, Counter[tuple[str, int, int]]()
    compute = proposer._compute

    def count(plan: StepPlan, sample: Any) -> list[int]:
        runs = (run for item in plan.scheduled for run in item.runs(0))
        rows.update((run.request, run.position + i, run.visit) for run in runs for i in range(run.count))
        return compute(plan, sample)

    monkeypatch.setattr(proposer, "_compute", count)
    return rows


def test_heads_give_the_plain_outputs(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(heads.target("eagle3"), check_invariants=True, **SMALL, **heads.settings("eagle3")) as llm:
        rows = _rows_of_drafts(llm, monkeypatch)
        names = ["sampled", "penalties", "grammar", "sampled"]
        _check_schedule(llm, heads, "eagle3", [(i % 2, i % 4, name) for i, name in enumerate([*names, "sampled"])])
        stats = llm.engine.speculator.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert llm.engine.scheduler.stats.cached_tokens > 0
        assert llm.engine.scheduler.stats.num_preemptions > 0
        assert max(rows.values()) == 1, "a row that is computed again is another visit"


def test_mtp_layers_give_the_plain_outputs(heads: Heads) -> None:
    """Recurrent states are rolled back to the last accepted row."""
    options = SMALL | {"state_checkpoint_interval": 8}
    with LLM(heads.target("qwen3_next"), check_invariants=True, **options, **heads.settings("qwen3_next")) as llm:
        _check_schedule(llm, heads, "qwen3_next", [(0, 0, "sampled"), (1, 1, "sampled")])
        stats = llm.engine.speculator.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


MASKED = ("gemma3", "llama4")
TREE: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 10}


@pytest.mark.parametrize("head", mostly_soak(["eagle", "eagle3", "deepseek_v3"], default=["eagle"]))
def test_draft_trees_give_the_plain_outputs(heads: Heads, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted branches not stored at their positions are moved; with batches, chunks, preemption and prefix hits."""
    options = SMALL | {"num_pages": 20, "check_invariants": True}
    with LLM(heads.target(head), **options, **heads.settings(head), **TREE) as llm:
        kept: list[KeptRows] = []
        keep_rows = llm.engine.runner.keep_rows
        monkeypatch.setattr(llm.engine.runner, "keep_rows", lambda each: (kept.append(each), keep_rows(each))[1])
        names = ["sampled", "penalties", "grammar", "greedy", "stop", "sampled"]
        _check_schedule(llm, heads, head, [(i % 2, i % 4, name) for i, name in enumerate(names * 2)])
        stats = llm.engine.speculator.stats
        assert len(stats.drafted_by_position) == 3
        assert stats.num_draft_tokens > sum(stats.drafted_by_position)
        assert sum(stats.accepted_by_position) == stats.num_accepted_tokens > 0
        assert kept
        assert llm.engine.scheduler.stats.cached_tokens > 0


def test_draft_trees_of_preempted_requests_change_no_output(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt requests between the proposal of a tree and its verification.

    The tree is dropped, and the head's cache entries for it are not read when the request is recomputed.
    """
    with LLM(heads.target("eagle"), check_invariants=True, **SMALL, **heads.settings("eagle"), **TREE) as llm:
        scheduler, in_flight, lost = llm.engine.scheduler, dict[str, Drafts](), list[Drafts]()
        plan, preempt = scheduler.plan, scheduler._preempt

        def plan_with(**given: Any) -> StepPlan:
            in_flight.clear()
            in_flight.update(given["drafts"] or {})
            return plan(**given)

        def note(request: Request) -> None:
            if (drafts := in_flight.get(request.id)) is not None and drafts.parents:
                lost.append(drafts)
            preempt(request)

        monkeypatch.setattr(scheduler, "plan", plan_with)
        monkeypatch.setattr(scheduler, "_preempt", note)
        arrivals = [(i % 2, i % 4, name) for i, name in enumerate(["sampled", "greedy", "sampled", "sampled"] * 3)]
        _check_schedule(llm, heads, "eagle", arrivals)
        assert lost
        assert llm.engine.speculator.stats.num_accepted_tokens > 0


def test_draft_trees_return_the_values_of_accepted_rows(heads: Heads) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3, ignore_eos=True, hidden_states=True, logprobs=1)
    found = []
    for options in ({}, heads.settings("eagle") | TREE):
        with LLM(heads.target("eagle"), batch_invariant=True, **options) as llm:
            found.append(llm.generate(PROMPTS, params))
    for plain, other in zip(*found, strict=True):
        assert (other.token_ids, other.logprobs) == (plain.token_ids, plain.logprobs)
        assert plain.hidden_states is not None
        assert other.hidden_states is not None
        assert (other.hidden_states.array() == plain.hidden_states.array()).all()


@pytest.mark.parametrize("family", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.soak) for name in MASKED)])
def test_draft_trees_beside_windowed_layers_round_apart_from_plain_decoding(tmp_path: Path, family: str) -> None:
    """Not batch-invariant: one masked attention covers the whole tree, with windows and sinks."""
    target = (make_checkpoint if family == "gemma3" else make_moe)(tmp_path / "target", family, seed=3)
    options: dict[str, Any] = {"page_size": 4, "dtype": "float32"}
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, hidden_states=True, allowed_token_ids=tuple(range(6)))
    found = []
    with LLM(target, **options) as llm:
        found.append(llm.generate(PROMPTS, params))
    options |= {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": make_eagle(tmp_path / "head")}
    with LLM(target, check_invariants=True, **options, **TREE) as llm:
        found.append(llm.generate(PROMPTS, params))
        assert llm.engine.speculator.stats.num_accepted_tokens > 0
    for plain, other in zip(*found, strict=True):
        assert plain.token_ids == other.token_ids
        assert plain.hidden_states is not None
        assert other.hidden_states is not None
        assert abs(plain.hidden_states.array() - other.hidden_states.array()).max() < 1e-4


@pytest.mark.parametrize("chunk", [9, pytest.param(3, marks=pytest.mark.soak)])
def test_draft_trees_across_chunks_of_attention_give_the_plain_outputs(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a branch belongs to the chunk of its position, not of the slot that stores it until it is accepted."""
    target = make_moe(tmp_path / "target", "llama4", seed=3, attention_chunk_size=chunk)
    common: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "allowed_token_ids": tuple(range(6))}
    greedy = SamplingParams(hidden_states=True, **common)
    each = [greedy, SamplingParams(temperature=0.8, seed=2, logprobs=1, **common)]
    found, kept, keep_rows = [], list[KeptRows](), ModelRunner.keep_rows
    monkeypatch.setattr(ModelRunner, "keep_rows", lambda self, rows: (kept.append(rows), keep_rows(self, rows))[1])
    head = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": make_eagle(tmp_path / "head")}
    for options in ({}, head | TREE):
        with LLM(target, check_invariants=True, **SMALL | {"num_pages": 40}, **options) as llm:
            found.append([one for params in each for one in llm.generate(PROMPTS, params)])
            assert not options or llm.engine.speculator.stats.num_accepted_tokens > 0
    assert kept
    for plain, other in zip(*found, strict=True):
        assert _result(plain) == _result(other)
        if plain.hidden_states is not None:
            assert other.hidden_states is not None
            assert (plain.hidden_states.array() == other.hidden_states.array()).all()


def test_draft_trees_of_models_that_do_not_support_them_are_refused(heads: Heads, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative_eagle_topk=3: a tree needs a recurrent state for each branch"):
        LLM(heads.target("qwen3_next"), **heads.settings("qwen3_next"), **TREE)
    settings = heads.settings("eagle") | TREE
    with pytest.raises(ConfigError, match="trees are not supported with an indexer .DeepseekV32ForCausalLM"):
        LLM(make_moe(tmp_path / "dsa", "deepseek_v32", seed=3), **settings)
    with pytest.raises(ConfigError, match="speculative_eagle_topk=3: must be at most max_num_batched_tokens=2"):
        LLM(heads.target("eagle"), max_num_batched_tokens=2, **settings)


@pytest.mark.soak
@pytest.mark.parametrize("head", HEADS)
def test_heads_give_the_plain_outputs_in_any_schedule(heads: Heads, head: str) -> None:
    options = SMALL | ({"state_checkpoint_interval": 8} if head == "qwen3_next" else {})
    with LLM(heads.target(head), check_invariants=True, **options, **heads.settings(head)) as llm:

        @settings(max_examples=12)
        @given(arrivals=ARRIVALS)
        def check(arrivals: list[tuple[int, int, str]]) -> None:
            _check_schedule(llm, heads, head, arrivals)

        check()


@pytest.mark.soak
@pytest.mark.parametrize("head", ["eagle", "eagle3", "deepseek_v3", "glm4_moe"])
def test_draft_trees_give_the_plain_outputs_in_any_schedule(heads: Heads, head: str) -> None:
    with LLM(heads.target(head), check_invariants=True, **SMALL, **heads.settings(head), **TREE) as llm:

        @settings(max_examples=12)
        @given(arrivals=ARRIVALS)
        def check(arrivals: list[tuple[int, int, str]]) -> None:
            _check_schedule(llm, heads, head, arrivals)

        check()


@pytest.mark.soak
@pytest.mark.parametrize("tree", [{}, TREE])
@pytest.mark.parametrize("head", HEADS)
def test_heads_run_on_all_ranks(heads: Heads, head: str, tree: dict[str, Any]) -> None:
    if tree and head == "qwen3_next":
        pytest.skip("no trees with recurrent states")
    with LLM(heads.target(head), tp=2, batch_invariant=True, **heads.settings(head), **tree) as llm:
        found = llm.generate(PROMPTS, PARAMS["sampled"])
        assert llm.engine.speculator.stats.num_accepted_tokens > 0
    with LLM(heads.target(head), tp=2, batch_invariant=True) as llm:
        assert [each.token_ids for each in found] == [
            each.token_ids for each in llm.generate(PROMPTS, PARAMS["sampled"])
        ]


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_heads_beside_windowed_layers_give_the_plain_outputs(tmp_path: Path, family: str, algorithm: str) -> None:
    """The target has additional page tables, which the head's steps update too."""
    target = make_moe(tmp_path / "target", family, seed=3)
    head = make_eagle(tmp_path / "head") if algorithm == "EAGLE" else make_eagle3(tmp_path / "head", target)
    options = SMALL | {"num_pages": 40, "check_invariants": True}
    with LLM(target, **options) as llm:
        plain = [_result(each) for each in llm.generate(PROMPTS, PARAMS["sampled"])]
        assert len(llm.engine.scheduler.kv_cache_manager.groups) == 2
    with LLM(target, speculative_algorithm=algorithm, speculative_draft_model_path=head, **options) as llm:
        assert [_result(each) for each in llm.generate(PROMPTS, PARAMS["sampled"])] == plain
        assert llm.engine.speculator.stats.num_accepted_tokens > 0


def test_rejected_drafts_of_a_head_never_enter_the_prefix_cache(heads: Heads) -> None:
    """Requests that continue an earlier request's tokens hit its pages and get the results of a fresh engine."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=8, ignore_eos=True)
    options: dict[str, Any] = {"page_size": 4, "batch_invariant": True}
    with LLM(heads.target("eagle"), **options, **heads.settings("eagle")) as llm:
        first = llm.generate(PROMPTS, params)
        assert llm.engine.speculator.stats.num_accepted_tokens < llm.engine.speculator.stats.num_draft_tokens
        longer = [[*each.prompt_ids, *each.token_ids, 17] for each in first]
        again = llm.generate(longer, params)
        assert min(each.cached_tokens for each in again) >= 8
    with LLM(heads.target("eagle"), prefix_cache=False, **options) as llm:
        assert [each.token_ids for each in again] == [each.token_ids for each in llm.generate(longer, params)]


def test_head_that_does_not_pay_computes_rows_in_batches(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "_FIRST_PAUSE", 40)
    monkeypatch.setattr(draft_head_proposer, "MAX_WAITING", 16)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True, logit_bias={511: -100.0})
    plans: list[StepPlan] = []
    with LLM(heads.target("eagle"), **heads.settings("eagle")) as llm:
        proposer = llm.engine.speculator.proposer
        compute = proposer._compute
        monkeypatch.setattr(draft_head_proposer, "draw_drafts", lambda *_: torch.tensor([511]))
        monkeypatch.setattr(proposer, "_compute", lambda plan, sample: (plans.append(plan), compute(plan, sample))[1])
        llm.generate([[5, 6, 7]], params)
        assert llm.engine.speculator.stats.num_accepted_tokens == 0
    steps = [item for plan in plans for item in plan.scheduled]
    assert [len(item.tokens) for item in steps if not item.samples] == [16, 16]
    assert len(steps) < 12  # for 50 steps of the target


def test_failed_step_of_a_head_changes_no_output(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step announces the pages of the failed step."""
    options: dict[str, Any] = {"page_size": 4, "batch_invariant": True, "check_invariants": True}
    with LLM(heads.target("eagle"), **options, **heads.settings("eagle")) as llm:
        proposer, failed = llm.engine.speculator.proposer, set()
        compute = proposer._compute

        def fail_before_a_new_page(plan: StepPlan, sample: Any) -> list[int]:
            new = {(item.request, item.page_start) for item in plan.scheduled if item.pages and item.page_start}
            if new - failed:
                failed.update(new)
                raise RuntimeError("a hook failed")
            return compute(plan, sample)

        monkeypatch.setattr(proposer, "_compute", fail_before_a_new_page)
        requests, done = [llm.submit(prompt, PARAMS["sampled"]) for prompt in PROMPTS], {}
        while llm.has_work:
            with suppress(RuntimeError):
                done |= {generation.request: generation for generation in llm.step()}
        assert len({request for request, _ in failed}) > 1
        assert [_result(done[request]) for request in requests] == heads.plain("eagle", "sampled")


def test_hidden_states_do_not_keep_other_rows_of_a_prompts_step(heads: Heads) -> None:
    with LLM(heads.target("eagle"), **heads.settings("eagle")) as llm:
        llm.generate([PROMPTS[1], [300]], SamplingParams(max_new_tokens=1))
        held = llm.engine.draft_runner.hidden_states._rows.values()
        pieces = [piece for each in held for piece in each.pieces]
        assert [piece.num for piece in pieces] == [len(PROMPTS[1]), 1]
        assert all(piece.states.untyped_storage().nbytes() == piece.rows.nbytes for piece in pieces)


class _Operations(TorchDispatchMode):
    """Counts tensor operations."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_a_step_that_the_head_waits_for_does_nothing_with_earlier_ones() -> None:
    """Otherwise the cost of steps without drafts would grow with the number of steps that the head has not read."""
    store, steps = HiddenStore(), [torch.rand(3, 4) for _ in range(40)]
    rows = {"visits": (), "pages": (), "prompt_length": 1}
    for position, states in enumerate(steps):
        items = (ScheduledRequest(request=str(i), row=i, position=position, tokens=(1,), **rows) for i in range(3))
        with _Operations() as operations:
            store.put_step(StepPlan(step=0, phase="decode", scheduled=tuple(items), kv_pages_used=0), states)
        assert operations.num == 0
    wanted = (ScheduledRequest(request=str(i), row=i, position=5, tokens=(1,) * 30, **rows) for i in (2, 0))
    plan = StepPlan(step=0, phase="draft", scheduled=tuple(wanted), kv_pages_used=0)
    with _Operations() as operations:
        taken = store.take_step(plan)
    assert operations.num < 10
    assert torch.equal(taken, torch.stack([states[i] for i in (2, 0) for states in steps[5:35]]))
    assert [store.start(i, str(i)) for i in range(3)] == [35, 0, 35]


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("EAGLE", {"hidden_size": 32}, "its hidden_size is 32, but the target's is 64; use a head of this target"),
        ("EAGLE3", {"vocab_size": 600}, "its vocab_size is 600, but the target's is 512; use a head of this target"),
        ("EAGLE", {"architectures": ["Qwen2ForCausalLM"]}, "its architecture is 'Qwen2ForCausalLM'; supported: Llama"),
        ("EAGLE", {"architectures": 3}, "its architecture is 3; supported: Llama"),
        ("EAGLE3", {"draft_vocab_size": 200}, r"draft_vocab_size is 200; the checkpoint's d2t has shape \[300\]"),
        ("EAGLE3", {"num_hidden_layers": 2}, "num_hidden_layers is 2; EAGLE-3 heads of one layer are supported"),
        (
            "EAGLE3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}},
            r"it reads the inputs of layers \[1, 2, 10\], but the target has 3 layers",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    heads: Heads, tmp_path: Path, algorithm: str, changes: dict[str, Any], message: str
) -> None:
    head = (
        make_eagle3(tmp_path / "head", heads.target("eagle"))
        if algorithm == "EAGLE3"
        else make_eagle(tmp_path / "head")
    )
    edit_config(head, changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        LLM(heads.target("eagle"), speculative_algorithm=algorithm, speculative_draft_model_path=head)


def test_wrong_kinds_of_heads_are_refused(heads: Heads, tmp_path: Path) -> None:
    llama = heads.target("eagle")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no MTP layer; those that have one: DeepseekV3"):
        LLM(llama, speculative_algorithm="NEXTN")
    with pytest.raises(ConfigError, match="speculative_algorithm='EAGLE3': needs speculative_draft_model_path"):
        LLM(llama, speculative_algorithm="EAGLE3")
    eagle = heads.settings("eagle")["speculative_draft_model_path"]
    with pytest.raises(ConfigError, match="its tensors are those of another kind; use speculative_algorithm='EAGLE'"):
        LLM(llama, speculative_algorithm="EAGLE3", speculative_draft_model_path=eagle)
    mistral = make_checkpoint(tmp_path / "mistral", "mistral")
    with pytest.raises(ConfigError, match="all layers of MistralForCausalLM have a window of 11"):
        LLM(mistral, speculative_algorithm="EAGLE", speculative_draft_model_path=eagle)
    head = make_eagle3(tmp_path / "head", llama)
    weights = load_file(head / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + 400}, head / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="d2t must map 300 tokens to different ids below 512, but maps"):
        LLM(llama, speculative_algorithm="EAGLE3", speculative_draft_model_path=head)
