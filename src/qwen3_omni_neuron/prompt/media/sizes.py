"""Sizes to which images and frames are resized, their numbers of tokens, and media settings.

Nothing here needs torch, because a process that only decodes uses it, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qwen3_omni_neuron.checkpoint.json_files import whole_setting
from qwen3_omni_neuron.errors import (
    CheckpointError,
    ImageError,
    InputError,
    PromptTooLongError,
    VideoError,
    format_value,
)
from qwen3_omni_neuron.prompt.media.fields import Warn
from qwen3_omni_neuron.prompt.media.image import MAX_ASPECT
from qwen3_omni_neuron.prompt.media.item_fields import MOST_PIXELS

Grid = tuple[int, int, int]
"""Frames, and rows and columns of patches in a frame."""
PixelLimits = tuple[int, float]  # minimum and maximum number of pixels after resizing
LOW_TOKENS = 256
"""Most tokens of an image of `detail` "low"."""
LOW_FRAME_TOKENS = 128
"""Most tokens of a frame of a video of `detail` "low"."""
LEAST_TOKENS = 64
"""Tokens that an image keeps when it is shrunk to fit, or a few less by rounding."""
LEAST_FRAMES = 4
"""Frames that a video keeps at least."""
_MOST_PATCH = 1024  # a patch's side: 16 pixels
# Limits per video frame. Not in the checkpoint: transformers Qwen3OmniMoeProcessor sets them.
_VIDEO_LIMITS = (128 * 32 * 32, 768 * 32 * 32)
_TOGETHER = 2  # qwen-omni-utils' FRAME_FACTOR, by which total_pixels is divided
# Tokens within which qwen-omni-utils keeps resized_height and resized_width.
_RESIZED_TOKENS = (4, 16384)


@dataclass(frozen=True)
class SizeLimits:
    """Limits of an item's size, as prompt.media.item_fields reads them.

    min_pixels, max_pixels: number of pixels after resizing; None: the default of its kind.
    total_pixels: most pixels of a video's frames / 2. resized_height, resized_width: the size
    itself, which is rounded to whole tokens. detail: one of DETAILS, None: "auto".
    least_frames: frames that a video keeps at least. most_tokens: maximum number of its tokens;
    None: no maximum.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    detail: str | None = None
    least_frames: int = LEAST_FRAMES
    most_tokens: int | None = None

    @classmethod
    def of(cls, item: Mapping[str, Any], most_tokens: int | None = None) -> "SizeLimits":
        """Return the limits in the fields of a message's item."""
        named = {name: item.get(name) for name in SIZE_FIELDS}
        # Frames that the caller asks for are kept.
        least = max(LEAST_FRAMES, item.get("min_frames") or 0, item.get("nframes") or 0)
        return cls(**named, least_frames=least, most_tokens=most_tokens)

    @property
    def shrinks(self) -> bool:
        """True where the item may be shrunk to fit."""
        return self.detail not in ("high", "original") and self.resized_height is None


SIZE_FIELDS = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    "detail",
)
"""Fields of an image or video item that set its size in tokens."""
USUAL = SizeLimits()


@dataclass(frozen=True)
class VisualSize:
    """Size of an image or video before it is decoded.

    height, width: in pixels, before rotation. frames: number of a video's frames, None for an
    image. where: name of the item in errors. sound_tokens: tokens that a video's audio adds, as far
    as its header says.
    """

    where: str
    height: int
    width: int
    frames: int | None = None
    asked: SizeLimits = USUAL
    sound_tokens: int = 0

    @property
    def error(self) -> type[InputError]:
        """Class of errors about it."""
        return ImageError if self.frames is None else VideoError

    def __str__(self) -> str:
        size = f"{self.width} x {self.height} pixels"
        frames = f"a video of {self.frames} frames of {size}"
        return f"an image of {size}" if self.frames is None else frames


