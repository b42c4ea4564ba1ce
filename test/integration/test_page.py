"""The page at /, in a real Chromium: it hears, is heard, is interrupted, and works without a mouse.

What its loudspeaker gets is judged by train/judge.py, as in test_speaking.
"""

import base64
import io
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.options import RequestOptions
from qwen3_omni_neuron.serving.page import FILES
from qwen3_omni_neuron.serving.server import Server
from testing.browser import CAPTURED, CHROMIUM, Visitor, chromium, visiting, write_microphone
from testing.http_client import ask
from testing.http_server import serving, url_of
from testing.media_cases import noise_image
from testing.scripted_model import ScriptedModel
from train.judge import Judge, RecognisedWord
from train.speech import MEASURING, spoken_clip

RATE = 16000
SUM_FILE = Path(__file__).parents[2] / "examples" / "sum.wav"
SUM, SUM_RATE = soundfile.read(SUM_FILE, dtype="float32")
LONG = spoken_clip("say seven red goodbye white", MEASURING, random.Random(1))
CAMERA = "Camera: a picture with each question"
SILENT_MS = 200  # after speech_started
DIED = {"error": {"message": "The engine died."}}
# What the page says of a response without text, by its status.
FAULTS = {
    "completed": "The model ended its answer without a word.",
    "incomplete": "A limit of the server ended this answer.",
    "failed": "The engine died.",
}


@pytest.fixture(scope="module")
def server(speaking) -> Iterator[Server]:
    with serving(speaking) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no Chromium: `make chromium` installs Debian's")
    microphone = tmp_path_factory.mktemp("microphone") / "sum.wav"
    write_microphone(microphone, SUM, SUM_RATE, silence_s=60)
    with playwright.sync_playwright() as running, chromium(running, microphone) as browser:
        yield browser


@pytest.fixture
def visitor(browser, server) -> Iterator[Visitor]:
    """The page, with a microphone that says what a test wants."""
    with visiting(browser, url_of(server), puppet=True) as made:
        yield made
        assert made.problems == []


def words(judge: Judge, sound: NDArray[np.float32]) -> list[RecognisedWord]:
    return judge.hear(np.concatenate((sound, np.zeros(2400, np.float32))))


