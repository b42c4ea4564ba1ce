"""The distribution of attention heads over ranks."""

from qwen3_omni_neuron.errors import OptionError

PAD = -1
"""Number of a head that is all zeros."""

Units = tuple[int, ...]


def query_heads(heads: int, kv_heads: int, tp: int) -> list[Units]:
    """Return the query heads of each rank, padded with PAD to the same number.

    Heads of their own keys (kv_heads == heads) go in order, padded at the end: 20 at TP 8 become
    24. Where several ranks share a KV head, the query heads of that one are spread over them: 4
    query and 2 KV heads at TP 8 become (0), (1), (PAD), (PAD), (2), (3), (PAD), (PAD).
    Raises OptionError where KV heads and ranks don't divide.
    """
    if heads == kv_heads:
        return _split(tuple(range(heads)), tp)
    group, sharing = heads // kv_heads, _sharing(kv_heads, tp)
    if sharing == 1:
        return _split(tuple(range(heads)), tp)
    return [
        units
        for kv in range(kv_heads)
        for units in _split(tuple(range(kv * group, (kv + 1) * group)), sharing)
    ]


def key_heads(heads: int, kv_heads: int, tp: int) -> list[Units]:
    """Return the KV heads of each rank: those that its query heads read.

    Raises OptionError where KV heads and ranks don't divide.
    """
    if heads == kv_heads:
        return _split(tuple(range(heads)), tp)
    sharing = _sharing(kv_heads, tp)
    if sharing == 1:
        return _split(tuple(range(kv_heads)), tp)
    return [(rank // sharing,) for rank in range(tp)]


def local_kv_heads(heads: int, kv_heads: int, tp: int) -> int:
    """Return the number of KV heads a rank. Raises OptionError as `key_heads` does."""
    return len(key_heads(heads, kv_heads, tp)[0])


def _sharing(kv_heads: int, tp: int) -> int:
    """Return the number of ranks that share a KV head."""
    if kv_heads % tp and tp % kv_heads:
        raise OptionError(
            f"{kv_heads} KV heads can't be held by {tp} cores: one number must divide the other. "
            "Choose another TP degree."
        )
    return max(1, tp // kv_heads)


def _split(units: Units, parts: int) -> list[Units]:
    each = -(-len(units) // parts)
    padded = units + (PAD,) * (each * parts - len(units))
    return [padded[i * each : (i + 1) * each] for i in range(parts)]
