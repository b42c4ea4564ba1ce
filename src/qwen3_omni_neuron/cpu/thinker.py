"""Thinker engine on the CPU, with the audio and vision encoders."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.slots import Slots
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.media import MediaEncoders, PromptMedia
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder, tokens_of_windows, window_batches
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import has_media, media_mask
from qwen3_omni_neuron.model.thinker import Thinker
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, pad_patches, patch_places
from qwen3_omni_neuron.prompt.media.pixels import Visual
from qwen3_omni_neuron.prompt.prompt import Prompt

PATCHES_AT_ONCE = 4096  # bounds the memory that a long video takes beside its results


class CpuAudio:
    """Audio encoder over model.audio_encoder.

    library: computes the convolutions, with up to `threads` threads; None: torch computes them.
    """

    def __init__(self, encoder: AudioEncoder, library: Any = None, threads: int = 1):
        self._encoder, self._dtype = encoder, encoder.norm.weight.dtype
        self._convolve: Callable[[Tensor, int], Tensor] = encoder.convolve
        if library is not None:
            self._convolve = NativeAudioConvolutions(encoder, library, threads)
        # torch prepares its convolutions at their first call; no request should wait for that.
        with torch.inference_mode():
            self.encode([torch.zeros(encoder.config.mel_bins, encoder.config.chunk_mel_frames)])

    def encode(self, clips: Sequence[Tensor], first: int = 0, stop: int | None = None) -> Tensor:
        """Encode the windows of audio clips one by one; see engines.media.Audio.encode."""
        c, dtype = self._encoder.config, self._dtype
        rows = torch.empty(sum(tokens_of_windows(clips, c)[first:stop]), c.output_size, dtype=dtype)
        end = 0
        # Encode one window at a time. In a batch of another size, or with a longer window, torch
        # adds in another order, and a prompt in pieces would differ from the whole prompt in the
        # last bits. Batches are not faster (128 s of audio on one core, 1, 4, 8 and 16 at once: 57,
        # 49, 61 and 62 ms with the tiny checkpoint, 217, 222, 281 and 340 ms with the small one),
        # and with the released sizes the convolutions of each window take 130 MB of float32.
        for batch in window_batches(clips, c, 1, whole=False, first=first, stop=stop):
            # [1, mels, 100 * chunks] -> [chunks, mels, 100]
            chunks = batch.mel[0].to(dtype).unflatten(1, (-1, c.chunk_mel_frames)).transpose(0, 1)
            convolved = self._convolve(chunks, batch.chunk_width)
            encoded = self._encoder.transform(convolved, batch.valid)
            valid_rows = encoded[batch.valid]
            rows[end : end + len(valid_rows)] = valid_rows
            end += len(valid_rows)
        return rows


class CpuVision:
    """Vision encoder over model.vision_encoder.

    patch_buckets: patch counts that frames are padded to, ascending; if empty, nothing is padded.
    """

    def __init__(self, encoder: VisionEncoder, patch_buckets: Sequence[int] = ()):
        self._encoder, self._buckets = encoder, patch_buckets
        self._dtype = encoder.merger.norm.weight.dtype

    def encode(self, visuals: Iterable[Visual]) -> Tensor:
        """Encode images and videos. Returns [1 + deepstack, rows, hidden] of all rows, in order."""
        encoded = [frames for visual in visuals for frames in self._encode_frames(visual)]
        return torch.cat(encoded, 1)

    def _encode_frames(self, visual: Visual) -> Iterator[Tensor]:
        """Yield [1 + deepstack, rows, hidden] of a few frames at a time."""
        frames, height, width = visual.grid
        c = self._encoder.config
        size = height * width
        bucket = bucket_of(size, self._buckets, "patches in a frame")
        places, grid = patch_places(height, width, c.merge_size), torch.tensor((height, width))
        at_once = max(1, PATCHES_AT_ONCE // bucket)
        for first in range(0, frames, at_once):
            some = visual.part(first, first + at_once).patches().to(self._dtype)
            patches, padded_places, valid = pad_patches(some, places, bucket)
            rows = self._encoder(patches, padded_places, grid, valid)
            yield rows[:, :, : size // c.merge_size**2].flatten(1, 2)


class CpuThinker:
    """Thinker over model.thinker and the media encoders; see engines.protocols.Thinker."""

    extends = True

    def __init__(
        self,
        config: OmniConfig,
        thinker: Thinker,
        media: MediaEncoders,
        slots: int,
        context_length: int,
        prompt_buckets: Sequence[int] = (),
        library: Any = None,
        threads: int = 1,
    ):
        self.slots, self.context_length = slots, context_length
        self._config, self._thinker, self._media = config, thinker, media
        self._dtype = thinker.decoder.norm.weight.dtype
        self._none_accepted = torch.empty(0, config.thinker.text.hidden_size)
        self._slots = Slots(
            config.thinker.text,
            thinker,
            slots,
            context_length,
            self._dtype,
            prompt_buckets,
            library,
            threads,
        )

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see engines.protocols.Thinker.prefill."""
        ids = prompt.token_ids.numpy()[start:]
        if self._slots.native is None or has_media(ids, self._config):
            return self._prefill_with_media(slot, prompt, start, media)
        # One call and no torch operation: see cpu.talker.NativeTalker.
        positions = prompt.positions.numpy()[:, start:]
        return self._slots.prefill_ids(slot, ids, positions, start), self._none_accepted

    @torch.inference_mode()
    def _prefill_with_media(
        self, slot: int, prompt: Prompt, start: int, media: PromptMedia | None
    ) -> tuple[Tensor, Tensor]:
        ids, positions = prompt.token_ids[start:], prompt.positions[:, start:]
        rows = self._thinker.embedding(ids).to(self._dtype)
        visual: tuple[Tensor, ...] = ()
        media = self._media.rows(prompt, start, media)
        if media is not None:
            rows[media.filled] = media.rows
            visual = media.visual, media.deepstack
        logits, accepted = self._slots.prefill(slot, rows, positions, *visual, start=start)
        return logits, accepted[: len(ids)][media_mask(ids, self._config)]

    @torch.inference_mode()
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see engines.protocols.Thinker.copy."""
        self._slots.copy(source, target, rows)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one token to each slot; see engines.protocols.Thinker.step."""
        if self._slots.native is not None:
            return self._slots.step_ids(slots, token_ids)
        return self._slots.step(slots, torch.tensor(token_ids))

    def close(self) -> None:
        """Do nothing: the engine holds only memory, which is freed with it."""
