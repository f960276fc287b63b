"""Tiny checkpoints with MTP layers and EAGLE heads, in the layouts of published files; contains no tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from moe_checkpoints import make_moe
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE, MLP, VOCAB = 64, 96, 512


def _normal(*shape: int, std: float = 0.1) -> Tensor:
    return torch.randn(*shape) * std


def make_mtp(folder: Path, family: str, **config: Any) -> Path:
    """Save a checkpoint of ``family`` (deepseek_v3, glm4_moe or qwen3_next) with one MTP layer."""
    is_next = family == "qwen3_next"
    kinds: dict[str, Any] = (
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"]} if is_next else {}
    )
    path = make_moe(folder, family, seed=3, **kinds, **config)
    weights = load_file(path / "model.safetensors")
    last = "model.layers.2."
    block = {name.removeprefix(last): tensor for name, tensor in weights.items() if name.startswith(last)}
    norm = 0.0 if is_next else 1.0  # Gemma's factor is 1 + weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        block = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in block.items()}
        half = torch.eye(SIZE)
        added = {"fc": torch.cat((0.3 * half, half), dim=1) + _normal(SIZE, 2 * SIZE, std=0.02)}
        norms = {name: norm + _normal(SIZE) for name in ("embedding", "hidden", "last")}
    if is_next:
        weights |= {f"mtp.layers.0.{name}": tensor for name, tensor in block.items()}
        weights |= {"mtp.fc.weight": added["fc"], "mtp.norm.weight": norms["last"]}
        weights |= {f"mtp.pre_fc_norm_{name}.weight": norms[name] for name in ("embedding", "hidden")}
    else:
        own = {
            "eh_proj.weight": added["fc"],
            "enorm.weight": norms["embedding"],
            "hnorm.weight": norms["hidden"],
            "shared_head.norm.weight": norms["last"],
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
        weights |= {f"model.layers.3.{name}": tensor for name, tensor in (block | own).items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    if not is_next:
        edit_config(path, {"num_nextn_predict_layers": 1})
    return path


def _attention(prefix: str, width: int) -> dict[str, Tensor]:
    sizes = {"q_proj": (SIZE, width), "k_proj": (32, width), "v_proj": (32, width), "o_proj": (SIZE, SIZE)}
    return {f"{prefix}self_attn.{name}.weight": _normal(*shape) for name, shape in sizes.items()}


def _mlp(prefix: str) -> dict[str, Tensor]:
    sizes = {"gate_proj": (MLP, SIZE), "up_proj": (MLP, SIZE), "down_proj": (SIZE, MLP)}
    return {f"{prefix}mlp.{name}.weight": _normal(*shape) for name, shape in sizes.items()}


def _norm(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": 1.0 + _normal(SIZE)}


def make_eagle(folder: Path, **config: Any) -> Path:
    """Save an EAGLE head for a tiny Llama."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        half = torch.eye(SIZE)
        weights = _attention("layers.0.", SIZE) | _mlp("layers.0.") | _norm("layers.0.post_attention_layernorm")
        weights |= {"fc.weight": torch.cat((0.3 * half, half), dim=1), "fc.bias": _normal(SIZE, std=0.01)}
        weights |= {"embed_tokens.weight": _normal(VOCAB, SIZE)}
    return _save(folder, weights, config)


def make_eagle3(folder: Path, target: Path, *, draft_vocab: int = 300, **config: Any) -> Path:
    """Save an EAGLE-3 head with ``draft_vocab`` tokens of ``target``, initialized from the target's output head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        stored = load_file(target / "model.safetensors")
        head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
        half = torch.eye(SIZE)
        weights = _attention("midlayer.", 2 * SIZE) | _mlp("midlayer.")
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            weights |= _norm(f"midlayer.{name}")
        weights |= _norm("norm") | {"lm_head.weight": head[ids].clone()}
        weights |= {"fc.weight": torch.cat((0.1 * half, 0.1 * half, half), dim=1)}
    known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    weights |= {"d2t": ids - torch.arange(draft_vocab), "t2d": known}
    return _save(folder, weights, {"draft_vocab_size": draft_vocab} | config)


def _save(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(content | config), encoding="utf-8")
    return folder


def make_llama(folder: Path) -> Path:
    """Save a tiny Llama of three layers."""
    return make_checkpoint(folder, "llama", seed=1)


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    """Change fields of config.json."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | changes), encoding="utf-8")


def _noisy(path: Path, draft: Path) -> Path:
    """Save a copy of a checkpoint with noise in its weights."""
    shutil.copytree(path, draft)
    torch.manual_seed(0)
    weights = {name: w + 0.004 * torch.randn_like(w) for name, w in load_file(draft / "model.safetensors").items()}
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    return draft


def make_speculating(folder: Path, algorithm: str) -> tuple[Path, dict[str, Any]]:
    """Return a target checkpoint, and the engine settings of the algorithm."""
    settings: dict[str, Any] = {"speculative_algorithm": algorithm}
    if algorithm == "NEXTN":
        return make_mtp(folder / "model", "glm4_moe"), settings
    path = make_llama(folder / "model")
    if algorithm == "STANDALONE":
        settings["speculative_draft_model_path"] = _noisy(path, folder / "draft")
    elif algorithm != "NGRAM":
        head = make_eagle(folder / "head") if algorithm == "EAGLE" else make_eagle3(folder / "head", path)
        settings["speculative_draft_model_path"] = head
    return path, settings
