"""Replies run in C alone where it was compiled, and are the same without it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.cpu import precision
from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from testing.native_library import needs_c
from testing.native_modules import DTYPES
from testing.replies import GREEDY, assert_alike
from testing.subprocesses import run_python

pytestmark = needs_c
LIMITS = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 12}


class _Operations(TorchDispatchMode):
    """Torch's operations in a block, but for those by which numpy and torch share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[Qwen3Omni]:
    with Qwen3Omni.load(checkpoint, max_concurrency=2) as omni:
        yield omni


def test_a_reply_without_media_is_computed_without_a_torch_operation(pair: Qwen3Omni) -> None:
    """Each gives up the interpreter lock, which costs more than the arithmetic: NativeTalker."""
    order, ids = (1, 0), (5, 6)
    prompt = pair.prompt_builder.prompt([{"role": "user", "content": "Hello"}])
    engines, c = pair._pipeline._engines, pair._config
    thinker, talker, vocoder = engines.thinker, engines.talker, engines.vocoder
    assert talker is not None and vocoder is not None and c.talker is not None
    speaker_id = next(iter(c.talker.speaker_ids.values()))
    none, chunk = torch.empty(0, c.thinker.text.hidden_size), torch.zeros(2, 16, dtype=torch.int64)
    drawn = PredictorSampling(5, 50, 1.0)
    greedy, other = replace(drawn, noise=None), replace(drawn, top_k=20)
    steps: list[Callable[[], object]] = [
        lambda: thinker.prefill(1, prompt),
        lambda: thinker.step(order, ids),
        lambda: talker.prepare(1, prompt.talker, speaker_id),
        lambda: talker.prefill(1, none, ids[0]),
        lambda: talker.step(order, ids),
        lambda: talker.predict(order, ids, [drawn, drawn]),
        lambda: talker.predict(order, ids, [drawn, other]),
        lambda: talker.predict(order, ids, [greedy, drawn]),
        lambda: vocoder.start(order, [chunk, chunk]),
        lambda: vocoder.step(order, [chunk, chunk]),
    ]
    for step in steps:  # the rows of the voice are made once
        step()
    ids = (250, 251)  # tokens that no request has had
    for number, step in enumerate(steps):
        with _Operations() as operations:
            step()
        assert not operations.names, number


class CountedLibrary:
    """A library that counts its calls by name."""

    def __init__(self, library: Library) -> None:
        self.calls: Counter[str] = Counter()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def call(*given: object) -> object:
            self.calls[name] += 1
            return function(*given)

        return call


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8", "int4"])
def test_a_reply_runs_in_c(
    checkpoint: Path, library: Library, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Every step, prompt, frame and chunk of a reply is one call of the library."""
    counted = CountedLibrary(library)
    monkeypatch.setattr(precision, "find_library", lambda: counted)
    with Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1) as omni:
        # Linear layers have projected the rows of a small vocabulary: none is left to the reply.
        assert counted.calls["multiply_rows"]
        counted.calls.clear()
        reply = omni.generate_audio(
            [{"role": "user", "content": "What is it?"}], **GREEDY, **LIMITS, chunk_frames=[1]
        )
    # The thinker's first token comes from its prompt. Each of the talker's comes from a step: the
    # last row of its prompt waits for the thinker's first token; its last token makes no frame.
    steps_made = (len(reply.token_ids) - 1) + (len(reply.codes) + 1)
    assert counted.calls == {
        "prefill": 2,
        "decode_step": steps_made,
        "predict_frame": len(reply.codes),
        "run_code2wav": len(reply.codes),  # a chunk a frame
    }


NEVER_BUILT = """
import sys
sys.modules["qwen3_omni_neuron.cpu.native._declarations"] = None  # importing it fails
from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.cpu.native import installed

installed.library_path = lambda: None
with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1, context_length=512) as omni:
    print(omni.generate_text([{"role": "user", "content": "Please say seven"}], seed=1).text)
name = "qwen3_omni_neuron.cpu.native."
print(*sorted(m.removeprefix(name) for m in sys.modules if m.startswith(name)))
"""


def test_a_checkout_that_was_never_built_speaks() -> None:
    """In torch, and imports nothing that needs what the build makes."""
    said = run_python("-c", NEVER_BUILT).split()
    assert said == ["seven", "_declarations", "installed", "sources"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_replies_are_the_same_without_the_c(
    checkpoint: Path,
    dtype: str,
    install: Callable[[Path | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch computes with the same weights where it was not compiled, and says so once."""
    messages = [{"role": "user", "content": "What is it?"}]
    with Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=1) as omni:
        expected = omni.generate_audio(messages, **GREEDY, **LIMITS)
    install(None)
    with (
        caplog.at_level(logging.WARNING),
        Qwen3Omni.load(checkpoint, dtype=dtype, max_concurrency=2) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert caplog.text.count("not built") == 1

        def answer(_: int) -> None:
            assert_alike(other.generate_audio(messages, **GREEDY, **LIMITS), expected, atol=1e-4)

        answer(0)
        assert list(pool.map(answer, range(2))) == [None, None]
