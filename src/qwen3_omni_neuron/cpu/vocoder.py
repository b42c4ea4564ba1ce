"""code2wav on the CPU."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from qwen3_omni_neuron.cpu.native.choice import native_wave
from qwen3_omni_neuron.cpu.native.wave import NativeWave
from qwen3_omni_neuron.cpu.traced import trace_graph
from qwen3_omni_neuron.engines.chunks import cut_audio, pad_chunks
from qwen3_omni_neuron.model.code2wav import Code2Wav, State


class CpuVocoder:
    """Serves runtime.protocols.Vocoder over model.code2wav: a streaming state a slot.

    Two functions, of a first chunk and of a later one, serve every chunk size and number of slots.
    A slot whose chunk was padded keeps no state: what it heard last was padding.
    """

    def __init__(
        self, code2wav: Code2Wav, slots: int, chunk_frames: tuple[int, ...] = CHUNK_FRAMES
    ):
        """chunk_frames: ascending."""
        self.slots = slots
        self.chunk_frames = chunk_frames
        self.frame_samples = code2wav.config.frame_samples
        self.latency_samples = code2wav.config.latency_samples
        self._states: dict[int, State] = {}

        self._start, self._step = code2wav_calls(code2wav)

    @torch.inference_mode()
    def start(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """As the protocol has it. Raises BucketError for a chunk of no frames or of too many."""
        batch = pad_chunks(codes, self.chunk_frames)
        samples, state = self._start(batch)
        return self._finish(slots, codes, samples, state, self.latency_samples)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], codes: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """As `start`. Every slot was started, and its last chunk was not padded."""
        batch = pad_chunks(codes, self.chunk_frames)
        lost = [slot for slot in slots if slot not in self._states]
        assert not lost, f"slots {lost} hold no stream: not started, at its end, or closed"
        samples, state = self._step(batch, _join([self._states[slot] for slot in slots]))
        return self._finish(slots, codes, samples, state, 0)

    def close(self) -> None:
        self._states.clear()

    def _finish(
        self,
        slots: Sequence[int],
        codes: Sequence[Tensor],
        samples: Tensor,
        state: State,
        late: int,
    ) -> list[NDArray[np.float32]]:
        """Put the new states into their slots, and cut the sound of the padding off."""
        frames = (samples.shape[1] + late) // self.frame_samples
        parts = zip(slots, codes, _part(state), strict=True)
        kept = {slot: left for slot, chunk, left in parts if len(chunk) == frames}
        for slot in slots:
            self._states.pop(slot, None)
        self._states |= kept
        return cut_audio(codes, samples, self.frame_samples, late)


def _join(states: list[State]) -> State:
    """States of one stream each -> the state of all of them. One alone is taken as it is."""
    if len(states) == 1:
        return states[0]
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def _part(state: State) -> list[State]:
    """The reverse of _join."""
    return list(zip(*(tensor.split(1) for tensor in state), strict=True))


Start = Callable[[Tensor], tuple[Tensor, State]]
Step = Callable[[Tensor, State], tuple[Tensor, State]]


def code2wav_calls(code2wav: Code2Wav) -> tuple[Start, Step]:
    """Code2Wav.start and Code2Wav.step. The state of one is for the other of the same pair; its
    parts are batch-first."""
    wave = native_wave(code2wav)
    if wave is None:
        return code2wav_graphs(code2wav, code2wav.start, code2wav.step)
    inputs = code2wav_graphs(code2wav, code2wav.start_inputs, code2wav.step_inputs)
    return _with_native_wave(*inputs, wave)


def code2wav_graphs(code2wav: Code2Wav, start: Start, step: Step) -> tuple[Start, Step]:
    """Two methods of code2wav, traced for any number of streams and frames."""

    def step_flat(codes: Tensor, *state: Tensor) -> tuple[Tensor, State]:
        return step(codes, state)

    example = torch.zeros(1, code2wav.config.code_groups, 1, dtype=torch.int64)
    with torch.inference_mode():
        _, state = start(example)
    start_graph = trace_graph(code2wav, start, example)
    step_graph = trace_graph(code2wav, step_flat, example, *state)
    return start_graph, lambda codes, state: step_graph(codes, *state)


def _with_native_wave(
    start_inputs: Start, step_inputs: Step, wave: NativeWave
) -> tuple[Start, Step]:
    """The wave's own state is the last part of all."""

    def start(codes: Tensor) -> tuple[Tensor, State]:
        x, state = start_inputs(codes)
        samples, left = wave.start(x)
        return samples, (*state, left)

    def step(codes: Tensor, state: State) -> tuple[Tensor, State]:
        x, left = step_inputs(codes, state[:-1])
        samples, left_of_wave = wave.step(x, state[-1])
        return samples, (*left, left_of_wave)

    return start, step
