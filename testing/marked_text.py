"""Texts for property tests: what a model may write inside a JSON string, markers among it."""

from hypothesis import strategies as st

MARKERS = [
    "</tool_call>",
    "<tool_call>",
    "</think>",
    '"',
    "\\",
    "\n",
    "{",
    "x",
    "\u00e9",
    "\U0001f600",
]
strings_with_markers = st.lists(st.sampled_from(MARKERS), max_size=8).map("".join)
