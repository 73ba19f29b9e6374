"""Answers that follow a grammar: what they are, what is sampled from, and what becomes of their neighbours."""

from __future__ import annotations

import hashlib
import json
import math
import re
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from steering import Choice, Engine, Grammar, Icd, OutOfRoom, Request, RequestError, Sampling, Steer, Steering, Vcd
from steering.grammar import compiled
from steering.grammar.compiled import Grammars
from steering.protocol.text import texts_of
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.front.asking import exact, greedy, user
from tests.steering.inside import sequences
from tests.steering.interventions.pushes import make_vector
from tests.waiting import PATIENCE

FAMILY = "qwen2_vl"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
        "count": {"type": "integer", "minimum": -3, "maximum": 99},
        "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["colour", "names", "count", "sure"],
    "additionalProperties": False,
}
VALID = Draft202012Validator(SCHEMA)
WARM = Sampling(max_tokens=120, temperature=1.5, seed=5)
CHAT = user("What colour is the small ball?")


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(FAMILY, slots=12)


def test_sampling_follows_the_models_distribution_over_permitted_tokens(engine: Engine, load_plain: LoadPlain) -> None:
    texts = [b'"red"', b'"rest"', b'"green"']
    grammar = Grammar.json_schema({"enum": ["red", "rest", "green"]})
    mllm = engine.mllm
    text_of = texts_of(mllm.tokenizer)
    spelt = [bytes(text_of(token)[1]) for token in range(len(mllm.tokenizer))]
    special = set(mllm.tokenizer.added_tokens_decoder)
    for seed in range(3):
        sampling = Sampling(max_tokens=20, temperature=1.0, seed=seed, logprobs=20)
        (choice,) = engine.generate([Request(CHAT, sampling, grammar=grammar)])[0].choices
        assert choice.text.encode() in texts
        assert choice.finish_reason == "stop"
        plain = load_plain(FAMILY).answer(CHAT, len(choice.token_ids), forced=choice.token_ids)
        written = b""
        assert choice.logprobs is not None
        for row, step in zip(plain.logits, choice.logprobs, strict=False):
            remaining = [text for text in texts if text.startswith(written)]
            possible = [
                token
                for token in range(len(spelt))
                if token not in special
                and spelt[token]
                and any(text.startswith(written + spelt[token]) for text in remaining)
            ]
            if len(remaining) == 1:  # what is certain is written as the tokenizer writes it
                possible = mllm.tokenizer.encode(remaining[0][len(written) :].decode(), add_special_tokens=False)[:1]
            possible += sorted(mllm.stop_ids) if written in texts else []
            expected = dict(zip(possible, row[possible].log_softmax(-1).tolist(), strict=True))
            assert step.logprob == pytest.approx(expected[step.token_id], abs=1e-4)
            assert {top.token_id: top.logprob for top in step.top} == pytest.approx(expected, abs=1e-4)
            written += spelt[step.token_id]


def test_every_answer_is_valid_with_any_other_option(engine: Engine) -> None:
    picture = families.example_messages(FAMILY, 1)
    steer = Steering([Steer(make_vector(engine.mllm), 3.0)])
    grammar = Grammar.json_schema(SCHEMA)
    requests = [
        Request(CHAT, WARM, grammar=grammar, n=2),
        Request(CHAT, Sampling(max_tokens=120), [steer], grammar=grammar, baseline=True),
        Request(
            picture, WARM, [Vcd(beta=1.0)], grammar=grammar
        ),  # of which nothing but the likeliest token is plausible
        Request(CHAT, WARM, [Icd()], grammar=grammar, n=2),
        Request(
            CHAT, Sampling(max_tokens=120, temperature=2.0, top_p=0.5, frequency_penalty=2.0, seed=1), grammar=grammar
        ),
        Request(CHAT, Sampling(max_tokens=120, logit_bias=dict.fromkeys(range(60), -100)), grammar=grammar),
    ]
    results = engine.generate(requests)
    choices = [choice for result in results for choice in result.choices]
    choices += [choice.baseline for choice in choices if choice.baseline is not None]
    assert len(choices) == 9
    for choice in choices:
        assert choice.finish_reason == "stop", choice.text
        VALID.validate(json.loads(choice.text))
    assert len({choice.text for choice in choices}) > 4


