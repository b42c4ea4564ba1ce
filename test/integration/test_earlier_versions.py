"""Files of earlier versions, one folder each in test/data, are read or refused with what mends it.

checkpoint, compiled: a tiny checkpoint, and `compile --context-length 512 --talker-context-length
768 --max-concurrency 2` of it. reply.json: to "Who are you?", of the compiled tree, greedy, since
later versions draw otherwise by a seed. arguments: every flag of `serve`, as the systemd unit reads
them. ray.yaml: an application of `serve --ray`. ttfb_rtf.json: `bench.ttfb_rtf --model checkpoint
--requests 2 --warm-up 0 --thinker-max-new-tokens 5 --talker-max-new-tokens 5`. session: of the
checkpoint, saved with an image, audio, an interrupted reply and a turn to answer; session.json: the
greedy reply to that.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from qwen3_omni_neuron import Qwen3Omni, cli
from qwen3_omni_neuron.cli.parsing import refuse_unknown
from qwen3_omni_neuron.errors import ArtifactError, OptionError, StoredSessionError
from qwen3_omni_neuron.serving.fleet.settings import check_config
from testing.results import load_results
from testing.specs import compiled_here

GREEDY = {f"{part}_do_sample": False for part in ("thinker", "talker", "predictor")}
VERSIONS = sorted(p for p in (Path(__file__).parents[1] / "data").iterdir() if p.is_dir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def written(request) -> Path:
    return request.param


def test_a_tree_gives_its_reply_after_the_command_that_the_error_names(written, tmp_path) -> None:
    reply = json.loads((written / "reply.json").read_text(encoding="utf-8"))
    checkpoint, tree = written / "checkpoint", shutil.copytree(written / "compiled", tmp_path / "t")
    try:
        Qwen3Omni.load(checkpoint, compiled_path=tree).close()
    except ArtifactError as error:
        found = re.search("Compile again: qwen3-omni-neuron (.*)", str(error))
        assert found, error
        with compiled_here():
            assert cli.main(shlex.split(found[1])) == 0
    with Qwen3Omni.load(checkpoint, compiled_path=tree) as omni:
        messages = [{"role": "user", "content": "Who are you?"}]
        limits = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
        result = omni.generate_audio(messages, **GREEDY, **limits)
    assert result.token_ids == reply["token_ids"]
    assert result.codes.tolist() == reply["codes"]


def test_a_stored_session_goes_on_as_it_did(written) -> None:
    reply = json.loads((written / "session.json").read_text(encoding="utf-8"))
    with Qwen3Omni.load(written / "checkpoint") as omni:
        try:
            session = omni.restore_session(written / "session")
        except StoredSessionError as error:
            assert "pip install" in str(error), "it says what to do"
            return
        with session, session.respond(**GREEDY) as stream:
            *_, finished = stream
    assert finished.result.token_ids == reply["token_ids"]
    assert finished.result.codes.tolist() == reply["codes"]


def test_an_application_is_read_after_the_change_that_the_error_names(written, tmp_path) -> None:
    config = Path(shutil.copy(written / "ray.yaml", tmp_path / "of a user.yaml"))
    try:
        check_config(config)
    except OptionError as error:
        found = re.search(r"(\S+) was removed: set import_path to ([\w.:]*\w)", str(error))
        assert found, error
        config.write_text(config.read_text().replace(found[1], found[2]))
        check_config(config)


def test_a_servers_flags_are_read_after_the_changes_that_the_errors_name(written, capsys) -> None:
    """None of them is lost: what is parsed are the values of the file."""
    text = (written / "arguments").read_text(encoding="utf-8").replace("\\\n", " ")
    words = shlex.split(text.split("ARGUMENTS=")[1])
    for _ in words:
        try:
            parsed, unknown = cli.make_parser().parse_known_args(["serve", *words])
            if not unknown:
                break
            refuse_unknown(parsed.verb, unknown)
        except SystemExit:
            error = capsys.readouterr().err
            found = re.search(r"(--\S+) was removed: (?:use (--[\w-]+))?", error)
            assert found, error
            at = words.index(found[1])
            words[at : at + 1 + (found[2] is None)] = [found[2]] if found[2] else []
    values = {name: value for name, value in vars(parsed).items() if name != "cores"}
    read = {
        f"{v:g}" if isinstance(v, float) else str(v)
        for value in values.values()
        for v in (value if isinstance(value, list) else [value])
    }
    cores = ",".join(f"{stage}={of}" for stage, of in parsed.cores.items())
    assert {word for word in words if not word.startswith("--")} <= read | {cores}
    assert parsed.log_content is True


def test_a_benchmarks_result_is_read(written) -> None:
    found = load_results(written / "ttfb_rtf.json")
    assert found.benchmark == "ttfb_rtf"
    assert len(found.rows) == 2
