# One image for all services: `docker build -t orca-mesh .`, then `docker run orca-mesh --help`.

FROM python:3.11-slim AS build
# Where torch comes from; empty is pip's default. Name an index that has builds for CPUs only to save gigabytes.
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/orca
ENV PATH=/opt/orca/bin:$PATH
# The largest layer first, on its own: a change of the project's code leaves it alone.
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch~=2.13.0"
COPY pyproject.toml README.md /src/
# Of bench only what the command line needs.
COPY bench/__init__.py bench/py.typed /src/bench/
COPY bench/load /src/bench/load
COPY kernels /src/kernels
COPY services /src/services
COPY shared /src/shared
RUN pip install "/src[otel]"

FROM python:3.11-slim
# The kernels for CPUs are compiled for the processor that the container runs on, at the first start.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home orca && install --directory --owner orca --group orca /var/lib/orca
COPY --from=build /opt/orca /opt/orca
ENV PATH=/opt/orca/bin:$PATH ORCA_HOME=/var/lib/orca ORCA_LOG_FORMAT=json PYTHONUNBUFFERED=1
USER orca
ENTRYPOINT ["orca"]
CMD ["--help"]
