"""Usage of tokens in the JSON of each endpoint, and log-probabilities of a transcript's tokens.

Audio tokens are those of the prompt's sound, and the frames of the reply's speech.
"""

from collections.abc import Callable, Sequence
from typing import Any

from qwen3_omni_neuron.events import TextDelta, Timings

Json = dict[str, Any]


def chat_usage(timings: Timings, reasoning_tokens: int) -> Json:
    """Return the usage of a chat completion."""
    made = timings.text_tokens + timings.frames
    return {
        **running_usage(timings.prompt_tokens, made),
        "prompt_tokens_details": _prompt_details(timings),
        "completion_tokens_details": {
            **_reply_details(timings),
            "reasoning_tokens": reasoning_tokens,
        },
    }


def running_usage(prompt_tokens: int, made: int) -> Json:
    """Return the usage of an answer so far. made: number of its tokens and frames."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
    }


def completion_usage(timings: Timings) -> Json:
    """Return the usage of the continuation of a raw prompt."""
    usage = running_usage(timings.prompt_tokens, timings.text_tokens)
    return usage | {"prompt_tokens_details": {"cached_tokens": timings.reused_tokens}}


def response_usage(timings: Timings, reasoning_tokens: int) -> Json:
    """Return the usage of a response."""
    made = timings.text_tokens + timings.frames
    return {
        "input_tokens": timings.prompt_tokens,
        "input_tokens_details": {**_prompt_details(timings), "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {**_reply_details(timings), "reasoning_tokens": reasoning_tokens},
        "total_tokens": timings.prompt_tokens + made,
    }


def realtime_usage(timings: Timings) -> Json:
    """Return the usage of a realtime response."""
    made = timings.text_tokens + timings.frames
    return {
        "total_tokens": timings.prompt_tokens + made,
        "input_tokens": timings.prompt_tokens,
        "output_tokens": made,
        "input_token_details": _prompt_details(timings),
        "output_token_details": _reply_details(timings),
    }


def speech_usage(timings: Timings) -> Json:
    """Return the usage of a text that was spoken: its tokens, and the frames of its speech."""
    return {
        "input_tokens": timings.text_tokens,
        "output_tokens": timings.frames,
        "total_tokens": timings.text_tokens + timings.frames,
    }


def transcription_usage(windows: Sequence[Timings]) -> Json:
    """Return the usage of a transcription. windows: timings of the requests that it took."""
    prompt = sum(timings.prompt_tokens for timings in windows)
    audio = sum(timings.prompt_audio_tokens for timings in windows)
    text = sum(timings.text_tokens for timings in windows)
    return {
        "type": "tokens",
        "input_tokens": prompt,
        "output_tokens": text,
        "total_tokens": prompt + text,
        "input_token_details": {"audio_tokens": audio, "text_tokens": prompt - audio},
    }


def duration_usage(seconds: float) -> Json:
    """Return the usage of a transcription that is counted by its sound's duration."""
    return {"type": "duration", "seconds": seconds}


def logprob_entries(delta: TextDelta) -> list[Json]:
    """Return the log-probability of a part of a transcript, in a list; none where it has no text.

    Tokens that only together spell a character are one entry, with the sum of their
    log-probabilities.
    """
    if not delta.text or not delta.logprobs:
        return []
    spelled = list(delta.text.encode())
    return [{"token": delta.text, "bytes": spelled, "logprob": sum(delta.logprobs)}]


def token_logprobs(delta: TextDelta, spell: Callable[[int], bytes]) -> list[Json]:
    """Return the log-probability of each token of a delta, in the form of chat completions.

    spell: returns the bytes of a token. None are returned for a token that is no text.
    """
    if not delta.text:
        return []
    likeliest = delta.top_logprobs or [[]] * len(delta.logprobs)
    return [
        _token_logprob(token_id, logprob, spell)
        | {"top_logprobs": [_token_logprob(*other, spell) for other in others]}
        for token_id, logprob, others in zip(
            delta.token_ids, delta.logprobs, likeliest, strict=True
        )
    ]


def _token_logprob(token_id: int, logprob: float, spell: Callable[[int], bytes]) -> Json:
    spelled = spell(token_id)
    text = spelled.decode(errors="replace")
    return {"token": text, "bytes": list(spelled), "logprob": logprob}


def _prompt_details(timings: Timings) -> Json:
    media = timings.prompt_audio_tokens + timings.prompt_image_tokens
    return {
        "text_tokens": timings.prompt_tokens - media,
        "audio_tokens": timings.prompt_audio_tokens,
        "image_tokens": timings.prompt_image_tokens,
        "cached_tokens": timings.reused_tokens,
    }


def _reply_details(timings: Timings) -> Json:
    return {"text_tokens": timings.text_tokens, "audio_tokens": timings.frames}
