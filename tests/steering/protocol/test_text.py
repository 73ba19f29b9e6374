"""Text comes out of tokens as the tokenizer has it, cut at stop strings, never in the middle of a character."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import MagicMock

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from steering.protocol.text import TextStream, texts_of
from tests import families
from tests.steering.conftest import LoadMLLM


@pytest.fixture(scope="module")
def byte_level(load_mllm: LoadMLLM) -> Any:
    """Byte-level BPE, as of Qwen and Llama 3: any byte can be a token of its own."""
    return load_mllm("qwen2_vl").tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Pieces with a mark for the space and tokens for single bytes, as of Llama 2, Gemma and PaliGemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Caf", "é", "▁au", "▁lait", "l", "a", "i", "t", "▁ü", "ber", "日", "本", ".", "▁is", "¬", "à"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def ids_of(tokenizer: Any, *pieces: str) -> list[int]:
    """Token ids of texts, tokenised apart so that borders are where they are put."""
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False).input_ids]


def bytes_of(tokenizer: Any, text: str) -> list[int]:
    """Return one token for every byte of a text."""
    if tokenizer.convert_tokens_to_ids("<0x00>") is not None and "<0x00>" in tokenizer.get_vocab():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    text_of = texts_of(tokenizer)
    names = {text_of(token)[1]: token for token in range(len(tokenizer))}
    return [names[byte,] for byte in text.encode()]


def run(tokenizer: Any, tokens: list[int], *stop: str) -> tuple[list[str], TextStream]:
    """Feed tokens until a stop string is complete; all pieces, the last being that of finish()."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.feed(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


# --- whole text ------------------------------------------------------------------------------------------------------


def test_random_tokens_stream_to_what_the_tokenizer_decodes(byte_level: Any) -> None:
    """Most random tokens of a byte-level tokenizer are no valid text."""
    draw = random.Random(0)
    for _ in range(400):
        tokens = [draw.randrange(len(byte_level)) for _ in range(draw.randint(1, 40))]
        pieces, stream = run(byte_level, tokens)
        expected = byte_level.decode(tokens, skip_special_tokens=True)
        assert "".join(pieces) == stream.text == expected


def test_a_text_that_goes_on_keeps_the_space_of_its_first_word(sentencepiece: Any) -> None:
    """Alone such a tokenizer drops the space that a text begins with; behind other words it is one."""
    before, rest = (
        ids_of(sentencepiece, "Caf\u00e9 au"),
        sentencepiece.convert_tokens_to_ids(["\u2581lait", "\u2581is"]),
    )
    stream = TextStream(sentencepiece, (), before=before)
    assert "".join([*map(stream.feed, rest), stream.finish()]) == " lait is"
    assert sentencepiece.decode([*before, *rest]) == "Caf\u00e9 au lait is"
    assert run(sentencepiece, rest)[1].text == "lait is"


def test_pieces_and_single_bytes_stream_to_what_the_tokenizer_decodes(sentencepiece: Any) -> None:
    draw = random.Random(0)
    units = [[token] for token in range(259, len(sentencepiece))] + [bytes_of(sentencepiece, c) for c in "aé日🙂"]
    for _ in range(400):
        tokens = [token for unit in draw.choices(units, k=12) for token in unit]
        pieces, stream = run(sentencepiece, tokens)
        assert "".join(pieces) == stream.text == sentencepiece.decode(tokens)


def test_broken_bytes_spoil_neither_the_stream_nor_what_was_shown(sentencepiece: Any) -> None:
    """The tokenizer's own stream decoder raises on some of these; decoding the whole would change earlier characters."""
    draw = random.Random(0)
    for _ in range(400):
        tokens = [draw.randrange(3, len(sentencepiece)) for _ in range(20)]
        shown, stream = run(sentencepiece, tokens)
        assert "".join(shown) == stream.text
        words = [name for token in tokens if "<" not in (name := sentencepiece.convert_ids_to_tokens(token))]
        assert [letter for letter in stream.text if letter in "éüà¬日本"] == [
            letter for word in words for letter in word if letter in "éüà¬日本"
        ]
    whole = bytes_of(sentencepiece, "🙂")
    assert run(sentencepiece, [*whole, *whole[:2]])[1].text.startswith("🙂\ufffd")


