"""Speculative decoding on a CPU against the same engine without: same weights and prompts, interleaved.

    python benchmarks/speculation_cpu.py [--new 96] [--rounds 3] [--dtype float32] [--case ngram-1 draft-1 ...]

One process, one torch thread. The weights are constructed, not trained, so that the acceptance rate is known: the
target's next token is a function of the last one. The computation is the same as with trained weights of that shape (62
M parameters).

Cases, with the batch size: `ngram` prompts that contain the continuation (copying); `draft` a checkpoint of 2 M
parameters that knows nine of ten successors; `hopeless-ngram` uniformly sampled tokens of a small vocabulary, whose
n-grams repeat only by chance; `hopeless-draft` a draft model that knows no successor. `eagle` and `nextn` are heads
that read the last token through a noisy matrix: four of five successors are their first guess, half of the others their
second or third. The first is an EAGLE head of the same target, the second the MTP layer of a GLM-4-MoE model of 86 M
parameters, 58 M of them active. They draft chains of 3 tokens, or with `tree` 7 tokens of the 3 best branches of 3
levels; a `hopeless` head knows nothing.

A ratio is the plain engine's CPU time over the speculating one's: above 1, speculation is faster. Median of rounds;
greedy outputs must be equal.
"""

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tapscope.engine import LLM, SamplingParams

