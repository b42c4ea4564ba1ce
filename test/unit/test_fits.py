"""Memory of a dtype on the CPU: the bytes of a tree and of a slot, and what fits a machine."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.released import released_config
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.compilation.runner import _check_disk
from qwen3_omni_neuron.cpu import fits, memory
from qwen3_omni_neuron.cpu.fits import GB, PROCESS_BYTES, Fit, fits_of, fits_text
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import WEIGHTS_FILE, compile_model, expected_bytes
from qwen3_omni_neuron.errors import OutputError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache
from testing.quantised_checkpoint import gptq, write_quantised_checkpoint


@pytest.mark.parametrize(
    ("dtype", "compact"),
    [(d, c) for d in fits.DTYPES for c in (False, True) if d in LIMITS.compact_dtypes or not c],
)
def test_the_tree_has_the_bytes_that_were_counted(
    checkpoint: Path, tmp_path: Path, dtype: str, compact: bool
) -> None:
    config = read_config(checkpoint)
    plan = make_plan(checkpoint, config, LIMITS, dtype=dtype, compact=compact)
    written = 0
    for model in MODELS:
        (tmp_path / model).mkdir()
        compile_model(plan, model, tmp_path / model)
        with (tmp_path / model / WEIGHTS_FILE).open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        written += (tmp_path / model / WEIGHTS_FILE).stat().st_size - 8 - header
    (fit,) = [fit for fit in fits_of(config, 64, 64, compact=compact) if fit.dtype == dtype]
    assert fit.tree_bytes == written
    assert 0 < fit.vision_bytes < written


def test_a_slot_has_the_bytes_of_its_kv_caches(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    assert config.talker is not None
    caches = [
        KvCache.zeros(text, 1, positions, torch.float32)
        for text, positions in ((config.thinker.text, 48), (config.talker.text, 80))
    ]
    allocated = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert {fit.slot_bytes for fit in fits_of(config, 48, 80)} == {allocated}


def test_the_released_model_in_int4_fits_24_gib_and_not_in_int8() -> None:
    """The goals of one conversation of 4,096 positions, and of the tree on the disk."""
    by_dtype = {fit.dtype: fit for fit in fits_of(released_config(), 4096, 4096 + 1024)}
    assert by_dtype["int4"].tree_bytes < 24.7e9
    assert by_dtype["int4"].memory_bytes() < 22.9 * 2**30
    assert by_dtype["int4"].slots(24 << 30) >= 1
    assert by_dtype["int8"].slots(24 << 30) == 0


def test_the_released_model_in_mixed_is_counted_in_12_bits_a_number_or_16() -> None:
    """Tables of rows, and code2wav's and the audio encoder's convolutions stay in 16."""
    gb = {}
    for compact in (False, True):
        mixed = fits_of(released_config(), 4096, 4096 + 1024, compact=compact)[0]
        gb[compact] = round(mixed.tree_bytes / GB, 1)
        assert any("12 bits" in line for line in fits_text([mixed], 1)) == compact
    assert gb == {False: 70.5, True: 53.7}


def test_the_table_says_how_much_is_missing() -> None:
    fit = Fit("int4", 2_100_000_000, 100_000_000, 500_000_000, 4096, 100_000, 12_000)
    assert fit.memory_bytes() == 2_000_000_000 + 500_000_000 + PROCESS_BYTES
    assert fits_text([fit], 4 * 10**9)[2] == "| int4 | 2.1 | 3.0 | 3 | 12000 |"
    assert fits_text([fit], 32 * 10**8)[2] == "| int4 | 2.1 | 3.0 | 1 | 6096 |"
    row = fits_text([fit], 2 * 10**9)[2]
    assert row == "| int4 | 2.1 | 3.0 | none: 1.0 GB are missing | none |"


def test_the_longest_slot_is_the_one_that_fits(config: OmniConfig) -> None:
    """And one position more does not."""
    here = fits_of(config, 48, 80)[0]
    memory_bytes = here.memory_bytes(1) + 10 * here.position_bytes
    assert here.longest(memory_bytes) == 58
    assert fits_of(config, 58, 90)[0].slots(memory_bytes) == 1
    assert fits_of(config, 59, 91)[0].slots(memory_bytes) == 0


def test_the_code_predictor_counts_in_its_own_dtype(config: OmniConfig) -> None:
    default, same = ({f.dtype: f for f in fits_of(config, 9, 9, {}, p)} for p in ("auto", "same"))
    assert same["int8"].tree_bytes < default["int8"].tree_bytes
    assert same["mixed"] == default["mixed"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(("123\n", None), 123), ((None, "456\n"), 456), (("max\n", f"{2**63 - 4096}\n"), None)],
    ids=["version 2", "version 1", "no limit"],
)
def test_the_memory_is_the_containers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: tuple[str | None, str | None],
    expected: int | None,
) -> None:
    files = tmp_path / "2", tmp_path / "1"
    for file, text in zip(files, texts, strict=True):
        if text is not None:
            file.write_text(text)
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", files)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.memory_bytes() == (expected or whole)


def test_a_dry_run_for_the_cpu_says_what_fits_here(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: int(0.6 * GB))
    words = ["compile", "--model", str(checkpoint), "--dry-run", "--target", "cpu"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=int(0.005 * GB)))
    assert cli.main([*words, "--context-length", "256", "--out", str(checkpoint / "no" / "o")]) == 0
    printed = capsys.readouterr().out
    assert "has 0.0 GB free, for a tree in mixed, int8, int4." in printed
    assert "memory with one conversation of 256 positions" in printed
    assert "conversations that fit 0.6 GB" in printed
    assert all(f"| {dtype} |" in printed for dtype in fits.DTYPES)


def test_a_quantised_checkpoint_is_counted_as_its_numbers_are_kept(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its files it is counted as if it were not quantised, and that is said."""
    queries = re.compile(r"thinker\.model\.layers\.\d+\.self_attn\.[qkv]_proj\.weight")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    folder, _ = write_quantised_checkpoint(
        checkpoint, tmp_path, lambda n: gptq(size=64) if queries.fullmatch(n) else None, settings
    )
    config, quantised = read_config(folder), Checkpoint(folder).quantised
    plan = make_plan(folder, config, LIMITS, dtype="int4")
    (fit,) = [fit for fit in fits_of(config, 64, 64, quantised) if fit.dtype == "int4"]
    (other,) = [fit for fit in fits_of(config, 64, 64) if fit.dtype == "int4"]
    assert fit.tree_bytes == sum(expected_bytes(plan, model) for model in MODELS)
    assert fit.tree_bytes != other.tree_bytes
    words = ["compile", "--model", str(folder), "--dry-run", "--target", "cpu", "--dtype", "int4"]
    assert cli.main(words) == 0
    assert capsys.readouterr().err == ""
    (folder / "model.safetensors").unlink()
    assert cli.main(words) == 0
    assert "counted as if it were not quantised" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"writes 1000000000000\.0 MB, .* nothing was written"):
        _check_disk(tmp_path, 10**18)
    _check_disk(tmp_path, 0)
