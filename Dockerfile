# The server: docker build -t penstock . && docker run -p 127.0.0.1:8000:8000 -v /path/to/model:/model:ro penstock /model
# The AIBrix runtime, for any engine: docker run --entrypoint aibrix_runtime penstock --port 8080
# Building needs the compiler of the first stage; the second one has the wheel and its Python dependencies.

FROM rust:1.89.0-slim-bookworm AS build
# The tag of the base has the versions of Debian's packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/maturin \
    && /opt/maturin/bin/pip install --no-cache-dir 'maturin>=1.14,<2'
WORKDIR /source
COPY Cargo.toml Cargo.lock pyproject.toml README.md LICENSE ./
COPY rust rust
COPY cuda cuda
COPY python python
RUN /opt/maturin/bin/maturin build --release --locked --out /dist \
    && /opt/maturin/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist ./python/aliases/aibrix

FROM python:3.13.7-slim-bookworm
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/penstock penstock
# A mount is not a layer: the image has the installed files only. The wheel has the versions of its dependencies.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    set -- /dist/penstock_llm-*.whl \
    && pip install --no-cache-dir "$1[server,fast,hub,tracing,runtime]" /dist/penstock_aibrix-*.whl
USER 10001
WORKDIR /var/lib/penstock
# Models by hub id are kept here; mount a volume to keep them longer than the container. A new volume gets the owner.
RUN mkdir models
ENV HF_HOME=/var/lib/penstock/models PYTHONUNBUFFERED=1
EXPOSE 8000
# 503 while the model loads: --start-period of `docker run` is the time that it may take.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
# `docker stop` waits 10 seconds before it kills.
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000", "--drain-timeout", "8"]
CMD ["--help"]
