"""What only the device can see of a wrong call ends in an error, and not in a kernel that runs for ever.

Each call has a process of its own: nothing runs on a GPU after such an error.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys

import torch

from punica_core import ops
from punica_core.ops import cuda
from tests.ops.test_lora_linear import make_layer
from tests.support.lora_batch import rows_of

call, misuse = sys.argv[1:]
cuda.load()
layer = make_layer(rows_of([300 if call == "prompt" else 5]), ranks=[64], in_features=1024, out_features=(512, 64))
batch = layer.batch
if misuse == "max_rank":
    batch.max_rank = 32
elif misuse == "rows":
    batch.x, batch.y = batch.x[:-1], batch.y[:-1]
elif misuse == "units":
    batch.plan.plan[-3] = 1000
if call == "linear":
    layer.run()
elif call == "expand":
    tables = (batch.arena.buffer, batch.table, batch.plan.plan)
    ops.lora_expand(batch.y, batch.v, *tables, batch.out_features, 1024, batch.max_rank, summed=True)
else:
    batch.apply(summed=True)
torch.cuda.synchronize()
print("ended")
"""

CALLS = {
    ("linear", "none"): True,
    ("linear", "max_rank"): False,
    ("linear", "rows"): False,
    ("linear", "units"): False,
    ("shrink", "none"): True,
    ("shrink", "max_rank"): False,
    ("expand", "max_rank"): False,
    ("prompt", "none"): True,
    ("prompt", "max_rank"): False,
    ("prompt", "rows"): False,
}


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "ends"), CALLS.items(), ids=[" ".join(call) for call in CALLS])
def test_a_wrong_call_ends_in_an_error(call: tuple[str, str], ends: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *call], capture_output=True, text=True, timeout=120)
    assert ("ended" in done.stdout) is ends, done.stderr
    assert ends or "CUDA error" in done.stderr
