"""One request from prompt to sound: thinker, talker with code predictor, vocoder."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3_omni_neuron.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.events import (
    SAMPLE_RATE,
    AudioChunk,
    Event,
    Finished,
    FinishReason,
    SpeechResult,
    TextDelta,
    Timings,
)
from qwen3_omni_neuron.prompt import Prompt
from qwen3_omni_neuron.runtime.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.sampling import RequestRandom, Sampler, SamplingParams, draw
from qwen3_omni_neuron.text import TextStream


@dataclass(frozen=True)
class ThinkerRequest:
    """What the thinker is to do."""

    prompt: Prompt
    sampling: SamplingParams
    max_new_tokens: int
    eos_ids: frozenset[int]
    decode_text: Callable[[list[int]], str]


@dataclass(frozen=True)
class TalkerRequest:
    """What the talker is to do."""

    speaker_id: int
    sampling: SamplingParams
    predictor_sampling: SamplingParams
    max_new_tokens: int


@dataclass(frozen=True)
class Request:
    """A request. talker None: text alone is asked for. arrived_s: time.perf_counter() when it
    came, before the conversation was read."""

    thinker: ThinkerRequest
    talker: TalkerRequest | None
    seed: int
    arrived_s: float


@dataclass
class _Reply:
    """What has been made so far."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    thinker_finish: FinishReason = "length"
    talker_finish: FinishReason = "no_speech"
    first_token_s: float = 0.0
    first_sample_s: float | None = None


class Pipeline:
    """Runs requests on engines, each in a slot of its own."""

    def __init__(self, engines: Engines, config: OmniConfig):
        self._thinker, self._talker, self._vocoder = (
            engines.thinker,
            engines.talker,
            engines.vocoder,
        )
        self._config = config

    def run(self, request: Request, slot: int) -> Iterator[Event]:
        """Events of one request: text as it is written, then the audio, then Finished."""
        reply, random = _Reply(), RequestRandom(request.seed)
        accepted = yield from self._think(request.thinker, slot, reply, random)
        spoken = [i for i in reply.token_ids if i not in request.thinker.eos_ids]
        codes = torch.zeros((0, self._config.code_groups), dtype=torch.int64)
        audio = np.zeros(0, dtype=np.float32)
        if request.talker and spoken:
            codes = self._talk(request, request.talker, slot, accepted, spoken, reply, random)
        if len(codes) and self._vocoder:
            audio = self._vocoder.decode(codes)
            reply.first_sample_s = time.perf_counter()
            yield AudioChunk(audio, 0, len(codes))
        yield Finished(_result(request, reply, codes, audio))

    def _think(
        self, request: ThinkerRequest, slot: int, reply: _Reply, random: RequestRandom
    ) -> Generator[Event, None, Tensor]:
        """Write text. Returns the accept layer's hidden states of the prompt."""
        prompt = request.prompt
        logits, accepted = self._thinker.prefill(slot, prompt)
        sampler = Sampler(request.sampling, logits.shape[-1], prompt.token_ids)
        text = TextStream(request.decode_text)
        limit = min(request.max_new_tokens, self._thinker.context_length - len(prompt))
        while True:
            token_id = sampler.next(logits, random.thinker)
            reply.token_ids.append(token_id)
            if len(reply.token_ids) == 1:
                reply.first_token_s = time.perf_counter()
            delta = text.push(token_id)
            if token_id in request.eos_ids:
                reply.thinker_finish = "stop"
            ended = reply.thinker_finish == "stop" or len(reply.token_ids) == limit
            if ended:
                rest = text.finish()
                delta = (delta[0] + rest[0], delta[1] + rest[1])
            if delta[1]:
                reply.text.append(delta[0])
                yield TextDelta(*delta)
            if ended:
                return accepted
            logits = self._thinker.step(slot, token_id)

    def _talk(
        self,
        request: Request,
        options: TalkerRequest,
        slot: int,
        accepted: Tensor,
        spoken: list[int],
        reply: _Reply,
        random: RequestRandom,
    ) -> Tensor:
        """Speak the text tokens of a reply, its end marker left out. Returns codes [frames, 16].

        Step k adds the row of token k + 1 while there is one, then tts_eos once, then tts_pad.
        """
        talker, config = self._talker, self._config.talker
        assert talker is not None and config is not None, "options.speaker_id checks this"
        trailing = [talker.text_row(i) for i in (*spoken[1:], self._config.tts_eos_id)]
        pad_row = talker.text_row(self._config.tts_pad_id)
        rows = talker.prompt_rows(request.thinker.prompt, accepted, options.speaker_id)
        output = talker.prefill(slot, rows, spoken[0])
        sampler = Sampler(
            options.sampling, config.text.vocab_size, suppressed=config.suppressed_ids
        )
        limit = min(options.max_new_tokens, talker.context_length - len(rows))
        frames: list[Tensor] = []
        reply.talker_finish = "length"
        while True:
            code0 = sampler.next(output.logits, random.talker)
            if code0 == config.codec_eos_id:
                reply.talker_finish = "stop"
                break
            if len(frames) + 1 >= limit:
                break
            draws = _predictor_sampling(options.predictor_sampling, config, random)
            codes, feedback = talker.predict(output.hidden, code0, draws)
            step = len(frames)
            frames.append(codes)
            output = talker.step(
                slot, feedback + (trailing[step] if step < len(trailing) else pad_row)
            )
        return torch.cat(frames) if frames else torch.zeros((0, config.code_groups)).long()


def _result(
    request: Request, reply: _Reply, codes: Tensor, audio: NDArray[np.float32]
) -> SpeechResult:
    audio_s = len(audio) / SAMPLE_RATE
    now = time.perf_counter()
    first = reply.first_sample_s
    timings = Timings(
        ttft_s=reply.first_token_s - request.arrived_s,
        ttfb_s=None if first is None else first - request.arrived_s,
        total_s=now - request.arrived_s,
        audio_s=audio_s,
        rtf=None if first is None else (first - request.arrived_s) / audio_s,
        prompt_tokens=len(request.thinker.prompt),
        text_tokens=len(reply.token_ids),
        frames=len(codes),
    )
    return SpeechResult(
        text="".join(reply.text),
        token_ids=reply.token_ids,
        codes=codes.numpy(),
        audio=audio,
        sample_rate=SAMPLE_RATE,
        thinker_finish_reason=reply.thinker_finish,
        talker_finish_reason=reply.talker_finish,
        timings=timings,
        seed=request.seed,
    )


def _predictor_sampling(
    params: SamplingParams, config: TalkerConfig, random: RequestRandom
) -> PredictorSampling:
    uniforms = draw(random.talker, config.code_groups - 1) if params.do_sample else None
    return PredictorSampling(uniforms, params.top_k, params.top_p)