def test_a_long_row_of_broken_bytes_is_not_held_back_for_ever(byte_level: Any) -> None:
    stream = TextStream(byte_level, ())
    token = bytes_of(byte_level, "é")[1]
    shown = sum(len(stream.feed(token)) for _ in range(1000))
    assert shown > 900
    assert shown + len(stream.finish()) == 1000


@pytest.mark.parametrize("family", families.FAMILIES)
def test_texts_come_back(family: str, load_mllm: LoadMLLM) -> None:
    tokenizer = load_mllm(family).tokenizer
    for text in ("The small ball is red.", " leading and trailing ", "é, 日本, 🙂🙃 and\nlines\n", "a"):
        tokens = ids_of(tokenizer, text)
        pieces, stream = run(tokenizer, tokens)
        assert "".join(pieces) == stream.text == text


def test_special_tokens_are_not_shown(byte_level: Any) -> None:
    tokens = [
        *ids_of(byte_level, "red"),
        byte_level.convert_tokens_to_ids("<|im_start|>"),
        *ids_of(byte_level, " ball"),
    ]
    pieces, _ = run(byte_level, tokens)
    assert "".join(pieces) == "red ball"


# --- characters of several bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_character_is_shown_once_it_is_whole(tokenizer: str, character: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(tokenizer)
    first, *rest = bytes_of(loaded, character)
    stream = TextStream(loaded, ())
    shown = stream.feed(ids_of(loaded, "a")[-1])
    shown += stream.feed(first)
    assert shown.strip() == "a"
    for token in rest[:-1]:
        assert stream.feed(token) == ""
    assert stream.feed(rest[-1]) == character
    assert stream.finish() == ""


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_an_answer_that_ends_in_a_character_shows_that_it_is_broken(character: str, byte_level: Any) -> None:
    for count in range(1, len(character.encode())):
        tokens = [*ids_of(byte_level, "red"), *bytes_of(byte_level, character)[:count]]
        pieces, stream = run(byte_level, tokens)
        assert pieces[-1] == byte_level.decode(tokens)[len("red") :]
        assert stream.text == "".join(pieces) == "red�"


# --- stop strings ----------------------------------------------------------------------------------------------------

CUTS = [
    # pieces as tokens, stop strings, what is shown
    (["red", " ball", " and", " more"], ["ball"], "red "),
    (["re", "d ba", "ll and"], ["d ball"], "re"),  # over three tokens
    (["a", "b", "c", "d"], ["bcx", "cd"], "ab"),  # the first possible one does not come
    (["a", "b", "a", "b", "c"], ["abc"], "ab"),  # a new beginning inside a false one
    (["a", "a", "a", "b"], ["aab"], "a"),
    (["x", "stop", "ping"], ["stopping", "stop"], "x"),  # one is the beginning of another: the shorter comes first
    (["x", "stopp"], ["stop", "stopp"], "x"),
    (["one two three"], ["three", "two"], "one "),  # inside one token, the earliest
    (["stop"], ["stop"], ""),
    (["a\n", "\nb"], ["\n\n"], "a"),
    (["red", " ball"], ["balloon", "xyz"], "red ball"),  # held back to the end, and then let go
    (["red ball"], ["ball"], "red "),
]


@pytest.mark.parametrize(("pieces", "stops", "expected"), CUTS)
def test_text_ends_before_the_first_stop_string(
    pieces: list[str], stops: list[str], expected: str, byte_level: Any
) -> None:
    shown, stream = run(byte_level, ids_of(byte_level, *pieces), *stops)
    assert "".join(shown) == stream.text == expected
    assert stream.stopped == any(stop in "".join(pieces) for stop in stops)


def test_nothing_of_a_stop_string_is_ever_shown(byte_level: Any) -> None:
    """Random texts over two letters, where stop strings begin everywhere; checked against a search in the whole text."""
    draw = random.Random(0)
    single = {letter: ids_of(byte_level, letter) for letter in "ab"}
    for _ in range(500):
        text = "".join(draw.choices("ab", k=12))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
        shown, stream = run(byte_level, [token for letter in text for token in single[letter]], *stops)
        # Token by token, the earliest end of a stop string stops; of those that end there, the longest is cut off.
        ends = [end for end in range(1, 13) if any(text[:end].endswith(stop) for stop in stops)]
        cut = text
        if ends:
            longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
            cut = text[: ends[0] - longest]
        assert "".join(shown) == stream.text == cut, (text, stops)


