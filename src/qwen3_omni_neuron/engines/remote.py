"""Engines that run in processes of their own, with the same protocols as other engines."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.process.engine_process import EngineProcess
from qwen3_omni_neuron.engines.protocols import Engines, Fault, PredictorSampling
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt


def remote_engines(
    thinker: EngineProcess,
    talker: EngineProcess | None,
    vocoder: EngineProcess | None,
    timeout_s: float,
) -> Engines:
    """Wait until the started processes have built their engines, side by side.

    timeout_s: longest wait for each one. Raises the errors of EngineProcess.wait_ready; all are
    closed then.
    """
    try:
        return Engines(
            RemoteThinker(thinker, timeout_s),
            RemoteTalker(talker, timeout_s) if talker else None,
            RemoteVocoder(vocoder, timeout_s) if vocoder else None,
        )
    except BaseException:
        for process in (thinker, talker, vocoder):
            if process:
                process.close()
        raise


class RemoteEngine:
    """Base of the remote engines. Their calls also raise the errors of EngineProcess.call."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        """Wait for the engine. Raises the errors of EngineProcess.wait_ready."""
        process.wait_ready(timeout_s)
        self.process = process
        self.slots: int = process.read("slots")
        self.fault: Fault | None = process.fault

    def close(self) -> None:
        """End the process within seconds. Any thread may call it."""
        self.process.close()


class RemoteDecoder(RemoteEngine):
    """Base of the engines with KV caches."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        super().__init__(process, timeout_s)
        self.context_length: int = process.read("context_length")
        self.chunked_prefill: bool = process.read("chunked_prefill")

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one slot to another one; see Thinker.copy."""
        self.process.call("copy", source, target, rows)

    def clear(self, slot: int) -> None:
        """Drop a slot's rows; see Thinker.clear."""
        self.process.call("clear", slot)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Append one row to each slot; see Thinker.step and Talker.step."""
        return self.process.call("step", slots, token_ids)


class RemoteThinker(RemoteDecoder):
    """A `Thinker` in another process."""

    def prefill(
        self, slot: int, prompt: Prompt, start: int = 0, media: PromptMedia | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute a prompt's rows from `start` on; see Thinker.prefill."""
        assert media is None, "its process encodes"
        return self.process.call("prefill", slot, prompt, start)


class RemoteTalker(RemoteDecoder):
    """A `Talker` in another process."""

    def prefill_chunk(self, slot: int, prompt: TalkerPrompt, start: int, accepted: Tensor) -> None:
        """Compute the user rows of a prompt from `start` on; see Talker.prefill_chunk."""
        self.process.call("prefill_chunk", slot, prompt, start, accepted)

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int, start: int = 0) -> None:
        """Begin a slot's prompt; see Talker.prepare."""
        self.process.call("prepare", slot, prompt, speaker_id, start)

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        """Complete a slot's prompt; see Talker.prefill."""
        return self.process.call("prefill", slot, accepted, first_token)

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        """Complete the frame of each slot; see Talker.predict."""
        return self.process.call("predict", slots, code0, sampling)


class RemoteVocoder(RemoteEngine):
    """A `Vocoder` in another process."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        super().__init__(process, timeout_s)
        self.chunk_frames: tuple[int, ...] = process.read("chunk_frames")
        self.frames_at_once: int = process.read("frames_at_once")
        self.frame_samples: int = process.read("frame_samples")
        self.latency_samples: int = process.read("latency_samples")

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the first chunks of streams; see Vocoder.start."""
        return self.process.call("start", slots, codes)

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Decode the next chunks of streams; see Vocoder.step."""
        return self.process.call("step", slots, codes)
