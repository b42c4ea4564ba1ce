"""Rope positions of thinker and talker, held against the reference's own."""

import pytest
import torch

from qwen3_omni_neuron.prompt.prompt import MediaRun, rope_positions
from qwen3_omni_neuron.verification.oracle import media_inputs
from testing.media_cases import CASES, Case


def test_text_counts_up_on_all_axes() -> None:
    assert rope_positions(4).tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_an_image_lies_in_rows_and_columns() -> None:
    """Two tokens of text, an image of 2 x 3, one token of text after its highest position."""
    assert rope_positions(9, [(2, MediaRun(grid=(1, 2, 3)))]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_a_videos_frames_lie_at_their_times() -> None:
    """Two frames of one token, 0.8 s apart at 13 positions a second."""
    time, height, _ = rope_positions(4, [(1, MediaRun(grid=(2, 1, 1), frame_positions=10.4))])
    torch.testing.assert_close(time, torch.tensor([0.0, 1.0, 11.4, 12.4]))
    torch.testing.assert_close(height, torch.tensor([0.0, 1.0, 1.0, 12.4]))


def test_a_frame_comes_before_the_sound_of_its_time() -> None:
    run = MediaRun(audio_tokens=3, grid=(2, 1, 2), frame_positions=1.0)
    assert run.is_audio().tolist() == [False, False, True, False, False, True, True]


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
