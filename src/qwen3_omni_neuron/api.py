"""Qwen3Omni: a loaded checkpoint that listens, writes and speaks."""

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from inspect import cleandoc
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.checkpoint.config_json import read_config, read_generation_defaults
from qwen3_omni_neuron.checkpoint.files import conversation_fingerprint
from qwen3_omni_neuron.compilation.loading import (
    find_target,
    host_sampler,
    load_engines,
    plan_of,
    resolve_model,
)
from qwen3_omni_neuron.compilation.target import EngineSpec
from qwen3_omni_neuron.engines.process.fork import check_not_forked, finalize
from qwen3_omni_neuron.engines.process.heap import give_back
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import (
    ClosedError,
    ForkError,
    MessageError,
    OptionError,
    PromptTooLongError,
    format_value,
)
from qwen3_omni_neuron.events import Finished, ModelInfo, SpeechResult, Status
from qwen3_omni_neuron.events.encoding import wav_header
from qwen3_omni_neuron.helpers.grammars import Admit, admit_all
from qwen3_omni_neuron.model.config import GenerationDefaults, OmniConfig
from qwen3_omni_neuron.model.torch_threads import one_torch_thread
from qwen3_omni_neuron.options import (
    LOAD_OPTIONS,
    REQUEST_OPTIONS,
    GenerateArguments,
    LoadArguments,
    LoadOptions,
    RequestArguments,
    RequestOptions,
    SpeechArguments,
    check_names,
)
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.media.pixels import MediaSettings
from qwen3_omni_neuron.prompt.messages import Conversation, Truncation, check_characters, check_last
from qwen3_omni_neuron.prompt.pieces import cut
from qwen3_omni_neuron.prompt.prompt import NO_KEYS, Prompt, prompt_keys
from qwen3_omni_neuron.prompt.stored import read_file
from qwen3_omni_neuron.runtime.grammar import ForcedTokens, Grammar, Grammars
from qwen3_omni_neuron.runtime.pipeline import Pipeline
from qwen3_omni_neuron.runtime.request import MOST_WRITTEN, Request, WrittenReply
from qwen3_omni_neuron.runtime.stream import SpeechStream
from qwen3_omni_neuron.session import STORED_KIND, Session, SessionModel
from qwen3_omni_neuron.transcription import Failure, Transcript, transcribe

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

PIECE_TOKENS = 128  # half a minute to a minute of speech
FRAMES_PER_TOKEN = 8  # talker positions per text token: slow speech, 0.64 s
_EMPTY_TURN = ({"role": "user", "content": ""},)
FINALIZER_TIMEOUT_S = 2.0  # per thread, when a model is dropped without being closed


