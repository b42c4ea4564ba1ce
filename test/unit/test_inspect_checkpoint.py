"""`inspect` of checkpoints: the dtype that auto means on the CPU, and checkpoints on the hub."""

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
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_omni_neuron import cli
from qwen3_omni_neuron.checkpoint.headers import read_headers
from qwen3_omni_neuron.checkpoint.hub_headers import _fetch_shard, read_range
from qwen3_omni_neuron.compilation.loading import plan_of
from qwen3_omni_neuron.cpu import target
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.options import LoadOptions
from testing.native_library import needs_c
from testing.quantised_checkpoint import (
    Writer,
    fp8,
    gptq,
    int8_rows,
    pack_quantized,
    write_quantised_checkpoint,
)

THINKER = re.compile(
    r"thinker\.model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+)\.\w+_proj\.weight"
)
QUERY = "thinker.model.layers.0.self_attn.q_proj.weight"
EXPERT = "thinker.model.layers.1.mlp.experts.3.down_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


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
        pytest.param(every(gptq(ordered=True)), {**GPTQ, "desc_act": True}, "int4", id="act order"),
        pytest.param(but(EXPERT, int8_rows), GPTQ, "int8", id="an expert in 8 bits"),
        pytest.param(but(QUERY, None), GPTQ, "int8", id="q in bfloat16"),
        pytest.param(every(gptq(size=16)), {**GPTQ, "group_size": 16}, "int8", id="groups of 16"),
        pytest.param(every(pack_quantized(8, 0)), PACKED, "int8", id="8 bits"),
        pytest.param(every(fp8("row")), PACKED, "int8", id="fp8"),
    ],
)
def test_auto_keeps_a_quantised_checkpoints_numbers_on_the_cpu(
    checkpoint: Path,
    tmp_path: Path,
    config: OmniConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    writer_of: Callable[[str], Writer | None],
    settings: dict[str, Any],
    dtype: str,
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
                if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    first, last, size = int(span[1]), int(span[2]), len(body)
                    body, status = body[first : last + 1], 206
                    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
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


def inspected(name: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `inspect` over a hub."""
    command = [sys.executable, "-m", "qwen3_omni_neuron.cli", "inspect", name]
    return run_with_hub(command, cache, **environment)


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


@pytest.mark.usefixtures("warm_commands")
def test_a_hub_id_is_shown_from_its_headers_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A shard is asked for its header and for weight_shape, two numbers for each matrix."""
    writer = pack_quantized()
    folder, _ = write_quantised_checkpoint(checkpoint, tmp_path, every(writer), PACKED)
    expected = inspected(str(folder), tmp_path / "none")
    assert expected.returncode == 0 and "pack-quantized" in expected.stdout
    shard = folder / "model.safetensors"
    stored = read_headers(folder, [shard.name])
    shapes = [s.bytes for name, s in stored.items() if name.endswith("weight_shape")]
    assert len(shapes) == 84
    header_bytes = min(s.begin for s in stored.values())
    with hub_of(folder) as (url, sent):
        shown = inspected("someone/omni", tmp_path / "cache", HF_ENDPOINT=url)
        assert shown.stdout == expected.stdout, shown.stderr
        assert sent[shard.name] == header_bytes + sum(shapes) < shard.stat().st_size / 2
        unknown = inspected("someone/else", tmp_path / "cache", HF_ENDPOINT=url)
    assert unknown.returncode == 1
    assert "someone/else is not a local folder, and the hub gave no checkpoint" in unknown.stderr


@pytest.mark.usefixtures("warm_commands")
def test_a_hub_id_whose_shards_are_cached_is_shown_offline(
    checkpoint: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "models--someone--omni"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "snapshots" / COMMIT).symlink_to(checkpoint)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    shown = inspected("someone/omni", tmp_path, HF_HUB_OFFLINE="1")
    assert shown.returncode == 0, shown.stderr
    assert "thinker" in shown.stdout and "dtype auto on the CPU: mixed" in shown.stdout


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("omni-Q4_K_M.gguf", "someone/omni is GGUF: files of llama.cpp"),
        ("thinker/config.json", "someone/omni is a checkpoint in folders: thinker, talker and"),
    ],
)
def test_other_kinds_on_the_hub_are_refused_by_their_files_names(
    tmp_path: Path, name: str, said: str
) -> None:
    """Also where a folder of theirs has safetensors."""
    folder = tmp_path / "files"
    for file in (name, "thinker/model.safetensors"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"{}")
    with hub_of(folder) as (url, sent):
        shown = inspected("someone/omni", tmp_path / "cache", HF_ENDPOINT=url)
    assert shown.returncode == 1 and not sent
    assert said in shown.stderr


@pytest.mark.usefixtures("warm_commands")
def test_what_is_not_read_is_refused_before_its_weights_are_downloaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    """MLX has the same files, and says its packing in config.json."""
    settings = {"group_size": 64, "bits": 4}
    folder, _ = write_quantised_checkpoint(checkpoint, tmp_path, lambda _: None, settings)
    with hub_of(folder) as (url, sent):
        loaded = run_with_hub(LOAD, tmp_path / "cache", HF_ENDPOINT=url)
    assert re.search("CheckpointError: .* is MLX: 4 or 8 bits in words", loaded.stderr)
    assert sent["config.json"] and not sent["model.safetensors"]


