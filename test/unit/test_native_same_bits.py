"""Results in C depend neither on threads, nor on rows beside them, nor on pieces."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron.cpu.native.audio_convolutions import NativeAudioConvolutions
from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear, use_native_linears
from qwen3_omni_neuron.cpu.native.steps import NativeSteps
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import ResizeMlp
from testing.native_library import needs_c
from testing.native_modules import (
    BLOCK,
    DTYPES,
    LONG,
    POSITIONS,
    assert_equal,
    copied,
    decode,
    inputs_of,
    made,
    parts,
    prompt_rows,
)
from testing.packed import packed_and_widened, randomize
from testing.subprocesses import run_python

pytestmark = needs_c


CUTS = [[1], [7], [20], [4, 5, 6], [1, 13, 14, 30], [BLOCK], [BLOCK - 1], [3, BLOCK + 2]]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("which", "stack"), [("thinker", "odd"), ("talker", "wide")])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.pairs
def test_a_prompt_in_pieces_is_the_whole_bit_for_bit(
    config: OmniConfig, library: Library, which: str, stack: str, dtype: str, threads: int
) -> None:
    m = made(config, which, stack, dtype, slots=2, positions=LONG)
    rows, positions = prompt_rows(m.c, LONG)
    expected = m.native(library).prefill(0, 0, rows, positions)
    steps = m.native(library, threads)
    for cuts in CUTS:
        m.cache.keys[:, 1], m.cache.values[:, 1] = float("nan"), float("nan")
        accepted = []
        for start, stop in itertools.pairwise((0, *cuts, LONG)):
            last = steps.prefill(1, start, rows[start:stop], positions[:, start:stop])
            accepted.append(last[1])
        if which == "thinker":
            last = last[0], torch.cat(accepted)
        assert_equal(last, expected)
        assert_equal(m.cache.keys[:, 1], m.cache.keys[:, 0])
        assert_equal(m.cache.values[:, 1], m.cache.values[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head", "wide"])
def test_a_prompt_is_its_rows_appended_one_by_one(
    config: OmniConfig, library: Library, stack: str, dtype: str
) -> None:
    m = made(config, "talker", stack, dtype, slots=2)
    rows, _ = prompt_rows(m.c, POSITIONS)
    steps, at = m.native(library), torch.arange(POSITIONS).float()
    expected = steps.prefill(0, 0, rows, at.expand(3, -1))
    for n in range(POSITIONS):
        got = decode(steps, [1], [n], [float(n)], rows[n : n + 1])
    assert_equal(got, expected)
    assert_equal(m.cache.keys[:, 1], m.cache.keys[:, 0])
    assert_equal(m.cache.values[:, 1], m.cache.values[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["thinker", "talker"])
@pytest.mark.parametrize("stack", ["tiny", "odd", "one kv head", "wide"])
@pytest.mark.parametrize("count", [2, 3, 5, 8, 13])
@pytest.mark.pairs
def test_a_step_of_several_slots_is_each_alone_bit_for_bit(
    config: OmniConfig, library: Library, which: str, stack: str, dtype: str, count: int
) -> None:
    m = made(config, which, stack, dtype, slots=count)
    alone_cache, inputs = copied(m.cache), inputs_of(m.c, which, count)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    lengths, positions = [(5 + 7 * s) % POSITIONS for s in slots], [1.0 + s for s in slots]
    together = parts(decode(m.native(library, 4), slots, lengths, positions, inputs))
    alone = m.native(library, cache=alone_cache)
    for row, slot in enumerate(slots):
        own = decode(alone, [slot], [lengths[row]], [positions[row]], inputs[row : row + 1])
        assert_equal(own, tuple(t[row : row + 1] for t in together))
    assert_equal(m.cache.keys, alone_cache.keys)
    assert_equal(m.cache.values, alone_cache.values)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("out", [1, 31, 33, 64, 500])
@pytest.mark.pairs
def test_a_linear_layer_is_torchs_whatever_its_rows_and_threads(
    library: Library, dtype: str, rows: int, out: int
) -> None:
    layer = nn.Linear(301, out)
    # The talker's own matrices are int8, a projection's are not; none of the talker's has a bias.
    packed, widened = packed_and_widened(layer, "talker", dtype)
    x = torch.randn(rows, 301)
    got = NativeLinear(packed, library, 1)(x)
    torch.testing.assert_close(got, widened(x), atol=2e-5, rtol=1e-5)
    for threads in (2, 4):
        assert_equal(NativeLinear(packed, library, threads)(x), got)
    for row in (0, rows // 2, rows - 1):
        assert_equal(NativeLinear(packed, library, 1)(x[row]), got[row])


@torch.no_grad()
def test_native_linears_take_the_place_of_all(config: OmniConfig, library: Library) -> None:
    assert config.talker is not None
    packed, widened = packed_and_widened(ResizeMlp(config.talker), "text_projection", "int8")
    use_native_linears(packed, library, 1)
    assert isinstance(packed.fc1, NativeLinear) and isinstance(packed.fc2, NativeLinear)
    x = torch.randn(2, 3, config.talker.thinker_hidden_size)
    torch.testing.assert_close(packed(x), widened(x), atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("channels", [5, 32, 40])
def test_audio_convolutions_are_the_modules_whatever_is_beside_a_chunk_and_the_threads(
    config: OmniConfig, library: Library, channels: int
) -> None:
    for mels, times in ((128, 100), (19, 100), (20, 37)):
        c = dataclasses.replace(
            config.thinker.audio, mel_bins=mels, chunk_mel_frames=times, conv_channels=channels
        )
        encoder = AudioEncoder(c)
        randomize(encoder)
        native = NativeAudioConvolutions(encoder, library, 1)
        for width in {times, times - 1, 9, 2, 1}:
            chunks = torch.randn(3, mels, times)
            chunks[..., width:] = 0
            got = native(chunks, width)
            torch.testing.assert_close(got, encoder.convolve(chunks, width), atol=2e-5, rtol=1e-5)
            assert not got[:, (width + 7) // 8 :].any()
            assert_equal(native(chunks[1:2], width), got[1:2])
            for threads in (2, 4):
                assert_equal(NativeAudioConvolutions(encoder, library, threads)(chunks, width), got)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stack", ["tiny", "dense"])
def test_nan_stays_in_its_row_and_slot(
    config: OmniConfig, library: Library, stack: str, dtype: str
) -> None:
    m = made(config, "talker", stack, dtype)
    clean_cache, rows = copied(m.cache), inputs_of(m.c, "talker", 3)
    slots, lengths, positions = [3, 0, 1], [5, 30, 9], [1.0, 2.0, 3.0]
    clean = decode(m.native(library, cache=clean_cache), slots, lengths, positions, rows)
    rows[1] = float("nan")
    got = decode(m.native(library), slots, lengths, positions, rows)
    for ours, theirs in zip(got, clean, strict=True):
        assert_equal(ours[[0, 2]], theirs[[0, 2]])
        assert ours[1].isnan().all()
    assert_equal(m.cache.keys[:, 1:], clean_cache.keys[:, 1:])
    # A prompt: the rows before it, of which two attend together with it.
    m = made(config, "thinker", "tiny", dtype)
    prompt, at = prompt_rows(m.c, 21)
    _, clean_rows = m.native(library).prefill(0, 0, prompt, at)
    prompt[14] = float("nan")
    logits, accepted = m.native(library).prefill(1, 0, prompt, at)
    assert_equal(accepted[:14], clean_rows[:14])
    assert logits.isnan().all()
    assert_equal(m.cache.keys[:, 1, :, :14], m.cache.keys[:, 0, :, :14])
    assert not m.cache.keys[:, [0, 2, 3]].isnan().any()


@torch.no_grad()
def test_several_threads_step_their_own_slots(config: OmniConfig, library: Library) -> None:
    m = made(config, "talker", "wide", "int8", positions=80)
    rows, _ = prompt_rows(m.c, 80)
    at = torch.arange(80).float().expand(3, -1)

    def run(steps: NativeSteps, slot: int) -> list[tuple[Tensor, ...]]:
        results = [steps.prefill(slot, 0, rows[:50], at[:, :50])]
        for n in range(50, 80):
            results.append(decode(steps, [slot], [n], [float(n)], rows[n : n + 1] + slot))
        return results

    alone = [run(m.native(library, cache=copied(m.cache)), slot) for slot in range(4)]
    shared = m.native(library, 4)
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda s: run(shared, s), range(4)), alone, strict=True):
            for ours, theirs in zip(got, expected, strict=True):
                assert_equal(ours, theirs)


# In a process of its own, where a deadlock meets a deadline: a pool at work, a child that inherits
# it, and many short calls from several threads.
POOL_SCRIPT = """
import faulthandler, os, time
from concurrent.futures import ThreadPoolExecutor
import torch
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.native.encoder_layers import NativeLinear
from qwen3_omni_neuron.cpu.native.binding import pack_in_c