def picture(url: str) -> Image.Image:
    """Return the image of a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def texts(visitor: Visitor, side: str) -> list[str]:
    return visitor.page.locator(f"#turns .{side} .words").all_text_contents()


# What is served.


def test_the_page_is_open_and_strict() -> None:
    """It needs no key, nothing beside its files is served, and what is not its own does not run."""
    model: Any = ScriptedModel(["hello"])
    with serving(model, api_keys=("a-key",)) as server:
        url = url_of(server)
        for path in FILES:
            answer = ask(url + path)
            assert answer.status == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy and "http" not in policy
        for path in ("/page", "/page/", "/page/__init__.py", "/page/../gate.py", "/page/x.js"):
            assert ask(url + path).status == 401
            assert ask(url + path, key="a-key").status == 404
        assert ask(url + "/", method="POST").status == 405


# What is heard and said.


def test_a_question_is_heard_and_its_answer_sounds(browser, server, judge) -> None:
    """From the browser's own fake microphone to its loudspeaker, in the asked voice, with nothing
    asked of any other server."""
    with visiting(browser, url_of(server)) as visitor:
        page = visitor.page
        page.locator("#voice option[value=Chelsie]").wait_for(state="attached")
        page.select_option("#voice", "Chelsie")
        page.click("#talk")
        visitor.answered(1)
        page.wait_for_timeout(200)
        [word] = words(judge, visitor.heard())
        assert (word.word, word.speaker) == ("eight", "chelsie")
        assert texts(visitor, "answer") == ["eight"]
        assert texts(visitor, "user") == ["(spoken)"]
        assert (
            visitor.sent("session.update")[0]["session"]["audio"]["input"]["transcription"] is None
        )
        asked = page.evaluate("asked.audio")
        assert asked["echoCancellation"] is asked["noiseSuppression"] is True
        figures = page.text_content(".answer .figures")
        assert "first text" in figures and "first sound" in figures
        here = (url_of(server) + "/", url_of(server).replace("http", "ws") + "/")
        assert all(url.startswith(here) for url in visitor.requests), visitor.requests
        assert visitor.problems == []


def test_a_model_that_transcribes_questions_has_them_written(browser, server, monkeypatch) -> None:
    url = url_of(server)
    [entry] = ask(url + "/v1/models").json()["data"]
    assert entry["transcribes_questions"] is False
    monkeypatch.setattr(Qwen3Omni, "transcription_instruction", "say it again")
    [entry] = ask(url + "/v1/models").json()["data"]
    assert entry["transcribes_questions"] is True
    with visiting(browser, url, puppet=True) as visitor:
        visitor.page.click("#talk")
        visitor.until("window.say")
        visitor.say(SUM, SUM_RATE)
        visitor.answered(1)
        visitor.until("received.some(({ type }) => type.endsWith('transcription.completed'))")
        [written] = visitor.received("conversation.item.input_audio_transcription.completed")
        assert texts(visitor, "user") == [written["transcript"]] != [""]
        assert visitor.problems == []


def test_speech_interrupts_the_answer(visitor, server, judge) -> None:
    """The loudspeaker is silent at once, the server is told what was heard, and the second
    question has its answer, and can be heard, too. The first one waits for it: it would be over on
    a slow machine."""
    page = visitor.page
    page.click("#talk")
    visitor.until("window.say")
    page.evaluate(
        """() => {
          const [loudspeaker] = contexts;
          let played_s = 0;
          window.onRendered = ({ sounds }) => {
            if (sounds) played_s += 0.02;
            if (played_s < 0.3 + 2 * loudspeaker.outputLatency) return; // some of it was heard
            window.onRendered = () => {};
            window.stopped = loudspeaker.suspend();
            window.onReceived = ({ type }) => {
              if (type !== "input_audio_buffer.speech_started") return;
              window.onReceived = () => {};
              loudspeaker.resume();
            };
          };
        }"""
    )
    visitor.say(LONG, RATE)
    visitor.until("window.stopped")
    visitor.say(SUM, SUM_RATE)
    visitor.until("document.querySelectorAll('.answer .figures').length === 2")
    visitor.answered(2)
    page.wait_for_timeout(200)
    _, second = visitor.received("input_audio_buffer.speech_started")
    _, made = visitor.received("response.created")
    last = page.evaluate(
        "([from, to]) => rendered.findLast(({ at, sounds }) => sounds && at < to).at - from",
        [second["at"], made["at"]],
    )
    assert last <= SILENT_MS, f"sound {last} ms after speech_started"
    assert page.locator(".answer").first.locator(".why").text_content() == "Interrupted"
    [cut] = visitor.sent("conversation.item.truncate")
    played_ms = page.evaluate(
        "(to) => 20 * rendered.filter(({ at, sounds }) => sounds && at < to).length", made["at"]
    )
    assert 0 < cut["audio_end_ms"] <= played_ms + 400  # silence between words is heard, too
    told = visitor.received("conversation.item.truncated")[-1]
    assert (told["item_id"], told["audio_end_ms"]) == (cut["item_id"], cut["audio_end_ms"])
    assert [word.word for word in words(judge, visitor.heard(made["at"]))] == ["eight"]
    assert texts(visitor, "answer")[1] == "eight"
    with page.expect_download() as found:
        page.locator(".user").nth(1).get_by_role("button", name="Download").click()
    assert found.value.suggested_filename == "question-2.wav"
    saved, rate = soundfile.read(found.value.path(), dtype="float32")
    assert abs(len(saved) / rate - len(SUM) / SUM_RATE) < 1
    asked = [{"role": "user", "content": [{"type": "audio", "audio": (saved, rate)}]}]
    omni = server.service.model.take()
    assert omni.generate_text(asked, thinker_do_sample=False).text == "eight"


def test_push_to_talk_by_the_keyboard(visitor, judge) -> None:
    """From the first Tab to the answer; what is said beside the held button is not sent."""
    page = visitor.page
    focus = "[document.activeElement].map((x) => x.id || x.value || x.type)[0]"
    reached = []
    page.locator("#questions button").first.wait_for()
    page.evaluate("document.querySelector('#settings').open = true")
    for _ in range(17):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focus))
        ring = page.evaluate(
            """() => [document.activeElement, document.activeElement.nextElementSibling,
                      document.activeElement.closest("label")].some(
                (x) => x && getComputedStyle(x).outlineStyle === "solid")"""
        )
        assert ring or reached[-1] in ("submit", ""), f"the focus on {reached[-1]} can be seen"
    page.focus("#talk")
    page.keyboard.press("Enter")
    visitor.until("window.say")
    page.focus("[value=hands-free]")
    page.keyboard.press("ArrowRight")
    visitor.until("received.filter(({ type }) => type === 'session.updated').length === 2")
    before = len(visitor.sent("input_audio_buffer.append"))
    visitor.say(LONG, RATE)
    page.evaluate("() => said")
    assert len(visitor.sent("input_audio_buffer.append")) == before
    page.focus("#talk")
    page.keyboard.down("Space")
    visitor.until("document.querySelector('#talk-label').textContent === 'Release to send'")
    visitor.say_to_the_end(SUM, SUM_RATE)
    page.keyboard.up("Space")
    visitor.answered(1)
    assert texts(visitor, "answer") == ["eight"]
    assert page.locator(".user").get_by_role("button", name="Replay").count() == 1
    controls = {"new", "scroller", "file", "camera", "text", "talk", "voice", "language"}
    assert controls | {"system", "microphone", "loudspeaker"} <= set(reached)
    assert [word.word for word in words(judge, visitor.heard())] == ["eight"]


def test_a_written_question_and_an_image(visitor, tmp_path) -> None:
    image = tmp_path / "noise.png"
    made = noise_image(3000, 400)
    made.putalpha(Image.linear_gradient("L").resize(made.size).point(lambda x: 255 * (x > 127)))
    made.save(image)
    page = visitor.page
    page.set_input_files("#file", image)
    visitor.until("received.some(({ type }) => type === 'conversation.item.done')")
    assert page.get_by_role("img", name="Image noise.png").is_visible()
    page.fill("#text", "say red")
    page.keyboard.press("Enter")
    visitor.answered(1)
    pictured, written = (item["item"] for item in visitor.sent("conversation.item.create"))
    [part] = pictured["content"]
    assert part["image_url"].startswith("data:image/jpeg;base64,")
    shown = picture(part["image_url"])
    assert shown.size == (1280, 171)
    assert np.asarray(shown)[:70].min() > 250  # what was transparent is white
    assert page.evaluate("document.querySelector('.user img').naturalWidth") == 1280
    assert written["content"] == [{"type": "input_text", "text": "say red"}]
    assert texts(visitor, "answer") != [""]
    assert visitor.page.evaluate("asked") is None
    [update] = visitor.sent("session.update")
    assert update["session"]["audio"]["output"] == {"voice": None}
    [session] = [event["session"] for event in visitor.received("session.updated")]
    assert session["audio"]["output"]["voice"] == RequestOptions().speaker


def test_a_sound_file_is_a_question(visitor, tmp_path) -> None:
    page = visitor.page
    page.set_input_files("#file", SUM_FILE)
    visitor.answered(1)
    page.evaluate(
        """(base64) => {
          const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], "sum.wav", { type: "audio/wav" }));
          const fields = { dataTransfer, bubbles: true, cancelable: true };
          document.querySelector("#scroller").dispatchEvent(new DragEvent("drop", fields));
        }""",
        base64.b64encode(SUM_FILE.read_bytes()).decode(),
    )
    visitor.answered(2)
    assert texts(visitor, "answer") == ["eight", "eight"]
    assert texts(visitor, "user") == ["sum.wav", "sum.wav"]
    text = {"name": "x.txt", "mimeType": "text/plain", "buffer": b"eight"}
    page.set_input_files("#file", text)
    page.get_by_text("This browser can't open x.txt.").wait_for()
    soundfile.write(tmp_path / "long.wav", np.zeros(301 * 8000), 8000)
    page.set_input_files("#file", tmp_path / "long.wav")
    page.get_by_text("long.wav is longer than 5 minutes").wait_for()


def test_a_key_is_asked_for(browser, server) -> None:
    """It goes as a subprotocol, never as a part of an address."""
    with (
        serving(server.service.model.take(), api_keys=("right-key",)) as locked,
        visiting(browser, url_of(locked), puppet=True) as visitor,
    ):
        page = visitor.page
        page.get_by_text("This server asks for an API key.").wait_for()
        page.fill("#text", "say red")
        page.keyboard.press("Enter")
        page.get_by_text("Not connected").first.wait_for()
        assert page.input_value("#text") == "say red"  # not sent, not lost
        for key, problem in (("wrong", "The server does not know this key."), ("right-key", "")):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            visitor.until(f"document.querySelector('#problem').textContent === '{problem}'")
        page.click("#talk")
        visitor.until("received.some(({ type }) => type === 'session.updated')")
        assert not any("right-key" in url for url in visitor.requests)


def test_a_camera_shows_each_question(visitor) -> None:
    """Its picture goes before what is said and what is written, until it is switched off."""
    page = visitor.page
    camera = page.get_by_role("button", name=CAMERA)
    camera.focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name=CAMERA, pressed=True).wait_for()
    visitor.until("document.querySelector('#view').videoWidth")
    assert "The camera is on" in page.text_content("#announcement")
    page.click("#talk")
    visitor.until("window.say")
    visitor.say(SUM, SUM_RATE)
    visitor.answered(1)
    page.fill("#text", "say red")
    page.keyboard.press("Enter")
    visitor.answered(2)
    sent = [item["item"]["content"][0] for item in visitor.sent("conversation.item.create")]
    assert [part["type"] for part in sent] == ["input_image", "input_image", "input_text"]
    frame = picture(sent[0]["image_url"])
    assert frame.size == (640, 480)
    assert np.asarray(frame).std() > 20  # the fake device's: green, with a clock
    [shown, committed] = visitor.received("conversation.item.done")[:2]
    assert committed["previous_item_id"] == shown["item"]["id"]
    camera.press("Enter")
    page.get_by_role("button", name=CAMERA, pressed=False).wait_for()
    assert page.evaluate("streams.map((x) => x.getTracks()[0].readyState)") == ["ended", "live"]
    assert not page.is_visible("#view")


# What the model says of itself.


def test_the_small_model_introduces_itself(visitor, server) -> None:
    omni, dice = server.service.model.take(), random.Random(1)

    def reply(content: Any) -> str:
        asked = [{"role": "user", "content": content}]
        return omni.generate_text(asked, thinker_do_sample=False).text

    questions = list(omni.info.questions)
    assert [reply(question) for question in questions] == ["i am a small demo", "five", "red blue"]
    clips = [(spoken_clip(question, MEASURING, dice), RATE) for question in questions]
    spoken = [reply([{"type": "audio", "audio": clip}]) for clip in clips]
    assert spoken == ["i am a small demo", "five", "red blue"]
    page = visitor.page
    page.locator("#introduction", has_text=omni.info.introduction).wait_for()
    assert "small model" in omni.info.introduction
    buttons = page.get_by_role("list", name="Questions to try").get_by_role("button")
    assert buttons.all_text_contents() == questions
    buttons.first.press("Enter")
    visitor.answered(1)
    assert texts(visitor, "user") == ["who are you"]
    assert texts(visitor, "answer") == ["i am a small demo"]
    assert page.is_hidden("#introduction")
    buttons.nth(1).click()  # they stay
    visitor.answered(2)
    assert texts(visitor, "answer") == ["i am a small demo", "five"]


def test_what_a_model_says_of_itself_is_text(browser) -> None:
    """Markup in a checkpoint's folder stays text, and a model that says nothing adds nothing."""
    model: Any = ScriptedModel(["hello"])
    with serving(model) as server:
        [entry] = ask(url_of(server) + "/v1/models").json()["data"]
        assert entry.keys() == {"id", "object", "created", "owned_by", "root"} | {
            "max_model_len",
            "transcribes_questions",
        }
        with visiting(browser, url_of(server)) as visitor:
            visitor.page.locator("#voice option[value=Ethan]").wait_for(state="attached")
            visitor.until("document.querySelector('#introduction').hidden")
            assert visitor.page.is_hidden("#questions")
        own = {"introduction": "<b>bold</b>", "questions": ("<img src=x>",)}
        model.info = replace(model.info, **own)
        [entry] = ask(url_of(server) + "/v1/models").json()["data"]
        assert (entry["introduction"], entry["questions"]) == ("<b>bold</b>", ["<img src=x>"])
        with visiting(browser, url_of(server)) as visitor:
            visitor.page.get_by_text("<b>bold</b>").wait_for()
            visitor.page.get_by_role("button", name="<img src=x>").wait_for()
            assert visitor.problems == []


