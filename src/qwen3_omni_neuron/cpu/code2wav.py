"""code2wav on the CPU: its waves in C where that can be had, and all before them as graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.graph import trace_graph
from qwen3_omni_neuron.cpu.native.choice import native_wave
from qwen3_omni_neuron.cpu.native.wave import NativeWave
from qwen3_omni_neuron.model.code2wav import Code2Wav, State

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
