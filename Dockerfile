# The command line in a container: docker build -t spec-lab . && docker run --rm spec-lab proposer=ngram
#
# For a GPU name a base with CUDA's libraries and Python 3.11 or newer, and run with --gpus all:
#   docker build --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://pypi.org/simple -t spec-lab:cuda .
# TORCH_INDEX is the index of torch's wheels: by default the wheels for CPUs, without CUDA's libraries (some GB).
# EXTRAS adds extras of pyproject.toml, such as EXTRAS=search,xgrammar.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG EXTRAS=search
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN python3 -c 'import venv, ensurepip' 2>/dev/null || { apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 python3-venv; }

WORKDIR /opt/spec-lab
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY spec_lab spec_lab
RUN python3 -m venv env && env/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]"

# Runs are written to /runs: docker run --rm -v "$PWD/runs:/runs" spec-lab output_dir=first
WORKDIR /runs
ENTRYPOINT ["/opt/spec-lab/env/bin/spec-lab"]