class Qwen3Omni:
    """A loaded model: `load` it, ask it, `close` it (or use it in a `with` block).

    Thread-safe: a request's result does not depend on concurrent ones.
    """

    def __new__(cls, config: object = None, *_: object, **__: object) -> "Qwen3Omni":
        """Raises TypeError for a checkpoint's path."""
        if not isinstance(config, OmniConfig):
            raise TypeError("Qwen3Omni(...) loads no checkpoint. Use Qwen3Omni.load(model_path).")
        return super().__new__(cls)

    def __init__(
        self,
        config: OmniConfig,
        defaults: GenerationDefaults,
        prompt_builder: PromptBuilder,
        engines: Engines,
        max_queued: int,
        reuse: bool = True,
        adapters: Sequence[AdapterPath] = (),
        predictor_top_k: int = 0,
    ):
        """Do not call this; use `load`. predictor_top_k: see CompilePlan."""
        self._config, self._defaults, self.prompt_builder = config, defaults, prompt_builder
        self._context_length, self._slots = engines.thinker.context_length, engines.thinker.slots
        self._max_queued, self._adapters = max_queued, adapters
        self._predictor_top_k = predictor_top_k
        self._vocab_size = vocab_size = config.thinker.text.vocab_size
        self._grammars = Grammars(prompt_builder, vocab_size, config.im_end_id)
        self._talker_context_length = engines.talker.context_length if engines.talker else 0
        self._pipeline = Pipeline(
            engines,
            config,
            max_queued,
            prefix_cache=reuse,
            sample_ids=host_sampler(),
            defaults=defaults,
        )
        # Ends threads and processes even if nobody closes the model.
        self._finalizer = finalize(
            self, _close, self._pipeline, self._grammars, FINALIZER_TIMEOUT_S
        )

    @staticmethod
    def load(model_path: str | Path, **options: "Unpack[LoadArguments]") -> "Qwen3Omni":
        """Load a checkpoint.

        model_path: a folder, or a hub id. options: see options.LoadArguments and docs/options.md.
        With compiled_path, only config, tokenizer and template come from the checkpoint.
        Raises CheckpointError, ArtifactError, OutputError, NotInstalledError, OptionError, and
        ForkError in a child forked after an earlier load.
        """
        check_not_forked()
        given = LoadOptions.parse(options)
        tree = None if given.compiled_path is None else Path(given.compiled_path)
        folder = resolve_model(model_path, given)
        config = read_config(folder)
        plan = plan_of(folder, config, tree, given)
        prompt_builder = PromptBuilder(folder, config)
        target = find_target(plan.target)
        spec = EngineSpec(plan, config, prompt_builder.newline_id, tree)
        defaults = read_generation_defaults(folder)
        engines = load_engines(target, spec, given)
        try:
            if given.wrap_engines is not None:
                engines = given.wrap_engines(engines)
            omni = Qwen3Omni(
                config,
                defaults,
                prompt_builder,
                engines,
                given.max_queued,
                given.reuse,
                plan.adapters,
                plan.predictor_top_k,
            )
        except BaseException:
            engines.close()
            raise
        if given.wrap_engines is None:  # a wrapper must see requests' calls only
            omni._warm_up()
        return omni

    def generate_audio(
        self, messages: Conversation, **options: "Unpack[RequestArguments]"
    ) -> SpeechResult:
        """Answer a conversation in text and speech: `stream`, collected."""
        return _collect(self.stream(messages, **options))

    def generate_text(
        self, messages: Conversation, **options: "Unpack[RequestArguments]"
    ) -> SpeechResult:
        """Answer a conversation in text only; the result has no audio."""
        return _collect(self._start(messages, options, speak=False))

    def stream(self, messages: Conversation, **options: "Unpack[RequestArguments]") -> SpeechStream:
        """Answer a conversation as a stream of TextDelta and AudioChunk events, then Finished.

        messages: a text, or dicts with "role" and "content", a string or a list of text, audio,
        image and video items (see prompt.builder.PromptBuilder.prompt). options: see
        options.RequestArguments.
        The request starts now, or is queued for a slot; closing the stream cancels it. All text
        is spoken; the reference omits the last token of a reply that a limit cut.
        Raises an InputError (see errors), BusyError or ClosedError; the stream raises later errors.
        """
        return self._start(messages, options, speak=True)

    def stream_text(
        self, messages: Conversation, **options: "Unpack[RequestArguments]"
    ) -> SpeechStream:
        """Answer a conversation in text only; see `stream`."""
        return self._start(messages, options, speak=False)

    def stream_continuation(
        self, prompt: str | Sequence[int], **options: "Unpack[RequestArguments]"
    ) -> SpeechStream:
        """Continue a text or token ids without a chat template; see `stream_text`.

        prompt: names of special tokens in a text become these tokens; no media.
        Raises the errors of `stream_text`, and MessageError for an empty prompt.
        """
        arrived_s = self._pipeline.clock.now()
        return self._continue(prompt, RequestOptions.parse(options), arrived_s)

    def stream_echo(
        self, prompt: str | Sequence[int], new_tokens: int, **options: "Unpack[RequestArguments]"
    ) -> SpeechStream:
        """Continue a prompt like `stream_continuation`; the reply begins with the prompt.

        Each prompt token after the first is forced in a step of its own, so that `logprobs` covers
        them. new_tokens: limit of tokens after the prompt, or 0. Also raises MessageError for a
        prompt of one token with new_tokens 0.
        """
        check_not_forked()
        arrived_s = self._pipeline.clock.now()
        parsed = RequestOptions.parse(options)
        whole = self.prompt_builder.raw(prompt, self._context_length - 1)
        first, *forced = whole.token_ids.tolist()
        if not (forced or new_tokens):
            raise MessageError(
                "the prompt has one token, and no new one is requested. Request one."
            )
        parsed = replace(
            parsed,
            grammar=ForcedTokens(forced, self._vocab_size),
            thinker_max_new_tokens=len(forced) + new_tokens,
        )
        return self._continue([first], parsed, arrived_s)

    def _continue(
        self, prompt: str | Sequence[int], options: RequestOptions, arrived_s: float
    ) -> SpeechStream:
        check_not_forked()
        made = self.prompt_builder.raw(prompt, self._context_length - 1)
        request = self._request(made, options, False, arrived_s)
        return SpeechStream(self._pipeline, request, owner=self)

    def say(self, text: str, **options: "Unpack[SpeechArguments]") -> SpeechResult:
        """Speak a text: `stream_speech`, collected."""
        return _collect(self.stream_speech(text, **options))

    def stream_speech(self, text: str, **options: "Unpack[SpeechArguments]") -> SpeechStream:
        """Speak a text, event by event.

        The talker reads an empty user turn, then the text. A long text is cut at sentence ends into
        pieces (prompt.pieces), spoken in order in one slot, each with the seed increased by 1 and
        its own talker_max_new_tokens. Names of special tokens are words; white space becomes one
        space. In the result talker_finish_reason is "length" if any piece was cut, ttft_s is the
        time to the slot, and prompt_tokens is 0.
        Raises an InputError (see errors), BusyError or ClosedError.
        """
        check_not_forked()
        arrived_s = self._pipeline.clock.now()
        parsed = RequestOptions.parse(options, SpeechArguments)
        parsed.speaker_id(self._config)
        prompt = self.prompt_builder.prompt(_EMPTY_TURN)
        pieces = self._pieces(text, len(prompt.talker))
        request = self._request(prompt, parsed, True, arrived_s)
        if request.keys is not None:
            request = replace(request, keys=replace(request.keys, thinker=NO_KEYS))
        seed = request.options.seed
        assert seed is not None
        first, *later = (
            replace(request, written=piece, options=replace(request.options, seed=seed + number))
            for number, piece in enumerate(pieces)
        )
        return SpeechStream(self._pipeline, first, self, later)

    def transcribe(
        self,
        audio: Any,
        instruction: str | None = None,
        concurrency: int = 1,
        max_new_tokens: int = RequestOptions.thinker_max_new_tokens,
    ) -> Transcript:
        """Transcribe audio of any length, window by window.

        audio: a path, a file's bytes, or (samples, sampling rate). Other arguments and errors: see
        transcription.transcribe. Also raises AudioError, PromptTooLongError and LateError.
        """
        (made,) = transcribe(self, [audio], instruction, concurrency, max_new_tokens)
        if isinstance(made, Failure):
            raise made.error
        return made

    def compile_grammar(
        self, admit: Admit = admit_all, **options: "Unpack[RequestArguments]"
    ) -> "Future[Grammar] | None":
        """Start compiling a request's grammar; return None if its options have none.

        The future's result is the request's option `grammar`; cancelling it ends the work. admit:
        called in another thread with the grammar's bytes; raises if they don't fit.
        Raises OptionError and NotInstalledError, now or by the future, which also raises BusyError,
        ClosedError, and errors of `admit`.
        """
        check_not_forked()
        return self._grammars.begin(RequestOptions.parse(options), admit)

    def count_tokens(self, messages: Conversation, **options: "Unpack[RequestArguments]") -> int:
        """Return the number of tokens of a conversation's prompt, media included.

        Raises an InputError (see errors).
        """
        with one_torch_thread():
            return len(self._prompt(messages, RequestOptions.parse(options)))

    @property
    def transcription_instruction(self) -> str | None:
        """Text that asks this checkpoint for a transcription, if it defines one; may be empty."""
        return self._defaults.transcription_instruction

    @cached_property
    def checkpoint_fingerprint(self) -> str:
        """Digest of the parts of checkpoint and adapters that sessions depend on: 64 hex digits.

        Computed on first use. Raises CheckpointError.
        """
        return conversation_fingerprint(self.prompt_builder.folder, self._adapters)

    @property
    def turns_by_silence(self) -> bool:
        """True if the checkpoint's spoken turns should end only by silence."""
        return self._defaults.turns_by_silence

    @property
    def media_settings(self) -> MediaSettings:
        """Settings for decoding media without a model: see helpers.media."""
        return self.prompt_builder.media_settings

    @property
    def speakers(self) -> tuple[str, ...]:
        """Voices, for the option `speaker`; empty without a talker."""
        talker = self._config.talker
        return tuple(name.capitalize() for name in sorted(talker.speaker_ids)) if talker else ()

    @property
    def info(self) -> ModelInfo:
        """Abilities and sizes of this model."""
        return ModelInfo(
            speakers=self.speakers,
            thinks=self.prompt_builder.thinks,
            takes_tools=self.prompt_builder.takes_tools,
            slots=self._slots,
            max_queued=self._max_queued,
            context_length=self._context_length,
            introduction=self._defaults.introduction,
            questions=self._defaults.questions,
        )

    def status(self) -> Status:
        """Return the numbers of running and waiting requests, and the stages' times."""
        return self._pipeline.status()

    def session(
        self,
        system: str | None = None,
        messages: Conversation = (),
        **options: "Unpack[RequestArguments]",
    ) -> Session:
        """Begin a conversation that accepts speech as it arrives.

        system: content of a system message. messages: the earlier conversation. options: of
        replies, unless `Session.respond` overrides them.
        Raises an InputError (see errors).
        """
        parsed = RequestOptions.parse(options)
        if "speaker" in options:
            parsed.speaker_id(self._config)
        return self._session(system, messages, parsed)

    def restore_session(self, path: str | Path) -> Session:
        """Resume the conversation that `Session.save` wrote into a file.

        Replies equal the saved session's, token for token and code for code, if this model was
        loaded alike and its options have a seed or sample nothing.
        Raises StoredSessionError for a file that is damaged, or of another checkpoint or format.
        """
        check_not_forked()
        document = read_file(Path(path), STORED_KIND, self.checkpoint_fingerprint)
        session = self._session(None, (), RequestOptions())
        session.restore(document)
        return session

    def __repr__(self) -> str:
        closed = "" if self._finalizer.alive else ", closed"
        return (
            f"Qwen3Omni({str(self.prompt_builder.folder)!r}, speakers={self.speakers}, "
            f"slots={self._slots}, context_length={self._context_length}{closed})"
        )

    def close(self) -> None:
        """End running requests with a ClosedError, then the threads and the engines."""
        check_not_forked()
        self._finalizer.detach()
        _close(self._pipeline, self._grammars)

    def __enter__(self) -> "Qwen3Omni":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkError):  # in a child forked inside the block
            self.close()

    def _session(
        self, system: str | None, messages: Conversation, options: RequestOptions
    ) -> Session:
        model = SessionModel(
            self.prompt_builder,
            self._pipeline,
            self._request,
            self._context_length - 1,
            self._config.talker is not None,
            lambda: self.checkpoint_fingerprint,
            self,
        )
        return Session(model, system, messages, options)

    def _warm_up(self) -> None:
        """Answer a short sound, to import modules and read the weights before the first request."""
        sound = {"type": "audio", "audio": wav_header(16000, 3200) + bytes(3200)}
        messages = [{"role": "user", "content": [sound]}]
        options = RequestOptions(
            thinker_max_new_tokens=2,
            talker_max_new_tokens=2,
            first_token_timeout_s=TIMEOUT_MAX,  # a slow disk's first read
            wait_timeout_s=TIMEOUT_MAX,
        )
        try:
            with one_torch_thread():
                prompt = self._prompt(messages, options)
            has_talker = self._config.talker is not None
            request = self._request(prompt, options, has_talker, self._pipeline.clock.now())
            self._pipeline.warm_up(replace(request, keys=None))
        except PromptTooLongError:  # the context has only a few rows
            pass
        except BaseException:
            self.close()
            raise

    def _start(self, messages: Conversation, given: RequestArguments, speak: bool) -> SpeechStream:
        check_not_forked()
        arrived_s = self._pipeline.clock.now()
        options = RequestOptions.parse(given)
        if speak:
            self._check_speech(options)  # before anything is read
        with one_torch_thread():
            prompt = self._prompt(messages, options)
        check_last(messages)
        request = self._request(prompt, options, speak, arrived_s)
        return SpeechStream(self._pipeline, request, owner=self)

    def _prompt(self, messages: Conversation, options: RequestOptions) -> Prompt:
        reply_tokens = options.thinker_max_new_tokens
        return self.prompt_builder.prompt(
            messages,
            options.use_audio_in_video,
            self._context_length - 1,
            options.shown_tools,
            options.literal_text,
            Truncation.of(options.truncation, self._context_length, reply_tokens),
        )

    def _pieces(self, text: str, rows: int) -> list[WrittenReply]:
        """Cut a text into pieces that the talker can speak after a prompt of `rows` rows."""
        if not isinstance(text, str):
            raise MessageError(f"the text to speak must be a str, got {format_value(text)}.")
        if not text.strip():
            raise MessageError("the text to speak is empty: give at least one word.")
        check_characters(text, "the text to speak")
        # The prompt's last row has the first token, and each frame's row has the next token.
        most = min(self._talker_context_length - rows + 1, MOST_WRITTEN)
        wanted = min(PIECE_TOKENS, self._defaults.reply_tokens or PIECE_TOKENS)
        wanted = min(wanted, max(1, most // FRAMES_PER_TOKEN))
        pieces: list[WrittenReply] = []
        before = ""
        for piece in cut(text.strip(), wanted, lambda part: self._spoken(part, wanted)[1]):
            token_ids, tokens = self._spoken(piece, most)
            if tokens > most:
                raise PromptTooLongError(
                    f"the text has {tokens} tokens or more without white space or punctuation, "
                    f"but the talker can speak at most {most} at a time: its KV cache has "
                    f"{self._talker_context_length} positions, {rows} of them for its prompt. "
                    "Divide the text, or load with a larger context_length."
                )
            pieces.append(WrittenReply(tuple(token_ids), before))
            before = " " if piece[-1].isspace() else ""
        return pieces

    def _spoken(self, text: str, most: int) -> tuple[list[int], int]:
        """Return a text's token ids and their number; [] and a lower bound if clearly too long."""
        words = " ".join(text.split())
        least = self.prompt_builder.least_tokens(words)
        token_ids = self.prompt_builder.encode_words(words, most) if least <= most else []
        return token_ids, max(least, len(token_ids))

    def _request(
        self, prompt: Prompt, options: RequestOptions, speak: bool, arrived_s: float
    ) -> Request:
        self._check_length(prompt)
        if speak:
            self._check_speech(options)
        if options.goes_on and len(options.eos_ids(self._config)) >= self._vocab_size:
            raise OptionError(
                "thinker_eos_token_id lists every token, and ignore_eos or thinker_min_new_tokens "
                "forbids them all. Leave one of them out."
            )
        if options.seed is None:
            options = replace(options, seed=secrets.randbits(32))
        keys = None
        if self._pipeline.caches_prefixes:
            keys = prompt_keys(prompt, self._config, options.cache_key)
        return Request(
            prompt,
            options,
            speak,
            arrived_s,
            self.prompt_builder,
            keys,
            grammar=self._grammars.compile(options),
            thinks=self.prompt_builder.thinks,
        )

    def _check_speech(self, options: RequestOptions) -> None:
        options.speaker_id(self._config)
        assert self._config.talker is not None
        codes, most = self._config.talker.predictor.vocab_size, self._predictor_top_k
        if most and options.predictor_do_sample:
            asked = min(options.predictor_top_k or codes, codes)
            if asked > most:
                raise OptionError(
                    f"predictor_top_k is {options.predictor_top_k} ({asked} codes), but the code "
                    f"predictor was compiled for at most {most}. Set 1 to {most}, or compile with "
                    f"predictor_top_k {asked}."
                )

    def _check_length(self, prompt: Prompt) -> None:
        if len(prompt) >= self._context_length:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, but the KV cache has {self._context_length} "
                "positions, one of them for the reply. Shorten the conversation, lower "
                "max_pixels of its images, let `truncation` drop its oldest turns, or load with a "
                "larger context_length (this checkpoint: up to "
                f"{self._config.thinker.text.max_positions})."
            )


def generate_audio(
    messages: Conversation, model_path: str | Path, **options: "Unpack[GenerateArguments]"
) -> SpeechResult:
    """Load a checkpoint, answer one conversation in text and speech, and close the model.

    options: options of `Qwen3Omni.load` and of a request. For example:

        result = generate_audio("two plus three", SPEAKING_CHECKPOINT, speaker="Chelsie")
        result.save("five.wav")
    """
    check_names(options, GenerateArguments.__annotations__)
    load: Any = {name: value for name, value in options.items() if name in LOAD_OPTIONS}
    request: Any = {name: value for name, value in options.items() if name not in load}
    RequestOptions.parse(request)  # before the load, which may take minutes
    with Qwen3Omni.load(model_path, **load) as omni:
        return omni.generate_audio(messages, **request)


_OPTIONS = "\n".join(
    f"    {option.name}: {option.help}; default: {option.default_text}"
    for option in (*REQUEST_OPTIONS, *LOAD_OPTIONS.values())
)
generate_audio.__doc__ = f"{cleandoc(generate_audio.__doc__ or '')}\n\nOptions:\n{_OPTIONS}\n"


def _close(pipeline: Pipeline, grammars: Grammars, join_timeout_s: float | None = None) -> None:
    grammars.close()
    pipeline.close(join_timeout_s)
    give_back()


def _collect(stream: SpeechStream) -> SpeechResult:
    with stream:
        for event in stream:
            if isinstance(event, Finished):
                return event.result
    raise ClosedError("the stream was closed before it finished.")
