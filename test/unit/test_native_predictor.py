"""Frames of the code predictor in C are the module's."""

from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL

import pytest
import torch

from qwen3_omni_neuron.cpu.native.binding import Library
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.model.code_predictor import sample_top, top_p_limits
from qwen3_omni_neuron.model.config import OmniConfig
from testing.native_library import needs_c
from testing.native_modules import (
    DTYPES,
    LARGE_PREDICTOR,
    ODD_PREDICTOR,
    CalledPredictor,
    assert_close_in,
    assert_equal,
    both_predictors,
    frames,
    native_predictor,
    noise_of_starts,
    random_predictor,
    talker_config,
)
from testing.packed import packed_and_widened
from testing.teacher_forcing import teacher_forced_logits

pytestmark = needs_c
M_PERTURB = -6  # of glibc's malloc.h


@torch.no_grad()
@pytest.mark.parametrize("rows", [[2], [3, 0, 1]], ids=str)
def test_frames_start_from_rows_of_tables_and_leave_their_feedback_there(
    config: OmniConfig, library: Library, rows: list[int]
) -> None:
    c = talker_config(config)
    native, (hidden, code0, starts) = native_predictor(c, library), frames(c, 4)
    feedback, limits = torch.full_like(hidden, 7.0), [0.9, 1.0, 0.5][: len(rows)]
    given = [starts[row] for row in rows]
    sampling = [PredictorSampling(*pair) for pair in zip(given, [20] * 3, limits, strict=False)]
    codes = native.predict(rows, code0[rows].tolist(), sampling, hidden, feedback)
    expected = native(hidden[rows], code0[rows], given, torch.tensor(limits), 20)
    assert_equal((codes, feedback[rows]), expected)
    assert (feedback[[row for row in range(4) if row not in rows]] == 7).all()
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="there are 4"):
            native.predict([0, wrong], [1, 1], 2 * sampling[:1], hidden, feedback)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("embedded", [1.0, 1e-3], ids=["", "where eps counts"])
@pytest.mark.parametrize("sizes", [{}, {"layers": 3}, ODD_PREDICTOR, LARGE_PREDICTOR], ids=str)
@pytest.mark.pairs
def test_predicted_logits_are_the_modules(
    config: OmniConfig, library: Library, sizes: dict[str, int], embedded: float, dtype: str
) -> None:
    c = talker_config(config, **sizes)
    native, predictor = both_predictors(
        c, library, random_predictor(c, embedded=embedded), dtype, threads=4
    )
    hidden, code0, _ = frames(c, 4)
    logits = torch.empty(15, 4, c.predictor.vocab_size)
    codes, _ = native(embedded * hidden, code0, logits=logits)
    expected = teacher_forced_logits(predictor, embedded * hidden, codes)
    assert_close_in(dtype, logits.transpose(0, 1), expected, 1e-4, 1e-4)
    assert codes[:, 1:].tolist() == logits.argmax(-1).t().tolist()


@torch.no_grad()
@pytest.mark.parametrize("vocab_size", [64, 300])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(50, 0.8), (50, 1.0), (0, 0.9), (0, 1.0), (5, 0.3), (1, 0.8), (270, 0.9), (999, 0.8)],
)
def test_sampled_codes_are_those_of_sample_top(
    config: OmniConfig, library: Library, top_k: int, top_p: float, vocab_size: int
) -> None:
    """3000 samples each: the same code for the same logits and noise."""
    c = talker_config(config, layers=2, vocab_size=vocab_size)
    hidden, code0, starts = frames(c, 200)
    limits = top_p_limits([top_p] * 200)
    logits = torch.empty(15, 200, c.predictor.vocab_size)
    native = native_predictor(c, library)
    codes, _ = native(hidden, code0, starts, limits, top_k=top_k, logits=logits)
    noise = noise_of_starts(c, starts)
    for step in range(15):
        expected = sample_top(logits[step], noise[:, step], top_k, limits)
        assert codes[:, step + 1].tolist() == expected.tolist(), f"step {step}"


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["mixed", "float32"])  # a code may hang on a rounded input
def test_sampled_frames_are_the_modules(config: OmniConfig, library: Library, dtype: str) -> None:
    c = talker_config(config, layers=3)
    native, predictor = both_predictors(c, library, random_predictor(c), dtype)
    hidden, code0, starts = frames(c, 100)
    limits = torch.linspace(0.5, 0.99, 100)  # each slot its own
    codes, feedback = native(hidden, code0, starts, limits, top_k=20)
    noise = noise_of_starts(c, starts)
    expected_codes, expected_feedback = predictor(hidden, code0, noise, limits, top_k=20)
    assert codes.tolist() == expected_codes.tolist()
    torch.testing.assert_close(feedback, expected_feedback, atol=1e-5, rtol=0)


