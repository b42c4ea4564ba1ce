# The server on a CPU. From the root of the repository:
#
#   docker build -f deploy/images/cpu.Dockerfile -t qwen3-omni-neuron:cpu .
#   docker run --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 qwen3-omni-neuron:cpu
#
# Without more arguments it serves the small checkpoint that ships; those of `serve` may follow.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY requirements/newest.txt requirements/
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
ARG EXTRAS=serve,realtime,video
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir -c requirements/newest.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home serve \
 && install --directory --owner serve /cache
COPY --from=build /opt/venv /opt/venv
# Of hub downloads: the only folder, beside /tmp, that is written to.
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/cache
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["qwen3-omni-neuron", "serve", "--host", "0.0.0.0"]
