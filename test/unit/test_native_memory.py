"""Every call of the C frees what it allocates."""

import ctypes
from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch
from torch import nn

from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.native.binding import Library, pack_in_c, quantise_in_c
from qwen3_omni_neuron.cpu.native.code2wav import NativeCode2Wav
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeEncoderLayer, NativeLinear
from qwen3_omni_neuron.cpu.native.sampler import NativeSampler
from qwen3_omni_neuron.cpu.packing import Groups
from qwen3_omni_neuron.engines.noise import TALKER, Noise
from qwen3_omni_neuron.engines.sampling import Sampler, SamplingParams
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.code2wav import Code2Wav
from qwen3_omni_neuron.model.config import OmniConfig
from testing.native_library import needs_c
from testing.native_modules import (
    decode,
    frames,
    made,
    native_predictor,
    prompt_rows,
    talker_config,
)
from testing.packed import packed_and_widened

pytestmark = needs_c


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Bytes that malloc has given out and not got back, in all threads. Python's small objects are
    not among them."""
    libc = CDLL(None)
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


CALLS = [
    "decode_step", "remaining_rows", "prefill", "predict_frame", "multiply_rows", "pack_matrices",
    "quantise_matrices", "run_code2wav", "convolve_audio", "encoder_layer",
]  # fmt: skip


def every_call(config: OmniConfig, library: Library) -> dict[str, Callable[[], object]]:
    """Each call of the library by its name, with small inputs."""
    c = talker_config(config)
    native = native_predictor(c, library)
    hidden, code0, starts = frames(c, 2)
    m = made(config, "thinker", "tiny", "int4")
    steps, tokens, (rows, at) = m.native(library, 4), torch.tensor([5, 6]), prompt_rows(m.c, 21)
    visual, features = torch.tensor([1, 3]), torch.randn(2, 2, m.c.hidden_size)
    layer = NativeLinear(packed_and_widened(nn.Linear(64, 99), "talker", "mixed")[0], library, 4)
    assert config.code2wav is not None
    code2wav, codes = Code2Wav(config.code2wav), torch.zeros(1, 16, 2, dtype=torch.int64)
    vocoder = NativeCode2Wav(code2wav, library)
    _, state = vocoder.start(codes)
    audio = config.thinker.audio
    convolve = NativeAudioConvolutions(AudioEncoder(audio), library, 4)
    ear, _ = packed_and_widened(AudioEncoder(audio), "audio_encoder", "mixed")
    encode = NativeEncoderLayer(ear.layers[0], library, 4)
    heard = torch.randn(2, 30, audio.hidden_size)
    chunks = torch.randn(2, audio.mel_bins, audio.chunk_mel_frames)
    sampler = Sampler(SamplingParams(True), 3000, Noise(0, TALKER))
    sample, tokens_logits = NativeSampler(library), torch.randn(1, 3000)
    return {
        "remaining_rows": lambda: sample([sampler], [tokens_logits]),
        "decode_step": lambda: decode(steps, [0, 1], [3, 4], [3.0, 4.0], tokens),
        "prefill": lambda: steps.prefill(0, 0, rows, at, visual, features),
        "predict_frame": lambda: native(hidden, code0, starts, torch.full((2,), 0.8)),
        "multiply_rows": lambda: layer(rows),
        "pack_matrices": lambda: pack_in_c(hidden, library),
        "quantise_matrices": lambda: quantise_in_c(hidden.bfloat16(), library, Groups()),
        "run_code2wav": lambda: (vocoder.start(codes), vocoder.step(codes, state)),
        "convolve_audio": lambda: convolve(chunks, audio.chunk_mel_frames),
        "encoder_layer": lambda: encode(heard, torch.ones(2, 1, 1, 30, dtype=torch.bool)),
    }


@torch.no_grad()
@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="malloc is not glibc's of 2.33")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_frees_what_it_allocates(
    config: OmniConfig, library: Library, name: str
) -> None:
    """Counted in malloc itself: a peak of memory hides what is leaked below it."""
    before = allocated_bytes()
    held = ctypes.create_string_buffer(100_000)
    assert allocated_bytes() - before >= len(held), "the measure misses an allocation"
    call, calls = every_call(config, library)[name], 500
    for _ in range(50):  # what torch, malloc and the pool's threads keep for later
        call()
    grown = []
    for _ in range(3):  # one that has a helper's first task keeps its memory; a leak is in all
        before = allocated_bytes()
        for _ in range(calls):
            call()
        grown.append((allocated_bytes() - before) / calls)
    assert min(grown) < 32, f"{grown} bytes a call are left"
