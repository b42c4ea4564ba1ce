"""Rope positions of thinker and talker, held against the reference's own."""

import pytest
import torch

from qwen3_omni_neuron.verification.oracle import media_inputs
from testing.media_cases import CASES, Case


def test_thinker_positions_are_the_references(omni, reference) -> None:
    for name in CASES:
        case = CASES[name]
        prompt = omni.prompt_builder.prompt(case.messages, case.use_audio_in_video)
        theirs = reference_positions(
            reference.model.thinker,
            prompt.token_ids,
            case,
            media_inputs(prompt),
            case.use_audio_in_video,
        )
        torch.testing.assert_close(prompt.positions, theirs, atol=1e-4, rtol=0)
        if "odd" not in name:
            assert torch.equal(prompt.positions, theirs)


@pytest.mark.parametrize("name", CASES)
def test_talker_positions_are_the_references(omni, config, reference, name) -> None:
    """Over its own ids: user segments, then tts_pad. It isn't told of sound in videos."""
    case = CASES[name]
    prompt = omni.prompt_builder.prompt(case.messages, case.use_audio_in_video)
    ids = torch.cat((prompt.talker.token_ids, torch.full((9,), config.tts_pad_id)))
    theirs = reference_positions(reference.model.talker, ids, case, media_inputs(prompt), False)
    torch.testing.assert_close(prompt.talker.positions, theirs, atol=1e-4, rtol=0)


def reference_positions(
    model: torch.nn.Module,
    ids: torch.Tensor,
    case: Case,
    media: dict[str, torch.Tensor],
    use_audio_in_video: bool,
) -> torch.Tensor:
    mask = media.get("feature_attention_mask")
    positions, _ = model.get_rope_index(
        ids[None],
        image_grid_thw=media.get("image_grid_thw"),
        video_grid_thw=media.get("video_grid_thw"),
        attention_mask=torch.ones_like(ids)[None],
        use_audio_in_video=use_audio_in_video,
        audio_seqlens=None if mask is None else mask.sum(1),
        second_per_grids=torch.tensor(case.seconds_per_grid),
    )
    return positions[:, 0].float()
