"""The released sizes, Qwen3-Omni-30B-A3B-Instruct, for plans and tests without its config.json."""

from dataclasses import replace

from qwen3_omni_neuron.model.config import (
    AudioEncoderConfig,
    Code2WavConfig,
    DecoderConfig,
    MoeConfig,
    OmniConfig,
    RopeConfig,
    TalkerConfig,
    ThinkerConfig,
    VisionEncoderConfig,
)

MROPE = RopeConfig(1e6, (24, 20, 20))
THINKER = ThinkerConfig(
    text=DecoderConfig(
        2048, 48, 32, 4, 128, 768, 152064, 65536, 1e-6, MROPE, MoeConfig(128, 8, 768, True, 0)
    ),
    audio=AudioEncoderConfig(1280, 32, 20, 5120, 128, 480, 2048, 1500, 100, 800),
    vision=VisionEncoderConfig(1152, 27, 16, 4304, 1536, 2, 2048, 48, 10000.0, (8, 16, 24)),
    audio_token_id=151675,
    image_token_id=151655,
    video_token_id=151656,
    positions_per_second=13,
)
TALKER = TalkerConfig(
    text=DecoderConfig(
        1024, 20, 16, 2, 128, 2048, 3072, 65536, 1e-6, MROPE, MoeConfig(128, 6, 384, True, 768)
    ),
    predictor=DecoderConfig(1024, 5, 16, 8, 128, 3072, 2048, 32768, 1e-6, RopeConfig(1e6)),
    code_groups=16,
    thinker_hidden_size=2048,
    projection_width=2048,
    accept_hidden_layer=24,
    codec_bos_id=2149,
    codec_eos_id=2150,
    codec_pad_id=2148,
    codec_nothink_id=2155,
    codec_think_bos_id=2156,
    codec_think_eos_id=2157,
    speaker_ids={"chelsie": 2301, "ethan": 2302, "aiden": 2303},
)
CODE2WAV = Code2WavConfig(
    hidden_size=1024,
    layers=8,
    heads=16,
    kv_heads=16,
    ffn_width=3072,
    codebook_size=2048,
    code_groups=16,
    sliding_window=72,
    max_positions=8000,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    decoder_dim=1536,
    upsampling_ratios=(2, 2),
    upsample_rates=(8, 5, 4, 3),
)
RELEASED = OmniConfig(
    thinker=THINKER,
    talker=TALKER,
    code2wav=CODE2WAV,
    dtype="bfloat16",
    im_start_id=151644,
    im_end_id=151645,
    user_id=872,
    assistant_id=77091,
    tts_pad_id=151671,
    tts_bos_id=151672,
    tts_eos_id=151673,
)


def of_depth(layers: int) -> OmniConfig:
    """Return the released sizes with decoders of so many layers, each of which repeats the last."""
    thinker, talker = (replace(c.text, layers=layers) for c in (RELEASED.thinker, TALKER))
    return replace(
        RELEASED,
        thinker=replace(RELEASED.thinker, text=thinker),
        talker=replace(TALKER, text=talker, accept_hidden_layer=1),
    )
