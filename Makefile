# make demo              a spoken question in, text and demo.wav out
# make test              lint, types and tests, with the newest transformers
# make test-nxdi-line    the tests with the transformers that NxDI pins
# make test-oracle       of these, those that transformers has a part in
# make bench             every benchmark over checkpoints of random weights: .venv/bench/*.json
# make test-nxdi         test/neuron over NxDI's CPU mode: NXDI_SOURCES=.../src:.../src, the src
#                        folders of aws-neuron/neuronx-distributed-inference and
#                        aws-neuron/neuronx-distributed
PYTHON ?= python3
VENV := .venv
NXDI_VENV := .venv-nxdi-line
CHECKPOINT := $(VENV)/tiny-checkpoint
BENCH_RESULTS := $(VENV)/bench
# Two processes, a file of tests at a time: models are loaded once a process.
PYTEST := pytest --numprocesses 2 --dist loadfile

WITHOUT_TRANSFORMERS := $(addprefix unit/,$(addsuffix .py,test_architecture test_bench_scripts \
    test_code2wav_streaming test_cores test_decoder_shards test_dry_run test_graphs test_hlo \
    test_metrics test_neuron_parts test_parallel test_pipeline test_planning \
    test_process_engines test_replay test_report test_token_buffer test_traced_parts)) \
    $(addprefix integration/,$(addsuffix .py,test_buckets test_compile_runner test_compiled \
    test_neuron_engines test_neuron_tree))

.PHONY: demo test lint test-nxdi-line test-oracle test-nxdi nxdi-sources bench clean

demo: $(CHECKPOINT)/config.json
	@echo "The tiny checkpoint has random weights: the words and the voice are noise, made the way"
	@echo "the real ones are. For the real ones, with 70 GB of memory and of disk:"
	@echo "  $(VENV)/bin/qwen3-omni-neuron speak --audio examples/question.wav \\"
	@echo "      --model Qwen/Qwen3-Omni-30B-A3B-Instruct"
	@echo
	$(VENV)/bin/qwen3-omni-neuron speak --audio examples/question.wav --out demo.wav \
	    --model $(CHECKPOINT) --dtype float32 --seed 0 \
	    --thinker-max-new-tokens 32 --talker-max-new-tokens 64

test: $(VENV)/installed lint
	$(VENV)/bin/$(PYTEST)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test-nxdi-line: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/$(PYTEST)

# The rest is the same whichever transformers is installed.
test-oracle: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/$(PYTEST) $(addprefix --ignore=test/,$(WITHOUT_TRANSFORMERS))

test-nxdi: nxdi-sources $(NXDI_VENV)/nxdi-imports
	NXDI_SOURCES="$(NXDI_SOURCES)" $(NXDI_VENV)/bin/pytest test/neuron

bench: $(VENV)/installed
	mkdir -p $(BENCH_RESULTS)
	$(VENV)/bin/python bench/vs_transformers.py --size tiny --json $(BENCH_RESULTS)/vs_transformers-tiny.json
	$(VENV)/bin/python bench/vs_transformers.py --size small --json $(BENCH_RESULTS)/vs_transformers-small.json
	$(VENV)/bin/python bench/concurrency.py --json $(BENCH_RESULTS)/concurrency.json
	$(VENV)/bin/python bench/long_audio.py --json $(BENCH_RESULTS)/long_audio.json
	$(VENV)/bin/python bench/ttfb_rtf.py --requests 16 --talker-max-new-tokens 101 \
	    --thinker-max-new-tokens 48 --timeline 1 --save-audio $(BENCH_RESULTS)/ttfb_rtf \
	    --json $(BENCH_RESULTS)/ttfb_rtf.json
	$(VENV)/bin/python bench/ttfb_rtf.py --requests 16 --talker-max-new-tokens 101 \
	    --thinker-max-new-tokens 48 --concurrency 4 --json $(BENCH_RESULTS)/ttfb_rtf-4-at-once.json
	$(VENV)/bin/python bench/thinker_ttft.py --json $(BENCH_RESULTS)/thinker_ttft.json
	$(VENV)/bin/python bench/stages.py --json $(BENCH_RESULTS)/stages.json
	$(VENV)/bin/python bench/long_speech.py --json $(BENCH_RESULTS)/long_speech.json
	$(VENV)/bin/python bench/report.py $(BENCH_RESULTS)/*.json --out $(BENCH_RESULTS)/report

clean:
	rm -rf $(VENV) $(NXDI_VENV) demo.wav

$(CHECKPOINT)/config.json: $(VENV)/installed $(wildcard src/qwen3_omni_neuron/tiny/*.py)
	$(VENV)/bin/qwen3-omni-neuron tiny-checkpoint $(CHECKPOINT)

$(VENV)/installed: pyproject.toml requirements/newest.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c requirements/newest.txt --editable '.[test,bench]'
	touch $@

nxdi-sources:
	@test -n "$(NXDI_SOURCES)" || { echo "Set NXDI_SOURCES: see test/neuron/nxdi_sources.py"; exit 1; }

# What NxDI's sources import beside the Neuron SDK.
$(NXDI_VENV)/nxdi-imports: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/pip install --quiet tenacity boto3
	touch $@

$(NXDI_VENV)/installed: pyproject.toml requirements/nxdi-line.txt
	$(PYTHON) -m venv $(NXDI_VENV)
	$(NXDI_VENV)/bin/pip install --quiet -c requirements/nxdi-line.txt --editable '.[test,bench]'
	touch $@
