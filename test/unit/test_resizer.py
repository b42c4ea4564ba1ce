"""Patches against transformers' processor, and against the layout written out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qwen3_omni_neuron.checkpoint.json_files import read_preprocessor
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.media.pixels import (
    Grid,
    PixelSettings,
    SizeLimits,
    Visual,
    VisualSize,
)
from testing.tiny.sizes import read_text

PATCH, MERGE, TOGETHER = 16, 2, 2
VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)


def folder_with(folder: Path, **changed: Any) -> Path:
    config = json.loads(read_text("preprocessor_config.json")) | changed
    (folder / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # Means and deviations that differ by channel: one mistaken for another would show.
    return folder_with(
        tmp_path_factory.mktemp("checkpoint"),
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.25, 0.2],
    )


class Resizer:
    """Images and frames in the grid that their sizes and limits give."""

    def __init__(self, folder: Path):
        self.pixels = PixelSettings.of(read_preprocessor(folder))
        self.sizes = self.pixels.sizes

    def grid(self, height: int, width: int, frames: int | None = None, **asked: Any) -> Grid:
        return self.sizes.grid(VisualSize("here", height, width, frames, SizeLimits(**asked)))

    def image(self, picture: Image.Image, **asked: Any) -> Visual:
        return self.pixels.image(picture, self.grid(picture.height, picture.width, **asked))

    def video(self, frames: np.ndarray, **asked: Any) -> Visual:
        n, height, width, _ = frames.shape
        return self.pixels.video(frames, self.grid(height, width, n, **asked))


@pytest.fixture(scope="module")
def resizer(folder) -> Resizer:
    return Resizer(folder)


@pytest.fixture(scope="module")
def processor(folder) -> Any:
    import transformers.models.qwen2_vl as models

    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )
    except ModuleNotFoundError:
        return models.Qwen2VLImageProcessor.from_pretrained(folder)
    return Qwen2VLImageProcessorPil.from_pretrained(folder)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def same(made: Visual, values: np.ndarray, grid: tuple[int, int, int]) -> None:
    assert made.grid == grid
    patches = made.patches()
    assert patches.dtype == torch.float32
    assert patches.shape[:2] == (grid[0], grid[1] * grid[2])
    assert patches.flatten(0, 1).shape == values.shape
    worst = float(np.abs(patches.flatten(0, 1).numpy() - values).max())
    assert worst < 1e-5, f"off by {worst}"


def test_sizes_are_those_of_the_checkpoint(resizer) -> None:
    made = resizer.sizes
    sizes = (made.patch_size, made.merge_size, made.temporal_patch_size)
    assert sizes == (PATCH, MERGE, TOGETHER)


@pytest.mark.parametrize(
    ("height", "width"),
    [(64, 96), (100, 37), (1, 1), (1, 150), (150, 1), (3, 50), (33, 3), (3, 3), (1000, 700)],
)
def test_pictures_are_as_transformers_makes_them(resizer, processor, height, width) -> None:
    pixels = noise(height, width, 3)
    expected = processor(images=[pixels], input_data_format="channels_last", return_tensors="np")
    made = resizer.image(Image.fromarray(pixels))
    same(made, expected["pixel_values"], tuple(expected["image_grid_thw"][0].tolist()))
    assert resizer.sizes.tokens(made.grid) * MERGE**2 == made.patches().shape[1]


def test_pictures_are_resized_into_the_limits(resizer, processor) -> None:
    for limits in ((4096, 8192), (200_000, 300_000), (1024, 1024)):
        pixels = noise(200, 120, 3)
        low, high = limits
        expected = processor(
            images=[pixels],
            size={"shortest_edge": low, "longest_edge": high},
            input_data_format="channels_last",
            return_tensors="np",
        )
        made = resizer.image(Image.fromarray(pixels), min_pixels=low, max_pixels=high)
        same(made, expected["pixel_values"], tuple(expected["image_grid_thw"][0].tolist()))
        assert low <= np.prod(made.grid) * PATCH**2 <= high


def test_limits_of_the_checkpoint_are_used(tmp_path) -> None:
    small = Resizer(folder_with(tmp_path, min_pixels=1024, max_pixels=4096))
    assert np.prod(small.grid(500, 500)) * PATCH**2 == 4096
    assert np.prod(small.grid(1, 1)) * PATCH**2 == 1024


def laid_out(frames: np.ndarray, resizer: Resizer) -> np.ndarray:
    """Lay out resized, normalised frames [n, 3, H, W], one number at a time."""
    n, channels, height, width = frames.shape
    h, w = height // PATCH, width // PATCH
    pairs = -(-n // TOGETHER)
    rows = np.full((pairs * h * w, channels * TOGETHER * PATCH * PATCH), np.nan, np.float32)
    for pair in range(pairs):
        for y in range(h):
            for x in range(w):
                block = (y // MERGE) * (w // MERGE) + x // MERGE
                row = pair * h * w + block * MERGE**2 + (y % MERGE) * MERGE + x % MERGE
                corner = (slice(y * PATCH, (y + 1) * PATCH), slice(x * PATCH, (x + 1) * PATCH))
                for channel in range(channels):
                    for k in range(TOGETHER):
                        frame = min(pair * TOGETHER + k, n - 1)
                        first = (channel * TOGETHER + k) * PATCH**2
                        values = frames[(frame, channel, *corner)]
                        rows[row, first : first + PATCH**2] = values.reshape(-1)
    return rows


@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
def test_videos_are_laid_out_frame_by_frame(resizer, n) -> None:
    frames = noise(n, 64, 96, 3)  # of a size that is not resized
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.5, 0.25, 0.2])
    normal = ((frames / 255 - mean) / std).astype(np.float32).transpose(0, 3, 1, 2)
    made = resizer.video(frames, min_pixels=1024)
    same(made, laid_out(normal, resizer), (-(-n // TOGETHER), 4, 6))
    assert resizer.grid(64, 96, n, min_pixels=1024) == made.grid


def test_a_video_of_one_picture_is_that_picture_over_and_over(resizer) -> None:
    for size in ((70, 50), (1, 1), (3, 40)):
        pixels = noise(*size, 3)
        low, high = VIDEO_LIMITS
        still = resizer.image(Image.fromarray(pixels), min_pixels=low, max_pixels=high)
        video = resizer.video(np.stack([pixels] * 6))
        same(video, still.patches()[0].repeat(3, 1).numpy(), (3, *still.grid[1:]))


def test_the_patches_of_a_part_are_those_of_the_whole(resizer) -> None:
    made = resizer.video(noise(5, 64, 96, 3), min_pixels=1024)
    patches = made.patches()
    for first, stop in ((0, 1), (1, 3), (2, 3), (2, 9)):
        part = made.part(first, stop)
        assert part.grid == (min(stop, 3) - first, 4, 6)
        assert torch.equal(part.patches(), patches[first:stop])


@pytest.mark.parametrize(
    "changed", [{"patch_size": 0}, {"merge_size": "2"}, {"do_resize": False}, {"max_pixels": -1}]
)
def test_a_checkpoint_that_makes_no_patches_is_refused(tmp_path, changed) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json has"):
        Resizer(folder_with(tmp_path, **changed))