@dataclass(frozen=True)
class Sizes:
    """Sizes of patches and images in a checkpoint's preprocessor_config.json.

    patch_size: side of a patch in pixels. merge_size: patches on each side of the square that
    becomes one token. temporal_patch_size: frames in a patch. min_pixels, max_pixels: number of
    pixels of an image after resizing.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Sizes":
        """Read the settings of a preprocessor_config.json, with the defaults of transformers.

        Raises CheckpointError for settings that make no patches.
        """
        size = settings.get("size") or {}
        if not isinstance(size, dict):
            raise CheckpointError(
                f"preprocessor_config.json has size {format_value(size)}, not an object."
            )
        limits = {
            "min_pixels": size.get("shortest_edge", 56 * 56),
            "max_pixels": size.get("longest_edge", 28 * 28 * 1280),
        } | {n: settings[n] for n in ("min_pixels", "max_pixels") if settings.get(n) is not None}
        return cls(
            whole_setting(settings, "patch_size", 14, _MOST_PATCH),
            whole_setting(settings, "merge_size", 2, _MOST_PATCH),
            whole_setting(settings, "temporal_patch_size", 2, _MOST_PATCH),
            whole_setting(limits, "min_pixels", 0, MOST_PIXELS),
            whole_setting(limits, "max_pixels", 0, MOST_PIXELS),
        )

    def grid(self, size: VisualSize) -> Grid:
        """Return the grid of patches of an image or video.

        Its first number is 1 for an image, and counts groups of frames of a video, whose limits
        count the pixels of a frame.
        One of more than asked.most_tokens is shrunk to them, unless its `detail` or resized_height
        forbids it: an image down to LEAST_TOKENS; of a video first its frames, down to their least
        pixels, then their number; see `frames_of`.
        Raises ImageError or VideoError for a side more than MAX_ASPECT times the other, and
        PromptTooLongError for more than asked.most_tokens.
        """
        exact, most, asked = self.exact_grid(size), size.asked.most_tokens, size.asked
        if most is None or self.tokens(exact) <= most:
            return exact
        grid = exact
        if asked.shrinks:
            limits, groups = self._limits(size), exact[0]
            pixels = max(self._least_pixels(size, limits), most // groups * self._token_pixels)
            grid = self._shrunk(size, exact, limits, pixels)
            fitting = most // (self.tokens(grid) // groups)
            grid = (min(groups, max(fitting, self._least_groups(exact, asked))), *grid[1:])
            if self.tokens(grid) <= most:
                return grid
        least = "" if grid == exact else " when it is shrunk as far as it may be"
        raise PromptTooLongError(
            f"{size.where} is {size}, which makes {self.tokens(grid)} vision tokens{least}; {most} "
            f"is the most. {self.advice(size)}"
        )

    def exact_grid(self, size: VisualSize) -> Grid:
        """Return the grid of an item that is not shrunk to fit; see `grid`."""
        height, width = size.height, size.width
        if height < 1 or width < 1:
            raise size.error(f"{size.where} is {width} x {height} pixels: there is nothing to see.")
        made = self._asked_size(size) or self._resized(size, height, width, self._limits(size))
        groups = 1 if size.frames is None else -(-size.frames // self.temporal_patch_size)
        return groups, made[0] // self.patch_size, made[1] // self.patch_size

    def least_tokens(self, size: VisualSize) -> int:
        """Return the tokens of an item that is shrunk as far as it may be."""
        exact = self.exact_grid(size)
        if not size.asked.shrinks:
            return self.tokens(exact)
        limits = self._limits(size)
        _, *sides = self._shrunk(size, exact, limits, self._least_pixels(size, limits))
        return self.tokens((self._least_groups(exact, size.asked), sides[0], sides[1]))

    def frames_of(self, grid: Grid, frames: int) -> int:
        """Return how many of a video's frames its grid shows."""
        return min(frames, grid[0] * self.temporal_patch_size)

    def fewer_frames(
        self, item: Mapping[str, Any], size: VisualSize
    ) -> tuple[Mapping[str, Any], int]:
        """Return the fields of a video's file and the number of frames to show of it.

        They are as many as fit into size.asked.most_tokens, and no more are read from the file.
        size: the video's with the fields that are given. Raises the errors of `grid`.
        """
        total = size.frames or 0
        frames = self.frames_of(self.grid(size), total)
        return (item if frames == total else {**item, "max_frames": frames}), frames

    def least_size(self, size: VisualSize, grid: Grid) -> tuple[int, int] | None:
        """Return the height and width that an image's file must be decoded with at least.

        None: with its own size, so that its pixels are those of transformers' processor: it is
        shrunk by its own max_pixels or the checkpoint's max_pixels, or not at all.
        """
        usual = replace(size, asked=replace(size.asked, detail=None))
        made = self.pixels(grid)
        exact = grid == self.exact_grid(usual) or max(made) > MAX_ASPECT * min(made)
        return None if exact else made

    def warn_of_shrinking(self, size: VisualSize, grid: Grid, warn: Warn) -> None:
        """Warn of an item that is shrunk to fit. grid: its grid."""
        exact = self.exact_grid(size)
        if grid == exact:
            return
        height, width = self.pixels(grid)
        shown = f"{width} x {height}"
        if size.frames is not None:
            shown = f"{self.frames_of(grid, size.frames)} frames of {shown}"
        warn(
            f"{size.where} is {size} ({self.tokens(exact)} tokens); it is shown to the model with "
            f"{shown} ({self.tokens(grid)} tokens), so that the conversation fits into the context."
            " To show more of it, load with a larger context_length or send less beside it."
        )

    def tokens(self, grid: Grid) -> int:
        """Count the tokens that a grid of patches becomes in a prompt."""
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def pixels(self, grid: Grid) -> tuple[int, int]:
        """Return the height and width in pixels of a grid."""
        return grid[1] * self.patch_size, grid[2] * self.patch_size

    def advice(self, size: VisualSize, several: bool = False) -> str:
        """Return what makes an item fit that does not. several: it has others beside it."""
        asked, a_frame, ways = size.asked, "" if size.frames is None else " a frame", list[str]()
        low, high = self._limits(size)
        if asked.resized_height is not None:
            ways.append("lower its resized_height and resized_width")
        elif not asked.shrinks:
            ways += ["leave its detail out, so that it is shrunk to what fits"]
            ways += [f"lower its max_pixels (now {high:.0f}{a_frame})"]
        elif asked.min_pixels is not None:
            ways.append(f"lower its min_pixels (now {low}{a_frame})")
        if asked.least_frames > LEAST_FRAMES:
            ways.append("ask for fewer frames of it")
        if several:
            ways.append("send fewer at a time")
        ways += ["shorten the conversation", "load with a larger context_length"]
        advice = f"{', '.join(ways[:-1])}, or {ways[-1]}."
        return advice[0].upper() + advice[1:]

    @property
    def _token_pixels(self) -> int:
        """Pixels of a token."""
        return (self.patch_size * self.merge_size) ** 2

    def _shrunk(self, size: VisualSize, exact: Grid, limits: PixelLimits, pixels: float) -> Grid:
        """Return the grid of at most so many pixels a frame, or the exact one if it is smaller."""
        # A side has one token at least. Beside it the other may have as many tokens as fit.
        short, long = sorted((size.height, size.width))
        flat = short / long * (pixels // self._token_pixels) ** 2 * self._token_pixels
        high = min(limits[1], pixels, max(flat, self._token_pixels))
        limits = min(limits[0], int(high)), high
        made = self._resized(size, size.height, size.width, limits)
        grid = exact[0], made[0] // self.patch_size, made[1] // self.patch_size
        return min(exact, grid, key=self.tokens)

    def _least_pixels(self, size: VisualSize, limits: PixelLimits) -> float:
        """Return the fewest pixels that an image or a frame keeps when it is shrunk to fit."""
        if size.asked.min_pixels is not None:
            return limits[0]
        image = LEAST_TOKENS * self._token_pixels
        return min(image if size.frames is None else _VIDEO_LIMITS[0], limits[1])

    def _least_groups(self, exact: Grid, asked: SizeLimits) -> int:
        return min(exact[0], -(-asked.least_frames // self.temporal_patch_size))

    def _resized(
        self, size: VisualSize, height: int, width: int, limits: PixelLimits
    ) -> tuple[int, int]:
        """Return the height and width to which an image is resized.

        Both are multiples of patch_size * merge_size, their ratio is nearly kept, and their product
        is within the limits, unless one such multiple a side is already more.
        size: the image, whose error is raised where one side is more than MAX_ASPECT times the
        other. Source: transformers smart_resize.
        """
        aspect = max(height, width) / min(height, width)
        if aspect > MAX_ASPECT:
            raise size.error(
                f"{size.where} is {width} x {height} pixels: one side is {aspect:.1f} times the "
                f"other, and {MAX_ASPECT} times is the most."
            )
        unit = self.patch_size * self.merge_size
        low, high = limits
        nearest = round(height / unit) * round(width / unit) * unit**2
        if nearest > high:
            shrink = math.sqrt((height * width) / high)
            sides = [max(1, math.floor(side / shrink / unit)) for side in (height, width)]
        elif nearest < low:
            grow = math.sqrt(low / (height * width))
            sides = [math.ceil(side * grow / unit) for side in (height, width)]
        else:
            sides = [round(side / unit) for side in (height, width)]
        return sides[0] * unit, sides[1] * unit

    def _asked_size(self, size: VisualSize) -> tuple[int, int] | None:
        """Return the height and width of resized_height and resized_width, None without them.

        Source: qwen-omni-utils.
        """
        height, width = size.asked.resized_height, size.asked.resized_width
        if height is None or width is None:
            return None
        low, high = (tokens * self._token_pixels for tokens in _RESIZED_TOKENS)
        made = self._resized(size, height, width, (low, high))
        unit = self.patch_size * self.merge_size
        # There a side is rounded to one token at least; transformers rounds it to 0, then enlarges.
        nearest = max(1, round(height / unit)) * unit, max(1, round(width / unit)) * unit
        return nearest if low <= nearest[0] * nearest[1] <= high else made

    def _limits(self, size: VisualSize) -> PixelLimits:
        """Return the least and most pixels of an image or a frame."""
        usual = (self.min_pixels, self.max_pixels) if size.frames is None else _VIDEO_LIMITS
        asked, total = size.asked, size.asked.total_pixels
        low = usual[0] if asked.min_pixels is None else asked.min_pixels
        high: float = usual[1] if asked.max_pixels is None else asked.max_pixels
        if low > high:
            # Only one limit was given, and the other's default contradicts it. The minimum becomes
            # 1, not the maximum: an image enlarged to a minimum is rounded up, beyond an equal
            # maximum.
            low, high = (low, low) if asked.max_pixels is None else (1, high)
        if size.frames is not None and total is not None:
            frames = -(-size.frames // self.temporal_patch_size) * self.temporal_patch_size
            each = max(min(usual[1], total / frames * _TOGETHER), int(low * 1.05))
            high = each if asked.max_pixels is None else min(high, each)
        if asked.detail == "low":
            most = LOW_TOKENS if size.frames is None else LOW_FRAME_TOKENS
            high = min(high, most * self._token_pixels)
            # What is smaller than the minimum is enlarged and rounded up: leave room for that.
            low = min(low, int(high) // (2 if asked.min_pixels is None else 1))
        return low, high


@dataclass(frozen=True)
class MediaSettings:
    """Settings of a checkpoint for decoding media.

    audio_rate: sampling rate in Hz. audio_tokens_per_s: number of tokens of a second of audio.
    sizes: sizes to which images and frames are resized.
    """

    audio_rate: int
    audio_tokens_per_s: float
    sizes: Sizes

    def longest_audio_s(self, most_tokens: int | None) -> float:
        """Return the length of audio with `most_tokens` tokens; None: any number."""
        return float("inf") if most_tokens is None else most_tokens / self.audio_tokens_per_s
