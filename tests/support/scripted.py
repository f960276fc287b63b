"""Checkpoints that generate scripted text: real Llamas whose next token depends only on the last one.

A script is a list of pieces, each one token of the vocabulary. The prompt's last token, ``<|go:NAME|>``, selects the
script: the chat template emits it for the NAME in the last message.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
from checkpoints import tokenizer_json
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

END = "</s>"
_HIDDEN = 128


def make_scripted(path: Path, template: str, scripts: dict[str, list[str]], special: list[str]) -> Path:
    """Save a checkpoint that generates ``scripts`` (``default`` if the last message contains no other name).

    ``template`` is a chat template without its generation prompt's last token; ``special`` tokens are added as special.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json())
    pieces = list(dict.fromkeys(piece for script in scripts.values() for piece in script))
    assert len(pieces) == sum(map(len, scripts.values())), "a piece that comes twice has two successors"
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [*special, *map(_start, scripts)]])
    plain = [piece for piece in pieces if piece not in special]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in plain])
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    named = [name for name in scripts if name != "default"]
    choice = "".join(f"{{%- if '{name}' in last %}}{{%- set ns.go = '{name}' %}}{{%- endif %}}" for name in named)
    go = "{%- set ns = namespace(go='default') %}{%- set last = messages[-1].content %}" + choice
    source = template + "{%- if add_generation_prompt %}" + go + "{{- '<|go:' + ns.go + '|>' }}{%- endif %}"
    config = {"chat_template": source, "bos_token": "<s>", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    _save_model(path, tokenizer, scripts)
    return path


def _start(name: str) -> str:
    return f"<|go:{name}|>"


def _save_model(path: Path, tokenizer: Tokenizer, scripts: dict[str, list[str]]) -> None:
    settings = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=_HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=tokenizer.token_to_id(END),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(settings)
        for layer in model.model.layers:  # the residual stream remains the token's embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(torch.randn(settings.vocab_size, _HIDDEN), dim=1)
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.zero_()
        for name, script in scripts.items():
            chain = [tokenizer.token_to_id(text) for text in [_start(name), *script, END]]
            for token, following in pairwise(chain):
                model.lm_head.weight[following] += 4 * rows[token]
    model.save_pretrained(path)
