# Builds two images: `api`, which serves HTTP without torch, and `worker`, which generates images. Layers that change
# rarely come first. BuildKit is optional; a builder without it runs all stages up to the requested one, so `api` comes
# first.

# -- base of both images: a virtual environment, and an unprivileged user who owns three folders -----------------------
FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/diptych/bin:$PATH \
    HOME=/home/diptych \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    DIPTYCH_DATA_DIR=/var/lib/diptych \
    DIPTYCH_CACHE_DIR=/var/cache/diptych
RUN python3 -m venv /opt/diptych \
 && groupadd --system --gid 10001 diptych \
 && useradd --system --uid 10001 --gid 10001 --home-dir "$HOME" --create-home diptych \
 && mkdir -p "$DIPTYCH_DATA_DIR/artifacts" "$DIPTYCH_CACHE_DIR" /var/spool/diptych \
 && chown -R diptych:diptych "$DIPTYCH_DATA_DIR" "$DIPTYCH_CACHE_DIR" /var/spool/diptych
WORKDIR /app
COPY constraints.txt install.py ./
# The packages that `api` imports and that DIPTYCH_TRACES needs; tests/deployment/test_image.py compares this line with
# the source. Verified by hash, as in `make`.
RUN python install.py /opt/diptych --only setuptools \
    celery fastapi fastapi-swagger h11 limits obstore pillow prometheus-client pydantic-settings python-multipart redis \
    uvicorn opentelemetry-sdk opentelemetry-exporter-otlp-proto-http

# -- the source, and the models separately; world-readable, whatever the umask of the checkout -------------------------
FROM base AS source
COPY . .
RUN chmod -R a+rX . && mv models /models && python -m compileall -q .

# -- api --------------------------------------------------------------------------------------------------------------
FROM base AS api
COPY --from=source /app /app
RUN pip install --no-deps --no-build-isolation -e .
USER diptych
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=3 CMD ["python", "-m", "deployment.probe", "api"]
CMD ["diptych", "api", "--host", "0.0.0.0"]

# -- additional dependencies of workers: a compiler for the CPU kernels, and torch -------------------------------------
FROM base AS engine
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# GPU=1 installs the CUDA build of torch. CPU builds come from this index, as in `make`.
ARG GPU=
ARG DIPTYCH_TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN DIPTYCH_TORCH_INDEX=$DIPTYCH_TORCH_INDEX python -c "import install, pathlib, sys; \
    install.install_torch(pathlib.Path(sys.executable), install.pinned('torch'), gpu=bool('$GPU'))"
# The base dependencies and the extra `text` (answers constrained by a JSON schema).
COPY pyproject.toml ./
RUN python install.py /opt/diptych --set base --set text

# -- worker -----------------------------------------------------------------------------------------------------------
FROM engine AS worker
# Caches of libraries are on the cache volume too (DIPTYCH_CACHE_DIR): HOME is read-only.
ENV HF_HOME=$DIPTYCH_CACHE_DIR/huggingface \
    TRITON_CACHE_DIR=$DIPTYCH_CACHE_DIR/triton
COPY --from=source /models models
COPY --from=source /app /app
RUN pip install --no-deps --no-build-isolation -e .
USER diptych
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=10s --start-period=300s --retries=3 CMD ["python", "-m", "deployment.probe", "worker"]
CMD ["diptych", "worker"]
