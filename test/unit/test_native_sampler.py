"""Sampled tokens and codes 0 in C are numpy's."""

import numpy as np
import pytest
import torch

from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.sampler import NativeSampler
from qwen3_omni_neuron.engines.noise import TALKER, Noise
from qwen3_omni_neuron.engines.sampling import Sampler, SamplingParams, allowed_ids, sample_ids
from testing.native_library import needs_c

pytestmark = needs_c


SAMPLINGS = [
    SamplingParams(True, 0.9, 50, 1.0, 1.05),
    SamplingParams(True, 0.7, 20, 0.8),
    SamplingParams(True, 1.4, 300, 0.7, 0.8),
    SamplingParams(True, 1.0, 0, 0.9, 2.0),
    SamplingParams(True, 0.5, 0, 1.0),
    SamplingParams(False, repetition_penalty=1.3),
    SamplingParams(False),
    SamplingParams(True, 1.2, 0, 0.95, min_p=0.1, presence_penalty=0.7, frequency_penalty=-0.3),
    SamplingParams(True, 0.8, 40, 1.0, 1.1, min_p=0.02, frequency_penalty=0.5),
]


@pytest.mark.parametrize("suppressed", [(), range(40, 90)], ids=["all", "some"])
@pytest.mark.parametrize(("vocab", "steps"), [(5, 50), (200, 200), (3000, 50), (151_936, 2)])
def test_sampled_ids_are_those_of_numpy(
    library: Library, vocab: int, steps: int, suppressed: range
) -> None:
    """With the interpreter's lock held and without, by the number of logits."""
    allowed = allowed_ids(vocab, suppressed) if suppressed else None

    def samplers() -> list[Sampler]:
        return [
            Sampler(kind, vocab, Noise(seed, TALKER), torch.tensor([0, 3]), allowed)
            for seed, kind in enumerate(SAMPLINGS)
        ]

    generator, ours, numpys = torch.Generator().manual_seed(vocab), samplers(), samplers()
    sample = NativeSampler(library)
    for _ in range(steps):
        logits = 3 * torch.randn(len(SAMPLINGS), vocab, generator=generator)
        assert sample(ours, logits.split(1)) == sample_ids(numpys, logits.split(1))
    for one, other in zip(ours, numpys, strict=True):
        assert (one.penalties is None) == (other.penalties is None)
        np.testing.assert_array_equal(one.penalties, other.penalties)
        assert (one.counts is None) == (other.counts is None)
        np.testing.assert_array_equal(one.counts, other.counts)


@pytest.mark.parametrize("vocab", [5, 200, 3000])
def test_a_mask_forbids_the_same_ids_as_in_numpy(library: Library, vocab: int) -> None:

    def samplers() -> list[Sampler]:
        return [Sampler(k, vocab, Noise(i, TALKER)) for i, k in enumerate(SAMPLINGS)]

    generator, ours, numpys = np.random.default_rng(vocab), samplers(), samplers()
    sample = NativeSampler(library)
    for step in range(40):
        allowed = generator.random((len(SAMPLINGS), vocab)) < (0.02, 0.5, 0.98)[step % 3]
        allowed[:, step % vocab] = True
        padded = np.pad(allowed, ((0, 0), (0, -vocab % 32)), constant_values=True)
        for index, mask in enumerate(np.packbits(padded, 1, "little").view(np.uint32)):
            masks = None if (index + step) % 4 == 0 else mask
            ours[index].mask = numpys[index].mask = masks
        logits = torch.from_numpy(3 * generator.standard_normal(allowed.shape, np.float32))
        ids = sample(ours, logits.split(1))
        assert ids == sample_ids(numpys, logits.split(1))
        for index, token_id in enumerate(ids):
            assert ours[index].mask is None or allowed[index, token_id]


def test_logits_of_another_type_are_widened(library: Library) -> None:
    logits = torch.randperm(100, generator=torch.Generator().manual_seed(0)).bfloat16() / 16
    first, second = (Sampler(SAMPLINGS[1], 100, Noise(0, TALKER)) for _ in range(2))
    for _ in range(20):
        assert NativeSampler(library)([first], [logits[None]]) == sample_ids(
            [second], [logits[None]]
        )


def test_logits_of_another_vocabulary_are_refused(library: Library) -> None:
    sampler = Sampler(SAMPLINGS[0], 10, Noise(0, TALKER))
    with pytest.raises(ValueError, match=r"\[1, 10\]"):
        NativeSampler(library)([sampler], [torch.zeros(1, 9)])
