"""Media that become large, take long, or are broken, as the ways of the server take them."""

import base64
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from test.hostile.attacks import files
from test.hostile.attacks.kinds import Kind
from test.hostile.attacks.outcomes import ANSWERED, REFUSED, Outcome, check
from test.hostile.attacks.over_http import at_once, chat, transcribe, user
from test.hostile.attacks.over_socket import outcome_of, session, until
from test.hostile.attacks.target import ServerSpec, Target, stopped
from testing.websocket_client import send

NO, EITHER = frozenset((REFUSED,)), frozenset((ANSWERED, REFUSED))
SIDE = 1792  # side of a picture whose 3136 tokens fit into the context that ships: 77 MB of patches
END_S = 5.0  # for a process to end once nobody waits for an answer
LATE_S = 1.0  # extra delay of an ordinary answer beside work that nobody waits for
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


def spoilt(how: Callable[[bytes], bytes]) -> Callable[[Target], list[Outcome]]:
    """Return an attack: a spoilt file of every format, and the sounds also transcribed."""

    def attack(target: Target) -> list[Outcome]:
        found = []
        for name, (kind, content) in files.honest().items():
            bad = how(content)
            found.append(chat(target, name, messages=[user(part_of(kind, bad))]))
            if kind == "audio":
                found.append(transcribe(target, bad, label=name))
        return found

    return attack


def noise(target: Target) -> list[Outcome]:
    """Send files that have no format."""
    noises = {"noise": np.random.default_rng(1).integers(0, 256, 8192, np.uint8).tobytes()}
    noises |= {"zeros": bytes(1 << 20), "nothing": b""}
    return [
        *(
            chat(target, f"{name} as {kind}", messages=[user(part_of(kind, content))])
            for name, content in noises.items()
            for kind in ("audio", "image", "video")
        ),
        *(transcribe(target, content, label=name) for name, content in noises.items()),
    ]