def test_a_row_without_a_grammar_keeps_every_bit(engine: Engine) -> None:
    plain = Request(CHAT, greedy(12))
    warm = Request(user("Why?"), Sampling(max_tokens=12, temperature=1.0, seed=2, logprobs=3, ignore_eos=True))
    # In the place of the others, for the same shapes.
    filler = Request(CHAT, Sampling(max_tokens=12, ignore_eos=True))
    alone = engine.generate([filler, plain, filler, warm])
    follows = Request(CHAT, WARM, grammar=Grammar.json_schema(SCHEMA))
    beside = engine.generate([follows, plain, follows, warm])
    for i in (1, 3):
        assert exact(alone[i].choices[0]) == exact(beside[i].choices[0])


def test_without_grammars_logits_are_not_touched(engine: Engine) -> None:
    logits = torch.randn(2, engine.mllm.vocab_size)
    assert engine.core.runner.choice._masks.apply([None, None], logits) is logits


def only(engine: Engine, grammar: Grammar, **sampling: Any) -> Choice:
    return engine.generate([Request(CHAT, Sampling(**sampling), grammar=grammar)])[0].choices[0]


def test_an_answer_that_is_cut_off_says_so(engine: Engine) -> None:
    choice = only(engine, Grammar.json_schema(SCHEMA), max_tokens=3)
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 3)


def test_a_stop_string_ends_it_and_a_least_length_does_not_outlast_the_grammar(engine: Engine) -> None:
    letters = Grammar.regex("[ab]{3,8}")
    least = only(engine, letters, max_tokens=20, min_tokens=4, logit_bias=dict.fromkeys(engine.mllm.stop_ids, 100.0))
    assert len(least.token_ids) >= 5 or len(least.text) == 8
    assert only(engine, letters, max_tokens=20, min_tokens=19).finish_reason == "stop"
    assert only(engine, Grammar.regex("ab{9}"), max_tokens=20, stop=("b",)).text == "a"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"forced": "red"}, "force"),
        ({"reply": "red"}, "reply"),
        ({"sampling": Sampling(ignore_eos=True)}, "ignore_eos"),
        ({"grammar": {"type": "object"}}, "grammar"),
    ],
)
def test_options_that_exclude_a_grammar_are_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request(CHAT, **{"grammar": Grammar.json_object(), **more})
    assert caught.value.param == param
    assert "grammar" in str(caught.value)


def test_unsupported_keywords_are_named_and_ignored_unless_strict(engine: Engine) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2, "minItems": 2}
    with pytest.raises(RequestError, match=r"'grammar' cannot be enforced: .*uniqueItems.* With \"strict\": false"):
        engine.submit(Request(CHAT, grammar=Grammar.json_schema(schema)))
    assert json.loads(only(engine, Grammar.json_schema(schema, strict=False), max_tokens=20).text)[0] in (1, 2)


WRONG = [
    ({"type": "colour"}, "Invalid type: colour"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"type": "string", "format": "poem"}, "Unknown format: poem"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "http://127.0.0.1:9/schema"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "string", "minLength": 2, "maxLength": 1}, "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "expected"), WRONG)
