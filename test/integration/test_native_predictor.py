"""The code predictor in C against the module that it stands for."""

import dataclasses
import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.config import OmniConfig, TalkerConfig
from qwen3_omni_neuron.cpu.native import predictor as native_module
from qwen3_omni_neuron.cpu.native.predictor import NativePredictor, find_library
from qwen3_omni_neuron.model.code_predictor import CodePredictor
from qwen3_omni_neuron.model.sampler import sample_top, top_p_limits

compiled = pytest.mark.skipif(
    find_library() is None, reason="the installation did not compile cpu/native/predictor.c"
)
MESSAGES = [{"role": "user", "content": "What is it?"}]
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False, "predictor_do_sample": False}
LIMITS = {"thinker_max_new_tokens": 5, "talker_max_new_tokens": 12}


def talker_config(config: OmniConfig, **sizes: int) -> TalkerConfig:
    """The tiny checkpoint's, with other sizes of the code predictor."""
    c = config.talker
    assert c is not None
    predictor = dataclasses.replace(c.predictor, **sizes)
    text = dataclasses.replace(c.text, hidden_size=predictor.hidden_size)
    return dataclasses.replace(c, predictor=predictor, text=text)


@torch.no_grad()
def random_predictor(c: TalkerConfig, seed: int = 0, embedded: float = 1.0) -> CodePredictor:
    """Weights that keep the rows' size, norms around 1; embedded: the size of the tables' rows."""
    generator = torch.Generator().manual_seed(seed)
    predictor = CodePredictor(c, nn.Embedding(c.text.vocab_size, c.text.hidden_size))
    for name, weight in predictor.named_parameters():
        weight.normal_(generator=generator)
        if "norm" in name:
            weight.mul_(0.1).add_(1)
        elif "embedding" in name:
            weight.mul_(embedded)
        else:
            weight.mul_(weight.shape[-1] ** -0.5)
    return predictor


def native_of(c: TalkerConfig, predictor: CodePredictor) -> NativePredictor:
    library = find_library()
    assert library is not None
    return NativePredictor(c, predictor, library)


def frames(c: TalkerConfig, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, code 0 and uniforms."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, c.predictor.hidden_size, generator=generator)
    code0 = torch.randint(0, c.text.vocab_size, (count,), generator=generator)
    return hidden, code0, torch.rand(count, c.code_groups - 1, generator=generator)


@compiled
@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_codes_and_feedback_are_the_modules(
    config: OmniConfig, layers: int, seed: int
) -> None:
    c = talker_config(config, layers=layers)
    predictor = random_predictor(c, seed)
    hidden, code0, _ = frames(c, 20, seed)
    codes, feedback = native_of(c, predictor)(hidden, code0)
    expected_codes, expected_feedback = predictor(hidden, code0)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@compiled
@torch.no_grad()
@pytest.mark.parametrize("embedded", [1.0, 1e-3], ids=["", "where eps counts"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"layers": 3},
        {"layers": 2, "kv_heads": 1, "head_dim": 24, "ffn_width": 40, "vocab_size": 72},
        {"layers": 2, "hidden_size": 256, "head_dim": 128, "ffn_width": 768, "vocab_size": 2048},
    ],
    ids=str,
)
def test_logits_are_the_modules(config: OmniConfig, sizes: dict[str, int], embedded: float) -> None:
    c = talker_config(config, **sizes)
    predictor = random_predictor(c, embedded=embedded)
    hidden, code0, _ = frames(c, 4)
    logits = torch.empty(15, 4, c.predictor.vocab_size)
    codes, _ = native_of(c, predictor)(embedded * hidden, code0, logits=logits)
    expected = predictor.teacher_forced_logits(embedded * hidden, codes)
    torch.testing.assert_close(logits.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)
    assert codes[:, 1:].tolist() == logits.argmax(-1).t().tolist()