_VOCAB, _CYCLE = 4096, 64
_WEIGHTS = "model.safetensors"
_TARGET = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
_DRAFT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 3}
_MOE = {"moe_intermediate_size": 768, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_CHAIN: dict[str, Any] = {"speculative_num_steps": 3}
_TREE: dict[str, Any] = _CHAIN | {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
_MARGIN = 0.68
"""Margin by which a head prefers the successor to the best other token: 82 to 85 % of the first guesses are correct, 90
% of the first three."""
_HEADS = ("eagle", "eagle-tree", "nextn", "nextn-tree", "hopeless-eagle", "hopeless-eagle-tree")
_CASES = (
    *("ngram-1", "ngram-8", "draft-1", "draft-8", "hopeless-ngram-1", "hopeless-draft-1", "hopeless-draft-8"),
    *(f"{head}-{batch}" for head in _HEADS for batch in (1, 8)),
)


def successor(token: torch.Tensor) -> torch.Tensor:
    """Return the next token in a cycle of :data:`_CYCLE` tokens."""
    return token // _CYCLE * _CYCLE + (token + 1) % _CYCLE


@torch.no_grad()
def save(folder: Path, shape: dict[str, int], dtype: str, known: float) -> Path:
    """Save a checkpoint that predicts the successor for a share ``known`` of the tokens, and otherwise an arbitrary
    token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, vocab_size=_VOCAB, num_key_value_heads=shape["num_attention_heads"] // 3, max_position_embeddings=1024,
        tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    teach(model, known)
    model.save_pretrained(folder)
    return folder


def teach(model: PreTrainedModel, known: float) -> None:
    """Modify ``model`` to predict the successor for a share ``known`` of the tokens."""
    vocab = model.config.vocab_size
    embedding = torch.randn(vocab, model.config.hidden_size)
    tokens = torch.arange(vocab)
    following = successor(tokens)
    unknown = torch.rand(vocab) >= known
    heads = embedding.new_zeros(embedding.shape).index_copy(0, following[~unknown], embedding[~unknown])
    model.model.embed_tokens.weight.copy_(embedding)
    model.lm_head.weight.copy_(heads + 0.01 * torch.randn_like(heads))
    for name, weight in model.named_parameters():  # keeps the layers' contribution to the embedding small
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            weight.mul_(0.01)


def reading(size: int, vocab: int, *, is_hopeless: bool, margin: float = _MARGIN) -> Tensor:
    """Return a projection [size, 2 size] that reads the embedding with noise, or only noise, and ignores the hidden
    state.

    With noise, the best of ``vocab`` tokens is about sqrt(2 log vocab) standard deviations above their mean, so a
    larger vocabulary needs less noise for the same accuracy. ``margin`` is the distance of the successor above that
    best token, in standard deviations.
    """
    noise = torch.randn(size, size)
    right = torch.eye(size) + noise / (math.sqrt(2 * math.log(vocab)) + margin)
    return torch.cat((noise if is_hopeless else right, torch.zeros(size, size)), dim=1)


@torch.no_grad()
def save_eagle(folder: Path, dtype: str, *, is_hopeless: bool) -> Path:
    """Save an EAGLE head of the target: a projection, then one of the target's layers."""
    torch.manual_seed(1)
    shape = _TARGET | {"num_hidden_layers": 1}
    config = LlamaConfig(
        **shape, vocab_size=_VOCAB, num_key_value_heads=4, max_position_embeddings=1024,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    layer = LlamaForCausalLM(config).model.layers[0]
    weights = {f"layers.0.{name}": each for name, each in layer.state_dict().items() if "input_layernorm" not in name}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"layers.0.{name}.weight"].mul_(0.01)
    weights["fc.weight"] = reading(shape["hidden_size"], _VOCAB, is_hopeless=is_hopeless)
    config.save_pretrained(folder)
    save_file({name: each.to(getattr(torch, dtype)).contiguous() for name, each in weights.items()}, folder / _WEIGHTS)
    return folder


@torch.no_grad()
def save_nextn(folder: Path, dtype: str) -> Path:
    """Save a mixture-of-experts model with an MTP layer after its last layer."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **_TARGET, **_MOE, vocab_size=_VOCAB, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
        first_k_dense_replace=1, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).to(getattr(torch, dtype)).eval()
    teach(model, 1.0)
    model.save_pretrained(folder)
    weights, size, count = load_file(folder / _WEIGHTS), config.hidden_size, config.num_hidden_layers
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    added = {own + name.removeprefix(last): each.clone() for name, each in weights.items() if name.startswith(last)}
    norms = {f"{own}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    added |= norms | {f"{own}eh_proj.weight": reading(size, _VOCAB, is_hopeless=False)}
    weights |= {name: each.to(getattr(torch, dtype)) for name, each in added.items()}
    save_file(weights, folder / _WEIGHTS, {"format": "pt"})
    return folder


def prompts(kind: str, batch: int) -> list[list[int]]:
    """Return prompts from a different cycle per request; for ``ngram``, one and a half cycles, which contain the
    continuation."""
    count = _CYCLE * 3 // 2 if kind == "ngram" else _CYCLE // 4
    return [[number * _CYCLE + i % _CYCLE for i in range(count)] for number in range(1, batch + 1)]


def measure(llm: LLM, given: list[list[int]], params: SamplingParams) -> tuple[float, list[tuple[int, ...]]]:
    """Return the CPU seconds and the outputs."""
    llm.engine.scheduler.flush()
    begin = time.process_time()
    found = llm.generate(given, params)
    return time.process_time() - begin, [generation.token_ids for generation in found]


def run(case: str, folder: Path, args: argparse.Namespace) -> None:
    kind, batch = case.rsplit("-", 1)[0], int(case.rsplit("-", 1)[1])
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
    if "draft" in kind:
        draft = "hopeless" if "hopeless" in kind else "draft"
        options = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": folder / draft}
    if kind.removesuffix("-tree").endswith(("eagle", "nextn")):
        algorithm = "NEXTN" if "nextn" in kind else "EAGLE"
        options = {"speculative_algorithm": algorithm} | (_TREE if kind.endswith("tree") else _CHAIN)
        if algorithm == "EAGLE":
            options["speculative_draft_model_path"] = folder / ("hopeless-eagle" if "hopeless" in kind else "eagle")
    target = folder / ("moe" if "nextn" in kind else "target")
    settings: dict[str, Any] = {"max_new_tokens": args.new, "ignore_eos": True}
    if kind == "hopeless-ngram":
        few = tuple(range(16))
        settings |= {"temperature": 1e5, "seed": 1, "allowed_token_ids": few}
    params, given = SamplingParams(**settings), prompts(kind, batch)
    with LLM(target, max_num_seqs=8) as plain, LLM(target, max_num_seqs=8, **options) as other:
        times: list[tuple[float, float]] = []
        for _ in range(args.rounds + 1):  # the first round is warm-up
            (before, expected), (after, found) = measure(plain, given, params), measure(other, given, params)
            assert found == expected, f"{case}: outputs differ"
            times.append((before, after))
        state = other.engine.state()["speculation"]
    ratios = [before / after for before, after in times[1:]]
    drafted = max(1, state["num_draft_tokens"])
    print(
        f"{case:21} {statistics.median(ratios):5.2f} x   ({', '.join(f'{ratio:.2f}' for ratio in ratios)})   "
        f"plain {statistics.median(before for before, _ in times[1:]):5.2f} s   acceptance length "
        f"{state['acceptance_length']:.2f}, {state['num_accepted_tokens'] / drafted:.0%} of drafts, drafting "
        f"{state['draft_seconds'] / len(times):.2f} s, {state['num_unprofitable_steps']} steps without, costs "
        f"{ {count: round(cost, 2) for count, cost in state['draft_costs'].items()} }",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--case", nargs="*", default=list(_CASES), choices=_CASES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "target", _TARGET, args.dtype, 1.0)
        save(folder / "draft", _DRAFT, args.dtype, 0.9)
        save(folder / "hopeless", _DRAFT, args.dtype, 0.0)
        save_eagle(folder / "eagle", args.dtype, is_hopeless=False)
        save_eagle(folder / "hopeless-eagle", args.dtype, is_hopeless=True)
        if any("nextn" in case for case in args.case):
            save_nextn(folder / "moe", args.dtype)
        for case in args.case:
            run(case, folder, args)


if __name__ == "__main__":
    main()
