"""OpenVINO's side of bench.vs_openvino: `python -m bench.peers.openvino` with a Job on stdin.

Runs in an environment with openvino_genai alone. Only replies measured to their first sample are
streamed: each of its streamed chunks is decoded alone, so its streamed audio is not a reply that
compares with another.
"""

import time
from typing import Any

import numpy as np

from bench.peers.side import Job, Reply, serve

SPEAKER = "Ethan"  # our default; OpenVINO's is the checkpoint's first speaker
# int8 and auto: what the CPU plugin chooses itself, which is bfloat16 if the CPU supports it.
PRECISION = {"float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}}


class OpenVino:
    """An exported checkpoint in openvino_genai's OmniPipeline."""

    def __init__(self, job: Job):
        import openvino_genai

        self._genai: Any = openvino_genai
        precision = PRECISION.get(job.dtype, {})
        self._pipeline = self._genai.OmniPipeline(
            job.model, "CPU", INFERENCE_NUM_THREADS=job.threads, **precision
        )

    def write(self, prompt: str, tokens: int) -> Reply:
        speech = self._genai.OmniTalkerSpeechConfig()
        speech.return_audio = False
        return self._answer(prompt, tokens, speech, streamed=False)

    def speak(self, prompt: str, tokens: int, frames: int, one_frame_chunks: bool) -> Reply:
        speech = self._genai.OmniTalkerSpeechConfig()
        speech.speaker = SPEAKER
        speech.max_new_tokens = frames
        # Greedy search, so one candidate each.
        speech.talker_top_k = speech.cp_top_k = 1
        speech.talker_repetition_penalty = 1.0
        if one_frame_chunks:
            speech.audio_chunk_frames = 1
        return self._answer(prompt, tokens, speech, streamed=one_frame_chunks)

    def _answer(self, prompt: str, tokens: int, speech: Any, streamed: bool) -> Reply:
        text = self._genai.GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
        taken = _tokens_taken(self._genai)
        chunks_at_s: list[float] = []

        def take_chunk(_: Any) -> None:
            chunks_at_s.append(time.perf_counter())

        start_s = time.perf_counter()
        found = self._pipeline.generate(
            prompt,
            text_config=text,
            talker_speech_config=speech,
            streamer=taken,
            speech_streamer=take_chunk if streamed else None,
        )
        total_s = time.perf_counter() - start_s
        waveforms = found.speech_result.waveforms
        return Reply(
            found.perf_metrics.get_num_input_tokens(),
            taken.token_ids,
            np.array(waveforms[0].data).ravel() if waveforms else np.empty(0, np.float32),
            taken.first_at_s - start_s,
            chunks_at_s[0] - start_s if chunks_at_s else None,
            total_s,
        )


def _tokens_taken(genai: Any) -> Any:
    """Return a streamer that keeps the tokens, and the first one's time."""

    class Taken(genai.StreamerBase):
        def __init__(self) -> None:
            super().__init__()
            self.token_ids: list[int] = []
            self.first_at_s = 0.0

        def write(self, token: int | list[int]) -> Any:
            self.first_at_s = self.first_at_s or time.perf_counter()
            self.token_ids += [token] if isinstance(token, int) else token
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Do nothing: no token is held back."""

    return Taken()


if __name__ == "__main__":
    serve("openvino-genai", OpenVino)