@compiled
@torch.no_grad()
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(50, 0.8), (50, 1.0), (0, 0.9), (0, 1.0), (5, 0.3), (1, 0.8), (999, 0.8)]
)
def test_draws_are_the_samplers(config: OmniConfig, top_k: int, top_p: float) -> None:
    """3000 draws each: the same code for the same logits and uniform. The module's own logits are
    other by a rounding, which swapped two neighbours in 1 draw of 300,000."""
    c = talker_config(config, layers=2)
    hidden, code0, uniforms = frames(c, 200)
    uniforms[0], uniforms[1] = 0, 1 - 2**-24
    limits = top_p_limits([top_p] * 200)
    logits = torch.empty(15, 200, c.predictor.vocab_size)
    native = native_of(c, random_predictor(c))
    codes, _ = native(hidden, code0, uniforms, limits, top_k=top_k, logits=logits)
    for step in range(15):
        expected = sample_top(logits[step], uniforms[:, step], top_k, limits)
        assert codes[:, step + 1].tolist() == expected.tolist(), f"step {step}"


@compiled
@torch.no_grad()
def test_sampled_frames_are_the_modules(config: OmniConfig) -> None:
    c = talker_config(config, layers=3)
    predictor = random_predictor(c)
    hidden, code0, uniforms = frames(c, 100)
    limits = torch.linspace(0.5, 0.99, 100)  # each slot its own
    codes, feedback = native_of(c, predictor)(hidden, code0, uniforms, limits, top_k=20)
    expected_codes, expected_feedback = predictor(hidden, code0, uniforms, limits, top_k=20)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@compiled
@torch.no_grad()
def test_of_equal_logits_the_smaller_id_comes_first(config: OmniConfig) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    predictor.head.zero_()
    hidden, code0, _ = frames(c, 1)
    native = native_of(c, predictor)
    assert native(hidden, code0)[0][0, 1:].tolist() == [0] * 15
    for uniform, code in ((0.0, 0), (0.49, 3), (0.5, 4), (0.51, 4), (0.99, 7)):
        uniforms = torch.full((1, 15), uniform)
        codes, _ = native(hidden, code0, uniforms, top_p_limits([1]), top_k=8)
        assert codes[0, 1:].tolist() == [code] * 15


@compiled
@torch.no_grad()
def test_a_batch_of_slots_is_each_alone_bit_for_bit(config: OmniConfig) -> None:
    c = talker_config(config, layers=3)
    native = native_of(c, random_predictor(c))
    hidden, code0, uniforms = frames(c, 7)
    limits = torch.linspace(0.5, 0.9, 7)
    for sampled in (False, True):
        codes, feedback = native(hidden, code0, *(uniforms, limits) if sampled else ())
        for slot in range(7):
            own = slice(slot, slot + 1)
            how = (uniforms[own], limits[own]) if sampled else ()
            alone_codes, alone_feedback = native(hidden[own], code0[own], *how)
            assert torch.equal(alone_codes, codes[own])
            assert torch.equal(alone_feedback, feedback[own])


@compiled
@torch.no_grad()
def test_two_threads_at_once(config: OmniConfig) -> None:
    """Two predictors, and one of them from both threads."""
    c = talker_config(config, layers=3)
    natives = [native_of(c, random_predictor(c, seed)) for seed in (0, 1)]
    hidden, code0, _ = frames(c, 2)
    alone = [native(hidden, code0) for native in natives]

    def run(which: int) -> bool:
        results = [natives[(which + i) % 2](hidden, code0) for i in range(500)]
        return all(
            torch.equal(got, expected)
            for i, result in enumerate(results)
            for got, expected in zip(result, alone[(which + i) % 2], strict=True)
        )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, (0, 1)))


@compiled
@torch.no_grad()
def test_the_weights_outlive_the_module(config: OmniConfig) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    hidden, code0, _ = frames(c, 1)
    native, (expected, _) = native_of(c, predictor), predictor(hidden, code0)
    del predictor
    _ = [torch.full((15, 64, 64), 1e9) for _ in range(50)]  # over what was freed
    assert torch.equal(native(hidden, code0)[0], expected)


