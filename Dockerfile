# The server: make wheel && docker build -t penstock .
#             docker run -p 127.0.0.1:8000:8000 -v /path/to/model:/model:ro penstock /model
# The server and the AIBrix runtime: docker build --target aibrix -t penstock-aibrix .
# Nothing is compiled: the wheel is that of dist/ or, with --build-arg WHEELS=, one of the package index.

# An image with Python 3.11 or newer, and its module venv.
ARG BASE=python:3.13.7-slim-bookworm

FROM ${BASE} AS files
ARG VERSION=0.1.0
ARG EXTRAS=server,fast,hub,tracing
ARG WHEELS=dist
LABEL org.opencontainers.image.title="Penstock" \
      org.opencontainers.image.description="An asynchronous LLM inference engine with OpenAI's API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# Models by hub id and compiled kernels are kept in the home directory, which needs a volume if the root is read-only.
# A new volume gets the owner of the directory.
ENV PATH=/opt/penstock/bin:${PATH} HOME=/var/lib/penstock PYTHONUNBUFFERED=1 \
    HF_HOME=/var/lib/penstock/models PENSTOCK_CACHE=/var/lib/penstock/cache
WORKDIR /var/lib/penstock
# The second `install` adds the extras to the wheel that the first one has chosen. The import writes the byte code of
# Python's own modules, which slim images lack: a start would take 0.7 s more, and each health check 0.2 s.
RUN --mount=type=bind,target=/context \
    set -- --no-cache-dir --only-binary :all: \
    && python3 -m venv /tmp/pip \
    && python3 -m venv --without-pip /opt/penstock \
    && /tmp/pip/bin/pip --python /opt/penstock/bin/python install "$@" --no-deps \
        ${WHEELS:+--no-index --find-links "/context/${WHEELS}"} "penstock-llm==${VERSION}" \
    && /tmp/pip/bin/pip --python /opt/penstock/bin/python install "$@" "penstock-llm[${EXTRAS}]==${VERSION}" \
    && python -c 'import penstock.server.serve, urllib.request' \
    && rm -rf /tmp/pip \
    && chown 10001:10001 .

# The commands `penstock runtime`, `aibrix_runtime` and `aibrix_download` beside the server.
FROM files AS aibrix
RUN --mount=type=bind,source=python/aliases/aibrix,target=/aibrix,rw \
    python3 -m venv /tmp/pip \
    && /tmp/pip/bin/pip --python /opt/penstock/bin/python install --no-cache-dir --only-binary :all: /aibrix \
    && rm -rf /tmp/pip
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["aibrix_runtime"]
CMD ["--port", "8080"]

FROM files AS server
USER 10001:10001
EXPOSE 8000
# 503 while the model loads: --start-period of `docker run` is the time that it may take.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
# `docker stop` waits 10 seconds before it kills.
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000", "--drain-timeout", "8"]
CMD ["--help"]