# What may go wrong.


def test_whoever_is_in_a_hurry_gets_one_session(visitor) -> None:
    """Two clicks are one; what has ended leaves neither sound nor microphone open; a session that
    begins at once is its own."""
    page = visitor.page
    click = "document.querySelector('#talk').click()"
    page.evaluate(f"() => {{ {click}; {click} }}")
    visitor.until("received.some(({ type }) => type === 'session.updated')")
    page.locator("#status", has_text="Listening").wait_for()
    page.focus("#end")
    page.evaluate(f"() => {{ document.querySelector('#end').click(); {click} }}")
    visitor.until("received.filter(({ type }) => type === 'session.updated').length === 2")
    page.locator("#status", has_text="Listening").wait_for()
    assert page.evaluate("document.activeElement.id") == "talk"
    visitor.until("sockets[0].readyState === WebSocket.CLOSED")
    page.wait_for_timeout(100)
    assert page.evaluate("streams.map((x) => x.getTracks()[0].readyState)") == ["ended", "live"]
    states = page.evaluate("contexts.map((x) => x.state)")
    assert states == ["closed", "closed", "running", "running"]
    assert page.is_hidden("#problem")


def test_a_microphone_that_comes_too_late_or_goes(visitor) -> None:
    page = visitor.page
    page.evaluate("() => { window.allowed = new Promise((yes) => (window.allow = yes)) }")
    page.click("#talk")
    page.get_by_text("Waiting for the microphone").wait_for()
    page.click("#end")
    page.evaluate("allow()")
    visitor.until("streams[0]?.getTracks()[0].readyState === 'ended'")
    page.click("#talk")
    page.locator("#status", has_text="Listening").wait_for()
    page.evaluate("contexts.at(-1).suspend()")  # as a telephone does for a call
    page.keyboard.press("Tab")
    visitor.until("contexts.at(-1).state === 'running'")
    page.evaluate("() => { streams[1].getTracks()[0].dispatchEvent(new Event('ended')) }")
    page.get_by_text("The microphone was lost.").wait_for()
    page.click("#talk")
    page.locator("#status", has_text="Listening").wait_for()
    assert page.is_hidden("#problem")
    states = page.evaluate("streams.map((x) => x.getTracks()[0].readyState)")
    assert states == ["ended", "ended", "live"]


