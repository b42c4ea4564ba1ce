"""Code2wav in C against the module, and against itself in other pieces."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.cpu.native.binding import Library, UnsuitedError
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav, NativeState
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.config import OmniConfig
from testing.native_library import KINDS, needs_c

pytestmark = [needs_c, pytest.mark.usefixtures("no_gradients")]
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    # Enough work for two threads, and channels that fill no tile.
    "shared": {"hidden_size": 128, "ffn_width": 160, "decoder_dim": 160, "layers": 1},
    "odd": {
        "hidden_size": 48, "heads": 6, "kv_heads": 2, "ffn_width": 40, "decoder_dim": 48,
        "sliding_window": 5,
    },
}  # fmt: skip


@pytest.fixture
def kind(use_kind: Callable[[str], None], request: pytest.FixtureRequest) -> str:
    """Kernels for another kind of processor, of those that this one can run."""
    use_kind(request.param)
    return str(request.param)


def code2wav_of(config: OmniConfig, size: str = "tiny", seed: int = 0) -> Code2Wav:
    """Random weights that keep the size of what they are applied to."""
    assert config.code2wav is not None
    code2wav = Code2Wav(dataclasses.replace(config.code2wav, **SIZES[size]))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in code2wav.named_parameters():
        weight.normal_(generator=generator)
        if name.endswith(("norm.weight", "magnitude", "frequency")):
            weight.mul_(0.1).add_(1)
        elif "scale" in name:
            weight.mul_(0.3)
        elif weight.ndim > 1 and "embedding" not in name:
            weight.mul_((weight.numel() / len(weight)) ** -0.5)
    for weight in code2wav.conv_out.parameters():
        weight.mul_(0.03)  # or the samples are clipped
    return code2wav


def random_codes(frames: int, streams: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (streams, 16, frames), generator=generator)


def stream(native: NativeCode2Wav, codes: Tensor, split: list[int]) -> tuple[Tensor, NativeState]:
    """The samples of chunks, and the last state. Every state is a value."""
    first, *rest = codes.split(split, 2)
    samples, state = native.start(first)
    heard = [samples]
    for chunk in rest:
        before = [part.copy() for part in state]
        samples, after = native.step(chunk, state)
        assert all(np.array_equal(a, b) for a, b in zip(state, before, strict=True))
        heard.append(samples)
        state = after
    return torch.cat(heard, 1), state


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "split", [[1] * 73, [5, 1, 40, 2, 25], [31, 1, 32, 9], [33, 40], [3, 70]], ids=str
)
def test_a_stream_in_pieces_is_one_call_bit_for_bit(
    models: Models, library: Library, split: list[int], threads: int
) -> None:
    code2wav = models.code2wav
    assert code2wav is not None
    codes = random_codes(73, 3)
    whole, left = NativeCode2Wav(code2wav, library).start(codes)
    samples, state = stream(NativeCode2Wav(code2wav, library, threads), codes, split)
    assert torch.equal(samples, whole)
    assert all(np.array_equal(a, b) for a, b in zip(state, left, strict=True))
    assert state[0].tolist() == [73] * 3
    assert 0.01 < float(whole.abs().mean()) < 0.9, "silent, or clipped throughout"
    torch.testing.assert_close(whole, code2wav(codes), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_is_each_stream_alone_bit_for_bit(
    config: OmniConfig, library: Library, size: str, threads: int
) -> None:
    code2wav = code2wav_of(config, size)
    native, one = NativeCode2Wav(code2wav, library, threads), NativeCode2Wav(code2wav, library)
    states = [native.start(random_codes(3 + stream, seed=stream))[1] for stream in range(3)]
    codes = random_codes(7, 3)
    samples, left = native.step(codes, native.join(states))
    assert left[0].tolist() == [10, 11, 12]
    for stream, (state, part) in enumerate(zip(states, native.split(left), strict=True)):
        own = slice(stream, stream + 1)
        for alone, after in (native.step(codes[own], state), one.step(codes[own], state)):
            assert torch.equal(alone, samples[own])
            assert all(np.array_equal(a, b) for a, b in zip(after, part, strict=True))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_processor_gives_the_modules_samples(
    config: OmniConfig, library: Library, size: str, kind: str
) -> None:
    """Samples are as exact as the module's by float64, over weights that amplify each rounding, and
    in pieces the same to the bit."""
    code2wav, codes = code2wav_of(config, size), random_codes(40, 2)
    native = NativeCode2Wav(code2wav, library)
    got, _ = native.start(codes)
    assert torch.equal(stream(native, codes, [1, 2, 13, 24])[0], got)
    theirs = code2wav(codes)
    exact = code2wav.double()(codes)
    bound = 3 * float((theirs - exact).abs().mean()) + 1e-6
    assert float((got - exact).abs().mean()) < bound


@pytest.mark.parametrize("larger", [100.0, 3000.0])
def test_snakes_of_large_angles_are_as_exact_as_the_modules(
    config: OmniConfig, library: Library, larger: float
) -> None:
    """Frequencies by which the sines' angles leave the first period far behind."""
    code2wav, codes = code2wav_of(config), random_codes(4)
    for name, weight in code2wav.named_parameters():
        if name.endswith("frequency"):
            weight.mul_(larger)
    got, _ = NativeCode2Wav(code2wav, library).start(codes)
    theirs = code2wav(codes)
    exact = code2wav.double()(codes)
    assert float((got - exact).abs().mean()) < 3 * float((theirs - exact).abs().mean()) + 1e-6


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_weights_give_what_they_give_in_float32(
    config: OmniConfig, library: Library, size: str, kind: str
) -> None:
    """By any number of threads, in 12 bits a number. They are widened; a layer's scale times a
    bias is the only product of two weights."""
    code2wav, codes = code2wav_of(config, size).bfloat16(), random_codes(9, 2)
    expected = NativeCode2Wav(copy.deepcopy(code2wav).float(), library).start(codes)[0]
    for threads in (1, 2, 4):
        native = NativeCode2Wav(code2wav, library, threads)
        assert torch.equal(native.start(codes)[0], expected)
        assert torch.equal(stream(native, codes, [1, 5, 3])[0], expected)


