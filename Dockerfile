# Build:  docker build -t punica .
# Run:    docker run --rm -p 8000:8000 -v ./adapters:/adapters punica                 (demo model, your adapters)
#         docker run --rm -p 8000:8000 -v ./adapters:/adapters -v ./model:/model:ro punica serve --model /model
# The first stage installs into a virtual environment; the second has that environment and nothing that built it.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /src
RUN python -m venv /opt/punica
# Dependencies change less often than sources: they get a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir app punica_core csrc && touch app/__init__.py punica_core/__init__.py \
    && /opt/punica/bin/pip install --no-cache-dir -c constraints.txt '.[demo]' \
    && /opt/punica/bin/pip uninstall --yes --quiet punica
COPY app app
COPY punica_core punica_core
COPY csrc csrc
RUN /opt/punica/bin/pip install --no-cache-dir --no-deps . && /opt/punica/bin/punica --version

FROM python:${PYTHON_VERSION}-slim
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