def test_a_wrong_schema_is_refused_in_one_line(engine: Engine, schema: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(Request(CHAT, grammar=Grammar.json_schema(schema)))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.code == "unsupported_value"


def test_a_choice_of_texts_is_generated_verbatim(engine: Engine) -> None:
    texts = ['a "b"', "c\\d\n", "é | {}"]
    drawn = {only(engine, Grammar.choice(texts), max_tokens=20, temperature=2.0, seed=seed).text for seed in range(12)}
    assert len(drawn) > 1
    assert drawn <= set(texts)
    for wrong in ("a", [], [""], [1]):
        with pytest.raises(RequestError, match="'grammar' must be a list of texts"):
            Grammar.choice(wrong)  # type: ignore[arg-type]


def test_invalid_schemas_are_refused() -> None:
    for schema in (
        1,
        {"enum": [math.nan]},
        {"enum": [object()]},
        {"x-guidance": {"key_separator": "="}},
        nested(100_000),
    ):
        with pytest.raises(RequestError, match="'grammar"):
            Grammar.json_schema(schema)  # type: ignore[arg-type]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def chained(links: int, by: str = "items") -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    definitions: dict[str, Any] = {str(i): {by: {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    return {"$defs": definitions | {str(links): {"type": "integer"}}, "$ref": "#/$defs/0"}


def test_schemas_that_would_end_the_process_are_bounded(engine: Engine) -> None:
    """The longest chain that may be written; on a stack of 8 MiB a thousand links are the end of the process."""
    bombs = [
        chained(1600),
        chained(3000, "$ref"),
        nested(200),
        {"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000},
    ]
    bombs += [{"allOf": [{"type": "string", "pattern": f".*{'abcdefgh'[i % 8] * 3}.*"} for i in range(40)]}]
    bombs += [{"type": "integer", "multipleOf": 999_999_937}]
    outcomes = []
    for bomb in bombs:
        try:
            outcomes.append(only(engine, Grammar.json_schema(bomb), max_tokens=3).finish_reason)
        except RequestError as error:
            outcomes.append(str(error.param))
    assert set(outcomes) <= {"stop", "length", "grammar"}
    with pytest.raises(RequestError, match="at most 65536 characters"):
        Grammar.json_schema(chained(4000))
    assert only(engine, Grammar.regex("ab"), max_tokens=9).text == "ab"


def test_a_grammar_whose_automaton_grows_without_end_is_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automaton has a state for every set of positions where some letters stood within the last thirty characters."""
    assert compiled.limits(1).max_lexer_states == compiled.STATES
    monkeypatch.setattr(compiled, "STATES", 2000)
    grown = Request(
        CHAT, Sampling(max_tokens=200, temperature=2.0), grammar=Grammar.regex("(.*[abc].{30}|.*[def].{31})")
    )
    with pytest.raises(RequestError, match=r"'grammar' (cannot be enforced|became too complex)"):
        engine.generate([grown] * 20)
    assert only(engine, Grammar.regex("[ab]"), max_tokens=3).text in ("a", "b")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema in which each definition holds the next one three times."""
    definitions: dict[str, Any] = {"0": {"enum": ["a0"]}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/{level - 1}"}
        definitions[str(level)] = {"oneOf": [below, {"enum": [f"a{level}"]}, {"allOf": [below, below]}]}
    return {"$defs": definitions, "$ref": f"#/$defs/{levels}"}


def test_grammars_of_a_hostile_client_do_not_fill_the_memory(engine: Engine) -> None:
    """Each of these took 26 to 83 MiB, or 220 that stayed with the C library after it was refused."""
    grammars = Grammars(engine.mllm)
    grammars.start(Grammar.regex("ab"))
    before = resident_mib()
    matchers = []
    for count in [*range(80_000, 80_012), *range(1_000_000, 1_000_006)]:
        with suppress(RequestError):
            matchers.append(grammars.start(Grammar.regex(f"a{{{count}}}")))
    with pytest.raises(RequestError, match="it is too large"):
        grammars.start(Grammar.json_schema(doubling(25)))
    assert resident_mib() - before < 300


def large_schema(number: int) -> Grammar:
    digests = [hashlib.sha256(b"%d %d" % (number, i)).hexdigest() for i in range(600)]
    return Grammar.json_schema(
        {"properties": {digest[:8]: {"type": "number", "maximum": int(digest[8:12], 16)} for digest in digests}}
    )


def test_the_number_of_large_grammars_is_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 2)
    grammars = Grammars(engine.mllm)
    large = [large_schema(number) for number in range(3)]
    for grammar in large:
        grammars.start(grammar)  # those that nobody follows make room
    followed = [grammars.start(grammar) for grammar in large[1:]]
    with pytest.raises(OutOfRoom, match="2 such are in use; try again"):
        grammars.start(large[0])
    grammars.start(Grammar.regex("[ab]"))
    del followed[0]
    assert not grammars.start(large[0]).inner.is_error()


def test_a_grammar_that_was_followed_for_long_or_failed_is_compiled_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automaton that all answers share grows with what they say, and would be kept with all of it."""
    monkeypatch.setattr(compiled, "FOLLOWED", 10)
    compilations: list[str] = []
    compile_ = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, grammar: compilations.append(grammar.text) or compile_(self, grammar)
    )
    grammars = Grammars(engine.mllm)
    grammar = Grammar.regex("[ad]{40}")
    letter = engine.mllm.tokenizer.convert_tokens_to_ids("a")
    for _ in range(2):
        matcher = grammars.start(grammar)
        for _ in range(6):
            matcher.advance(letter)
    assert compilations == [grammar.text]
    matcher = grammars.start(grammar)
    assert compilations == [grammar.text] * 2
    with pytest.raises(RequestError, match="became too complex"):
        matcher.advance(next(iter(engine.mllm.stop_ids)))
    grammars.start(grammar)
    assert compilations == [grammar.text] * 3


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar.json_schema({"$ref": "#"}), "nothing matches it, or it refers to itself alone"),
        (Grammar.regex(r"[^\s\S]"), "nothing matches it, or it refers to itself alone"),
        (
            Grammar.json_schema({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}),
            "anyOf is",
        ),
        (large_schema(0), "it is too large"),
    ],
)
def test_refusals_are_in_words_that_a_client_knows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, expected: str
) -> None:
    monkeypatch.setattr(compiled, "MOST_FUEL", compiled.FUEL + 1)
    with pytest.raises(RequestError, match=rf"^'grammar' cannot be enforced: .*{expected}"):
        engine.submit(Request(CHAT, grammar=grammar))


def test_keywords_that_assert_nothing_are_accepted(engine: Engine) -> None:
    grammar = Grammar.json_schema({"type": "array", "uniqueItems": False, "items": {"enum": ["uniqueItems"]}})
    assert set(json.loads(only(engine, grammar, max_tokens=200).text)) <= {"uniqueItems"}


def test_a_compilation_that_takes_too_long_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(Grammars, "_compile", lambda *_: released.wait(PATIENCE))
    monkeypatch.setattr(compiled, "SECONDS", 0.05)
    with pytest.raises(RequestError, match="takes longer than"):
        only(engine, Grammar.regex("[bd]{4}"), max_tokens=3)
    released.set()


def test_a_compiled_grammar_is_cached(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar.regex("[ac]{4}")
    first = only(engine, grammar, max_tokens=9).text
    monkeypatch.delattr(Grammars, "_compile")
    assert only(engine, grammar, max_tokens=9).text == first


def test_a_grammar_that_becomes_too_complex_ends_its_own_answer_alone(engine: Engine) -> None:
    """The matcher is brought into the state in which a bound of the library leaves it; the server is not at fault."""
    before = engine.stats()
    spoilt = engine.submit(Request(CHAT, Sampling(max_tokens=9), grammar=Grammar.regex("[a-c]{9}")))
    beside = engine.submit(Request(CHAT, Sampling(max_tokens=9), grammar=Grammar.regex("[a-c]{9}")))
    (sequence,) = sequences(spoilt)
    assert sequence.matcher is not None
    assert not sequence.matcher.inner.consume_token(next(iter(engine.mllm.stop_ids)))
    with pytest.raises(RequestError, match="'grammar' became too complex while it was followed"):
        engine.result_of(spoilt)
    assert set(engine.result_of(beside).choices[0].text) <= set("abc")
    after = engine.stats()
    assert (after["faults"], after["refused"]) == (before["faults"], before["refused"] + 1)


def test_a_schema_of_too_many_optional_properties_is_told_what_to_change(engine: Engine) -> None:
    def asked(count: int) -> str:
        properties = {f"p{number}": {"type": "integer"} for number in range(count)}
        return only(engine, Grammar.json_schema({"type": "object", "properties": properties}), max_tokens=4).text

    with pytest.raises(RequestError, match=r"fewer optional properties in one object \(400 are well") as refused:
        asked(2000)
    assert not re.search("left-recursive|Parser|row", str(refused.value))
    assert asked(400)
