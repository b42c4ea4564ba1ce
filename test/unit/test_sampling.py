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
from qwen3_omni_neuron.engines.sampling import (
    NOT_FINITE,
    UNIFORMS_AT_ONCE,
    Floats,
    Ids,
    RequestRandom,
    SampleIds,
    Sampler,
    SamplingParams,
    Uniforms,
    all_ids_but,
    allowed_ids,
    kept,
    processed,
    sample_ids,
)
from qwen3_omni_neuron.model.code_predictor import kept_probabilities, sample_top, top_p_limits
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


def random_logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def in_graph(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities [1, VOCAB] that sample_top samples with."""
    values, ids = logits.topk(min(top_k, VOCAB) or VOCAB)
    kept = kept_probabilities(values, top_p_limits([top_p]))
    return torch.zeros(1, VOCAB).scatter(1, ids, kept / kept.sum())


def ours(logits: torch.Tensor, top_k: int, top_p: float, ids: Ids | None = None) -> torch.Tensor:
    """Probabilities [1, VOCAB] that sample_ids samples with; ids: those of the logits."""
    places, probabilities = kept(logits.numpy()[0], top_k, top_p)
    found = torch.zeros(1, VOCAB)
    found[0, places if ids is None else ids[places]] = torch.from_numpy(probabilities)
    return found / found.sum()


@pytest.mark.parametrize("ours", [ours, in_graph])
@pytest.mark.parametrize(("top_k", "top_p"), CASES)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.pairs
def test_kept_set_and_probabilities_are_transformers(
    top_k: int, top_p: float, seed: int, ours: Callable[..., torch.Tensor]
) -> None:
    logits = random_logits(seed)
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 0).long(), logits.clone()).softmax(-1)
    actual = ours(logits, top_k, top_p)
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
    sampler = Sampler(params, VOCAB, RequestRandom(0).talker, seen[0], allowed)
    scores = torch.from_numpy(processed(sampler, logits))[None]
    actual = ours(scores / params.temperature, 12, 0.7, allowed)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert not actual[0, suppressed].any()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.05), (50, 0.8, 0.2), (9, 1, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_min_p_keeps_what_transformers_keep(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = random_logits(seed)
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = LogitsProcessorList([*warpers, MinPLogitsWarper(min_p)])(
        torch.zeros(1, 0).long(), logits.clone()
    ).softmax(-1)
    places, probabilities = kept(logits.numpy()[0], top_k, top_p, min_p)
    actual = torch.zeros(1, VOCAB)
    actual[0, places] = torch.from_numpy(probabilities)
    torch.testing.assert_close(actual / actual.sum(), expected, atol=1e-6, rtol=1e-4)
    assert (actual > 0).tolist() == (expected > 0).tolist()


def test_presence_and_frequency_penalties_are_openais(sample: SampleIds) -> None:
    """By hand: an id loses 0.5 once it was sampled, and 0.25 for each time."""
    scores = torch.full((1, VOCAB), -9.0)
    scores[0, :3] = torch.tensor([3.0, 2.6, 2.0])
    params = SamplingParams(False, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(params, VOCAB, RequestRandom(0).thinker)
    # 3.0 -> 2.25 -> 2.0 -> 1.75; 2.6 -> 1.85 -> 1.6; 2.0 -> 1.25; the first of equal ones
    wanted = [0, 1, 0, 0, 2, 1, 0]
    assert [sample([sampler], [scores])[0] for _ in wanted] == wanted
    free = Sampler(SamplingParams(False), VOCAB, RequestRandom(0).thinker)
    assert sample([free, sampler], [scores, scores])[0] == 0


def follow(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether counts follow probabilities; rare ids are one cell of the chi-square."""
    wanted = expected.astype(np.float64) * counts.sum()
    likely = wanted >= 5
    cells = np.array([[*n[likely], n[~likely].sum()] for n in (counts, wanted)])
    assert not counts[wanted == 0].any(), "an id outside the kept set was sampled"
    observed, wanted = cells[:, cells[1] > 0]
    return bool(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 0.001)


@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.8), (8, 1.0), (0, 0.9)])
def test_frequencies_follow_the_probabilities(top_k: int, top_p: float) -> None:
    logits = random_logits(1)
    count = 20000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(2))
    sampled = sample_top(
        logits.expand(count, -1), uniforms, top_k, top_p_limits([top_p]).expand(count)
    )
    expected = ours(logits, top_k, top_p)[0]
    counts = torch.bincount(sampled, minlength=VOCAB)
    assert follow(counts.numpy(), expected.numpy())


