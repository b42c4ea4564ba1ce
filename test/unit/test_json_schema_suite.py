"""Grammars of the schemas of the JSON Schema Test Suite: the values that they accept.

`make test-all` gets the suite out of the sources of jsonschema, and names it by JSON_SCHEMA_SUITE.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.helpers import grammar_work
from qwen3_omni_neuron.helpers.grammar_end import Closer
from qwen3_omni_neuron.runtime.grammar import _body

llguidance = pytest.importorskip("llguidance", reason="the extra serve is not installed")
SUITE = Path(os.environ.get("JSON_SCHEMA_SUITE", "suite"))
pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(not SUITE.is_dir(), reason="JSON_SCHEMA_SUITE names no folder"),
]
# By draft: schemas that compile, their valid values that are accepted. Others need another order of
# keys, other spaces, or a leap second at another offset than UTC's.
DRAFTS = {"draft2020-12": (174, 470), "draft2019-09": (180, 475), "draft7": (165, 407)}
# llguidance reads a $ref and an $id beside it by the rules of later drafts.
WRONG = {"draft7": {("$ref resolves to /definitions/base_foo, data does not validate", '"a"')}}


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_value_is_accepted_and_valid_ones_are(omni, draft) -> None:
    words, end_id = omni.prompt_builder, omni._config.im_end_id
    vocab_size = omni._config.thinker.text.vocab_size
    made = grammar_work._without_names(words.tokenizer_json())
    tokenizer = llguidance.LLTokenizer(json.dumps(made), n_vocab=vocab_size, eos_token=end_id)
    rows = np.zeros((2, grammar_work.words_of(vocab_size)), np.uint32)
    matcher = grammar_work.Matcher(tokenizer, Closer(made["model"]["vocab"]), end_id, rows)
    compiled = accepted = 0
    wrong: set[Any] = set()
    for file in [*(SUITE / draft).glob("*.json"), *(SUITE / draft).glob("optional/format/*.json")]:
        for group in json.loads(file.read_text()):
            try:
                matcher.compile([{"name": "reply", **_body({"json": group["schema"]})}], [])
            except (OptionError, TypeError, AttributeError):  # a schema may be true or false
                continue
            compiled += 1
            for case in group["tests"]:
                matcher.begin()
                value = json.dumps(case["data"], ensure_ascii=False)
                read = matcher._matcher.consume_tokens(words.encode_exactly(value))
                if read and matcher._matcher.is_accepting():
                    accepted += case["valid"]
                    wrong |= set() if case["valid"] else {(case["description"], value)}
    assert (wrong, compiled, accepted) == (WRONG.get(draft, set()), *DRAFTS[draft])
