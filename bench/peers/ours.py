"""This package's side of bench.vs_openvino: `python -m bench.peers.ours` with a Job on stdin."""

import time
from typing import Any

import numpy as np

from bench.peers.side import Job, Reply, serve

NO_EOS = 2**31 - 1  # an id that is never generated
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}


class Ours:
    """A compiled checkpoint with one slot. Speech is always streamed."""

    def __init__(self, job: Job):
        from qwen3_omni_neuron import Qwen3Omni

        self._omni = Qwen3Omni.load(
            job.model, compiled_path=job.compiled or None, dtype=job.dtype, threads=job.threads
        )

    def write(self, prompt: str, tokens: int) -> Reply:
        result = self._omni.generate_text(messages(prompt), **limits(tokens))
        times = result.timings
        return Reply(
            times.prompt_tokens,
            result.token_ids,
            np.empty(0, np.float32),
            times.ttft_s,
            None,
            times.total_s,
        )

    def speak(self, prompt: str, tokens: int, frames: int, one_frame_chunks: bool) -> Reply:
        from qwen3_omni_neuron.events import AudioChunk, Finished

        options = {
            **limits(tokens),
            # The talker token that meets its limit is never decoded: one more than frames.
            "talker_max_new_tokens": frames + 1,
            "talker_repetition_penalty": 1.0,
            "runaway_speech": "keep",
            "chunk_frames": [1] if one_frame_chunks else None,
        }
        start_s = time.perf_counter()
        first_sample_s = None
        with self._omni.stream(messages(prompt), **options) as stream:
            for event in stream:
                if first_sample_s is None and isinstance(event, AudioChunk):
                    first_sample_s = time.perf_counter() - start_s
        total_s = time.perf_counter() - start_s
        assert isinstance(event, Finished), "a stream ends with its result"
        result = event.result
        return Reply(
            result.timings.prompt_tokens,
            result.token_ids,
            result.audio,
            result.timings.ttft_s,
            first_sample_s,
            total_s,
        )


def messages(prompt: str) -> list[dict[str, Any]]:
    """Return a conversation of one written question."""
    return [{"role": "user", "content": prompt}]


def limits(tokens: int) -> dict[str, Any]:
    """Return the options of a greedy reply with exactly this number of tokens."""
    return {**GREEDY, "thinker_max_new_tokens": tokens, "thinker_eos_token_id": NO_EOS}


if __name__ == "__main__":
    serve("qwen3-omni-neuron", Ours)
