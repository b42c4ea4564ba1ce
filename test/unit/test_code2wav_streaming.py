"""Sound in chunks is the sound of one full decode, sample for sample."""

import copy
import dataclasses
from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from qwen3_omni_neuron.cpu.eager import EagerCode2Wav
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.vocoder import CpuVocoder
from qwen3_omni_neuron.engines.protocols import Vocoder
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.code2wav import Code2Wav, State
from qwen3_omni_neuron.neuron.engines import NeuronVocoder
from qwen3_omni_neuron.neuron.graphs.parts import code2wav_graph
from testing.eager_neuron import EagerPart

pytestmark = pytest.mark.usefixtures("no_gradients")
FRAME, LATENCY = 1920, 555
WINDOW = 12  # of the tiny checkpoint
SPLITS = {
    "ones": (1,),
    "primes": (2, 3, 5, 7, 11, 13),
    "25s": (25,),
    "ramp": (1, 2, 4, 8, 16, 25, 25, 25),
    "one chunk": (10_000,),
}
EXACT = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def single(models) -> Code2Wav:
    return models.code2wav


@pytest.fixture(scope="module")
def double(single) -> Code2Wav:
    return copy.deepcopy(single).double()


@pytest.fixture(scope="module")
def cpu_vocoder(single) -> CpuVocoder:
    return CpuVocoder(EagerCode2Wav(single), slots=4)


@pytest.fixture(scope="module")
def c_vocoder(single) -> CpuVocoder:
    library = find_library()
    if library is None:
        pytest.skip("the C was not compiled")
    from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav

    return CpuVocoder(NativeCode2Wav(single, library, threads=2), slots=4)


def neuron_vocoder(single: Code2Wav, slots: int, chunk_frames: tuple[int, ...]) -> NeuronVocoder:
    c = single.config
    graphs = [
        code2wav_graph(c, streams, frames, slots, torch.float32, c.kv_heads)
        for streams, frames in product((1, slots), chunk_frames)
    ]
    return NeuronVocoder(EagerPart(single, graphs), c)


@pytest.fixture(scope="module", params=["cpu", "c", "neuron"])
def vocoder(request, single, cpu_vocoder) -> Vocoder:
    if request.param == "cpu":
        return cpu_vocoder
    if request.param == "c":
        made: CpuVocoder = request.getfixturevalue("c_vocoder")
        return made
    return neuron_vocoder(single, 4, CHUNK_FRAMES)


def random_codes(frames: int, streams: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + frames)
    return torch.randint(0, 64, (streams, 16, frames), generator=generator)


def cut(frames: int, sizes: Sequence[int]) -> list[int]:
    """Chunk sizes, taken from `sizes` over and over, that add up to `frames`."""
    split: list[int] = []
    for size in cycle(sizes):
        if sum(split) == frames:
            return split
        split.append(min(size, frames - sum(split)))
    raise AssertionError("no sizes")


def stream(code2wav: Code2Wav, codes: Tensor, split: Sequence[int]) -> list[Tensor]:
    """The sound of each chunk."""
    first, *rest = codes.split(list(split), 2)
    samples, state = code2wav.start(first)
    chunks = [samples]
    for chunk in rest:
        samples, state = code2wav.step(chunk, state)
        chunks.append(samples)
    return chunks


def assert_same(chunks: Sequence[Tensor], expected: Tensor, tolerance: float) -> None:
    """The chunks, one after the other, are `expected` [streams, samples]."""
    ours = torch.cat(list(chunks), 1)
    assert ours.shape == expected.shape
    wrong = ~((ours - expected).abs() <= tolerance)  # so that NaN is wrong too
    if wrong.any():
        sample = int(wrong.any(0).nonzero()[0])
        at = int(wrong[:, sample].nonzero()[0])
        ends = list(accumulate(c.shape[1] for c in chunks))
        chunk = next(i for i, end in enumerate(ends) if sample < end)
        pytest.fail(
            f"first of {int(wrong.sum())} wrong samples: stream {at}, sample {sample} (frame "
            f"{sample / FRAME:.2f}), chunk {chunk} of {len(chunks)}: "
            f"{ours[at, sample]} instead of {expected[at, sample]}"
        )


def join(states: Sequence[State]) -> State:
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def part(state: State) -> list[State]:
    return [tuple(t[i : i + 1] for t in state) for i in range(len(state[0]))]


