"""Written conversations of about so many prompt tokens."""

from typing import Any

from qwen3_omni_neuron.conversation.template import Conversation

WORD = " go"


def written_messages(conversation: Conversation, tokens: int) -> list[dict[str, Any]]:
    """One user turn whose prompt has at most so many tokens, and as many as words of one kind give.

    Raises ValueError for fewer tokens than the shortest conversation has.
    """

    def messages(words: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "Ready." + WORD * words}]

    def length(words: int) -> int:
        return len(conversation.prompt(messages(words)))

    shortest = length(0)
    if tokens < shortest:
        raise ValueError(
            f"a prompt of {tokens} tokens is wanted, and the shortest conversation has {shortest}."
        )
    # By halves, since how many tokens a word has is the tokenizer's.
    fits, too_many = 0, tokens - shortest + 1
    while too_many - fits > 1:
        words = (fits + too_many) // 2
        if length(words) <= tokens:
            fits = words
        else:
            too_many = words
    return messages(fits)
