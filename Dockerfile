# Two images: `slim` (gateway, kvstore, merger; no torch) and `engine` (prefill, decode).
#
#   docker build --target slim   -t baton-slim:dev .
#   docker build --target engine -t baton-engine:dev .
#
# Both share everything but torch: Python, the packages, the model. Layers go from what changes
# least to what changes most, so that a changed line of code rebuilds only the last one.
#
# Build arguments: BASE_IMAGE (any Debian with Python 3.11 or newer), and pip's own PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_TRUSTED_HOST. Without them torch may come as its CUDA
# build, which is gigabytes; docs/compose.md says how to get the CPU build. They end up in the
# build's history, so put no password into them.
ARG BASE_IMAGE=debian:bookworm-slim

# --- python: the operating system's Python and the user that everything runs as --------------
FROM ${BASE_IMAGE} AS python
ENV PYTHONUNBUFFERED=1 \
    PATH=/opt/baton/project/bin:/opt/baton/venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# The three directories are mount points: a named volume takes its owner from them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid baton --no-create-home --shell /usr/sbin/nologin baton \
    && install -d -o baton -g baton -m 0700 /var/lib/baton /var/lib/baton/log /var/lib/baton/arena \
        /var/lib/baton/nvme \
    && chmod 0755 /var/lib/baton

# --- requirements: what to install, told apart from the rest of pyproject.toml -----------------
# A builder compares what is copied out of here, so that only changed requirements cost a new
# installation.
FROM python AS requirements
COPY deploy/compose/requirements.py pyproject.toml /build/
RUN cd /build \
    && python3 requirements.py redis otlp >base.txt \
    && python3 requirements.py --only engine >engine.txt

# --- packages: what the project needs, without the project and without torch ------------------
FROM python AS packages
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
COPY --from=requirements /build/base.txt /build/
# Torch and the project lie beside the environment, in layers of their own; where they are absent
# Python passes over the line.
RUN python3 -m venv /opt/baton/venv \
    && /opt/baton/venv/bin/pip install -r /build/base.txt \
    && printf '/opt/baton/engine\n/opt/baton/project\n' \
       >"$(/opt/baton/venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/baton.pth"

# --- model: fetched and verified once; depends on the few modules that do it ------------------
FROM packages AS model
COPY baton/__init__.py baton/errors.py /build/baton/
COPY baton/engine/__init__.py baton/engine/gguf_meta.py /build/baton/engine/
COPY baton/models /build/baton/models
RUN cd /build \
    && BATON_MODELS_DIR=/var/lib/baton/models /opt/baton/venv/bin/python -c \
       'from baton.models import pull; print(pull("smollm2"))' \
    && chmod -R a+rX /var/lib/baton/models

# --- project: Baton itself, with its native code -------------------------------------------------
# The compiler stays here; CMake comes as a wheel while pip builds. The library has every
# instruction set in it and chooses at run time, so that an image runs on another machine too.
FROM packages AS project
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE /build/
COPY native /build/native
COPY baton /build/baton
COPY services /build/services
# An installation without the libraries would serve, several times slower: not in an image.
RUN cd /build && /opt/baton/venv/bin/pip install --no-deps --target /opt/baton/project . \
    && test -s /opt/baton/project/baton/engine/libbaton_step.so \
    && test -s /opt/baton/project/services/kvstore/log/libbaton_log.so \
    && test -s /opt/baton/project/baton/arena/libbaton_copy.so

# --- runtime: what both images share -----------------------------------------------------------
FROM python AS runtime
ENV BATON_MODELS_DIR=/var/lib/baton/models
COPY --from=packages /opt/baton/venv /opt/baton/venv
COPY --from=model /var/lib/baton/models /var/lib/baton/models

# --- slim: gateway, kvstore and merger ---------------------------------------------------------
FROM runtime AS slim
COPY --from=project /opt/baton/project /opt/baton/project
COPY deploy/compose/entrypoint.sh /opt/baton/entrypoint.sh
USER baton
WORKDIR /tmp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-m", "baton.cli.health_probe", "--http", "http://127.0.0.1:9464/readyz"]
ENTRYPOINT ["/opt/baton/entrypoint.sh"]

# --- torch: by far the largest part; only the workers get it ----------------------------------
# After `slim`, so that a builder that works from top to bottom makes `slim` without it.
FROM packages AS torch
ARG PIP_FIND_LINKS
COPY --from=requirements /build/engine.txt /build/
RUN /opt/baton/venv/bin/pip install --target /opt/baton/engine -r /build/engine.txt

# --- engine: prefill and decode ----------------------------------------------------------------
FROM runtime AS engine
COPY --from=torch /opt/baton/engine /opt/baton/engine
COPY --from=project /opt/baton/project /opt/baton/project
COPY deploy/compose/entrypoint.sh /opt/baton/entrypoint.sh
USER baton
WORKDIR /tmp
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-m", "baton.cli.health_probe", "--http", "http://127.0.0.1:9464/readyz"]
ENTRYPOINT ["/opt/baton/entrypoint.sh"]
