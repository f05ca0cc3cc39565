"""What a block keeps for backward is what docs/memory.md says, within 5 %."""

import subprocess
import sys


def test_the_count_is_the_formula() -> None:
    # In a process of its own: it makes a process group that moves nothing.
    command = [sys.executable, "benchmarks/activation_memory.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 18
    for _, tensor, sequence_parallel, recompute, counted, _, _ in rows:
        # A block's input has 2 x 256 x 256 fp32 numbers: 512 KiB. By sublayer its two inputs are kept, or their slices.
        slices = int(tensor) if sequence_parallel.strip() == "on" else 1
        if recompute.strip() == "sublayer":
            assert int(counted) <= 2 * 512 // slices
    page = open("docs/memory.md").read()
    assert all(line in page for line in result.stdout.splitlines() if line.startswith("| "))