def swapped(target: Target) -> list[Outcome]:
    """Send a picture as sound, a sound as video, and so on."""
    one = files.honest()
    pairs = [("audio", "PNG"), ("image", "WAV"), ("image", "mp4"), ("video", "WAV")]
    found = [chat(target, f"{n} as {k}", messages=[user(part_of(k, one[n][1]))]) for k, n in pairs]
    scripts = {"EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"}
    scripts |= {"SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'}
    return [
        *found,
        *(chat(target, n, messages=[user(part_of("image", c))]) for n, c in scripts.items()),
    ]


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
    part = part_of("image", files.png(2048, 2048))
    return [chat(target, messages=[user(*(16 * [part]))])]


def queued_pictures(target: Target) -> list[Outcome]:
    """Send 24 chats of 3 megapixels at once: more than run at a time."""
    part = part_of("image", files.png(SIDE, SIDE))
    wait_s = 5 if target.short else 20  # they take longer: each picture has 3136 tokens
    ask = partial(chat, target, messages=[user(part)], wait_s=wait_s, leave=True)
    return at_once(24 * [ask])


def rich_pictures(target: Target) -> list[Outcome]:
    """Send pictures that are honest except for their other content; a GIF as a video, too."""
    film = part_of("video", files.gif_of_frames(3000, 512))
    shown = showing("image", files.rich_pictures)(target)
    return [*shown, chat(target, "GIF as a video", messages=[user(film)])]


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


def realtime_clips(target: Target) -> list[Outcome]:
    """Have ten clips of five minutes transcribed, and delete each at once."""
    silence = base64.b64encode(bytes(300 * 2 * 16_000)).decode()
    sound = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
    found = []
    with session(target, audio={"input": {**sound, "transcription": {"model": "any"}}}) as made:
        for _ in range(3 if target.short else 10):
            sent = send(made, "input_audio_buffer.append", audio=silence)
            sent += send(made, "input_audio_buffer.commit")
            found.append(outcome_of(made, sent, "input_audio_buffer.committed"))
            if found[-1].how != ANSWERED:
                break
            item_id = until(made, "conversation.item.done")["item"]["id"]
            send(made, "conversation.item.delete", item_id=item_id)
        time.sleep(0.5)  # meanwhile the held memory is measured
    return found


def leave_long_decodings(target: Target) -> list[Outcome]:
    """Send four files that take long to decode, and disconnect before they are decoded."""
    seconds, wait_s = (40, 1) if target.short else (160, 3)
    content = files.flac_of_zeros(seconds, 655_350, 8)
    return at_once(4 * [partial(transcribe, target, content, wait_s=wait_s, leave=True)])


def long_decodings(target: Target) -> list[Outcome]:
    """Disconnect while files that take long to decode are decoded; then ask a usual question."""
    alone, alone_s = answered_in(target)
    found = leave_long_decodings(target)
    said, took_s = answered_in(target)
    late = f"an ordinary chat took {took_s:.1f} s, alone {alone_s:.1f}"
    in_time = target.short or took_s - alone_s < LATE_S
    return [
        *found,
        check(said == alone, f"an ordinary chat was answered {said!r}", "chat after it"),
        check(in_time, late, "chat after it"),
    ]


def answered_in(target: Target) -> tuple[str, float]:
    """Return the answer to a good question, and how many seconds it took."""
    start_s = time.monotonic()
    return target.says(), time.monotonic() - start_s


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


KINDS = (
    Kind(
        "picture-bombs",
        "PNG, GIF, TIFF, BMP, WebP, JPEG, ICO that say or become too much",
        showing("image", files.picture_bombs),
        NO,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "picture-lies",
        "a GIF of 3000 frames; PNGs with 512 MiB of text, of a profile",
        rich_pictures,
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "sound-bombs",
        "FLAC and WAV that say or become too much",
        sounding(files.sound_bombs),
        NO,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "sound-lies",
        "WAV, MP3, Ogg, FLAC with lying lengths",
        sounding(files.lenient_sounds),
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "video-bombs",
        "MP4, AVI, Matroska with lies, no decoder, playlists",
        showing("video", files.video_bombs),
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "media-garbage",
        "a file of every format that goes on as noise",
        spoilt(files.garbage),
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind("media-truncated", "half of a file of every format", spoilt(files.truncated), EITHER),
    Kind("media-noise", "noise, and a megabyte of zeros, as media", noise, NO),
    Kind("media-swapped", "pictures as sound, scripts as pictures", swapped, EITHER),
    Kind("media-urls", "URLs of files and of hosts that the server can reach", foreign_urls, NO),
    Kind(
        "chat-pictures",
        "16 PNGs of 12 KB, 4 megapixels each, in one chat",
        many_pictures,
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "queued-pictures",
        "24 chats at once of a PNG of 3 megapixels",
        queued_pictures,
        EITHER,
        most_mb=ALL_MB,
    ),
    Kind(
        "realtime-pictures",
        "12 PNGs of 10 KB, 3 megapixels each, as realtime items",
        realtime_pictures,
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "transcriptions",
        "40 transcriptions at once of ten minutes in a kilobyte",
        transcriptions_of_silence,
        EITHER,
        most_mb=ALL_MB,
    ),
    Kind(
        "realtime-clips",
        "10 clips of five minutes that wait for a transcript, deleted",
        realtime_clips,
        EITHER,
        most_mb=ONE_REQUEST_MB,
    ),
    Kind(
        "long-decoding",
        "4 FLACs of 42 KB, 8 channels at 655 kHz, left after 3 s; a chat",
        long_decodings,
        EITHER,
        ServerSpec(own=True),
    ),
    Kind(
        "long-decoding-drain",
        "the same, and SIGTERM",
        long_decodings_at_the_end,
        EITHER,
        ServerSpec(own=True, ends_with=0),
        good=False,
    ),
)