def test_an_answer_is_heard_to_its_end_though_the_connection_is_not(visitor) -> None:
    """Another one is opened meanwhile, for a new conversation. A message that waits for it is
    shown, and stands behind what is said of the new one."""
    page, held = visitor.page, []
    page.fill("#text", "say seven red goodbye white")
    page.keyboard.press("Enter")
    visitor.until("received.some(({ type }) => type === 'response.done')")
    page.route("**/v1/models", lambda route: held.append(route))  # noqa: PLW0108  it gets an attribute
    page.evaluate("sockets[0].close()")
    page.get_by_text("The connection was lost. Trying again.").wait_for()
    visitor.answered(1)
    assert "played" in page.text_content(".answer .figures")
    assert page.locator(".why").count() == 0
    page.fill("#text", "say red")
    page.keyboard.press("Enter")
    page.locator(".unsent", has_text="say red").wait_for()
    assert page.text_content("#status") == "Reconnecting"
    held[-1].continue_()
    page.get_by_text("the model does not remember the turns above").wait_for()
    visitor.answered(2)
    assert page.is_hidden("#problem")
    sides = page.evaluate("[...document.querySelectorAll('#turns li')].map((x) => x.className)")
    assert sides == ["user", "answer", "note", "user", "answer"]
    assert texts(visitor, "answer")[1] == "red"
    page.click("#end")
    visitor.until("contexts.every((x) => x.state === 'closed')")


