"""Checkpoints on the hubs: what `inspect` shows of them, as in docs/options.md, and their loads."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.checkpoint.released import SPEAKS, open_config, released_config
from qwen3_omni_neuron.compilation.loading import plan_of
from qwen3_omni_neuron.compilation.plan import MODELS, make_plan
from qwen3_omni_neuron.cpu import target
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import expected_bytes
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.options import LoadOptions
from testing.hub_checkpoints import HUB_CHECKPOINTS
from testing.imports import ROOT
from testing.native_library import needs_c
from testing.quantised_checkpoint import (
    Writer,
    fp8,
    gptq,
    pack_quantized,
    write_quantised_checkpoint,
)
from testing.released import RELEASED
from testing.repeats import again

DTYPES = ("mixed", "int8", "int4")


def rows() -> dict[str, list[str]]:
    """Return the cells of the table in docs/options.md, by checkpoint."""
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| checkpoint \|.*\n\| ---.*\n((?:\|.*\n)+)", text)
    cells = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    return {name.split("`")[1]: row for name, *row in cells}


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def form_and_use(shown: dict[str, Any]) -> list[str]:
    """Return what is quantised and how, and what becomes of it: the first cells of a row."""
    quantised = [row for row in shown["tensors"] if row["dtypes int8, int4"]]
    if not quantised:
        return ["bfloat16", "rounded"]
    parts = ", ".join(row["part"].replace("_", " ") for row in quantised)
    cells = {
        (
            f"{row['form']}, {row['bits']} bits, a scale for {row['a scale for']}: {parts}",
            row["dtypes int8, int4"],
        )
        for row in quantised
    }
    assert len(cells) == 1
    return list(cells.pop())


def test_the_table_has_every_checkpoint() -> None:
    assert rows().keys() == HUB_CHECKPOINTS.keys()


@needs_c  # without it `auto` is `mixed`
@pytest.mark.parametrize("name", HUB_CHECKPOINTS)
def test_a_checkpoint_is_read_in_the_form_that_the_table_says(name, tmp_path, capsys) -> None:
    HUB_CHECKPOINTS[name].write(tmp_path, layers=3)
    shown = inspected(tmp_path, capsys)
    assert [*form_and_use(shown), f"`{shown['dtype auto on the CPU']}`"] == rows()[name][:3]


@pytest.mark.parametrize("name", [again(n) for n in HUB_CHECKPOINTS])
def test_a_checkpoint_takes_the_memory_that_the_table_says(name, tmp_path) -> None:
    """By its headers, in all layers. Its tensors are as large as its files are said to be."""
    checkpoint = HUB_CHECKPOINTS[name]
    size = checkpoint.write(tmp_path) / 1e9
    assert size == pytest.approx(checkpoint.reported_gb or size, abs=0.1)
    config, found = read_config(tmp_path), []
    for dtype in DTYPES:
        plan = make_plan(tmp_path, config, LIMITS, dtype=dtype)
        found.append(f"{sum(expected_bytes(plan, model) for model in MODELS) / 1e9:.1f}")
    assert found == rows()[name][3:]


@pytest.fixture
def no_hub(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)


def test_the_released_settings_are_those_of_instruct() -> None:
    assert released_config() == RELEASED


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("hub_id", SPEAKS)
def test_a_released_checkpoint_is_read_without_the_hub(hub_id) -> None:
    with open_config(hub_id) as folder:
        config = read_config(folder)
        raw = json.loads((folder / "config.json").read_text())
    assert not folder.exists()
    assert config == released_config(hub_id)
    assert config.thinker == RELEASED.thinker
    assert raw["enable_audio_output"] is (config.talker is not None)
    assert (config.talker, config.code2wav) == (
        (RELEASED.talker, RELEASED.code2wav) if hub_id.endswith("Instruct") else (None, None)
    )


@pytest.mark.usefixtures("no_hub")
def test_another_hub_id_needs_the_hub_and_a_folder_comes_first(checkpoint) -> None:
    with pytest.raises(ImportError, match="huggingface_hub"), open_config("someone/omni"):
        pass
    with pytest.raises(CheckpointError, match="does not exist"), open_config("no folder"):
        pass
    folder = Path("Qwen/Qwen3-Omni-30B-A3B-Captioner")
    folder.parent.mkdir()
    folder.symlink_to(checkpoint)
    with open_config(str(folder)) as found:
        assert read_config(found) == read_config(checkpoint)


@pytest.mark.usefixtures("no_hub")
def test_a_dry_run_of_a_hub_id_for_the_cpu_reads_no_weights(capsys) -> None:
    words = ["compile", "--model", "Qwen/Qwen3-Omni-30B-A3B-Thinking", "--dry-run"]
    assert cli.main([*words, "--target", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "thinker  mixed" in printed.out
    assert printed.err == ""


THINKER = re.compile(
    r"thinker\.model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+)\.\w+_proj\.weight"
)
QUERY = "thinker.model.layers.0.self_attn.q_proj.weight"
EXPERT = "thinker.model.layers.1.mlp.experts.3.down_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "group_size": 32}


def every(writer: Writer) -> Callable[[str], Writer | None]:
    return lambda name: writer if THINKER.fullmatch(name) else None


def but(exception: str, other: Writer | None) -> Callable[[str], Writer | None]:
    """Return 4 bits for all matrices but one."""
    return lambda name: other if name == exception else every(gptq())(name)


@needs_c
@pytest.mark.parametrize(
    ("writer_of", "settings", "dtype"),
    [
        pytest.param(every(gptq()), GPTQ, "int4", id="4 bits"),
        pytest.param(but(EXPERT, fp8()), GPTQ, "int8", id="an expert in 8 bits"),
        pytest.param(but(QUERY, None), GPTQ, "int8", id="q in bfloat16"),
        pytest.param(every(gptq(size=16)), {**GPTQ, "group_size": 16}, "int8", id="groups of 16"),
        pytest.param(every(pack_quantized(8)), PACKED, "int8", id="8 bits"),
    ],
)
def test_auto_keeps_a_quantised_checkpoints_numbers_on_the_cpu(
    checkpoint, tmp_path, config, capsys, monkeypatch, writer_of, settings, dtype
) -> None:
    """int4 rounds nothing to 4 bits that was not published so. Without the C auto is mixed."""
    folder, _ = write_quantised_checkpoint(checkpoint, tmp_path, writer_of, settings)

    def dtype_of(folder: Path) -> str:
        return plan_of(folder, config, None, LoadOptions()).dtype

    assert dtype_of(folder) == dtype
    assert dtype_of(checkpoint) == "mixed"
    assert cli.main(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"\ndtype auto on the CPU: {dtype}\n")
    monkeypatch.setattr(target, "find_library", lambda: None)
    assert dtype_of(folder) == "mixed"


COMMIT = "c" * 40
LOAD = [sys.executable, "-c", "import qwen3_omni_neuron as q; q.Qwen3Omni.load('someone/omni')"]


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a checkpoint as someone/omni. Yields the hub's URL, and what was sent of each file."""
    sent: Counter[str] = Counter()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def _answer(self, whole: bool) -> None:
            headers = {"X-Repo-Commit": COMMIT}
            name = self.path.removeprefix(f"/someone/omni/resolve/{COMMIT}/")
            if self.path.startswith("/api/models/someone/omni"):
                files = (path for path in folder.rglob("*") if path.is_file())
                names = [path.relative_to(folder).as_posix() for path in files]
                siblings = [{"rfilename": name} for name in names]
                about: Any = {"id": "someone/omni", "sha": COMMIT, "siblings": siblings}
                if "/tree/" in self.path:  # asked for by newer clients
                    about = [{"type": "file", "path": n, "size": 1, "oid": n} for n in names]
                body, status = json.dumps(about).encode(), 200
                headers["Content-Type"] = "application/json"
            elif (folder / name).is_file():
                body, status = (folder / name).read_bytes(), 200
                headers |= {"ETag": hashlib.sha256(body).hexdigest(), "Accept-Ranges": "bytes"}
                sent[name] += len(body) if whole else 0
            else:
                body, status = b"", 404
                headers["X-Error-Code"] = "RepoNotFound"
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if whole:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_with_hub(
    command: list[str], cache: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a process of its own: the hub client reads its settings when imported."""
    return subprocess.run(
        command,
        env={**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_id_is_not_shown_before_it_is_downloaded(capsys) -> None:
    assert cli.main(["inspect", "someone/omni"]) == 1
    assert "`hf download ID` prints the folder of a hub id" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_commands")
def test_what_is_not_read_is_refused_before_its_weights_are_downloaded(
    checkpoint, tmp_path
) -> None:
    """MLX has the same files, and names no method in config.json."""
    settings = {"group_size": 64, "bits": 4}
    folder, _ = write_quantised_checkpoint(checkpoint, tmp_path, lambda _: None, settings)
    with hub_of(folder) as (url, sent):
        loaded = run_with_hub(LOAD, tmp_path / "cache", HF_ENDPOINT=url)
    assert "is quantised by the method 'None', which is not supported" in loaded.stderr
    assert sent["config.json"] and not sent["model.safetensors"]


@pytest.mark.usefixtures("warm_commands")
def test_what_is_in_folders_of_a_checkpoint_on_the_hub_is_not_downloaded(
    checkpoint, tmp_path
) -> None:
    """People also publish an original, or another size, in folders beside what is read."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "files"))
    shutil.copytree(checkpoint, folder / "original")
    with hub_of(folder) as (url, sent):
        loaded = run_with_hub(LOAD, tmp_path / "cache", HF_ENDPOINT=url)
    assert loaded.returncode == 0, loaded.stderr
    assert sent["config.json"] and not any("/" in name for name in sent)


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][name])


def test_a_tensor_that_the_index_has_in_a_file_without_it_is_named(
    checkpoint, tmp_path, capsys
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "made"))
    shard = shard_of(folder, QUERY)
    tensors = load_file(shard)
    del tensors[QUERY]
    save_file(tensors, shard)
    assert cli.main(["inspect", str(folder)]) == 1
    said = f"{shard} lacks {QUERY}, which model.safetensors.index.json has there; 1 tensors"
    assert said in capsys.readouterr().err


def test_a_tensor_that_is_left_in_another_file_is_not_the_one_shown(
    checkpoint, tmp_path, capsys
) -> None:
    """The index tells which file's is read."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "made"))
    own = shard_of(folder, QUERY)
    for shard in sorted(folder.glob("*.safetensors")):
        if shard != own:
            save_file(load_file(shard) | {QUERY: torch.zeros(3, dtype=torch.int8)}, shard)
    assert cli.main(["inspect", str(checkpoint)]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out == expected