@pytest.mark.parametrize("stop", ["🙂", "é", "a🙂", "🙂b", "é🙂"])
def test_stop_strings_of_characters_that_are_split_over_tokens(stop: str, byte_level: Any) -> None:
    text = "aé🙂b"
    tokens = bytes_of(byte_level, text)
    if stop not in text:
        text, tokens = "xa🙂b", bytes_of(byte_level, "xa🙂b")
    shown, stream = run(byte_level, tokens, stop)
    assert "".join(shown) == text[: text.index(stop)]
    assert stream.stopped


def test_text_is_held_back_only_as_long_as_it_may_become_a_stop_string(byte_level: Any) -> None:
    stream = TextStream(byte_level, ("abcd",))
    shown = [stream.feed(token) for piece in "xabxabcy" for token in ids_of(byte_level, piece)]
    assert shown == ["x", "", "", "abx", "", "", "", "abcy"]


def test_after_a_stop_nothing_more_comes(byte_level: Any) -> None:
    _, stream = run(byte_level, ids_of(byte_level, "red", " stop", " ball"), "stop")
    assert stream.finish() == ""
    assert stream.text == "red "


# --- bytes of single tokens ------------------------------------------------------------------------------------------


def test_bytes_of_tokens_join_to_the_bytes_of_the_text(byte_level: Any) -> None:
    for text in ("The small ball is red.", "é 日本 🙂", "\x00\x7f\xa0", "".join(map(chr, range(32, 400)))):
        tokens = ids_of(byte_level, text)
        assert b"".join(bytes(texts_of(byte_level)(token)[1]) for token in tokens) == text.encode()


def test_bytes_of_pieces_join_to_the_bytes_of_the_text(sentencepiece: Any) -> None:
    """Pieces are text, though some of their letters are also names of bytes in byte-level tokenizers."""
    for text in ("Café au lait.", "über 日本", "¬à", "Café is 🙂."):
        tokens = ids_of(sentencepiece, text)
        joined = b"".join(bytes(texts_of(sentencepiece)(token)[1]) for token in tokens)
        assert joined.decode().removeprefix(" ") == text


def test_a_part_of_a_character_has_bytes_but_no_text(byte_level: Any, sentencepiece: Any) -> None:
    for tokenizer in (byte_level, sentencepiece):
        first, second = bytes_of(tokenizer, "é")
        assert texts_of(tokenizer)(first) == ("�", (0xC3,))
        assert texts_of(tokenizer)(second) == ("�", (0xA9,))


def test_a_special_token_is_its_name(byte_level: Any) -> None:
    token = byte_level.convert_tokens_to_ids("<|im_end|>")
    assert texts_of(byte_level)(token) == ("<|im_end|>", tuple(b"<|im_end|>"))


def test_what_was_added_to_a_vocabulary_is_asked_for_once(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's tokenizer takes 11 ms to list it, which an answer with twenty alternatives a token waited for at each."""
    tokens = ids_of(byte_level, "red", " ball")
    listed = MagicMock(return_value=byte_level.added_tokens_decoder)
    monkeypatch.setattr(type(byte_level), "added_tokens_decoder", property(listed))
    text_of = texts_of(byte_level)
    assert "".join(text_of(token)[0] for token in tokens) == "red ball"
    listed.assert_called_once()


@pytest.mark.parametrize(
    ("least", "text", "tokens"),
    [(0, "", 2), (1, "", 2), (2, "abc", 5), (3, "abc", 5), (4, "abc", 5), (5, "abcabx", 6), (9, "abcabx", 6)],
)
def test_a_stop_string_counts_once_it_ends_behind_the_least_tokens(
    byte_level: Any, least: int, text: str, tokens: int
) -> None:
    """As in vLLM: the string may begin before; what of it was complete by then is text."""
    stream = TextStream(byte_level, ("ab",), least=least)
    fed = 0
    for token in bytes_of(byte_level, "abcabx"):
        stream.feed(token)
        fed += 1
        if stream.stopped:
            break
    stream.finish()
    assert (stream.text, fed) == (text, tokens)
