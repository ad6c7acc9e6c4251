# Build:  docker build -t punica .
# Run:    docker run --rm -p 8000:8000 -v ./adapters:/adapters punica                 (demo model, your adapters)
#         docker run --rm -p 8000:8000 -v ./adapters:/adapters -v ./model:/model:ro punica serve --model /model
# The first stage installs into a virtual environment; the second has that environment and nothing that built it.
#
# For an NVIDIA GPU both stages are those of an image with nvcc, which compiles attention kernels at the first start:
#   docker build -t punica:gpu --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg EXTRAS=gpu .
#   docker run --rm --gpus all -p 8000:8000 -v ./model:/model:ro -v ./adapters:/adapters \
#       -v punica-cache:/home/punica/.cache punica:gpu serve --config /opt/punica/configs/single-gpu.yaml --model /model
# EXTRAS: of pyproject.toml, with commas, besides that of the demo model, which every image can prepare.

ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRAS=
WORKDIR /src
RUN command -v python3 || (apt-get update && apt-get install --yes --no-install-recommends python3-dev python3-venv)
RUN python3 -m venv /opt/punica
# Dependencies change less often than sources: they get a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir app punica_core csrc && touch app/__init__.py punica_core/__init__.py \
    && /opt/punica/bin/pip install --no-cache-dir -c constraints.txt ".[demo${EXTRAS:+,$EXTRAS}]" \
    && /opt/punica/bin/pip uninstall --yes --quiet punica
COPY app app
COPY punica_core punica_core
COPY csrc csrc
RUN /opt/punica/bin/pip install --no-cache-dir --no-deps . && /opt/punica/bin/punica --version
# From another folder, so that the kernels go to the installed package and not to these sources.
RUN if command -v nvcc; then cd / && /opt/punica/bin/python -m punica_core.ops.build; fi
COPY configs /opt/punica/configs

FROM ${BASE}
# Where Python comes from a package, so do the headers with which layers are compiled.
RUN command -v python3 || (apt-get update && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*)
RUN useradd --create-home --uid 10001 punica \
    && install --directory --owner punica /adapters /home/punica/.cache
COPY --from=build /opt/punica /opt/punica
COPY --chown=punica examples/adapters /adapters
ENV PATH=/opt/punica/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PUNICA_HOST=0.0.0.0 \
    PUNICA_PORT=8000 \
    PUNICA_ADAPTERS=/adapters \
    PUNICA_DRAIN_TIMEOUT=8
USER punica
WORKDIR /home/punica
VOLUME /home/punica/.cache
EXPOSE 8000
# /health answers from the moment the server listens; the start period covers preparing and loading the model.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PUNICA_PORT\"]}/health', timeout=2)"]
# SIGTERM drains: running requests finish, then the worker is stopped. `docker stop` kills after 10 s, hence
# PUNICA_DRAIN_TIMEOUT; raise both together (docker stop --time 40).
STOPSIGNAL SIGTERM
ENTRYPOINT ["punica"]
CMD ["serve"]