@pytest.mark.usefixtures("warm_commands")
def test_another_model_is_refused_before_its_weights_are_downloaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "files"))
    change_config(folder, lambda config: config.update(model_type="qwen2_5_omni"))
    with hub_of(folder) as (url, sent):
        loaded = run_with_hub(LOAD, tmp_path / "cache", HF_ENDPOINT=url)
    assert "says model_type 'qwen2_5_omni'; this package runs" in loaded.stderr
    assert sent["config.json"] and not any(name.endswith(".safetensors") for name in sent)


@pytest.mark.usefixtures("warm_commands")
def test_what_is_in_folders_of_a_checkpoint_on_the_hub_is_not_downloaded(
    checkpoint: Path, tmp_path: Path
) -> None:
    """People also publish an original, or another size, in folders beside what is read."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "files"))
    shutil.copytree(checkpoint, folder / "original")
    with hub_of(folder) as (url, sent):
        loaded = run_with_hub(LOAD, tmp_path / "cache", HF_ENDPOINT=url)
    assert loaded.returncode == 0, loaded.stderr
    assert sent["config.json"] and not any("/" in name for name in sent)


@pytest.mark.usefixtures("warm_commands")
def test_a_shard_in_another_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder, _ = write_quantised_checkpoint(checkpoint, tmp_path, every(gptq()), GPTQ)
    index = {"weight_map": {"thinker.lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with hub_of(folder) as (url, sent):
        shown = inspected("someone/omni", tmp_path / "cache", HF_ENDPOINT=url)
    assert shown.returncode == 1
    assert "no file in its folder" in shown.stderr
    assert "model.safetensors" not in sent


@pytest.mark.usefixtures("warm_commands")
def test_a_weight_shape_of_many_numbers_is_not_fetched(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    shard = folder / "model.safetensors"
    save_file({"thinker.lm_head.weight_shape": torch.zeros(9, dtype=torch.int64)}, shard)
    with hub_of(folder) as (url, sent):
        shown = inspected("someone/omni", tmp_path / "cache", HF_ENDPOINT=url)
    assert shown.returncode == 1
    assert "a weight_shape has more than 64 bytes" in shown.stderr
    assert sent[shard.name] == shard.stat().st_size - 72


def test_weight_shapes_with_gigabytes_between_them_are_not_fetched(tmp_path: Path) -> None:
    """A header may say that each is just near enough to the one before to be fetched with it."""
    entry = {"dtype": "I64", "shape": [2]}
    places = [(n * 60_000, n * 60_000 + 16) for n in range(1200)]
    header = {f"{n}.weight_shape": entry | {"data_offsets": p} for n, p in enumerate(places)}
    written = json.dumps(header).encode()
    shard, asked = len(written).to_bytes(8, "little") + written, []

    def read(begin: int, end: int) -> bytes:
        asked.append(end)
        return shard[begin:end]

    with pytest.raises(ValueError, match="its weight_shapes are spread over 71940016 bytes"):
        _fetch_shard(read, tmp_path / "model.safetensors")
    assert max(asked) == len(shard)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][name])


def test_another_shape_than_config_json_says_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "made"))

    def widen(config: dict[str, Any]) -> None:
        config["thinker_config"]["text_config"]["moe_intermediate_size"] *= 2

    change_config(folder, widen)
    assert cli.main(["inspect", str(folder)]) == 1
    said = "experts.0.gate_proj.weight has shape [32, 64]; config.json says [64, 64]"
    assert said in capsys.readouterr().err


def test_a_tensor_that_the_index_has_in_a_file_without_it_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


ENDLESS = 64 << 20  # bytes of a body that should not be read, more than sockets buffer


@contextmanager
def reply_of(status: int, headers: dict[str, str], body: bytes) -> Iterator[tuple[str, list[int]]]:
    """Serve one reply. Yields its URL, and gets how many bytes of it a client let be sent."""
    sent: list[int] = []

    class Reply(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            done, pieces = 0, memoryview(body)
            with suppress(ConnectionError):
                while done < len(body):
                    done += self.connection.send(pieces[done : done + 65536])
            sent.append(done)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Reply)
    server.daemon_threads = False  # so that server_close waits for what they sent
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/shard", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=["own", "requests"])
def session_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub client have its own session, and one of requests, as before its version 1."""
    if request.param == "requests":
        requests = pytest.importorskip("requests", reason="requests is not installed")
        monkeypatch.setattr("huggingface_hub.utils.get_session", requests.Session)


PARTIAL = {"Content-Range": "bytes 8-15/99"}


@pytest.mark.usefixtures("session_of")
@pytest.mark.parametrize(
    ("status", "headers", "size", "said"),
    [
        (206, PARTIAL, 8, None),
        (206, PARTIAL, 7, "8 bytes were asked for, and 7 came"),
        (206, PARTIAL, ENDLESS, "8 bytes were asked for, and more than 8 came"),
        (206, {"Content-Range": "bytes 0-7/99"}, 8, "bytes 8-15 were .*-Range bytes 0-7/99"),
        (206, {}, ENDLESS, "bytes 8-15 were .*, Content-Range none, Content-Length None"),
        (
            200, {"Content-Length": str(ENDLESS)}, ENDLESS,
            f"a reply of status 200 came, Content-Range none, Content-Length {ENDLESS}",
        ),
    ],
)  # fmt: skip
def test_a_hub_that_sends_other_bytes_than_asked_for_is_not_read_whole(
    status: int, headers: dict[str, str], size: int, said: str | None
) -> None:
    with reply_of(status, headers, bytes(size)) as (url, sent):
        if said is None:
            assert read_range(url, 8, 16) == bytes(8)
        else:
            with pytest.raises(ValueError, match=said):
                read_range(url, 8, 16)
    assert size <= 8 or sent[0] < ENDLESS
