"""Engines that live in processes of their own, seen from here as engines like any other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.conversation.prompt import Prompt, TalkerPrompt
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.process.engine_process import EngineProcess


class RemoteThinker:
    """A `Thinker` in another process. Its calls raise what EngineProcess.call does, besides."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        """Wait for the engine. Raises what EngineProcess.wait_ready does."""
        self.process = process
        attributes = process.wait_ready(timeout_s)
        self.slots: int = attributes["slots"]
        self.context_length: int = attributes["context_length"]

    def prefill(self, slot: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
        return self.process.call("prefill", slot, prompt)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self.process.call("step", slots, token_ids)

    def close(self) -> None:
        """End the process, in bounded time. Any thread's."""
        self.process.close()


class RemoteTalker:
    """A `Talker` in another process, as `RemoteThinker`."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        """As `RemoteThinker`."""
        self.process = process
        attributes = process.wait_ready(timeout_s)
        self.slots: int = attributes["slots"]
        self.context_length: int = attributes["context_length"]

    def prepare(self, slot: int, prompt: TalkerPrompt, speaker_id: int) -> None:
        self.process.call("prepare", slot, prompt, speaker_id)

    def prefill(self, slot: int, accepted: Tensor, first_token: int) -> Tensor:
        return self.process.call("prefill", slot, accepted, first_token)

    def predict(
        self, slots: Sequence[int], code0: Sequence[int], sampling: Sequence[PredictorSampling]
    ) -> Tensor:
        return self.process.call("predict", slots, code0, sampling)

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        return self.process.call("step", slots, token_ids)

    def close(self) -> None:
        """End the process, in bounded time. Any thread's."""
        self.process.close()


class RemoteVocoder:
    """A `Vocoder` in another process, as `RemoteThinker`."""

    def __init__(self, process: EngineProcess, timeout_s: float) -> None:
        """As `RemoteThinker`."""
        self.process = process
        attributes = process.wait_ready(timeout_s)
        self.slots: int = attributes["slots"]
        self.chunk_frames: tuple[int, ...] = attributes["chunk_frames"]
        self.frame_samples: int = attributes["frame_samples"]
        self.latency_samples: int = attributes["latency_samples"]

    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        return self.process.call("start", slots, codes)

    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        return self.process.call("step", slots, codes)

    def close(self) -> None:
        """End the process, in bounded time. Any thread's."""
        self.process.close()


def remote_engines(
    thinker: EngineProcess,
    talker: EngineProcess | None,
    vocoder: EngineProcess | None,
    timeout_s: float,
) -> Engines:
    """Wait for processes that were started to build their engines at the same time.

    timeout_s: for each one. Raises what EngineProcess.wait_ready does; all are closed then.
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
