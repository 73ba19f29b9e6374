"""Tokens are chosen as transformers would choose them, row by row, and seeded draws are reproducible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from steering.protocol.request import Sampling
from steering.runner.sampler import (
    Needs,
    Sampled,
    SamplerRows,
    _draw,
    _penalise_counts,
    _penalise_repetition,
    answer_seed,
    sample,
    uniform,
)

VOCABULARY = 60
STOPS = (7, 3)
CPU = torch.device("cpu")
NOTHING = torch.zeros(0, dtype=torch.int64)


def rows_of(settings: list[Sampling], prompts: list[list[int]], answers: list[list[int]]) -> SamplerRows:
    rows = SamplerRows(len(settings), VOCABULARY, STOPS, CPU)
    # Twice, as slots are used again, and because tables appear when the first row needs them.
    for _ in range(2):
        for slot, sampling in enumerate(settings):
            rows.place(slot, sampling, 7, torch.tensor(prompts[slot]), torch.tensor(answers[slot], dtype=torch.int64))
    return rows


def plain_rows(settings: list[Sampling], seed: int = 0) -> tuple[SamplerRows, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(settings), VOCABULARY, generator=generator)
    return rows_of(settings, [[0]] * len(settings), [[]] * len(settings)), logits


def generated(steps: int, logits: torch.Tensor, rows: SamplerRows, settings: list[Sampling]) -> list[list[int]]:
    """Sample tokens of all rows from the same logits, each counted before the next one."""
    chosen = []
    for _ in range(steps):
        tokens = sample(logits, rows, slice(0, len(settings)), None, Needs.of(settings)).tokens
        rows.count(slice(0, len(settings)), tokens)
        chosen.append(tokens.tolist())
    return chosen


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 9e-6])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}])
def test_temperatures_at_which_float32_ends_are_greedy(temperature: float, truncation: dict[str, Any]) -> None:
    settings = [Sampling(temperature=temperature, **truncation), Sampling(temperature=1.0, top_p=0.5), Sampling()]
    for seed in range(5):
        rows, logits = plain_rows(settings, seed)
        sampled = sample(1000 * logits, rows, slice(0, 3), torch.tensor([5, 5, 5]), Needs.of(settings))
        assert sampled.tokens[0] == logits[0].argmax()
        assert sampled.tokens[2] == logits[2].argmax()


def test_the_lowest_temperature_and_penalty_that_are_not_greedy_stay_within_float32() -> None:
    settings = [Sampling(temperature=1e-5, repetition_penalty=0.01), Sampling(temperature=1e-5)]
    rows, logits = plain_rows(settings)
    sampled = sample(1000 * logits.abs(), rows, slice(0, 2), torch.tensor([5, 5]), Needs.of(settings))
    assert sampled.tokens[0] == 0  # the one token of the prompt, times a hundred
    assert sampled.tokens[1] == logits[1].abs().argmax()


# --- against transformers --------------------------------------------------------------------------------------------

TRUNCATIONS: list[dict[str, Any]] = [
    {},
    *({"top_k": k} for k in (1, 5, VOCABULARY - 1, VOCABULARY, 1000)),
    *({"top_p": p} for p in (0.01, 0.3, 0.9, 0.999, 1.0)),
    *({"min_p": p} for p in (0.001, 0.1, 0.9, 1.0)),
    {"top_k": 10, "top_p": 0.8},
    {"top_k": 10, "top_p": 0.95, "min_p": 0.2},
    {"top_p": 0.5, "min_p": 0.01},
    {"top_k": 3, "top_p": 0.2, "min_p": 0.9},
]


def test_repetition_penalty_is_that_of_transformers() -> None:
    penalties = [1.0, 1.3, 0.7, 2.0]
    prompts, answers = [[1, 2, 2, 5]] * 4, [[], [5, 9], [9, 9, 1], [3]]
    settings = [Sampling(repetition_penalty=penalty) for penalty in penalties]
    logits = plain_rows(settings)[1]
    ours = _penalise_repetition(logits, rows_of(settings, prompts, answers), slice(0, 4))
    for row, penalty in enumerate(penalties):
        history = torch.tensor([prompts[row] + answers[row]])
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[row : row + 1].clone())
        torch.testing.assert_close(ours[row], theirs[0])


def test_frequency_and_presence_penalties_are_those_of_openai() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c counted over the answer only."""
    settings = [Sampling(frequency_penalty=0.5, presence_penalty=0.25), Sampling(frequency_penalty=-1.0)]
    rows = rows_of(settings, [[1, 1, 4]] * 2, [[4, 4, 7]] * 2)
    logits = torch.zeros(2, VOCABULARY)
    ours = _penalise_counts(logits, rows, slice(0, 2))
    expected = torch.zeros(2, VOCABULARY)
    expected[0, 4], expected[0, 7] = -2 * 0.5 - 0.25, -0.5 - 0.25
    expected[1, 4], expected[1, 7] = 2.0, 1.0
    torch.testing.assert_close(ours, expected)


