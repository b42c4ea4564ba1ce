"""Inputs, weights and slots that the C refuses."""

import pytest
import torch
from torch import nn

from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.native.binding import Library, UnsuitedError
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.config import OmniConfig
from testing.native_library import needs_c
from testing.native_modules import (
    POSITIONS,
    decode,
    frames,
    made,
    native_predictor,
    prompt_rows,
    random_predictor,
    talker_config,
)
from testing.packed import packed_and_widened

pytestmark = needs_c


@torch.no_grad()
def test_other_shapes_and_types_are_refused(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    native = native_predictor(c, library)
    hidden, code0, starts = frames(c, 2)
    native(hidden, code0, starts, torch.full((2,), 0.8))
    for wrong in (
        hidden[:, :32],
        hidden.double(),
        torch.stack((hidden, hidden), -1)[..., 0],  # not dense
    ):
        with pytest.raises(ValueError, match="the C takes"):
            native(wrong, code0)
    with pytest.raises(IndexError, match="there are 1"):
        native(hidden[:1], code0)
    for code in (-1, c.text.vocab_size):
        with pytest.raises(IndexError, match=str(code)):
            native(hidden, torch.tensor([0, code]))
    m = made(config, "thinker", "tiny")
    steps, (rows, positions) = m.native(library), prompt_rows(m.c, 5)
    visual, features = torch.tensor([1, 3]), torch.randn(2, 2, m.c.hidden_size)
    for wrong_prompt in (
        (rows[:, :32], positions),
        (rows.double(), positions),
        (rows.bfloat16(), positions),
        (rows, positions[:2]),
        (rows, positions[:, :4]),
        (rows, positions.double()),
        (rows, positions, visual.int(), features),
        (rows, positions, visual, features[:, :1]),
        (rows, positions, visual, features.double()),
    ):
        with pytest.raises(ValueError, match="the C takes"):
            steps.prefill(0, 0, *wrong_prompt)
    layer = NativeLinear(packed_and_widened(nn.Linear(3, 5), "talker", "mixed")[0], library, 1)
    with pytest.raises(ValueError, match=r"the C takes torch\.float32"):
        layer(torch.randn(2, 3).double())
    audio = config.thinker.audio
    convolve = NativeAudioConvolutions(AudioEncoder(audio), library, 1)
    chunks = torch.zeros(2, audio.mel_bins, audio.chunk_mel_frames)
    for wrong_chunks in (chunks.double(), chunks[:, 1:], chunks[..., 1:], chunks[0]):
        with pytest.raises(ValueError, match=r"the C takes torch\.float32"):
            convolve(wrong_chunks, 9)
    for width in (0, audio.chunk_mel_frames + 1):
        with pytest.raises(ValueError, match=f"of 1 to {audio.chunk_mel_frames}"):
            convolve(chunks, width)


@torch.no_grad()
def test_weights_in_other_forms_are_refused(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    whole = random_predictor(c)
    with pytest.raises(UnsuitedError, match="float32"):  # not packed
        NativePredictor(c, whole, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    with pytest.raises(UnsuitedError, match=r"uint8 \[2, 5, 3200\]"):
        NativePredictor(talker_config(config, ffn_width=136), packed, library)
    with pytest.raises(UnsuitedError, match=r"no weights of torch\.float64"):
        packed.head.data = packed.head.double()
        NativePredictor(c, packed, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    packed.head.data = packed.head.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(UnsuitedError, match="dense"):
        NativePredictor(c, packed, library)
    packed, _ = packed_and_widened(whole, "code_predictor", "mixed")
    with pytest.raises(UnsuitedError, match="float32"):  # norms in bfloat16
        NativePredictor(c, packed.bfloat16(), library)
    m = made(config, "talker", "tiny", "int8")
    m.packed.codec_head.weight_scale = m.packed.codec_head.weight_scale[:-1]
    with pytest.raises(UnsuitedError, match="float32"):
        m.native(library)


def test_a_place_outside_the_slots_is_refused(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "tiny")
    steps, row = m.native(library), torch.zeros(1, m.c.hidden_size)
    for slot, length in ((4, 0), (-1, 0), (0, POSITIONS)):
        with pytest.raises(IndexError, match=f"{POSITIONS} of 4"):
            decode(steps, [slot], [length], [0.0], row)
    for start, count in ((0, POSITIONS + 1), (1, POSITIONS), (POSITIONS, 1)):
        with pytest.raises(IndexError, match=f"to {POSITIONS + 1} of slots"):
            steps.prefill(0, start, torch.zeros(count, m.c.hidden_size), torch.zeros(3, count))
    rows, positions = torch.zeros(3, m.c.hidden_size), torch.zeros(3, 3)
    with pytest.raises(IndexError, match="positions"):
        steps.prefill(0, -1, rows, positions)
    with pytest.raises(IndexError, match="positions"):
        decode(steps, [0], [-1], [0.0], row)
    with pytest.raises(ValueError, match="no rows"):
        steps.prefill(0, 3, rows[:0], positions[:, :0])
    thinker = made(config, "thinker", "tiny")
    for visual in ([0, 3], [-1, 0], [1, 0], [1, 1]):
        features = torch.zeros(1, 2, thinker.c.hidden_size)
        prompt = torch.zeros(3, thinker.c.hidden_size), positions
        with pytest.raises(IndexError, match="ascending rows of the 3"):
            thinker.native(library).prefill(0, 0, *prompt, torch.tensor(visual), features)
