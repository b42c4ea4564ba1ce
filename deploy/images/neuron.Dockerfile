# The server on Neuron, over AWS's image of one of two SDK lines. From the root of the repository:
#
#   docker build -f deploy/images/neuron.Dockerfile -t qwen3-omni-neuron:sdk2.33 .
#   docker build -f deploy/images/neuron.Dockerfile --build-arg SDK=2.31 -t qwen3-omni-neuron:sdk2.31 .
#
#   docker run --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 --device /dev/neuron0 \
#       -v /srv/models:/models:ro qwen3-omni-neuron:sdk2.33 --instance trn2.3xlarge \
#       --model /models/Qwen3-Omni-30B-A3B-Instruct --compiled /models/compiled-torchneuron
ARG SDK=2.33

# Target torchneuron.
FROM public.ecr.aws/neuron/pytorch-inference-vllm-neuronx:0.29.0.1.2.0-neuronx-py314-sdk2.33.0-ubuntu26.04 AS sdk-2.33
# Target neuron: the last line with NxDI.
FROM public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.1-ubuntu24.04 AS sdk-2.31

# hadolint ignore=DL3006
FROM sdk-${SDK}
ARG SDK
ARG EXTRAS=serve,realtime,video
# In an image that has a Python of its system alone, pip needs to be told that this is meant.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
# The versions are those of the package: of its extra for SDK 2.31, of neuron/versions.py for 2.33.
# pip keeps what the image has of them.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3013
RUN if [ "${SDK}" = 2.31 ]; then extras="${EXTRAS},neuron"; else extras="${EXTRAS}"; fi \
 && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --extra-index-url https://pip.repos.neuron.amazonaws.com ".[${extras}]" \
 && if [ "${SDK}" = 2.33 ]; then \
      newest="$(python -c 'from qwen3_omni_neuron.neuron.versions import TORCHNEURON_VERSIONS as v; print(v.split(", ")[-1])')" \
   && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --extra-index-url https://pip.repos.neuron.amazonaws.com "torch-neuronx==${newest}"; \
    fi \
 && qwen3-omni-neuron doctor
RUN useradd --uid 10001 --create-home serve \
 && install --directory --owner serve /cache
WORKDIR /
# Of hub downloads: the only folder, beside /tmp, that is written to.
ENV XDG_CACHE_HOME=/cache
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=1h --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["qwen3-omni-neuron", "serve", "--host", "0.0.0.0"]