def test_penalties_count_the_tokens_as_they_are_generated() -> None:
    settings = [Sampling(frequency_penalty=1.5), Sampling()]
    rows = rows_of(settings, [[0], [0]], [[], []])
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 3], logits[:, 4] = 2.0, 1.0
    chosen = generated(4, logits, rows, settings)
    # Row 0: 2, then 2 - 1.5 < 1, then 0.5 > 1 - 1.5, then 2 - 3 < 0 and every other token is at 0: the first one.
    assert chosen == [[3, 3], [4, 3], [3, 3], [0, 3]]


def test_a_generated_token_is_repeated_from_then_on() -> None:
    settings = [Sampling(repetition_penalty=2.0), Sampling()]
    rows = rows_of(settings, [[0], [0]], [[], []])
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 3], logits[:, 4] = 2.0, 1.5
    chosen = generated(3, logits, rows, settings)
    assert chosen == [[3, 3], [4, 3], [3, 3]]  # 2, then 2 / 2 < 1.5, then 1.5 / 2 < 1


def test_a_prompt_may_have_tokens_that_are_never_generated() -> None:
    rows = rows_of([Sampling(repetition_penalty=2.0)], [[1, VOCABULARY + 5]], [[]])
    assert rows.occurred is not None
    assert rows.occurred[0].nonzero()[:, 0].tolist() == [1]


def test_bias_moves_the_choice_of_its_row_only() -> None:
    settings = [Sampling(logit_bias={7: 100.0}), Sampling(logit_bias={3: -100.0}), Sampling()]
    rows, logits = rows_of(settings, [[0]] * 3, [[]] * 3), torch.zeros(3, VOCABULARY)
    logits[:, 3], logits[:, 5] = 2.0, 1.0
    assert sample(logits, rows, slice(0, 3), torch.zeros(3), Needs.of(settings)).tokens.tolist() == [7, 5, 3]


class _Bias(LogitsProcessor):
    def __init__(self, bias: dict[int, float]):
        self.bias = bias

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores


def test_everything_together_samples_from_the_distribution_of_transformers() -> None:
    """Mixed settings in one batch: the uniform number of each row falls into the token's share of the distribution."""
    bias = {4: 1.5, 9: -3.0}
    settings = [
        Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2, logit_bias=bias),
        Sampling(temperature=0.0),
        Sampling(temperature=1.7, top_p=0.6),
        Sampling(temperature=1.0, repetition_penalty=0.8),
        Sampling(temperature=1.2, logit_bias=bias, min_p=0.3),
    ]
    prompt, answer = [4, 11, 30], [9, 11]
    for seed in range(30):
        rows = rows_of(settings, [prompt] * 5, [answer] * 5)
        rows.seed[:] = torch.arange(5) + 10 * seed
        logits = plain_rows(settings, seed)[1]
        positions = torch.arange(5) + 3
        numbers = uniform(rows.seed, positions)
        tokens = sample(logits, rows, slice(0, 5), positions, Needs.of(settings)).tokens
        for row, sampling in enumerate(settings):
            processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
            processors.append(_Bias(dict(sampling.logit_bias)))
            if sampling.temperature:
                processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                processors.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                processors.append(MinPLogitsWarper(sampling.min_p))
            scores = processors(torch.tensor([prompt + answer]), logits[row : row + 1].clone())[0].double()
            if not sampling.temperature:
                assert int(tokens[row]) == int(scores.argmax())
                continue
            shares = scores.softmax(-1)
            below = shares[: tokens[row]].sum()
            assert below - 1e-6 <= numbers[row] < below + shares[tokens[row]] + 1e-6
            assert shares[tokens[row]] > 0