faulthandler.dump_traceback_later(100, exit=True)

def threads():
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0

library, before = find_library(), threads()
library.grow_pool(4)
torch.manual_seed(0)
linear = torch.nn.Linear(64, 4000, bias=False)  # shared by 32 tasks of some microseconds
linear.weight.data = pack_in_c(linear.weight.data, library)
native, x = NativeLinear(linear, library, 4), torch.randn(3, 64)
with torch.inference_mode():
    expected = NativeLinear(linear, library, 1)(x)

@torch.inference_mode()
def right(calls):
    return all(torch.equal(native(x), expected) for _ in range(calls))

assert right(50)
helpers = threads() - before
child = os.fork()
if child == 0:
    done = right(200)
    os._exit(0 if done and (helpers == 0 or threads() - 1 == helpers) else 7)
assert right(200)
assert os.waitpid(child, 0)[1] == 0
with ThreadPoolExecutor(4) as pool:
    assert all(pool.map(right, [500] * 4))
if hasattr(os, "sched_getaffinity"):
    # A helper that leaves its caller's core may go back there later: at once, or on a busy machine
    # as soon as it runs again.
    mine, end_s = os.sched_getaffinity(0), time.monotonic() + 20

    def affinity(task):
        try:
            return os.sched_getaffinity(int(task))
        except ProcessLookupError:  # it has ended since it was listed
            return mine

    while any(affinity(task) != mine for task in os.listdir("/proc/self/task")):
        assert time.monotonic() < end_s
        time.sleep(0.01)
print("helpers", helpers)
"""


def test_the_pool_works_in_a_forked_child_and_under_calls_of_several_threads(
    library: Library,
) -> None:
    """The child has helpers of its own; four threads make 2000 short calls."""
    said = run_python("-c", POOL_SCRIPT, timeout_s=150)
    if Path("/proc/self/task").is_dir():
        assert said.split() == ["helpers", "3"]
