"""A reference on a GPU, shown without one: torch is told that it has one, or that it has none."""

from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, cli
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.verification import write
from qwen3_omni_neuron.verification.write import computing_on

PARTS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def precisions() -> list[str]:
    return [part.fp32_precision for part in PARTS]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(write, "find_spec", lambda name: name)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_computes_without_tf32_and_the_settings_are_put_back(name: str) -> None:
    before = precisions()
    assert "tf32" in before, "what convolutions have by default"
    with computing_on(name):
        assert precisions() == ["ieee"] * 3
    assert precisions() == before
    with pytest.raises(KeyError), computing_on(name):
        raise KeyError
    assert precisions() == before


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_with_too_little_memory_is_named() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 5.02 GiB. GPU 0 has a total capacity of 4.00 GiB. "
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
    )
    expected = r"--device cuda has too little memory: .*5\.02 GiB.*4\.00 GiB\. bfloat16 takes half"
    with pytest.raises(OptionError, match=expected) as raised, computing_on("cuda"):
        raise torch.OutOfMemoryError(message)
    assert "PYTORCH_ALLOC_CONF" not in str(raised.value)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "takes cpu, or one GPU such as cuda or cuda:1, got 'gpu'"),
        ("auto", "got 'auto'"),
        ("cuda:1", "no --device cuda:1: it finds 1 GPUs"),
    ],
)
def test_another_device_is_refused(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message), computing_on(name):
        pytest.fail("it was taken")


def test_the_command_says_that_torch_finds_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qwen3_omni_neuron.verification import questions

    monkeypatch.setattr(questions, "make_questions", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = ["verify", "--model", str(SPEAKING_CHECKPOINT), "--write", "none.npz"]
    assert cli.main([*given, "--device", "cuda"]) == 1
    assert "has no --device cuda: it finds 0 GPUs" in capsys.readouterr().err
    assert not Path("none.npz").exists()
