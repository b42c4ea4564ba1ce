"""Each model alone against the reference's, in float32 (and bfloat16 where it matters)."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.engines.talker import TextRows
from qwen3_omni_neuron.model.audio_encoder import WindowBatch, window_batches
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.model.layers import RmsNorm, widen
from qwen3_omni_neuron.model.rotary import apply_rotary
from qwen3_omni_neuron.prompt.prompt import rope_positions
from qwen3_omni_neuron.verification.oracle import Reference
from testing.models import load_models
from testing.teacher_forcing import teacher_forced_logits
from testing.tiny import write_tiny_checkpoint
from testing.tiny.sizes import SIZES, resized

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def random_ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 250, (rows,), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def test_thinker_prefill_and_accept_layer(models, config, reference) -> None:
    """hidden_states[accept_hidden_layer] is the output of the layer before that number."""
    ids = random_ids(30)
    expected = reference.model.thinker(
        input_ids=ids[None], attention_mask=torch.ones(1, 30).long(), output_hidden_states=True
    )
    cache = KvCache.zeros(config.thinker.text, 3, 64, torch.float32)
    positions = rope_positions(30)
    logits, accepted = models.thinker.prefill(
        models.thinker.embedding(ids), positions, torch.tensor([29]), PromptCache(cache.slots(1, 2))
    )
    torch.testing.assert_close(logits[0], expected.logits[0, -1], **CLOSE)
    layer = config.talker.accept_hidden_layer
    torch.testing.assert_close(accepted, expected.hidden_states[layer][0], **CLOSE)
    neighbours = (expected.hidden_states[layer - 1][0], expected.hidden_states[layer + 1][0])
    assert not any(torch.allclose(accepted, other, atol=1e-2) for other in neighbours)
    assert not cache.keys[:, 0].any(), "a prefill writes into its own line alone"
    assert not cache.keys[:, 2].any(), "a prefill writes into its own line alone"


@torch.no_grad()
@pytest.mark.parametrize("axes", ["apart", "alike"])
def test_thinker_positions_over_three_axes(models, config, reference, axes) -> None:
    ids = random_ids(24)
    time = torch.arange(24)
    positions = torch.stack((time, time // 4, time % 5)) if axes == "apart" else time.expand(3, -1)
    expected = reference.thinker_model(
        inputs_embeds=models.thinker.embedding(ids)[None], position_ids=positions[:, None]
    ).last_hidden_state[0, -1]
    cache = KvCache.zeros(config.thinker.text, 1, 64, torch.float32)
    logits, _ = models.thinker.prefill(
        models.thinker.embedding(ids), positions.float(), torch.tensor([23]), PromptCache(cache)
    )
    torch.testing.assert_close(logits[0], reference.model.thinker.lm_head(expected), **CLOSE)


@torch.no_grad()
def test_thinker_decodes_slots_of_different_lengths_as_one_batch(models, config) -> None:
    """Each row of the batch is what the slot gives alone, whatever lies in the rest of the cache,
    and whichever slots take part."""
    lengths, lines = [5, 17, 9], [3, 0, 4]
    cache = KvCache.zeros(config.thinker.text, 5, 32, torch.float32)
    cache.keys.fill_(1e3)
    cache.values.fill_(-1e3)
    prompts = [random_ids(n) for n in lengths]
    for line, ids in zip(lines, prompts, strict=True):
        models.thinker.prefill(
            models.thinker.embedding(ids),
            rope_positions(len(ids)),
            torch.tensor([len(ids) - 1]),
            PromptCache(cache.slots(line, line + 1)),
        )
    where = torch.tensor(lengths)
    token = torch.tensor([7, 8, 9])
    slots = SlotCache(cache.window(max(lengths) + 1), torch.tensor(lines), where)
    logits = models.thinker.decode(token, where.float(), slots)
    assert (cache.keys[:, 1:3] == 1e3).all(), "a step writes into its own slots alone"
    for slot, ids in enumerate(prompts):
        alone = KvCache.zeros(config.thinker.text, 1, 32, torch.float32)
        whole = torch.cat((ids, token[slot : slot + 1]))
        expected, _ = models.thinker.prefill(
            models.thinker.embedding(whole),
            rope_positions(len(whole)),
            where[slot, None],
            PromptCache(alone),
        )
        torch.testing.assert_close(logits[slot], expected[0], **CLOSE)


def encoded(models: Models, batches: Iterable[WindowBatch]) -> torch.Tensor:
    """Rows [tokens, hidden] of all windows."""
    return torch.cat([models.audio_encoder(*batch)[batch.valid] for batch in batches])


@torch.no_grad()
@pytest.mark.parametrize(
    "frames",
    [[1], [7], [41], [99], [30, 57], [100], [799], [800], [801], [930, 400], [1650, 90, 803]],
    ids=lambda frames: "-".join(map(str, frames)),
)
def test_clips_of_any_length_are_encoded_as_the_references(
    models, config, reference, frames
) -> None:
    """Windows of 8 s, clips apart. The oracle is the encoder of transformers 5, which keeps to
    the windows; 4.57's attends across them unless flash attention is on, so there each window is
    given to it on its own."""
    audio = config.thinker.audio
    clips = [torch.randn(128, n, generator=torch.Generator().manual_seed(n)) for n in frames]
    if TRANSFORMERS_5:
        pieces = [(torch.cat(clips, 1), torch.tensor(frames))]
    else:
        windows = [w for c in clips for w in c.split(audio.window_mel_frames, 1)]
        if len(windows) > 1 and min(w.shape[1] for w in windows) < audio.chunk_mel_frames:
            pytest.skip("4.57 pads a window of under 1 s otherwise when it is given it alone")
        pieces = [(w, torch.tensor([w.shape[1]])) for w in windows]
    thinker = reference.model.thinker
    tower = getattr(thinker, "audio_tower", None) or thinker.model.audio_tower
    theirs = [tower(m, feature_lens=n).last_hidden_state for m, n in pieces]
    for most, whole in ((1, True), (2, False), (8, True), (8, False)):
        batches = list(window_batches(clips, audio, most, whole))
        longest = max(min(n, audio.window_mel_frames) for n in frames)
        chunks = 8 if whole else -(-longest // audio.chunk_mel_frames)
        assert max(batch.mel.shape[2] for batch in batches) == chunks * audio.chunk_mel_frames
        ours = encoded(models, batches)
        torch.testing.assert_close(ours, torch.cat(theirs), **CLOSE)
    assert len(ours) == sum(audio.tokens(n) for n in frames)


@torch.no_grad()
def test_audio_padding_does_not_matter(models, config) -> None:
    (batch,) = window_batches([torch.randn(128, 300)], config.thinker.audio, 8)
    clean = encoded(models, [batch])
    batch.mel[:, :, 300:] = 1e4
    torch.testing.assert_close(encoded(models, [batch]), clean, **CLOSE)


@torch.no_grad()
def test_talker_prefill_and_decode(models, config, reference) -> None:
    rows = torch.randn(14, config.talker.text.hidden_size)
    expected = reference.model.talker.model(
        inputs_embeds=rows[None], position_ids=torch.arange(14).expand(3, 1, -1)
    ).last_hidden_state[0]
    cache = KvCache.zeros(config.talker.text, 1, 32, torch.float32)
    models.talker.prefill(rows[:9], rope_positions(9), torch.tensor([8]), PromptCache(cache))
    for step in range(9, 14):
        at = torch.tensor([step])
        line = SlotCache(cache.window(step + 1), torch.tensor([0]), at)
        logits, hidden = models.talker.decode(rows[step : step + 1], at.float(), line)
        torch.testing.assert_close(hidden[0], expected[step], **CLOSE)
        torch.testing.assert_close(
            logits[0], reference.model.talker.codec_head(expected[step]), **CLOSE
        )


@torch.no_grad()
def test_projections_and_text_rows(models, reference) -> None:
    weight = models.thinker.embedding.weight
    text_rows = TextRows(weight, models.text_projection, 64, torch.float32)
    ids = torch.tensor([0, 5, 300, len(weight) - 1])
    embedded = reference.thinker_model.embed_tokens(ids)
    expected = reference.model.talker.text_projection(embedded)
    torch.testing.assert_close(text_rows(ids), expected, **CLOSE)
    hidden = torch.randn(6, 64)
    torch.testing.assert_close(
        models.hidden_projection(hidden), reference.model.talker.hidden_projection(hidden), **CLOSE
    )


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory) -> Path:
    """The tiny one's code predictor has one layer; drift and a cache by layer show in more."""
    predictor = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    changes = {"talker_config": {"code_predictor_config": predictor}}
    size = resized(SIZES["tiny"], changes)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("deep"), seed=5, size=size)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_code_predictor_teacher_forced(deep_checkpoint, dtype) -> None:
    """Logits at each of the 15 steps. In bfloat16 both round at every operation, so the yardstick
    is the reference in float32: ours may be no further from it than the reference's own."""
    models = load_models(Checkpoint(deep_checkpoint), read_config(deep_checkpoint), dtype)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(64, 64, generator=generator).to(dtype)
    codes = torch.randint(0, 64, (64, 16), generator=generator)
    ours = teacher_forced_logits(models.code_predictor, hidden, codes).float()
    exact = reference_logits(Reference(deep_checkpoint), hidden.float(), codes)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, exact, **CLOSE)
        return
    theirs = reference_logits(Reference(deep_checkpoint, dtype), hidden, codes).float()
    for step in range(15):
        ours_off = (ours[:, step] - exact[:, step]).abs().mean()
        theirs_off = (theirs[:, step] - exact[:, step]).abs().mean()
        assert ours_off < 1.2 * theirs_off, f"step {step}: {ours_off} against {theirs_off}"