def test_a_fault_of_an_answer_is_said_and_another_conversation_offered(visitor) -> None:
    page = visitor.page
    page.click("#talk")
    for status, words in FAULTS.items():
        page.locator("#status", has_text="Listening").wait_for()
        assert page.locator("#turns li").count() == 0
        for kind in ("created", "done"):
            response = {"id": "resp", "status": status, "status_details": DIED}
            page.evaluate(
                "(data) => sockets.at(-1).dispatchEvent(new MessageEvent('message', { data }))",
                json.dumps({"type": f"response.{kind}", "response": response}),
            )
        assert page.text_content(".answer .why") == words
        assert page.text_content("#announcement") == f"Answer: {words}"
        page.locator(".answer").get_by_role("button", name="New conversation").click()


def test_a_server_that_can_t_be_reached_is_named(browser, speaking) -> None:
    """Tries end some time, and begin again with Start; what was said stays."""
    with ExitStack() as running, browser.new_context() as context:
        server = running.enter_context(serving(speaking))
        page = context.new_page()
        page.clock.install()
        visitor = Visitor(page, url_of(server))
        visitor.open()
        page.fill("#text", "say red")
        page.keyboard.press("Enter")
        visitor.answered(1)
        running.close()
        page.get_by_text("The server can't be reached. Trying again.").wait_for()
        for _ in range(20):
            page.clock.fast_forward(45_000)
            page.wait_for_timeout(20)
        page.get_by_text("The server can't be reached. Press Start to try again.").wait_for()
        assert texts(visitor, "answer") == ["red"]
        page.click("#talk")
        page.get_by_text("The server can't be reached.", exact=True).wait_for()
        page.fill("#text", "say blue")
        page.keyboard.press("Enter")
        page.locator("#status", has_text="Not connected").wait_for()
        assert page.input_value("#text") == "say blue"


