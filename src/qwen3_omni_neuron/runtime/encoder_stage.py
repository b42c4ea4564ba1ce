"""Encoder stage: encode a long prompt's media while the thinker works on other requests.

An image of three megapixels is one call of the vision encoder, which takes as long as hundreds of
the thinker's steps. Short media are encoded in the thinker's own calls: a spoken question does not
wait for another stage.
"""

from collections.abc import Callable, Sequence
from functools import partial

from qwen3_omni_neuron.engines.media import PromptMedia
from qwen3_omni_neuron.engines.protocols import Encoder
from qwen3_omni_neuron.runtime.fairness import in_turn
from qwen3_omni_neuron.runtime.prefix_cache import PrefixCache
from qwen3_omni_neuron.runtime.request import Request
from qwen3_omni_neuron.runtime.stage import Shared, Stage, Task, Work

LONG_ROWS = 256  # thinker rows: 20 s of audio, or an image of a quarter of a megapixel


def takes_long(request: Request) -> bool:
    """Return whether a request's media take so long that this stage encodes them."""
    prompt = request.prompt
    return prompt.audio_tokens + prompt.image_tokens > LONG_ROWS and not request.ahead


class EncoderStage(Stage[Task]):
    """Worker of the encoders, one prompt at a time.

    cache: the rows that the thinker's slots hold, whose media are not encoded again. on_encoded:
    called with the lock held, when a request's media are encoded.
    """

    def __init__(
        self, engine: Encoder, cache: PrefixCache, shared: Shared, on_encoded: Callable[[], None]
    ):
        super().__init__("encoder", shared)
        self._engine, self._cache, self._on_encoded = engine, cache, on_encoded

    def _select(self) -> Work | None:
        waiting = in_turn(self._tasks, self._tasks)
        return partial(self._work, waiting[0]) if waiting else None

    def _work(self, task: Task) -> None:
        encoded = self._call_engine((task,), self._encode)
        with self._lock:
            if encoded and task in self._tasks:
                ((_, task.live.encoded),) = encoded
                task.live.encoding = False
                self._release(task)
                self._on_encoded()

    def _encode(self, tasks: Sequence[Task]) -> list[PromptMedia | None]:
        requests = [task.live.request for task in tasks]
        return [self._engine.encode(x.prompt, self._start(x)) for x in requests]

    def _start(self, request: Request) -> int:
        """Return the first row of a prompt that the thinker is expected to compute."""
        if request.keys is None:
            return 0
        return self._cache.count(request.keys.thinker)
