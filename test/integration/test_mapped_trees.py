"""Pages of mapped files: all of a tree's at its load, but for images and without the memory."""

import ctypes
import gc
import mmap
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qwen3_omni_neuron import Qwen3Omni, SpeechResult, cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.modules import STAGES
from qwen3_omni_neuron.checkpoint.tensor_file import map_tensors, write_tensors
from qwen3_omni_neuron.compilation.plan import MODELS
from qwen3_omni_neuron.cpu.memory import POPULATE_READ
from qwen3_omni_neuron.cpu.native.installed import find_library
from qwen3_omni_neuron.cpu.weights import WEIGHTS_FILE, compile_model, load_compiled_models
from testing.media_cases import text, user
from testing.replies import GREEDY
from testing.specs import plan_of

MB = 1 << 20
SMAPS = Path("/proc/self/smaps")


def pages_can_be_mapped() -> bool:
    if not SMAPS.exists():
        return False
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        page.madvise(mmap.MADV_HUGEPAGE)
        page.madvise(POPULATE_READ)
    except OSError:
        return False
    return True


needs_map_pages = pytest.mark.skipif(
    not pages_can_be_mapped(),
    reason="no MADV_POPULATE_READ (Linux 5.14), no large pages or no /proc/self/smaps",
)


def mappings(file: Path) -> list[tuple[int, list[str]]]:
    """Return the bytes in memory and the flags of each part of a file that is mapped here."""
    found, of_file, nbytes = [], False, 0
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        if re.match("[0-9a-f]+-", line):
            of_file = line.endswith(f" {file}")
        elif of_file and line.startswith("Rss:"):
            nbytes = int(line.split()[1]) * 1024
        elif of_file and line.startswith("VmFlags:"):
            found.append((nbytes, line.split()[1:]))
    return found


@pytest.fixture
def file(tmp_path) -> Path:
    weights = {"first": torch.ones(2 * MB), "none": torch.ones(0), "last": torch.ones(1001)}
    save_file(weights, tmp_path / WEIGHTS_FILE)
    return tmp_path / WEIGHTS_FILE


def test_tensors_are_those_of_the_file_wherever_they_lie(tmp_path) -> None:
    """An odd number of bytes before the numbers of four bytes, none, and a shape without axes."""
    layout = {
        "odd": ((3,), torch.int8),
        "four": ((2, 5), torch.float32),
        "none": ((0, 7), torch.bfloat16),
        "one": ((), torch.float64),
    }
    tensors = {
        name: torch.arange(float(prod(shape))).add(1).to(dtype).reshape(shape)
        for name, (shape, dtype) in layout.items()
    }
    write_tensors(tmp_path / WEIGHTS_FILE, layout, tensors.items())
    found = map_tensors(tmp_path / WEIGHTS_FILE)
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    assert found["four"].data_ptr() % 4 == 3


@needs_map_pages
def test_all_models_but_the_vision_encoder_are_mapped_at_the_load(checkpoint, tmp_path) -> None:
    config = read_config(checkpoint)
    plan = plan_of(checkpoint, config, dtype="float32")
    for model in MODELS:
        (tmp_path / model).mkdir()
        compile_model(plan, model, tmp_path / model)
    models = load_compiled_models(tmp_path, config, "float32", STAGES, packed=True)
    assert models.thinker is not None
    mapped = {model: mappings(tmp_path / model / WEIGHTS_FILE) for model in MODELS}
    assert {model: any(nbytes for nbytes, _ in found) for model, found in mapped.items()} == {
        model: model != "vision" for model in MODELS
    }


@pytest.mark.skipif(find_library() is None, reason="torch computes over the mapped weights")
@pytest.mark.skipif(not SMAPS.exists(), reason="no /proc/self/smaps")
def test_no_page_of_code2wav_stays_beside_its_packed_copy(checkpoint, tmp_path) -> None:
    words = ["compile", "--model", str(checkpoint), "--out", str(tmp_path / "tree")]
    assert cli.main([*words, "--dtype", "int4", "--context-length", "256"]) == 0
    with Qwen3Omni.load(checkpoint, compiled_path=tmp_path / "tree"):
        gc.collect()
        mapped = {model: mappings(tmp_path / "tree" / model / WEIGHTS_FILE) for model in MODELS}
    assert [model for model, parts in mapped.items() if not parts] == ["code2wav"]


def take_pages_away(tree: Path, until: threading.Event, taken: list[float]) -> None:
    """Drop the pages of a tree's files from this process and from the page cache, again and again.

    taken: receives the time of each round.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while not until.is_set():
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if line.endswith(WEIGHTS_FILE) and str(tree) in line:
                start, end = (int(at, 16) for at in line.split()[0].split("-"))
                assert advise(start, end - start, mmap.MADV_DONTNEED) == 0
        for file in tree.rglob(WEIGHTS_FILE):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        taken.append(time.monotonic())


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/self/maps")
def test_replies_stay_right_while_pages_are_taken_away(checkpoint, tmp_path) -> None:
    words = ["compile", "--model", str(checkpoint), "--out", str(tmp_path / "tree")]
    assert cli.main([*words, "--dtype", "int4", "--context-length", "256"]) == 0
    asked, done = [user(text("What colour is the sky?"))], threading.Event()
    taken, replies = list[float](), list[SpeechResult]()
    options = {**GREEDY, "thinker_max_new_tokens": 8, "talker_max_new_tokens": 12}
    with (
        Qwen3Omni.load(checkpoint, compiled_path=tmp_path / "tree") as omni,
        ThreadPoolExecutor(1) as pool,
    ):
        before = omni.generate_audio(asked, **options)
        taking = pool.submit(take_pages_away, tmp_path / "tree", done, taken)
        while not taking.done() and (len(replies) < 5 or len(taken) < 5):
            replies.append(omni.generate_audio(asked, cache_key=str(len(replies)), **options))
        done.set()
        taking.result()
    for reply in replies:
        assert reply.token_ids == before.token_ids
        assert np.array_equal(reply.codes, before.codes)
