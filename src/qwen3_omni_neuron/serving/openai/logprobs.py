"""Log-probabilities of a transcript's tokens, as OpenAI's API gives them."""

from typing import Any

from qwen3_omni_neuron.events import TextDelta

Json = dict[str, Any]


def logprob_entries(delta: TextDelta) -> list[Json]:
    """Return the entry of a part of the text, in a list; an empty list for a part without text.

    Tokens that only together spell a character are one entry, with the sum of their
    log-probabilities.
    """
    if not delta.text or not delta.logprobs:
        return []
    spelled = list(delta.text.encode())
    return [{"token": delta.text, "bytes": spelled, "logprob": sum(delta.logprobs)}]
