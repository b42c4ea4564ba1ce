"""The table of cores: who gets which, and what is refused."""

from dataclasses import replace

import pytest

from qwen3_omni_neuron.compilation.degrees import Degrees
from qwen3_omni_neuron.compilation.plan import cores_of_stages
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.neuron.cores import instance_type, plan_cores

LARGE, SMALL = "trn2.48xlarge", "trn2.3xlarge"
STAGES = ("thinker", "talker", "vocoder")
MIXED = Degrees(thinker=8, talker=4, predictor=8, vocoder=1, encoders=2)


def needed(tp: Degrees | int) -> dict[str, int]:
    return cores_of_stages(Degrees.parse(tp, MIXED), STAGES)


def visible(plan: object) -> list[str]:
    return [plan.environment(stage)["NEURON_RT_VISIBLE_CORES"] for stage in STAGES]  # type: ignore[attr-defined]


def test_stages_have_these_cores_or_those_that_are_named() -> None:
    for instance, placement, tp, expected in (
        (LARGE, "shared", 8, ["0-7", "0-7", "0-7"]),
        (LARGE, "split", 8, ["0-7", "8-15", "16-23"]),
        (LARGE, "split", 4, ["0-3", "4-7", "8-11"]),
        (LARGE, "split", 1, ["0", "1", "2"]),
        (LARGE, "split", MIXED, ["0-7", "8-15", "16"]),
        (LARGE, "shared", MIXED, ["0-7", "0-7", "0-7"]),
        (LARGE, "shared", replace(MIXED, thinker=1, talker=1, predictor=1), ["0-1"] * 3),
        (SMALL, "shared", 4, ["0-3", "0-3", "0-3"]),
        (SMALL, "split", 1, ["0", "1", "2"]),
    ):
        plan = plan_cores(instance, placement, needed(tp))
        assert visible(plan) == expected
        assert plan.environment("talker") == {
            "NEURON_RT_VISIBLE_CORES": expected[1],
            "NEURON_LOGICAL_NC_CONFIG": "2",
        }
    plan = plan_cores(SMALL, "split", cores_of_stages(Degrees.same(4), ("thinker",)))
    assert plan.ranges == {"thinker": (0, 3)}, "a checkpoint that only listens"
    cores = {"thinker": "32-39", "talker": "0-7", "vocoder": "8-15"}
    assert visible(plan_cores(LARGE, "split", needed(8), cores=cores)) == ["32-39", "0-7", "8-15"]
    plan = plan_cores(SMALL, "shared", needed(8), lnc=1)  # twice as many
    assert plan.environment("thinker")["NEURON_LOGICAL_NC_CONFIG"] == "1"


def test_cores_that_a_machine_lacks_or_stages_would_share_are_refused() -> None:
    for instance, placement, tp, cores, said in (
        ("trn1.32xlarge", "shared", 8, None, "one of trn2.48xlarge, trn2u.48.*, got 'trn1"),
        (SMALL, "shared", 8, None, "4 logical cores at LNC=2, 0 to 3, got .* smaller tp"),
        (SMALL, "split", 4, None, r"vocoder 8-11. .* use placement shared"),
        (LARGE, "split", 8, ("0-7", "7-14", "16-23"), "thinker and talker share core 7"),
        (LARGE, "split", 8, ("16-23", "8-15", "16-23"), "thinker and vocoder share core 16"),
        (LARGE, "split", 8, ("0-7", "8-15", "16"), "vocoder has cores 16-16, 1 of them.*for 8"),
        (LARGE, "split", MIXED, ("0-7", "8-15", "16-23"), "vocoder has cores 16-23, 8 .*for 1"),
        (LARGE, "split", 8, ("0-7", "8-15", "57-64"), "64 logical cores .* Name other cores"),
        (LARGE, "shared", 8, ("0-7", "0-7", "8-15"), "on the same cores, got .* placement split"),
        (LARGE, "split", 8, ("0-7", "8-15", "x"), 'like "8-15" or "8", got \'x\''),
        (LARGE, "split", 8, ("0-7",), "cores names thinker; it must name all of thinker, talker, "),
    ):
        named = None if cores is None else dict(zip(STAGES, cores, strict=False))
        with pytest.raises(OptionError, match=said):
            plan_cores(instance, placement, needed(tp), cores=named)


def test_the_machine_says_what_it_is(tmp_path) -> None:
    file = tmp_path / "product_name"
    file.write_text("trn2.3xlarge\n", encoding="utf-8")
    assert instance_type(file) == SMALL
    file.write_text("Standard PC\n", encoding="utf-8")
    with pytest.raises(OptionError, match=r"says Standard PC, which is not a known.*Set instance"):
        instance_type(file)
    with pytest.raises(OptionError, match=r"says nothing .*No such file"):
        instance_type(tmp_path / "absent")
