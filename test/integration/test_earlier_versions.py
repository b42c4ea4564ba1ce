"""Files of earlier versions, one folder each in test/data, are read or refused with what to do.

checkpoint, compiled: `tiny-checkpoint`, and `compile --context-length 512 --talker-context-length
768 --max-concurrency 2` of it. reply.json: to "Who are you?", of the compiled tree. ray.yaml: an
application of `serve --ray`. ttfb_rtf.json: `bench.ttfb_rtf --model checkpoint --requests 2
--warm-up 0 --thinker-max-new-tokens 5 --talker-max-new-tokens 5`. session: of the checkpoint, saved
with an image, audio, an interrupted reply and a turn to answer; session.json: the reply to that.
"""

import json
from pathlib import Path

import pytest

from bench.common.results import load_results
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.errors import ArtifactError, OptionError, StoredSessionError
from qwen3_omni_neuron.serving.fleet.command import IMPORT_PATH, check_config

VERSIONS = sorted((Path(__file__).parents[1] / "data").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def written(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_a_tree_gives_the_reply_that_it_gave(written: Path) -> None:
    reply = json.loads((written / "reply.json").read_text(encoding="utf-8"))
    limits = {"thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
    try:
        omni = Qwen3Omni.load(written / "checkpoint", compiled_path=written / "compiled")
    except ArtifactError as error:
        assert "compile" in str(error), "it says what to do"
        return
    with omni:
        messages = [{"role": "user", "content": "Who are you?"}]
        result = omni.generate_audio(messages, seed=1, **limits)
    assert result.token_ids == reply["token_ids"]
    assert result.codes.tolist() == reply["codes"]


def test_a_stored_session_goes_on_as_it_did(written: Path) -> None:
    reply = json.loads((written / "session.json").read_text(encoding="utf-8"))
    with Qwen3Omni.load(written / "checkpoint") as omni:
        try:
            session = omni.restore_session(written / "session")
        except StoredSessionError as error:
            assert "pip install" in str(error), "it says what to do"
            return
        with session, session.respond() as stream:
            *_, finished = stream
    assert finished.result.token_ids == reply["token_ids"]
    assert finished.result.codes.tolist() == reply["codes"]


def test_an_application_is_checked_or_refused_with_its_new_name(written: Path) -> None:
    try:
        check_config(written / "ray.yaml")
    except OptionError as error:
        assert IMPORT_PATH in str(error)


def test_a_benchmarks_result_is_read(written: Path) -> None:
    found = load_results(written / "ttfb_rtf.json")
    assert found.benchmark == "ttfb_rtf"
    assert len(found.rows) == 2