# What the user may choose, and take along.


def test_an_answer_can_be_heard_again_saved_and_copied(visitor, judge) -> None:
    page = visitor.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert page.is_hidden("#save")
    page.fill("#text", "say seven red")
    page.keyboard.press("Enter")
    visitor.answered(1)
    with page.expect_download() as text:
        page.get_by_role("button", name="Save text").click()
    assert text.value.suggested_filename == "conversation.txt"
    assert text.value.path().read_text() == "You: say seven red\n\nAnswer: seven red\n"
    assert page.is_hidden(".figures")
    page.get_by_text("Times").click()
    assert page.is_visible(".figures")
    with page.expect_download() as found:
        page.get_by_role("button", name="Download").press("Enter")
    assert found.value.suggested_filename == "answer-1.wav"
    saved, rate = soundfile.read(found.value.path(), dtype="float32")
    assert rate == 24000 and len(saved) > 0.5 * rate
    assert [word.word for word in words(judge, saved)] == ["seven", "red"]
    page.click("#end")
    since = page.evaluate("Date.now()")
    page.get_by_role("button", name="Replay").press("Enter")
    page.get_by_role("button", name="Stop replay").wait_for()
    page.get_by_role("button", name="Replay", exact=True).wait_for()
    assert [word.word for word in words(judge, visitor.heard(since))] == ["seven", "red"]
    page.get_by_role("button", name="Copy").press("Enter")
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "seven red"
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()) }")
    page.locator(".answer .buttons button").last.press("Enter")
    page.get_by_text("The browser did not let the page copy.").wait_for()
    page.evaluate(
        """() => {
          const list = document.querySelector("#loudspeaker");
          list.append(new Option("Unplugged", "gone"));
          list.value = "gone";
        }"""
    )
    page.get_by_role("button", name="Replay").press("Enter")
    page.get_by_text("The chosen loudspeaker can't be used.").wait_for()
    page.get_by_role("button", name="Replay", exact=True).wait_for()
    page.evaluate("document.querySelector('#loudspeaker').value = ''")
    page.get_by_role("button", name="Replay").click()
    page.get_by_role("button", name="New conversation").click()
    visitor.until("contexts.every((x) => x.state === 'closed')")


