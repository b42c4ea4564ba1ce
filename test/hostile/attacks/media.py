"""Media that become large, take long, or are broken, as the ways of the server take them."""

import base64
import time
from collections.abc import Callable, Mapping
from functools import partial

from test.hostile.attacks import files
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, REFUSED, Outcome, check
from test.hostile.attacks.over_http import at_once, chat, transcribe, user
from test.hostile.attacks.over_socket import outcome_of, session
from test.hostile.attacks.target import ServerSpec, Target, stopped
from testing.websocket_client import send

NO, EITHER = frozenset((REFUSED,)), frozenset((ANSWERED, REFUSED))
SIDE = 1792  # side of a picture whose 3136 tokens fit into the context that ships: 77 MB of patches
END_S = 5.0  # for a process to end once nobody waits for an answer
# Memory for Base64, tensors and malloc's caches; seventeen megapixels in floats are 200 MB.
ONE_REQUEST_MB, ALL_MB = 300.0, 700.0


def part_of(kind: str, content: bytes) -> dict[str, object]:
    """Return the part of a message that contains a file."""
    data = base64.b64encode(content).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/x;base64,{data}"}}


def showing(
    kind: str, made: Callable[[], Mapping[str, bytes]]
) -> Callable[[Target], list[Outcome]]:
    """Return an attack: a chat with each file."""
    return lambda target: [
        chat(target, name, messages=[user(part_of(kind, content))])
        for name, content in made().items()
    ]


def sounding(made: Callable[[], Mapping[str, bytes]]) -> Callable[[Target], list[Outcome]]:
    """Return an attack: each file in a chat, and in a transcription."""
    shown = showing("audio", made)

    def attack(target: Target) -> list[Outcome]:
        heard = [transcribe(target, content, label=name) for name, content in made().items()]
        return [*shown(target), *heard]

    return attack


def spoilt(target: Target) -> list[Outcome]:
    """Send a file of every format that goes on as noise, and have the sounds transcribed."""
    found = []
    for name, (kind, content) in files.honest().items():
        bad = files.garbage(content)
        found.append(chat(target, name, messages=[user(part_of(kind, bad))]))
        if kind == "audio":
            found.append(transcribe(target, bad, label=name))
    return found


def foreign_urls(target: Target) -> list[Outcome]:
    """Name files and hosts that only the server can reach."""
    here = f"http://{target.host}"
    urls = [f"{here}/v1/models", "file:///etc/passwd", "/etc/passwd", "http://169.254.169.254/a"]
    urls += ["http://[::1]/", "http://0x7f000001/", "ftp://localhost/", f"{here}@example.org/", ""]
    urls += ["data:image/png,a", "data:;base64,", "data:image/png;base64,=" + "A" * (1 << 20)]
    return [
        chat(target, url[:40], messages=[user({"type": "image_url", "image_url": {"url": url}})])
        for url in urls
    ]


def many_pictures(target: Target) -> list[Outcome]:
    """Send 16 small files of 4 megapixels each in one chat."""
    return [chat(target, messages=[user(*(16 * [part_of("image", files.png(2048, 2048))]))])]


def realtime_pictures(target: Target) -> list[Outcome]:
    """Put 12 small files of 3 megapixels each into a conversation."""
    data = base64.b64encode(files.png(SIDE, SIDE)).decode()
    content = [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}]
    item = {"type": "message", "role": "user", "content": content}
    found = []
    with session(target, output_modalities=["text"]) as made:
        for _ in range(12):
            sent = send(made, "conversation.item.create", item=item)
            found.append(outcome_of(made, sent, "conversation.item.done"))
        time.sleep(0.5)  # meanwhile the held memory is measured
    return found


def transcriptions_of_silence(target: Target) -> list[Outcome]:
    """Send 40 files of a kilobyte with ten minutes each."""
    content = files.flac_of_zeros(600, 8000)
    wait_s = 10 if target.short else 20
    return at_once(40 * [partial(transcribe, target, content, wait_s=wait_s, leave=True)])


def leave_long_decodings(target: Target) -> list[Outcome]:
    """Send four files that take long to decode, and disconnect before they are decoded."""
    seconds, wait_s = (40, 1) if target.short else (160, 3)
    content = files.flac_of_zeros(seconds, 655_350, 8)
    return at_once(4 * [partial(transcribe, target, content, wait_s=wait_s, leave=True)])


def long_decodings_at_the_end(target: Target) -> list[Outcome]:
    """Disconnect while files that take long to decode are decoded; then end the server."""
    found = leave_long_decodings(target)
    start_s = time.monotonic()
    target.process.terminate()
    status = stopped(target.process, 90)
    ended_s = time.monotonic() - start_s
    in_time = target.short or ended_s < END_S
    return [
        *found,
        check(status == 0, f"it ended with status {status}", "SIGTERM"),
        check(in_time, f"the process lived {ended_s:.1f} s", "SIGTERM"),
    ]


_one_request = partial(Kind, most_mb=ONE_REQUEST_MB)
KINDS = (
    _one_request(
        "picture-bombs",
        "PNGs that say or become too much",
        showing("image", files.picture_bombs),
        NO,
    ),
    _one_request(
        "sound-bombs", "FLACs that say or become too much", sounding(files.sound_bombs), NO
    ),
    _one_request(
        "video-bombs", "MP4 with lies, playlists", showing("video", files.video_bombs), EITHER
    ),
    _one_request("media-garbage", "a file of every format that goes on as noise", spoilt, EITHER),
    Kind("media-urls", "URLs of files and of hosts that the server can reach", foreign_urls, NO),
    _one_request(
        "chat-pictures", "16 PNGs of 12 KB, 4 megapixels each, in one chat", many_pictures, EITHER
    ),
    _one_request(
        "realtime-pictures",
        "12 PNGs of 10 KB, 3 megapixels each, as realtime items",
        realtime_pictures,
        EITHER,
    ),
    Kind(
        "transcriptions",
        "40 transcriptions at once of ten minutes in a kilobyte",
        transcriptions_of_silence,
        EITHER,
        most_mb=ALL_MB,
    ),
    Kind(
        "long-decoding-drain",
        "4 FLACs of 42 KB, 8 channels at 655 kHz, left after 3 s, and SIGTERM",
        long_decodings_at_the_end,
        EITHER,
        ServerSpec(own=True, ends_with=0),
        good=False,
    ),
)