def test_a_slot_keeps_nothing_of_its_predecessor() -> None:
    everything = Sampling(
        temperature=1.0,
        top_k=2,
        top_p=0.5,
        min_p=0.5,
        repetition_penalty=1.9,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logit_bias={3: 100.0},
    )
    for sampling in (
        Sampling(),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias={9: 1.0}),
        Sampling(temperature=1.0),
    ):
        used, fresh = SamplerRows(1, VOCABULARY, STOPS, CPU), SamplerRows(1, VOCABULARY, STOPS, CPU)
        used.place(0, everything, 1, torch.tensor([5, 6]), torch.tensor([7, 7]))
        for rows in (used, fresh):
            rows.place(0, sampling, 2, torch.tensor([1]), torch.tensor([2]))
        assert used.occurred is not None
        assert used.occurred[0].nonzero()[:, 0].tolist() == [1, 2]
        needs = Needs.of([everything])  # as if a neighbour wanted all of it
        for table in ("generated", "occurred", "bias"):
            if getattr(fresh, table) is None:
                setattr(fresh, table, torch.zeros_like(getattr(used, table)))
        for seed in range(10):
            logits = 2 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
            after_use, unused = (
                sample(logits, rows, slice(0, 1), torch.tensor([seed]), needs) for rows in (used, fresh)
            )
            assert after_use.tokens.tolist() == unused.tokens.tolist()
        assert torch.equal(used.scalars, fresh.scalars)
        assert used.bias is not None
        assert used.bias[0].nonzero()[:, 0].tolist() == list(sampling.logit_bias)


def test_a_row_is_chosen_as_if_it_were_alone() -> None:
    settings = [Sampling(temperature=1.0, **options) for options in TRUNCATIONS] + [Sampling()]
    rows, logits = plain_rows(settings)
    positions = torch.arange(len(settings))
    together = sample(logits, rows, slice(0, len(settings)), positions, Needs.of(settings)).tokens
    for row, sampling in enumerate(settings):
        index = torch.tensor([row])
        alone = sample(logits[index], rows, index, positions[index], Needs.of([sampling])).tokens
        assert alone.tolist() == together[index].tolist()


# --- draws -----------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 40,000 draws over 8 tokens, 7 degrees of freedom: 24.3 is the 99.9 % quantile."""
    shares = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    count = 40_000
    for seed in (0, 1, -12345):
        numbers = uniform(torch.full((count,), seed), torch.arange(count))
        drawn = _draw(shares.log().expand(count, -1), numbers)
        observed = torch.bincount(drawn, minlength=8).double()
        expected = shares.double() * count
        assert float(((observed - expected) ** 2 / expected).sum()) < 24.3


def test_draws_of_one_position_over_many_seeds_are_uniform_too() -> None:
    """Consecutive seeds, as clients count them; 100 bins, 99 degrees of freedom: 148.2 is the 99.9 % quantile."""
    for position in (0, 1, 500):
        numbers = uniform(torch.arange(50_000), torch.full((50_000,), position))
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed = torch.histc(numbers.float(), bins=100, min=0, max=1)
        assert float(((observed - 500) ** 2 / 500).sum()) < 148.2


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    table = uniform(torch.arange(200)[:, None], torch.arange(200)[None])
    for left, right in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, 1:], table[:-1, :-1])):
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / 200