def test_the_user_chooses_prompt_language_and_devices(browser, server) -> None:
    """The language is asked for in the instructions: the server's transcripts have none."""
    with visiting(browser, url_of(server)) as visitor:
        page = visitor.page
        page.locator("#model", has_text=server.service.model.name).wait_for()
        assert page.evaluate("sockets.length") == 0
        page.evaluate("document.querySelector('#settings').open = true")
        page.fill("#system", "Answer in text only.")
        page.select_option("#language", "German")
        page.click("#talk")
        page.locator("#status", has_text="Listening").wait_for()
        visitor.until("document.querySelector('#microphone').options.length > 2")
        visitor.until("received.some(({ type }) => type === 'session.updated')")
        [shown] = visitor.received("session.updated")
        assert shown["session"]["instructions"] == "Answer in text only.\n\nAnswer in German."
        assert "deviceId" not in page.evaluate("asked.audio")
        page.select_option("#microphone", index=2)
        visitor.until("streams.length === 2")
        chosen = page.input_value("#microphone")
        assert page.evaluate("asked.audio.deviceId.exact") == chosen != ""
        states = page.evaluate("streams.map((x) => x.getTracks()[0].readyState)")
        assert states == ["ended", "live"]
        page.locator("#status", has_text="Listening").wait_for()
        visitor.until("document.querySelector('#loudspeaker').options.length > 1")
        page.select_option("#loudspeaker", index=1)
        loudspeaker = page.input_value("#loudspeaker")
        visitor.until(f"contexts.some((x) => x.sinkId === '{loudspeaker}')")
        page.select_option("#language", "")
        visitor.until("received.filter(({ type }) => type === 'session.updated').length === 2")
        shown = visitor.received("session.updated")[1]
        assert shown["session"]["instructions"] == "Answer in text only."
        assert page.is_hidden("#problem") and visitor.problems == []


# What it looks like, and is read as.


def test_the_conversation_has_half_of_a_phone_beside_open_settings(visitor) -> None:
    for width, height in ((390, 664), (320, 568), (844, 390)):
        visitor.page.set_viewport_size({"width": width, "height": height})
        visitor.page.evaluate("document.querySelector('#settings').open = true")
        assert visitor.page.locator("#conversation").bounding_box()["height"] >= height / 2
        assert visitor.page.evaluate("document.documentElement.scrollWidth") == width


def test_the_forms_of_docs_send_their_examples(browser, server) -> None:
    with visiting(browser, url_of(server)) as visitor:
        page = visitor.page
        visitor.open("/docs")
        for form in page.locator("form").all():
            for field in form.locator("input").all():
                if field.get_attribute("type") == "file":
                    field.set_input_files(SUM_FILE)
                elif not field.input_value():
                    field.fill("unknown")
            form.locator("button").click()
            form.locator("output :is(pre, audio)").wait_for()
            path = form.get_attribute("data-path")
            status = form.locator("output").text_content()[:3]
            assert (path, status) == (path, "404" if "{" in path else "200")
        assert page.locator("form").count() > 8
        assert "eight" in page.locator("form[data-path$=transcriptions] output pre").text_content()
        assert page.locator("audio").evaluate("(audio) => audio.duration") > 0.5
        page.get_by_role("link", name="Talk with the model").click()
        page.locator("#talk").wait_for()


# The worklets, by themselves.


@pytest.mark.parametrize("rate", [16000, 44100, 48000, 96000])
def test_the_microphone_is_resampled(visitor, rate) -> None:
    """A tone stays what it is; one that 24 kHz can't have is gone, not folded down."""
    got = np.array(visitor.page.evaluate(CAPTURED, [rate, 440])) / 32767
    assert len(got) % 480 == 0 and 23000 < len(got) <= 24000
    middle = got[4000:-4000]
    time = np.arange(len(middle)) / 24000
    basis = np.stack([f(2 * np.pi * 440 * time) for f in (np.sin, np.cos)], axis=1)
    weights, *_ = np.linalg.lstsq(basis, middle, rcond=None)
    assert np.hypot(*weights) == pytest.approx(1, abs=0.01)
    assert np.abs(middle - basis @ weights).max() < 0.01
    if rate > 2 * 16000:
        folded = np.array(visitor.page.evaluate(CAPTURED, [rate, 16000]))[4000:-4000] / 32767
        assert np.abs(folded).max() < 0.01
