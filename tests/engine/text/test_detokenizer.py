"""Incremental detokenization holds back incomplete characters and possible stop strings, and emits all other text."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from checkpoints import tokenizer_json
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers

from tapscope.core.errors import UsageError
from tapscope.engine import SamplingParams
from tapscope.engine.text.detokenizer import Detokenizer
from tapscope.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    path.write_text(tokenizer_json(), encoding="utf-8")
    return Tokenizer(path)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Create a tokenizer like Llama 2's: words with ``▁``, bytes as ``<0xE2>``, a leading space that is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "▁b", "é"]
    inner = HfTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = tmp_path_factory.mktemp("fallback") / "tokenizer.json"
    inner.save(str(path))
    return Tokenizer(path)


def _stream(tokenizer: Tokenizer, ids: Sequence[int], **params: object) -> tuple[list[str], str | None]:
    """Push ``ids`` one by one; return the deltas and the stop string."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_new_tokens=1000, **params))
    deltas = []
    for i, token in enumerate(ids):
        delta = detokenizer.push([token], final=i + 1 == len(ids))
        deltas.append(delta.text)
        if delta.matched is not None:
            return deltas, delta.matched
    return deltas, None


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_detokenizer_deltas_equal_the_whole_text(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    deltas, _ = _stream(byte_level, ids, skip_special_tokens=skip)
    assert "".join(deltas) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=80)
