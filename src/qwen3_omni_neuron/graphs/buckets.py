"""The sizes that graphs are compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphBuckets:
    """Sizes of every kind of graph, ascending.

    audio_windows: windows of 8 s a call. vision_patches: of one frame. prompt_rows: of thinker and
    talker prompts. media_rows: that the hidden projection takes at once. slots: requests in a
    decode step. windows: positions that a decode step reads. thinker_positions, talker_positions:
    of a line of the KV cache. chunk_frames: that a code2wav call decodes. top_k: the most that the
    code predictor's sampled graph chooses from.
    """

    audio_windows: tuple[int, ...] = (1, 4)
    vision_patches: tuple[int, ...] = (1024, 4096)
    prompt_rows: tuple[int, ...] = (512, 2048)
    media_rows: tuple[int, ...] = (512, 2048)
    slots: tuple[int, ...] = (1, 4)
    windows: tuple[int, ...] = (2048, 8192)
    thinker_positions: int = 8192
    talker_positions: int = 8192
    chunk_frames: tuple[int, ...] = (1, 2, 4, 8, 16, 25)
    top_k: int = 50

    @property
    def most_slots(self) -> int:
        return self.slots[-1]