def test_a_sampler_samples_with_temperature_top_k_and_top_p(sample: SampleIds) -> None:
    logits = random_logits(4)
    sampler = Sampler(SamplingParams(True, 0.5, 12, 0.9), VOCAB, RequestRandom(11).thinker)
    count = 4000
    counts = np.bincount([sample([sampler], [logits])[0] for _ in range(count)], minlength=VOCAB)
    assert follow(counts, ours(logits / 0.5, 12, 0.9)[0].numpy())


def test_the_ends_of_the_unit_interval_sample_kept_ids() -> None:
    logits = random_logits(3)
    ends = torch.tensor([0.0, np.nextafter(np.float32(1), np.float32(0))])
    sampled = sample_top(logits.expand(2, -1), ends, 20, top_p_limits([0.9, 0.9]))
    assert (ours(logits, 20, 0.9)[0, sampled] > 0).all()
    assert int(sampled[0]) == int(logits.argmax()), "the likeliest comes first"


class Always(Uniforms):
    """Random numbers that are all the same."""

    def __init__(self, uniform: float):
        super().__init__(np.random.SeedSequence(0))
        self._uniform = uniform

    def __call__(self, count: int) -> Floats:
        return np.full(count, self._uniform, np.float32)


@pytest.mark.parametrize(("uniform", "rank"), [(0.0, 0), (1 - 2**-24, -1)])
def test_the_ends_of_the_unit_interval_sample_the_first_and_the_last_kept(
    uniform: float, rank: int, sample: SampleIds
) -> None:
    """Beside the models, too; what top-p drops is never sampled."""
    logits = random_logits(3)
    sampler = Sampler(SamplingParams(True, 1.0, 20, 0.9), VOCAB, Always(uniform))
    likeliest_first = logits[0].argsort(descending=True)
    held = int((ours(logits, 20, 0.9)[0] > 0).sum())
    assert sample([sampler], [logits]) == [int(likeliest_first[:held][rank])]


def test_greedy_takes_the_likeliest_after_penalty_and_suppression(sample: SampleIds) -> None:
    logits = torch.tensor([[5.0, 4.9, 4.8, -1.0]])
    params = SamplingParams(False, repetition_penalty=1.05)
    sampler = Sampler(params, 4, RequestRandom(0).talker, allowed=allowed_ids(4, [2]))
    assert [sample([sampler], [logits])[0] for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("params", [SamplingParams(False), SamplingParams(True, top_k=2)])
@pytest.mark.parametrize("vocab", [40, 400])  # C sorts few and many logits in other ways
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
            samplers.append(Sampler(params, vocab, RequestRandom(1).talker))
            samplers[-1].mask = mask
    expected = [found for _, _, one in cases for found in (one, 3)]
    assert sample(samplers, rows) == expected
    nowhere = Sampler(params, vocab, RequestRandom(1).talker)
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
            Sampler(kind, VOCAB, RequestRandom(seed).talker, history, allowed)
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


def test_a_request_draws_thinker_and_talker_numbers_apart() -> None:
    first, second = RequestRandom(7), RequestRandom(7)
    second.talker(100)
    assert first.thinker(5).tolist() == second.thinker(5).tolist()
    assert RequestRandom(7).thinker(1) != RequestRandom(7).talker(1)
    assert RequestRandom(7).thinker(1) != RequestRandom(8).thinker(1)


def test_random_numbers_are_the_generators_in_their_order_however_many_are_asked_for() -> None:
    counts = [1, 15, 0, 1, UNIFORMS_AT_ONCE - 5, 15, 3 * UNIFORMS_AT_ONCE, 3]
    uniforms = Uniforms(np.random.SeedSequence(5))
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(5)))
    taken = [uniforms(count) for count in counts]
    assert [len(numbers) for numbers in taken] == counts
    assert np.concatenate(taken).tolist() == generator.random(sum(counts), np.float32).tolist()


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