def reference_logits(
    reference: Reference, hidden: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """[streams, 15, vocab], from one causal pass over all sixteen rows."""
    predictor = reference.model.talker.code_predictor
    rows = [hidden, reference.model.talker.get_input_embeddings()(codes[:, 0])]
    tables = predictor.get_input_embeddings()
    rows += [tables[g](codes[:, g + 1]) for g in range(14)]
    states = predictor.model(inputs_embeds=torch.stack(rows, 1)).last_hidden_state
    return torch.stack([predictor.lm_head[g](states[:, g + 1]) for g in range(15)], 1)


@torch.no_grad()
def test_norm_and_rotation_are_float32_inside(models) -> None:
    """In bfloat16 they are the float32 result, rounded: once for the norm before its weight, once
    after the rotation. A norm that stays in bfloat16 is off in every third value."""
    assert models.code_predictor is not None
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(8)).bfloat16()
    norm = RmsNorm(64, eps=1e-6)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert (norm(x).bfloat16() == exact.bfloat16()).float().mean() > 0.999
    heads = x.view(200, 4, 16)
    rotation = models.thinker.rotary.at(torch.arange(200) % 16)
    assert rotation[0].dtype == rotation[1].dtype == torch.float32
    turned = apply_rotary(widen(heads), rotation)
    assert turned.dtype == torch.float32
    assert torch.equal(turned, apply_rotary(heads.float(), rotation))


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 2048])
def test_norm_is_the_references(width) -> None:
    theirs = modeling.Qwen3OmniMoeRMSNorm(width, eps=1e-6)
    ours = RmsNorm(width, eps=1e-6)
    weight = 1 + 0.1 * torch.randn(width)
    theirs.weight.copy_(weight)
    ours.weight.copy_(weight)
    for scale in (1e-4, 1.0, 1e4):  # the smallest is where eps counts
        x = scale * torch.randn(50, width)
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_code_predictor_codes_and_feedback(deep_checkpoint) -> None:
    config, reference = read_config(deep_checkpoint), Reference(deep_checkpoint)
    models = load_models(Checkpoint(deep_checkpoint), config, torch.float32)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    code0 = torch.tensor([3, 0, 63, 17])
    codes, feedback = models.code_predictor(hidden, code0)
    talker = reference.model.talker
    embedded = talker.get_input_embeddings()(code0)
    for stream in range(4):
        rows = torch.stack((hidden[stream], embedded[stream]))[None]
        expected = talker.code_predictor.generate(inputs_embeds=rows, max_new_tokens=15)
        assert codes[stream].tolist() == [int(code0[stream]), *expected[0].tolist()]
    tables = talker.code_predictor.get_input_embeddings()
    total = embedded + sum(tables[g](codes[:, g + 1]) for g in range(15))
    torch.testing.assert_close(feedback, total, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2, 11, 12, 13, 60])
def test_code2wav_gives_the_references_samples(models, config, reference, frames) -> None:
    """One full forward, within and beyond the sliding window of 12."""
    assert config.code2wav is not None
    codes = torch.randint(0, 64, (2, 16, frames), generator=torch.Generator().manual_seed(frames))
    ours = models.code2wav(codes)
    assert ours.shape == (2, frames * 1920 - 555)
    torch.testing.assert_close(ours, reference.model.code2wav(codes)[:, 0], **CLOSE)
