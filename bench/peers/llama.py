"""llama.cpp's side of bench.vs_llama: `python -m bench.peers.llama` with a job and calls on stdin.

Runs in an environment with llama-cpp-python and gguf. The first line is the job as JSON; every
later one a call, `prefill ROWS` or `decode REQUESTS`, answered by its wall-clock and CPU seconds.
"""

import json
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

ROWS = 128  # of each request before a decode step


def write_gguf(path: str, c: dict[str, Any]) -> None:
    """Write a model of random q4_0 numbers; norms are 1, routers small. c: a DecoderConfig."""
    import gguf

    draw, q4_0 = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "qwen3moe")
    hidden, width, experts = c["hidden_size"], c["moe"]["expert_width"], c["moe"]["experts"]
    queries, keys = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    writer.add_block_count(c["layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(c["moe"]["experts_per_token"])
    writer.add_head_count(c["heads"])
    writer.add_head_count_kv(c["kv_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def rounded(name: str, *shape: int) -> None:
        blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
        blocks[..., :2] = np.array([shape[-1] ** -0.5 / 8], np.float16).view(np.uint8)  # the scale
        flat = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", flat, raw_dtype=q4_0)

    rounded("token_embd", c["vocab_size"], hidden)
    rounded("output", c["vocab_size"], hidden)
    ones("output_norm", hidden)
    for layer in (f"blk.{number}." for number in range(c["layers"])):
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden)):
            ones(layer + name, size)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(layer + name, c["head_dim"])
        for name, out in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            rounded(layer + name, out, hidden)
        rounded(f"{layer}attn_output", hidden, queries)
        router = draw.standard_normal((experts, hidden), np.float32) * hidden**-0.5
        writer.add_tensor(f"{layer}ffn_gate_inp.weight", router)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            rounded(layer + name, experts, width, hidden)
        rounded(f"{layer}ffn_down_exps", experts, hidden, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A model in llama.cpp with the KV rows of several requests."""

    def __init__(self, path: str, job: dict[str, Any]):
        import llama_cpp

        self._api: Any = llama_cpp
        self._ids = np.random.default_rng(1).integers(0, job["config"]["vocab_size"], 4096).tolist()
        self._model = self._api.llama_model_load_from_file(
            path.encode(), self._api.llama_model_default_params()
        )
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = 4096, 1 + job["requests"]
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = job["threads"]
        self._context = self._api.llama_init_from_model(self._model, settings)
        self._batch = self._api.llama_batch_init(512, 0, 1)
        for request in range(1, 1 + job["requests"]):
            self._run([(request, row) for row in range(ROWS)])

    def prefill(self, rows: int) -> None:
        self._forget(0, 0)
        self._run([(0, row) for row in range(rows)])

    def decode(self, requests: int) -> None:
        for request in range(1, 1 + requests):
            self._forget(request, ROWS)
        self._run([(request, ROWS) for request in range(1, 1 + requests)])

    def _forget(self, request: int, start: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, request, start, -1)

    def _run(self, rows: list[tuple[int, int]]) -> None:
        """Append rows of (request, position); the last one of a request has logits."""
        batch, last = self._batch, {request: i for i, (request, _) in enumerate(rows)}
        batch.n_tokens = len(rows)
        for i, (request, position) in enumerate(rows):
            batch.token[i], batch.pos[i] = self._ids[request + position], position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
            batch.logits[i] = i == last[request]
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")


def main() -> None:
    """Write the model, load it, and answer calls."""
    job = json.loads(sys.stdin.readline())
    write_gguf(job["path"], job["config"])
    model = Llama(job["path"], job)
    print(metadata.version("llama-cpp-python"), flush=True)
    for line in sys.stdin:
        kind, size = line.split()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        getattr(model, kind)(int(size))
        took = time.perf_counter() - start_s, time.process_time() - cpu_s
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