def splitmix64(state: int) -> int:
    """Return the output function of SplitMix64 (Steele, Lea and Flood 2014), with Python's integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_random_numbers_are_those_of_splitmix64() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        for position in (0, 1, 77, 10_000):
            state = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
            expected = (splitmix64(state) >> 11) / 2**53
            assert float(uniform(torch.tensor([seed]), torch.tensor([position]))) == expected


def test_seeds_of_several_answers_are_int64_and_differ() -> None:
    for seed in (0, 2**63 - 1, -(2**63)):
        seeds = [answer_seed(seed, index) for index in range(128)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 128
        assert torch.tensor(seeds).dtype == torch.int64


def test_a_token_without_probability_is_never_drawn() -> None:
    scaled = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for number in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        assert int(_draw(scaled, torch.tensor([number], dtype=torch.float64))) in (1, 3)


# --- log-probabilities, broken rows ----------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_plain_distribution() -> None:
    """Whatever temperature, penalties, bias and truncation did to the choice."""
    settings = [
        Sampling(logprobs=3),
        Sampling(logprobs=5, temperature=1.5, top_k=2, logit_bias={3: 100.0}),
        Sampling(temperature=0.5, frequency_penalty=2.0),
    ]
    rows, logits = plain_rows(settings)
    result = sample(logits, rows, slice(0, 3), torch.zeros(3, dtype=torch.int64), Needs.of(settings))
    expected = logits.log_softmax(-1)
    assert result.logprob is not None
    assert result.top_logprob is not None
    assert result.top_id is not None
    assert int(result.tokens[1]) == 3
    torch.testing.assert_close(result.logprob, expected.gather(1, result.tokens[:, None])[:, 0])
    torch.testing.assert_close(result.top_logprob, expected.sort(descending=True).values[:, :5])
    torch.testing.assert_close(expected.gather(1, result.top_id), result.top_logprob)


def test_no_logprobs_where_nobody_asked() -> None:
    settings = [Sampling(), Sampling(temperature=1.0)]
    rows, logits = plain_rows(settings)
    result = sample(logits, rows, slice(0, 2), torch.zeros(2, dtype=torch.int64), Needs.of(settings))
    assert (result.logprob, result.top_logprob, result.top_id) == (None, None, None)
    samplings = [Sampling(logprobs=0), Sampling()]
    result = sample(logits, rows, slice(0, 2), torch.zeros(2, dtype=torch.int64), Needs.of(samplings))
    assert result.logprob is not None


def mixed(logits: torch.Tensor) -> tuple[Sampled, list[Sampling]]:
    settings = [
        Sampling(),
        Sampling(temperature=1.0, top_p=0.5, logprobs=2),
        Sampling(temperature=2.0, top_k=4, repetition_penalty=1.5),
        Sampling(temperature=1.0, min_p=0.5),
    ]
    rows = plain_rows(settings)[0]
    return sample(logits, rows, slice(0, 4), torch.arange(4), Needs.of(settings)), settings


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("kind", ["one nan", "all nan", "inf", "all -inf"])
def test_a_row_that_is_not_finite_is_flagged_and_disturbs_no_other(row: int, kind: str) -> None:
    logits = plain_rows([Sampling()] * 4)[1]
    healthy = mixed(logits)[0]
    assert healthy.finite.tolist() == [True] * 4
    broken = logits.clone()
    if kind == "one nan":
        broken[row, 5] = torch.nan
    else:
        broken[row] = {"all nan": torch.nan, "inf": torch.inf, "all -inf": -torch.inf}[kind]
    result = mixed(broken)[0]
    healthy_rows = [i for i in range(4) if i != row]
    assert result.finite.tolist() == [i != row for i in range(4)]
    assert result.tokens[healthy_rows].tolist() == healthy.tokens[healthy_rows].tolist()
    assert 0 <= int(result.tokens[row]) < VOCABULARY


def test_forbidden_tokens_do_not_make_a_row_broken() -> None:
    logits = plain_rows([Sampling()] * 4)[1]
    logits[:, ::2] = -torch.inf
    result = mixed(logits)[0]
    assert result.finite.tolist() == [True] * 4
    assert all(token % 2 for token in result.tokens.tolist())


def test_a_moved_row_keeps_its_settings_and_counts() -> None:
    moved = {"frequency_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {4: 9.0}}
    settings = [Sampling(), Sampling(temperature=1.0, top_k=3, seed=5, **moved)]
    rows = rows_of(settings, [[1], [2]], [[], [3, 3]])
    logits = plain_rows(settings)[1]
    index, needs = torch.tensor([1]), Needs.of(settings)
    expected = sample(logits[:1], rows, index, torch.tensor([9]), needs).tokens
    rows = rows_of(settings, [[1], [2]], [[], [3, 3]])
    rows.move(1, 0)
    for table in (rows.occurred, rows.generated, rows.bias):
        assert table is not None
        assert torch.equal(table[0], table[1])
        assert table[0].any()
    assert sample(logits[:1], rows, torch.tensor([0]), torch.tensor([9]), needs).tokens.tolist() == expected.tolist()
