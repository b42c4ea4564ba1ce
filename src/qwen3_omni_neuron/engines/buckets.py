"""Buckets, the compiled lengths: inputs are padded to the smallest that fits."""

from collections.abc import Sequence

from qwen3_omni_neuron.errors import BucketError


def buckets_within(longest: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the ascending buckets below `longest`, followed by `longest`; () without buckets."""
    if not buckets:
        return ()
    return (*(bucket for bucket in buckets if bucket < longest), longest)


def bucket_of(length: int, buckets: Sequence[int], what: str) -> int:
    """Return the smallest of the ascending `buckets` that fits `length`; `length` without buckets.

    what: unit for the error, such as "prompt rows". Raises BucketError if all are too short.
    """
    if not buckets:
        return length
    fitting = next((bucket for bucket in buckets if bucket >= length), None)
    if fitting is None:
        raise BucketError(
            f"{length} {what}, but the longest compiled bucket has {buckets[-1]}. Shorten the "
            "input, or compile a longer bucket."
        )
    return fitting
