"""The fleet's autoscaling policy, with a record of what Ray asks it."""

import json
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.serving.fleet.scaling import FirstAudioPolicy


class RecordedPolicy(FirstAudioPolicy):
    """FirstAudioPolicy that appends each decision to a file as a line of JSON.

    A line has each replica's figures by its name, the current target number of replicas, and the
    number that the policy wants.
    """

    def __init__(self, file: str, **options: Any):
        super().__init__(**options)
        self._file = Path(file)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the result of FirstAudioPolicy."""
        wanted, state = super().__call__(context)
        figures = {
            name: {replica.unique_id: value for replica, value in values.items()}
            for name, values in (context.aggregated_metrics or {}).items()
        }
        line = {"figures": figures, "target": context.target_num_replicas, "wanted": wanted}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return wanted, state
