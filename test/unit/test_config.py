"""Reading of config.json and generation_config.json into dataclasses."""

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron.checkpoint.config_json import (
    parse_config,
    read_config,
    read_generation_defaults,
)
from qwen3_omni_neuron.checkpoint.released import released_config_dict
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import GenerationDefaults, RopeConfig
from qwen3_omni_neuron.model.rotary import Rotary
from testing.released import RELEASED


def edited(checkpoint: Path, into: Path, change: Any) -> Path:
    """Write the checkpoint's config.json, changed by `change`, into a folder; return the folder."""
    raw = json.loads((checkpoint / "config.json").read_text())
    change(raw)
    (into / "config.json").write_text(json.dumps(raw))
    return into


def test_both_spellings_of_the_rope_settings_are_the_same(checkpoint, config, tmp_path) -> None:
    """transformers 5 saves rope_parameters, with rope_theta inside."""

    def respell(raw: dict[str, Any]) -> None:
        sections = [
            raw["thinker_config"]["text_config"],
            raw["talker_config"]["text_config"],
            raw["talker_config"]["code_predictor_config"],
            raw["code2wav_config"],
        ]
        for section in sections:
            parameters = dict(section.pop("rope_scaling", None) or {"rope_type": "default"})
            section["rope_parameters"] = {**parameters, "rope_theta": section.pop("rope_theta")}
        raw["talker_config"]["text_config"]["num_local_experts"] = raw["talker_config"][
            "text_config"
        ].pop("num_experts")

    assert read_config(edited(checkpoint, tmp_path, respell)) == config
    assert config.thinker.text.rope == RopeConfig(1e6, (4, 2, 2))
    assert config.code2wav.rope.theta == 10000


def test_what_transformers_saves_is_read(checkpoint, tmp_path, config) -> None:
    from transformers import Qwen3OmniMoeConfig

    Qwen3OmniMoeConfig.from_pretrained(checkpoint).save_pretrained(tmp_path)
    assert read_config(tmp_path) == config


# Names for the same setting. transformers 4.57 and 5 disagree on the default of the last two.
ALIASES = (("num_experts", "num_local_experts"), ("rope_theta", "rope_scaling", "rope_parameters"))
DIFFERENT = ("n_window", "n_window_infer")


def test_what_is_left_out_has_transformers_default() -> None:
    """Every field of every config class: leaving it out is as writing its default."""
    from transformers import Qwen3OmniMoeConfig

    walked = set()

    def walk(defaults: dict[str, Any], path: tuple[str, ...] = ()) -> None:
        for name, default in defaults.items():
            released = released_config_dict()
            section = reduce(dict.__getitem__, path, released)
            if name.endswith("_config"):
                walk(default, (*path, name))
                continue
            for alias in next((a for a in ALIASES if name in a), (name,)):
                section.pop(alias, None)
            if name in DIFFERENT:
                with pytest.raises(CheckpointError, match=f"has no {name}. Use the config"):
                    parse_config(released)
            elif default is not None and name != "model_type":
                left_out = parse_config(released)
                section[name] = default
                assert left_out == parse_config(released), (*path, name)
                walked.add((*path, name))

    walk(Qwen3OmniMoeConfig().to_dict())
    assert ("talker_config", "code_predictor_config", "head_dim") in walked and len(walked) > 100


@pytest.mark.parametrize("part", ["thinker", "talker"])
@pytest.mark.parametrize("head_dim", [128, 96, 32])
def test_rotary_embedding_without_sections_is_transformers(part, head_dim) -> None:
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    theirs = getattr(Qwen3OmniMoeConfig(), f"{part}_config").text_config
    theirs.head_dim = head_dim
    if getattr(theirs, "rope_scaling", 0) is None:  # 4.57 fails without any
        theirs.rope_scaling = {"rope_type": "default"}
    raw = released_config_dict()
    section = raw[f"{part}_config"]["text_config"]
    del section["rope_scaling"], section["rope_theta"]
    rotary = Rotary(getattr(parse_config(raw), part).text.rope, head_dim)
    positions = torch.tensor([[1.0, 5, 40], [2, 7, 50], [3, 9, 60]])
    cos, _ = modeling.Qwen3OmniMoeThinkerTextRotaryEmbedding(theirs)(positions, positions[:, None])
    torch.testing.assert_close(rotary.at_axes(positions)[0][:, 0], cos[0])


def test_what_cannot_be_used_is_named(checkpoint, tmp_path) -> None:
    for change, message in (
        (lambda raw: raw.update(model_type="llama"), "model_type 'llama'"),
        (lambda raw: raw["talker_config"].pop("speaker_id"), "config.json.talker_config has no"),
        (
            lambda raw: raw["thinker_config"]["text_config"].update(
                rope_scaling={"rope_type": "yarn", "factor": 4.0}
            ),
            "rope_type to 'yarn'",
        ),
        (lambda raw: raw["talker_config"].update(accept_hidden_layer=4), "must be 1 to 2"),
        (
            lambda raw: raw["thinker_config"]["text_config"].update(mlp_only_layers=[1]),
            "mlp_only_layers",
        ),
        (lambda raw: raw.update(thinker_config=3), "thinker_config is not an object"),
    ):
        with pytest.raises(CheckpointError) as caught:
            read_config(edited(checkpoint, tmp_path, change))
        assert message in str(caught.value)


def test_a_config_json_that_is_broken_or_missing_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path)
    for content in (b"{", b"[]", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_config(tmp_path)


def test_a_text_only_checkpoint_has_no_talker(checkpoint, tmp_path) -> None:
    def remove_speech(raw: dict[str, Any]) -> None:
        raw["enable_audio_output"] = False
        del raw["talker_config"], raw["code2wav_config"]

    config = read_config(edited(checkpoint, tmp_path, remove_speech))
    assert config.talker is None
    assert config.code2wav is None
    assert config.code_groups == 0


def test_generation_defaults_come_from_the_checkpoint(checkpoint, tmp_path) -> None:
    expected = GenerationDefaults(do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    assert read_generation_defaults(checkpoint) == expected
    assert read_generation_defaults(tmp_path) == GenerationDefaults(do_sample=False)
    (tmp_path / "generation_config.json").write_text('{"top_k": null, "top_p": 0.5}')
    assert read_generation_defaults(tmp_path) == GenerationDefaults(top_p=0.5)


def test_latency_follows_from_the_upsampling() -> None:
    """8, then 8 * 5 + 5 = 45, then 45 * 4 + 4 = 184, then 184 * 3 + 3 = 555."""
    c = RELEASED.code2wav
    assert c is not None and (c.latency_samples, c.frame_samples) == (555, 1920)
    assert replace(c, upsample_rates=(8, 5, 4)).latency_samples == 184
    assert replace(c, upsample_rates=(2,)).latency_samples == 2