@compiled
@torch.no_grad()
def test_frames_leave_no_memory_behind(config: OmniConfig) -> None:
    """5000 frames of 100 KB each."""
    c = talker_config(config)
    native = native_of(c, random_predictor(c))
    hidden, code0, uniforms = frames(c, 2)
    limits = torch.full((2,), 0.8)
    for count in (100, 5000):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            native(hidden, code0, uniforms, limits)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 20_000


@compiled
@torch.no_grad()
def test_other_shapes_and_types_are_refused(config: OmniConfig) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    native = native_of(c, predictor)
    hidden, code0, uniforms = frames(c, 2)
    limits = torch.full((2,), 0.8)
    native(hidden, code0, uniforms, limits)
    for wrong in (
        (hidden[:1], code0),
        (hidden[:, :32], code0),
        (hidden.double(), code0),
        (torch.stack((hidden, hidden), -1)[..., 0], code0),  # not dense
        (hidden, code0.int()),
        (hidden, code0, uniforms[:, :14], limits),
        (hidden, code0, uniforms.double(), limits),
        (hidden, code0, uniforms, limits[:1]),
    ):
        with pytest.raises(ValueError, match="native code predictor takes"):
            native(*wrong)
    for code in (-1, c.text.vocab_size):
        with pytest.raises(IndexError, match=str(code)):
            native(hidden, torch.tensor([0, code]))
    for other in (
        talker_config(config, layers=1, head_dim=20, heads=4),
        talker_config(config, ffn_width=132),
        talker_config(config, vocab_size=60),
    ):
        with pytest.raises(ValueError, match="multiples of 8"):
            native_of(other, random_predictor(other))
    with pytest.raises(ValueError, match="float32"):
        native_of(talker_config(config, ffn_width=136), predictor)
    predictor.head.data = predictor.head.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="dense"):
        native_of(c, predictor)
    with pytest.raises(ValueError, match="float32"):
        native_of(c, random_predictor(c).bfloat16())


@compiled
def test_it_is_used_where_the_calls_cost_more_than_the_arithmetic(config: OmniConfig) -> None:
    sizes = {
        "tiny": {},
        "small": {"layers": 3, "hidden_size": 256, "head_dim": 128, "ffn_width": 768,
                  "vocab_size": 2048},
        "released": {"layers": 5, "hidden_size": 1024, "heads": 16, "kv_heads": 8,
                     "head_dim": 128, "ffn_width": 3072, "vocab_size": 2048},
    }  # fmt: skip
    configs = {name: talker_config(config, **size) for name, size in sizes.items()}
    most = {
        name: native_of(c, CodePredictor(c, nn.Embedding(c.text.vocab_size, c.text.hidden_size)))
        for name, c in configs.items()
    }
    assert {name: native.most_slots for name, native in most.items()} == {
        "tiny": 96, "small": 1, "released": 0
    }  # fmt: skip


@pytest.mark.parametrize("library", ["compiled", "missing"])
def test_replies_are_the_same_without_it(
    checkpoint: Path,
    omni: Qwen3Omni,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the library, two slots at once go through the graph here, and one alone through C."""
    if library == "missing":
        monkeypatch.setattr(native_module, "find_library", lambda: None)
        expected_log = "was not compiled"
    else:
        if find_library() is None:
            pytest.skip("the installation did not compile cpu/native/predictor.c")
        monkeypatch.setattr(native_module, "MOST_PRODUCTS", 60_000)
        expected_log = "in C up to 1 slots"
    expected = omni.generate_audio(MESSAGES, **GREEDY, **LIMITS).codes
    with (
        caplog.at_level(logging.INFO),
        Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=2) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        assert expected_log in caplog.text
        alone = other.generate_audio(MESSAGES, **GREEDY, **LIMITS).codes
        assert alone.tolist() == expected.tolist()
        both = [pool.submit(other.generate_audio, MESSAGES, **GREEDY, **LIMITS) for _ in range(2)]
        assert [f.result().codes.tolist() for f in both] == [expected.tolist()] * 2
