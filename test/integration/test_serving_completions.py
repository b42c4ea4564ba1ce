"""Raw prompts, and the fields of engines that load tools send, by OpenAI's client."""

from typing import Any

import openai
import pytest
import torch

from qwen3_omni_neuron.errors import MessageError, OptionError, PromptTooLongError

MODEL = "qwen3-omni"
RAW = "<|im_start|>user\nThe sky is<|im_end|>\n<|im_start|>assistant\n"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 9}


@torch.no_grad()
def test_a_raw_prompt_is_continued_as_by_the_reference(omni, reference) -> None:
    token_ids = omni.prompt_builder.raw(RAW, 500).token_ids
    assert omni.prompt_builder.decode(token_ids.tolist()) == "user\nThe sky is\nassistant\n"
    ids = token_ids[None]
    theirs = reference.model.thinker.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=None,
    )
    for prompt in (RAW, token_ids.tolist()):
        with omni.stream_continuation(
            prompt, thinker_do_sample=False, thinker_max_new_tokens=9, ignore_eos=True
        ) as stream:
            *_, end = stream
        assert end.result.token_ids == theirs[0, len(token_ids) :].tolist()


def test_prompts_that_cannot_be_continued_are_refused(omni) -> None:
    for prompt, error, said in (
        ("", MessageError, "is empty"),
        ([], MessageError, "is empty"),
        ([1, 1 << 40], MessageError, "token 1099511627776, which"),
        ([-1], MessageError, "token -1"),
        ("a <|audio_pad|>", MessageError, "media placeholder"),
        ("half \ud800", MessageError, "surrogate"),
        ("word " * 5000, PromptTooLongError, "Shorten it, or load"),
        (["a"], MessageError, "neither a str nor"),
        ([1.5], MessageError, "neither a str nor"),
        ([True], MessageError, "neither a str nor"),
        (None, MessageError, "neither a str nor"),
    ):
        with pytest.raises(error, match=said):
            omni.stream_continuation(prompt)


def test_a_text_that_every_token_ends_and_none_may_is_refused(omni) -> None:
    every = range(omni._config.thinker.text.vocab_size)
    with pytest.raises(OptionError, match="lists every token"):
        omni.stream_continuation(RAW, thinker_eos_token_id=every, ignore_eos=True)


def test_lengths_that_contradict_each_other_are_refused_by_their_field(client) -> None:
    for change, param in (
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"min_tokens": 3, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"min_tokens": 30, "max_tokens": 3}, "min_tokens"),
    ):
        body = {"model": MODEL, "messages": HELLO, **change}
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/chat/completions", body=body, cast_to=object)
        assert refused.value.param == param


def test_completions_have_openais_shape(omni, client) -> None:
    options: Any = {"thinker_do_sample": False, "thinker_max_new_tokens": 9}
    with omni.stream_continuation(RAW, **options) as stream:
        *_, end = stream
    asked: Any = {"model": MODEL, "prompt": RAW, **GREEDY}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert whole.choices[0].text == end.result.text
    assert whole.choices[0].finish_reason == end.result.thinker_finish_reason
    assert whole.usage.completion_tokens == end.result.timings.text_tokens
    pieces = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(p.choices[0].text for p in pieces if p.choices) == end.result.text
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert {p.id for p in pieces} == {pieces[0].id}
    listed = client.completions.create(**{**asked, "prompt": [RAW]})
    assert listed.choices[0].text == end.result.text
    short = client.completions.create(model=MODEL, prompt=RAW, temperature=0)
    assert short.usage is not None and short.usage.completion_tokens <= 16


