"""Compiled lengths: what is shorter is padded to the next one."""

from collections.abc import Sequence

from qwen3_omni_neuron.errors import BucketError


def buckets_within(longest: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Those of `buckets`, ascending, that are shorter than `longest`, and `longest` itself; none
    where there are none."""
    if not buckets:
        return ()
    return (*(bucket for bucket in buckets if bucket < longest), longest)


def bucket_of(length: int, buckets: Sequence[int], what: str) -> int:
    """The smallest of `buckets`, ascending, that holds `length`; without buckets, the length.

    what: is counted, for the error: "prompt rows". Raises BucketError where none is long enough.
    """
    if not buckets:
        return length
    fitting = next((bucket for bucket in buckets if bucket >= length), None)
    if fitting is None:
        raise BucketError(
            f"{length} {what}, and the longest compiled bucket holds {buckets[-1]}. Shorten the "
            "input, or compile a longer bucket."
        )
    return fitting
