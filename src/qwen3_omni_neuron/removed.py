"""Names that the last release had and this one refuses, each with what to use instead.

The tables are emptied at the next release. A value completes the sentence "NAME was removed: ...".
"""

_SPILLED = "a conversation that lost its slot is prefilled again; raise max_concurrency"

_NO_SESSION_FOLDER = "a server keeps realtime sessions in memory, while they are open"
OPTIONS: dict[str, str] = {
    "session_folder": _NO_SESSION_FOLDER,
    "session_keys": _NO_SESSION_FOLDER,
    "max_session_folder_bytes": _NO_SESSION_FOLDER,
    "kept_session_s": _NO_SESSION_FOLDER,
    "spill_bytes": _SPILLED,
    "spill_folder": _SPILLED,
    "spill_folder_bytes": _SPILLED,
    "compact": "leave it out: matrices are kept in 12 bits wherever that loses nothing",
    "kv_cache_dtype": "leave it out: KV caches are in the dtype of the arithmetic",
    "max_bodies_bytes": "use max_held_bytes, which also counts decoded media and sessions.",
    "qwen3_omni_neuron.fleet.application:build": "its import_path is "
    "qwen3_omni_neuron.serving.fleet.application:build now.",
    "max_connections": "a proxy limits connections, in nginx by limit_conn (deploy/proxy)",
    "send_timeout_s": "a proxy disconnects who does not read, in nginx by send_timeout",
}
"""Keyword arguments of loads, requests and compiles, and settings of the server."""

FLAGS: dict[str, str] = {
    "--by-layer": "the page names the stage and the row; load with dtype float32 to narrow it",
    "--translate": 'ask for a translation: speak "Translate this into English." --audio FILE',
    "--resume": "leave it out: an interrupted compile always resumes.",
}
"""Flags of the command line that are not made from an option."""

VERBS: dict[str, str] = {
    "pull": "use `aws s3 sync`, `hf download`, a volume or an init container. See docs/fleet.md.",
    "push": "use `aws s3 sync`, `hf upload` or a volume. See docs/fleet.md.",
    "talk": "use the page of `serve`, or any client of the OpenAI Realtime API.",
    "tiny-checkpoint": "use testing.tiny.write_tiny_checkpoint in a checkout.",
}
"""Verbs of the command line."""

FIELDS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("input_audio_format", "output_audio_format", "input_audio_transcription"),
            *("input_audio_noise_reduction", "max_response_output_tokens"),
        ),
        "OpenAI has ended the beta of its Realtime API; send session.audio and max_output_tokens",
    ),
    "session.resume": "begin another session and send its items again",
    "resume_token": "begin another session and send its items again",
}
"""Fields and values of request bodies and of realtime events."""

PATHS: dict[str, str] = {
    "/v1/audio/translations": "ask for a translation in a message with the sound, in "
    "/v1/chat/completions.",
}
"""Paths of the server."""


def removed(name: str, table: dict[str, str]) -> str:
    """Return the sentence that refuses a removed name; empty for any other name."""
    sentence = f"{name} was removed: {table.get(name, '').rstrip('.')}."
    return sentence if name in table else ""