@pytest.mark.parametrize("dtype", EXACT, ids=["float64", "float32"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.diagonal
def test_stream_equals_one_full_decode_for_every_split(single, double, split, dtype) -> None:
    code2wav = double if dtype == torch.float64 else single
    codes = random_codes(10 * WINDOW + 3, streams=2)
    expected = code2wav(codes)
    assert expected.shape == (2, codes.shape[2] * FRAME - LATENCY)
    assert 0.01 < expected.std() < 0.5, "sound that is neither silent nor clipped"
    chunks = stream(code2wav, codes, cut(codes.shape[2], split))
    assert_same(chunks, expected, EXACT[dtype])


def test_a_stream_may_be_longer_than_the_positions_of_the_config(double) -> None:
    """The reference computes them as it goes; the talker sets the limit."""
    longer = Code2Wav(dataclasses.replace(double.config, max_positions=20)).double()
    longer.load_state_dict(double.state_dict())
    codes = random_codes(50)
    sound = torch.cat(stream(longer, codes, [25, 25]), 1)
    assert (sound - double(codes)).abs().max() < EXACT[torch.float64]


def test_a_broken_stream_breaks_no_other(double) -> None:
    codes = random_codes(6)
    _, state = double.start(random_codes(3))
    alone, left = double.step(codes, state)
    broken = tuple(torch.full_like(t, torch.nan) if t.is_floating_point() else t for t in state)
    samples, states = double.step(codes.repeat(3, 1, 1), join([broken, state, broken]))
    assert samples[0].isnan().any(), "the broken ones are broken"
    assert_same([samples[1:2]], alone, 1e-9)
    for ours, expected in zip(part(states)[1], left, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=0)


def test_the_references_chunks_lose_sound_and_ours_lose_none(reference, single) -> None:
    """620 frames in the reference's chunks of 300 lack 555 samples at each of two boundaries; ours
    are its one full decode."""
    codes = random_codes(620)
    decoder = reference.model.code2wav
    whole = decoder(codes)[:, 0]
    theirs = decoder.chunked_decode(codes, chunk_size=300, left_context_size=25)[:, 0]
    assert whole.shape[1] == 620 * FRAME - LATENCY
    assert theirs.shape[1] == whole.shape[1] - 2 * LATENCY
    at = 300 * FRAME - LATENCY
    torch.testing.assert_close(theirs[:, :at], whole[:, :at], atol=1e-4, rtol=0)
    after = theirs[:, at : at + FRAME]
    skipped = (after - whole[:, at + LATENCY :][:, :FRAME]).abs().mean()
    in_place = (after - whole[:, at:][:, :FRAME]).abs().mean()
    assert skipped < 0.1 * in_place, "its second chunk goes on 555 samples too late"
    for split in ([300, 300, 20], cut(620, SPLITS["25s"])):
        assert_same(stream(single, codes, split), whole, 1e-4)


def rows(codes: Tensor, start: int, stop: int) -> Tensor:
    """A chunk as the runtime hands it over: [frames, 16]."""
    return codes[0, :, start:stop].t()


def as_chunks(sound: Sequence[np.ndarray]) -> list[Tensor]:
    assert all(s.dtype == np.float32 for s in sound)
    return [torch.from_numpy(s)[None] for s in sound]


@pytest.mark.parametrize(
    "split",
    [*(cut(48, SPLITS[name]) for name in ("ones", "25s", "ramp")), [16, 16, 3], [5], [1], [2, 1]],
    ids=str,
)
def test_vocoder_in_one_slot(vocoder, single, split) -> None:
    codes = random_codes(sum(split))
    sound = []
    for begin, end in pairwise((0, *accumulate(split))):
        decode = vocoder.step if sound else vocoder.start
        sound += decode([2], [rows(codes, begin, end)])
    assert_same(as_chunks(sound), single(codes), 1e-5)


def test_vocoder_serves_streams_of_its_slots_together(vocoder, single) -> None:
    """Slots 3 and 0 start together, 1 comes later; 0 ends short beside a full chunk and is used
    again."""
    codes = [random_codes(n, seed=n) for n in (7, 16, 12, 20)]
    sound: dict[int, list[np.ndarray]] = {i: [] for i in range(4)}

    def call(first: bool, **chunks: tuple[int, int, int]) -> None:
        """s<slot>=(stream, begin, end)"""
        slots = [int(name[1:]) for name in chunks]
        given = [rows(codes[i], begin, end) for i, begin, end in chunks.values()]
        decoded = (vocoder.start if first else vocoder.step)(slots, given)
        for (i, _, _), samples in zip(chunks.values(), decoded, strict=True):
            sound[i].append(samples)

    call(True, s3=(3, 0, 4), s0=(0, 0, 4))
    call(True, s1=(1, 0, 8))
    call(False, s3=(3, 4, 8), s0=(0, 4, 7))
    with pytest.raises(AssertionError, match=r"slots \[0\] hold no stream"):
        call(False, s0=(0, 4, 7))
    call(True, s0=(2, 0, 8))
    call(False, s1=(1, 8, 16), s3=(3, 8, 16))
    call(False, s0=(2, 8, 12), s3=(3, 16, 20))
    for i, chunks in sound.items():
        assert_same(as_chunks(chunks), single(codes[i]), 1e-5)


def test_a_call_that_raises_moves_no_slot(vocoder, single) -> None:
    codes = [random_codes(8, seed=1), random_codes(8, seed=2)]
    sound = [[s] for s in vocoder.start([0, 1], [rows(c, 0, 4) for c in codes])]
    good, broken = rows(codes[0], 4, 8), torch.full((4, 16), 10**6)
    for decode in (vocoder.start, vocoder.step):
        with pytest.raises(BucketError, match=r"1 to 25 frames, got 26.*1, 2, 4, 8, 16, 25"):
            decode([0], [torch.zeros(26, 16, dtype=torch.int64)])
        with pytest.raises(BucketError, match="got 0"):
            decode([0, 1], [good, good[:0]])
        with pytest.raises((RuntimeError, IndexError)):
            decode([0, 1], [good, broken])
        with pytest.raises((RuntimeError, ValueError)):
            decode([0, 1], [good])
    with pytest.raises(AssertionError, match="hold no stream"):
        vocoder.step([0, 9], [good, good])
    for slot in (0, 1):
        sound[slot] += vocoder.step([slot], [rows(codes[slot], 4, 8)])
        assert_same(as_chunks(sound[slot]), single(codes[slot]), 1e-5)