def test_an_echo_has_the_log_probabilities_that_its_tokens_had_when_they_were_written(
    omni, client
) -> None:
    """The request is lm-eval's: the whole text as token ids, and one new token."""
    asked: Any = {"model": MODEL, "temperature": 0, "logprobs": 2}
    ids = omni.prompt_builder.raw(RAW, 1000).token_ids.tolist()
    written = client.completions.create(**asked, prompt=RAW, max_tokens=6)
    told = written.choices[0].logprobs
    assert len(told.tokens) == 6
    with omni.stream_continuation(RAW, thinker_do_sample=False, thinker_max_new_tokens=6) as stream:
        *_, end = stream
    whole = [*ids, *end.result.token_ids]
    for prompt, most in (([whole], 1), (whole, 0)):
        answer = client.completions.create(**asked, prompt=prompt, max_tokens=most, echo=True)
        (choice,) = answer.choices
        echo = choice.logprobs
        assert choice.text.startswith(RAW + ".")
        assert "".join(echo.tokens).startswith(RAW) and len(echo.tokens) == len(whole) + most
        assert (echo.token_logprobs[0], echo.top_logprobs[0]) == (None, None)
        assert echo.token_logprobs[len(ids) : len(whole)] == pytest.approx(told.token_logprobs)
        assert set(told.top_logprobs[0]) == set(echo.top_logprobs[len(ids)])
        assert echo.text_offset[:3] == [0, len(echo.tokens[0]), len("".join(echo.tokens[:2]))]
        assert answer.usage.prompt_tokens == len(whole)
        assert answer.usage.completion_tokens == most
    for change, param in (
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "prompt": ids[:1]}, "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{**asked, "prompt": RAW, **change})
        assert refused.value.param == param


ASKED = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}


def test_penalties_are_the_options_of_the_api(omni, client) -> None:
    sent = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 2.0}
    own: Any = {f"thinker_{name}": value for name, value in sent.items()}
    limits: Any = {"thinker_do_sample": False, "thinker_max_new_tokens": 12, "literal_text": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=12, extra_body=sent
    )
    assert answer.choices[0].message.content == omni.generate_text(HELLO, **own, **limits).text
    assert answer.choices[0].message.content != omni.generate_text(HELLO, **limits).text


@pytest.mark.parametrize(
    ("path", "asked", "name"),
    [
        ("completions", {"prompt": "a", "max_tokens": 3}, "thinker_max_new_tokens"),
        ("completions", {"prompt": "a", "top_p": 0.5}, "thinker_top_p"),
        ("chat/completions", {"messages": HELLO, "temperature": 0.5}, "thinker_temperature"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 3}, "thinker_max_new_tokens"),
        ("responses", {"input": "a", "max_output_tokens": 3}, "thinker_max_new_tokens"),
    ],
)
def test_an_option_counts_by_its_own_name_and_may_not_have_two_values(
    client, path, asked, name
) -> None:
    value = 1 if name != "thinker_max_new_tokens" else 40
    with pytest.raises(openai.BadRequestError, match="Give one of them") as refused:
        client.post(f"/{path}", body={**asked, name: value}, cast_to=object)
    assert refused.value.param == name
    same = asked.get("max_tokens") or asked.get("max_output_tokens")
    if same is None:
        return
    long = {"ignore_eos": True, name: value}
    body = {key: of for key, of in asked.items() if of != same}
    made: Any = client.post(f"/{path}", body={**body, **long}, cast_to=object)
    usage = made["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == value
    client.post(f"/{path}", body={**asked, name: same}, cast_to=object)


def test_a_wrong_completion_is_refused_by_name(client) -> None:
    for change, said in (
        ({"prompt": ["a", "b"]}, "2 texts"),
        ({"prompt": ["a", 1]}, "2 texts or tokens"),
        ({"prompt": [[1, 2], [3]]}, "neither a str nor a list of token ids"),
        ({"prompt": [True]}, "neither a str nor a list of token ids"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": list(range(9)) * 999}, "8991 tokens or more, but"),
        ({"stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens is 9, more than the limit of the text, 5"),
        ({"prompt": {"text": "a"}}, "a string or a list"),
        ({"logprobs": 21}, "logprobs"),
        ({"temprature": 1}, "temprature: this field is unknown"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.post(
                "/completions", body={"model": MODEL, "prompt": "a", **change}, cast_to=object
            )
