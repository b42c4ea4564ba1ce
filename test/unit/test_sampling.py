"""Sampling against transformers' own processors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.engines.noise import (
    TALKER,
    THINKER,
    Noise,
    noise_of_frame,
    noise_of_rows,
    split_mix,
)
from qwen3_omni_neuron.engines.sampling import (
    NOT_FINITE,
    SampleIds,
    Sampler,
    SamplingParams,
    all_ids_but,
    allowed_ids,
    kept,
    processed,
    sample_ids,
)
from qwen3_omni_neuron.model.code_predictor import sample_top, top_p_limits
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import RequestOptions

VOCAB = 200
CASES = [(50, 1.0), (50, 0.8), (5, 0.5), (1, 1.0), (0, 0.9), (0, 1.0), (7, 0.01), (500, 0.95)]


@pytest.fixture(params=["numpy", "C"])
def sample(request: pytest.FixtureRequest) -> SampleIds:
    """Both functions that sample: numpy's, and that of the compiled library."""
    if request.param == "numpy":
        return sample_ids
    library = find_library()
    if library is None:
        pytest.skip("no C compiler, so nothing in C")
    from qwen3_omni_neuron.cpu.native.sampler import NativeSampler

    return NativeSampler(library)


def random_logits(seed: int) -> Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def by_numpy(scores: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Probabilities [1, ids] that sample_ids samples with."""
    found = torch.full_like(scores, float("-inf"))
    ids = kept(scores.numpy()[0], top_k, top_p, min_p)
    found[0, ids] = scores[0, ids]
    return found.softmax(-1)


def in_graph(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities [1, VOCAB] that sample_top samples with."""
    noise, limits = 1e9 * torch.eye(VOCAB), top_p_limits([top_p] * VOCAB)  # each id once the first
    kept = sample_top(logits.expand(VOCAB, -1), noise, top_k, limits) == torch.arange(VOCAB)
    return logits.masked_fill(~kept, float("-inf")).softmax(-1)


def by_transformers(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Tensor:
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    return LogitsProcessorList(warpers)(torch.zeros(1, 0).long(), logits.clone()).softmax(-1)


@pytest.mark.parametrize("ours", [by_numpy, in_graph])
@pytest.mark.parametrize(("top_k", "top_p"), CASES)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.pairs
def test_kept_set_and_probabilities_are_transformers(
    top_k: int, top_p: float, seed: int, ours: Callable[..., Tensor]
) -> None:
    """All logits that equal the k-th stay, and count in top-p's sum."""
    logits = random_logits(seed)
    for given in (logits, torch.where(logits < 2.5, (2 * logits).round() / 2, logits)):
        expected = by_transformers(given, 1.0, top_k, top_p)
        actual = ours(given, top_k, top_p)
        edge = given[expected > 0].min()
        # At the edge of top-p they stay together, where transformers keeps some by their order.
        if top_p < 1 and (given == edge).sum() > 1:
            assert ((actual > 0) == (expected > 0))[given != edge].all()
        else:
            assert (actual > 0).tolist() == (expected > 0).tolist()
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_penalty_suppression_temperature_top_k_top_p(seed: int) -> None:
    logits = random_logits(seed)
    seen = torch.tensor([[3, 9, 9, 40, int(logits.argmax())]])
    suppressed = [0, int(logits.topk(2).indices[0, 1]), 77]
    params = SamplingParams(True, 0.6, 12, 0.7, 1.3)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            SuppressTokensLogitsProcessor(suppressed),
            TemperatureLogitsWarper(0.6),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.7),
        ]
    )
    expected = chain(seen, logits.clone()).softmax(-1)
    allowed = allowed_ids(VOCAB, suppressed)
    sampler = Sampler(params, VOCAB, Noise(0, TALKER), seen[0], allowed)
    scores = torch.from_numpy(processed(sampler, logits))[None]
    actual = torch.zeros(1, VOCAB)
    actual[:, allowed] = by_numpy(scores / params.temperature, 12, 0.7)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert not actual[0, suppressed].any()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.05), (50, 0.8, 0.2), (9, 1, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_min_p_keeps_what_transformers_keep(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = random_logits(seed)
    expected = by_transformers(logits, 1.0, top_k, top_p, min_p)
    actual = by_numpy(logits, top_k, top_p, min_p)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert (actual > 0).tolist() == (expected > 0).tolist()


def test_presence_and_frequency_penalties_are_openais(sample: SampleIds) -> None:
    """By hand: an id loses 0.5 once it was sampled, and 0.25 for each time."""
    scores = torch.full((1, VOCAB), -9.0)
    scores[0, :3] = torch.tensor([3.0, 2.6, 2.0])
    params = SamplingParams(False, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(params, VOCAB, Noise(0, THINKER))
    # 3.0 -> 2.25 -> 2.0 -> 1.75; 2.6 -> 1.85 -> 1.6; 2.0 -> 1.25; the first of equal ones
    wanted = [0, 1, 0, 0, 2, 1, 0]
    assert [sample([sampler], [scores])[0] for _ in wanted] == wanted
    free = Sampler(SamplingParams(False), VOCAB, Noise(0, THINKER))
    assert sample([free, sampler], [scores, scores])[0] == 0


def follow(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether counts follow probabilities; rare ids are one cell of the chi-square."""
    wanted = expected.astype(np.float64) * counts.sum()
    likely = wanted >= 5
    cells = np.array([[*n[likely], n[~likely].sum()] for n in (counts, wanted)])
    assert not counts[wanted == 0].any(), "an id outside the kept set was sampled"
    observed, wanted = cells[:, cells[1] > 0]
    return bool(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.001)


EQUAL = torch.tensor([[4.0, 4.0, 3.5, 3.0, 3.0, 3.0, 3.0, 1.0, -2.0, 4.0 - 2e-5]])
DRAWS = {  # logits, temperature, top-k, top-p, min-p
    "code 0": (random_logits(1), 0.9, 50, 1.0, 0.0),
    "codes 1 to 15": (random_logits(2), 1.0, 50, 0.8, 0.0),
    "no limit": (random_logits(3), 1.0, 0, 1.0, 0.0),
    "every limit": (random_logits(4), 0.7, 20, 0.9, 0.05),
    "equal logits at the k-th place": (EQUAL, 1.0, 5, 1.0, 0.0),
    "equal logits, top_p": (EQUAL, 1.0, 5, 0.99, 0.0),
    "top_k of 1": (EQUAL, 1.0, 1, 1.0, 0.0),
    "a temperature of 1e-5": (EQUAL, 1e-5, 50, 1.0, 0.0),
    "a temperature of 100": (random_logits(5), 100.0, 50, 1.0, 0.0),
    "large logits": (EQUAL + 3000, 1e-5, 0, 1.0, 0.0),
}


@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.pairs
def test_draws_are_distributed_as_transformers(case: str, sample: SampleIds) -> None:
    """10,000 in a row: chi-square. Some probabilities are equal, some are 0."""
    logits, temperature, top_k, top_p, min_p = DRAWS[case]
    params = SamplingParams(True, temperature, top_k, top_p, min_p=min_p)
    sampler, vocab = Sampler(params, logits.shape[1], Noise(11, THINKER)), logits.shape[1]
    counts = np.bincount([sample([sampler], [logits])[0] for _ in range(10_000)], minlength=vocab)
    expected = by_transformers(logits.double(), temperature, top_k, top_p, min_p)
    assert follow(counts, expected[0].numpy())


@pytest.mark.parametrize("case", ["codes 1 to 15", *(name for name in DRAWS if "equal" in name)])
def test_draws_of_a_graph_are_distributed_as_transformers(case: str) -> None:
    logits, temperature, top_k, top_p, _ = DRAWS[case]
    noise = np.concatenate([noise_of_frame(Noise(3, TALKER).at(f), 15, VOCAB) for f in range(1000)])
    count, vocab = len(noise), logits.shape[1]
    given = torch.from_numpy(noise[:, :vocab])
    drawn = sample_top(logits.expand(count, -1), given, top_k, top_p_limits([top_p]).expand(count))
    expected = by_transformers(logits, temperature, top_k, top_p)[0].numpy()
    for code in range(15):
        assert follow(drawn[code::15].bincount(minlength=vocab).numpy(), expected)


def test_noise_is_a_function_of_seed_stage_position_code_and_id() -> None:
    """SplitMix64's published numbers; Gumbel's mean and deviation; no number stands twice."""
    steps = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert split_mix(steps).tolist() == published
    starts = [Noise(s, stage).at(p) for s in (0, 7, 2**80) for stage in range(2) for p in (0, 1, 9)]
    every = np.stack([noise_of_frame(start, 15, 2048) for start in starts])
    assert len(np.unique(every)) > 0.97 * every.size, "float32 alone repeats some"
    assert abs(every.mean() - np.euler_gamma) < 0.01 and abs(every.std() - 1.2825) < 0.01
    ids = [np.array([5, 2047]), np.array([7]), np.array([], np.int64)]
    rows = [noise_of_rows([start], [np.arange(2048)]) for start in starts[:3]]
    expected = np.concatenate([row[each] for row, each in zip(rows, ids, strict=True)])
    assert noise_of_rows(starts[:3], ids).tolist() == expected.tolist()
    assert not np.isin(every, rows).mean() > 0.03, "code 0 has noise of its own"
    assert noise_of_frame(starts[0], 3, 9).tolist() == every[0, :3, :9].tolist()


def test_greedy_takes_the_likeliest_after_penalty_and_suppression(sample: SampleIds) -> None:
    logits = torch.tensor([[5.0, 4.9, 4.8, -1.0]])
    params = SamplingParams(False, repetition_penalty=1.05)
    sampler = Sampler(params, 4, Noise(0, TALKER), allowed=allowed_ids(4, [2]))
    assert [sample([sampler], [logits])[0] for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("params", [SamplingParams(False), SamplingParams(True, top_k=2)])
@pytest.mark.parametrize("vocab", [40, 400])
def test_a_row_with_nan_or_infinity_has_no_id(
    sample: SampleIds, params: SamplingParams, vocab: int
) -> None:
    """At the first, a later and the last place; -infinity, and what a mask forbids, may stand."""
    nan, inf = float("nan"), float("inf")
    cases = [(nan, place, NOT_FINITE) for place in (0, 2, vocab - 1)]
    cases += [(inf, place, NOT_FINITE) for place in (0, 2, vocab - 1)]
    cases += [(-inf, 2, 3), (30.0, 2, 2)]
    rows, samplers = list[Tensor](), list[Sampler]()
    for value, place, _ in cases:
        row = torch.full((1, vocab), -50.0)
        row[0, 3], row[0, place] = 3.0, value
        for mask in (None, all_ids_but(vocab, [place])):
            rows.append(row)
            samplers.append(Sampler(params, vocab, Noise(1, TALKER)))
            samplers[-1].mask = mask
    assert sample(samplers, rows) == [found for _, _, one in cases for found in (one, 3)]
    nowhere = Sampler(params, vocab, Noise(1, TALKER))
    assert sample([nowhere], [torch.full((1, vocab), -inf)]) == [NOT_FINITE]


def test_sequences_sampled_together_get_the_ids_that_each_gets_alone(sample: SampleIds) -> None:
    """Greedy and sampled, of several temperatures, limits and penalties, with their histories."""
    kinds = [
        SamplingParams(True, 0.9, 50, 1.0, 1.05),
        SamplingParams(False, repetition_penalty=1.3),
        SamplingParams(True, 1.4, 5, 0.7),
        SamplingParams(True, 0.4, 50, 0.5, 0.8),
        SamplingParams(False),
        SamplingParams(True, 1.0, 0, 0.9, 2.0),
    ]
    allowed = allowed_ids(VOCAB, [*range(20, 40), *range(150, VOCAB)])

    def samplers() -> list[Sampler]:
        history = torch.tensor([3, 77])
        return [
            Sampler(kind, VOCAB, Noise(seed, TALKER), history, allowed)
            for seed, kind in enumerate(kinds)
        ]

    logits = [torch.cat([random_logits(100 * s + n) for n in range(len(kinds))]) for s in range(40)]
    group = samplers()
    together = [sample(group, rows.split(1)) for rows in logits]
    apart = [
        [sample([one], [rows[n : n + 1]])[0] for rows in logits] for n, one in enumerate(samplers())
    ]
    assert together == [list(step) for step in zip(*apart, strict=True)]
    sampled = {token_id for step in together for token_id in step}
    assert sampled <= set(allowed.tolist()) and max(sampled) > 100


def test_the_talkers_defaults_are_the_references() -> None:
    options = RequestOptions()
    assert options.sampling("talker") == SamplingParams(True, 0.9, 50, 1.0, 1.05)
    assert options.sampling("predictor") == SamplingParams(True, 1.0, 50, 0.8, 1.0)
    assert (options.thinker_max_new_tokens, options.talker_max_new_tokens) == (1024, 4096)
    assert options.speaker == "Ethan"


def test_the_last_1024_codec_ids_but_codec_eos_are_suppressed(config: OmniConfig) -> None:
    assert config.talker is not None
    suppressed = config.talker.suppressed_ids
    vocab = config.talker.text.vocab_size
    assert len(suppressed) == 1023
    assert set(range(vocab - 1024, vocab)) - set(suppressed) == {config.talker.codec_eos_id}
