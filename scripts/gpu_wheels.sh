#!/usr/bin/env bash
# Fill a folder with the wheels that scripts/gpu_check.py and the command line need on a machine without a network that
# has Python 3.12, torch, transformers, numpy, pandas, pyarrow, scipy and safetensors with what these require.
#
#     scripts/gpu_wheels.sh [FOLDER]        # wheels, which git ignores
#
# There:
#
#     python -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
#     export PYTHONPATH=/tmp/site
#
# PYTHON is the interpreter whose pip is used (python3). The versions are those of pyproject.toml. The folder is emptied
# first, and must stay below 20 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-wheels}
python=${PYTHON:-python3}
most=$((20 * 1000 * 1000))
names=(hydra-core omegaconf rich llguidance pytest hypothesis)  # of pyproject.toml
further=(iniconfig pluggy pygments markdown-it-py mdurl sortedcontainers)  # that those require
source_only='antlr4-python3-runtime==4.9.*'  # as omegaconf requires it; it has no wheel, and is pure Python

mkdir -p "$folder"
rm -f "$folder"/*.whl
mapfile -t named < <("$python" - "${names[@]}" <<'PYTHON'
import re
import sys
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
groups = [project["dependencies"], *project["optional-dependencies"].values()]
for name in sys.argv[1:]:
    print(next(line for group in groups for line in group if re.match(re.escape(name) + r"[<>=]", line)))
PYTHON
)
platforms=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for tag in 2_34 2_31 2_28 2_24 2_17; do  # pip takes these alone, not the ones between
    platforms+=(--platform "manylinux_${tag}_x86_64")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: "${platforms[@]}" --platform manylinux2014_x86_64 \
    --dest "$folder" "${named[@]}" "${further[@]}"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$source_only"

count=$(find "$folder" -type f -name '*.whl' | wc -l)
wanted=$((${#names[@]} + ${#further[@]} + 1))
size=$(cat "$folder"/*.whl | wc -c)
echo "$folder: $count wheels, $((size / 1000)) kB"
if ((count != wanted)); then
    echo "$folder must hold $wanted wheels, but holds $count: look at what pip printed" >&2
    exit 1
fi
if ((size >= most)); then
    echo "$folder must stay below $((most / 1000)) kB: leave out packages that the check does not need" >&2
    exit 1
fi