@given(text=st.text(st.sampled_from("ab é€😀\u0301日本語"), max_size=20), data=st.data())
def test_detokenizer_holds_back_incomplete_characters(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
    ids = tokenizer.encode(text)
    deltas, _ = _stream(tokenizer, ids)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == tokenizer.decode(ids)
    chunk = Detokenizer(tokenizer, SamplingParams())
    cut = data.draw(st.integers(0, len(ids)))
    assert chunk.push(ids[:cut]).text + chunk.push(ids[cut:], final=True).text == "".join(deltas)


def test_detokenizer_emits_characters_with_their_last_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b")
    assert len(ids) == 6
    assert _stream(byte_level, ids)[0] == ["a", "", "", "", "😀", "b"]


@pytest.mark.parametrize(("prompt", "output"), [("the", " the b"), ("the b", "b"), ("é", "€ the"), ("", "the")])
def test_detokenizer_continues_the_text_of_the_prompt(byte_fallback: Tokenizer, prompt: str, output: str) -> None:
    ids, start = byte_fallback.encode(prompt + output), byte_fallback.encode(prompt)
    assert ids[: len(start)] == start
    detokenizer = Detokenizer(byte_fallback, SamplingParams(), start)
    assert "".join(detokenizer.push([token]).text for token in ids[len(start) :]) == output


@pytest.mark.parametrize("cut", [slice(1, 3), slice(0, 2), slice(0, 3)])
def test_detokenizer_leaves_out_incomplete_characters_of_the_prompt(byte_fallback: Tokenizer, cut: slice) -> None:
    character = byte_fallback.encode("€")[-3:]  # one token per byte
    prompt = [*byte_fallback.encode("the the"), *character[cut]]
    assert Detokenizer(byte_fallback, SamplingParams(), prompt).push(character, final=True).text == "€"


def test_detokenizer_flushes_incomplete_characters_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀")[:-1]
    assert _stream(byte_level, ids)[0] == ["a", "", "", "�"]
    assert len(ids) == 4


STOPS = st.lists(st.text("ab é😀", min_size=1, max_size=4), min_size=1, max_size=3)


def _expected(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """Apply the definition: the first stop string that is complete as characters arrive, the longest of several."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@settings(max_examples=100)
@given(text=st.text("ab é😀", max_size=24), stops=STOPS, keep=st.booleans(), size=st.integers(1, 5))
def test_stop_text_cuts_at_stop_strings_across_tokens(
    byte_level: Tokenizer, text: str, stops: list[str], keep: bool, size: int
) -> None:
    ids = byte_level.encode(text)
    detokenizer = Detokenizer(
        byte_level, SamplingParams(max_new_tokens=99, stop=stops, include_stop_str_in_output=keep)
    )
    got, matched, num_tokens = "", None, 0
    for start in range(0, len(ids), size):
        delta = detokenizer.push(ids[start : start + size], final=start + size >= len(ids))
        got, num_tokens = got + delta.text, num_tokens + delta.num_tokens
        if delta.matched is not None:
            matched = delta.matched
            break
    assert (got, matched) == _expected(text, stops, keep)
    if matched is not None:  # without the last token the text lacks the stop string
        assert matched in byte_level.decode(ids[:num_tokens])
        assert _expected(byte_level.decode(ids[: num_tokens - 1]).rstrip("\ufffd"), stops, keep)[1] is None


def test_stop_text_holds_back_possible_stop_strings(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(char)[0] for char in "xaab"]
    assert _stream(byte_level, ids, stop=["aac"])[0] == ["x", "", "", "aab"]
    assert _stream(byte_level, ids[:3], stop=["aac"])[0] == ["x", "", "aa"]
    assert _stream(byte_level, ids, stop=["ab"]) == (["x", "", "a", ""], "ab")
    assert _stream(byte_level, ids, stop=["ab"], include_stop_str_in_output=True) == (["x", "", "a", "ab"], "ab")


def test_stop_text_ignores_stop_strings_before_min_new_tokens(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(char)[0] for char in "abab"]
    assert _stream(byte_level, ids, stop=["ab"], min_new_tokens=2) == (["a", "b", "", ""], "ab")


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\s", "é", "😀"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map("(?:{})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "+?"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


def _first_match(text: str, expression: str) -> tuple[int, int] | None:
    """Apply the definition with Python's `re`: the first complete match as characters arrive, the longest if tied."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.match(rf"(?:{expression})\Z", text[start:end]):
                return start, end
    return None


@settings(max_examples=100)
@given(text=st.text("ab é😀", max_size=16), expression=EXPRESSIONS, keep=st.booleans())
def test_stop_text_cuts_at_the_first_regex_match(byte_level: Tokenizer, text: str, expression: str, keep: bool) -> None:
    if re.match(rf"(?:{expression})\Z", ""):
        with pytest.raises(UsageError, match="matches the empty string"):
            SamplingParams(stop_regex=expression)
        return
    ids = byte_level.encode(text)
    deltas, matched = _stream(byte_level, ids, stop_regex=expression, include_stop_str_in_output=keep)
    found = _first_match(text, expression)
    assert "".join(deltas) == (text if found is None else text[: found[keep]])
    assert matched == (None if found is None else expression)


def test_stop_text_holds_back_possible_regex_matches(byte_level: Tokenizer) -> None:
    def stream(text: str, **params: Any) -> tuple[list[str], str | None]:
        return _stream(byte_level, [byte_level.encode(char)[0] for char in text], **params)

    assert stream("xaab", stop_regex="a{2}c") == (["x", "", "", "aab"], None)
    assert stream("x12.", stop_regex=r"\d+\.") == (["x", "", "", ""], r"\d+\.")
    assert stream("xab cab", stop_regex=r"\bcab\b") == (["x", "a", "b", " ", "", "", ""], r"\bcab\b")  # \b at the end
    assert stream("cabs", stop_regex=r"cab\b") == (["", "", "", "cabs"], None)
    assert stream("x\nab", stop_regex=r"(?m)^ab") == (["x", "\n", "", ""], "(?m)^ab")
    assert stream("xEnd", stop_regex=["(?i)end", "q"], stop=["zz"]) == (["x", "", "", ""], "(?i)end")
    assert stream("abab", stop_regex="ab", min_new_tokens=2) == (["a", "b", "", ""], "ab")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(ab", "invalid regular expression: missing )"),
        ("a*", "matches the empty string"),
        ("(?=a)b", "RE2 has no look-around"),
        (r"(a)\1", "RE2 has no look-around, backreferences"),
        ("a++b", "RE2 has no look-around, backreferences or atomic groups"),
        ("ab$", "more text may follow"),
        ("((((a{1000}){1000}){1000}){1000}){1000}", "invalid repetition size"),
        ("(" * 2000 + "a" + ")" * 2000, "nested too deeply"),
        ("a" * 6000, "it has 6000 characters"),
        (7, "stop_regex[0]=7: must be a string"),
    ],
)
def test_stop_regex_rejects_invalid_expressions(expression: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        SamplingParams(stop_regex=[expression])
    assert len(str(caught.value)) < 300


def test_detokenizer_shows_the_end_token_on_request(byte_level: Tokenizer) -> None:
    end = 1
    for params, text in (
        ({}, "x"),
        ({"skip_special_tokens": False}, "x"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "x</s>"),
    ):
        detokenizer = Detokenizer(byte_level, SamplingParams(**params))
        delta = detokenizer.push([*byte_level.encode("x"), end], final=True, end_token=end)
        assert (delta.text, delta.num_tokens) == (text, 2)