@torch.no_grad()
def test_frames_of_different_top_k_share_a_call(config: OmniConfig, library: Library) -> None:
    c = talker_config(config, layers=2)
    native, (hidden, code0, starts) = native_predictor(c, library), frames(c, 4)
    top_k, top_p = [50, 50, 0, 7], [0.3, 0.8, 1.0, 0.9]
    feedback = torch.empty_like(hidden)
    given = zip([None, *starts[1:]], top_k, top_p, strict=True)
    sampling = [PredictorSampling(*each) for each in given]
    codes = native.predict(range(4), code0.tolist(), sampling, hidden, feedback)
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        one = slice(row, row + 1)
        drawn = () if row == 0 else (starts[one], top_p_limits([p]), k)
        assert_equal((codes[one], feedback[one]), native(hidden[one], code0[one], *drawn))


@torch.no_grad()
def test_of_equal_logits_greedy_takes_the_first_and_a_draw_any(
    config: OmniConfig, library: Library
) -> None:
    c = talker_config(config)
    predictor = random_predictor(c)
    predictor.head.zero_()
    hidden, code0, starts = frames(c, 40)
    native, _ = both_predictors(c, library, predictor)
    assert not native(hidden, code0)[0][:, 1:].any()
    codes, _ = native(hidden, code0, starts, torch.full((40,), 0.1), top_k=1)
    assert torch.equal(codes[:, 1:], noise_of_starts(c, starts).argmax(-1))


@torch.no_grad()
@pytest.mark.skipif(not hasattr(CDLL(None), "mallopt"), reason="malloc is not glibc's")
@pytest.mark.parametrize("vocab_size", [64, 300])
@pytest.mark.parametrize("top_k", [50, 0])
def test_nan_gives_no_code_and_leaves_the_other_frames_alone(
    config: OmniConfig, library: Library, vocab_size: int, top_k: int
) -> None:
    """Broken weights must not lead outside the tables. The module's codes are the same."""
    c = talker_config(config, vocab_size=vocab_size)
    native, module = both_predictors(c, library, random_predictor(c))
    hidden, code0, starts = frames(c, 2)
    hidden[0] = float("nan")
    whole, _ = native(hidden[1:], code0[1:], starts[1:], top_p_limits([1]), top_k)
    libc = CDLL(None)
    try:
        libc.mallopt(M_PERTURB, 0x7F)  # new memory is full of what are no ids
        codes, _ = native(hidden, code0, starts, top_p_limits([1, 1]), top_k)
    finally:
        libc.mallopt(M_PERTURB, 0)
    assert torch.equal(codes[1:], whole)
    assert torch.equal(codes[:, 0], code0)
    assert codes[0, 1:].tolist() == [-1] * 15
    again, _ = module(hidden, code0, noise_of_starts(c, starts), top_p_limits([1, 1]), top_k)
    assert again[0, 1:].tolist() == [-1] * 15
    assert (again[1] >= 0).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{"layers": 3}, ODD_PREDICTOR, LARGE_PREDICTOR], ids=str)
def test_a_batch_of_frames_is_each_alone_bit_for_bit(
    config: OmniConfig, library: Library, sizes: dict[str, int], dtype: str
) -> None:
    c = talker_config(config, **sizes)
    packed, _ = packed_and_widened(random_predictor(c), "code_predictor", dtype)
    natives = [CalledPredictor(c, packed, library, threads) for threads in (1, 2, 4)]
    hidden, code0, starts = frames(c, 7)
    limits = torch.linspace(0.5, 0.9, 7)
    for sampled in (False, True):
        together = natives[0](hidden, code0, *(starts, limits) if sampled else ())
        for native in natives[1:]:
            assert_equal(native(hidden, code0, *(starts, limits) if sampled else ()), together)
        for slot in range(7):
            own = slice(slot, slot + 1)
            how = (starts[own], limits[own]) if sampled else ()
            alone = natives[slot % 3](hidden[own], code0[own], *how)
            assert_equal(alone, tuple(t[own] for t in together))


@torch.no_grad()
def test_predictors_called_by_two_threads_at_once_give_what_each_gives_alone(
    config: OmniConfig, library: Library
) -> None:
    c = talker_config(config, layers=3)
    natives = [native_predictor(c, library, seed) for seed in (0, 1)]
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


@torch.no_grad()
def test_the_weights_outlive_the_module(config: OmniConfig, library: Library) -> None:
    c = talker_config(config)
    packed, widened = packed_and_widened(random_predictor(c), "code_predictor", "float32")
    hidden, code0, _ = frames(c, 1)
    native, (expected, _) = CalledPredictor(c, packed, library), widened(hidden, code0)
    del packed
    _ = [torch.full((15, 64, 64), 1e9) for _ in range(50)]  # over what was freed
    assert torch.equal(native(hidden, code0)[0], expected)
