"""Files of tensors: the format of safetensors, the same bytes in every process, and nothing half-written."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from spec_lab.core.tensors import NAMES, read_tensors, save_tensors
from spec_lab.models.checkpoint import open_weights
from tests.full_disk import full_disk

FACTS = {f"fact {number}": str(number) for number in range(8)}


def test_the_library_reads_what_is_written(tmp_path):
    file, base = tmp_path / "a.safetensors", torch.arange(-3.0, 9.0)
    tensors = {str(dtype): base.to(dtype).reshape(3, 4) for dtype in NAMES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "columns": base.reshape(3, 4).T}
    tensors |= {"shared": base[:5], "trained": torch.nn.Parameter(base.clone()), "é\n": torch.ones(1)}
    save_tensors(tensors, file, FACTS | {"format": "pt"})
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].double(), tensor.double()), name
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == FACTS | {"format": "pt"}


def test_data_types_that_the_format_does_not_have_are_named_with_the_tensor(tmp_path):
    with pytest.raises(ValueError, match=r"a\.safetensors cannot hold 'b' of torch\.complex128"):
        save_tensors({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_every_process_writes_the_same_bytes(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path; from spec_lab.core.tensors import save_tensors; "
        f"save_tensors(dict(a=torch.ones(3), b=torch.arange(2)), Path(sys.argv[1]), {FACTS!r})"
    )
    digests = set()
    for number in range(3):
        file = tmp_path / f"{number}.safetensors"
        environment = os.environ | {"PYTHONHASHSEED": str(number), "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code, str(file)], env=environment, check=True, timeout=120)
        digests.add(hashlib.sha256(file.read_bytes()).hexdigest())
    assert len(digests) == 1


SCARCE = """
import resource, sys, torch
from pathlib import Path
from spec_lab.core.tensors import read_tensors
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
try:
    read_tensors(Path(sys.argv[1]))
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
@pytest.mark.parametrize("more", [2**20, 600 * 2**20])  # neither safetensors nor torch can map it; torch cannot
def test_a_file_that_does_not_fit_into_memory_is_named_with_its_size(tmp_path, more):
    file = tmp_path / "large.safetensors"
    save_tensors({"a": torch.zeros(1)}, file)
    header = json.dumps({"a": {"dtype": "U8", "shape": [2**29], "data_offsets": [0, 2**29]}}).encode()
    with open(file, "wb") as stream:  # a sparse file
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2**29)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCARCE, str(file), str(more)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert f"{file} (512 MiB) cannot be read, since there is too little memory" in done.stdout, done


def test_memory_that_is_missing_later_is_named_as_well_and_other_errors_are_not(tmp_path):
    file = tmp_path / "a.safetensors"
    save_tensors({"a": torch.ones(2**19)}, file)

    def read(error):
        with open_weights([file]):
            raise error

    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        with pytest.raises(OSError, match=r"a\.safetensors \(2 MiB\) cannot be read, since there is too little memory"):
            read(error)
    with pytest.raises(RuntimeError, match="another"):
        read(RuntimeError("another"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"a\.safetensors is truncated or corrupt"):
        read_tensors(file)


def test_a_full_disk_keeps_the_older_file_and_is_named(tmp_path):
    file = tmp_path / "a.safetensors"
    save_tensors({"a": torch.ones(3)}, file)
    with full_disk(2**16), pytest.raises(OSError, match=r"space.*a\.safetensors'") as caught:
        save_tensors({"a": torch.ones(2**16)}, file)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(file))
    assert os.listdir(tmp_path) == [file.name] and torch.equal(load_file(file)["a"], torch.ones(3))