def test_keys_before_a_stream_are_not_seen(config: OmniConfig, library: Library) -> None:
    """After 3 frames the first 8 of 11 keys are from before it."""
    code2wav, codes = code2wav_of(config), random_codes(6)
    native, c = NativeCode2Wav(code2wav, library), code2wav.config
    _, (position, state) = native.start(random_codes(3))
    expected, _ = native.step(codes, (position, state))
    held = state[:, : 2 * c.layers * c.kv_heads * (c.sliding_window - 1) * c.head_dim]
    keys = held.reshape(2 * c.layers * c.kv_heads, c.sliding_window - 1, c.head_dim)
    assert not keys[:, :8].any() and keys[:, 8:].all()
    keys[:, :8] = float("nan")
    held[0] = keys.ravel()
    assert torch.equal(native.step(codes, (position, state))[0], expected)


def test_a_broken_stream_breaks_no_other(config: OmniConfig, library: Library) -> None:
    native, codes = NativeCode2Wav(code2wav_of(config), library), random_codes(6)
    _, (position, state) = native.start(random_codes(3))
    alone, _ = native.step(codes, (position, state))
    broken = position, np.full_like(state, np.nan)
    three = native.join((broken, (position, state), broken))
    samples, _ = native.step(codes.repeat(3, 1, 1), three)
    assert samples[0].isnan().any(), "the broken ones are broken"
    assert torch.equal(samples[1:2], alone)


def test_what_the_c_cannot_take_is_refused(config: OmniConfig, library: Library) -> None:
    code2wav, codes = code2wav_of(config), random_codes(2)
    native = NativeCode2Wav(code2wav, library)
    for code in (-1, 64):
        wrong = codes.clone()
        wrong[0, 15, 1] = code
        with pytest.raises(IndexError, match=f"codes are 0 to 63, got .*{code}"):
            native.start(wrong)
    for wrong in (codes[:, :15], codes.int()):
        with pytest.raises(ValueError, match="the C takes"):
            native.start(wrong)
    _, (position, state) = native.start(codes)
    single, double = position.astype(np.int32), state.astype(np.float64)
    for other in ((position, state[:, 1:]), (single, state), (position, double)):
        with pytest.raises(ValueError, match="the C takes"):
            native.step(codes, other)
    with pytest.raises(ValueError, match="at least one frame"):
        native.start(codes[:, :, :0])
    with pytest.raises(ValueError, match="at least one frame"):
        native.step(codes[:, :, :0], (position, state))
    with pytest.raises(UnsuitedError, match="float64"):
        NativeCode2Wav(code2wav.double(), library)
