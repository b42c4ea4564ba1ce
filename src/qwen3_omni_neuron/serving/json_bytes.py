"""JSON of answers and events."""

from functools import partial

import pydantic_core

to_json = partial(pydantic_core.to_json, inf_nan_mode="null")
"""Return a value as JSON in UTF-8. NaN and infinity become null."""
