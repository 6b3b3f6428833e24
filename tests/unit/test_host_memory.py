"""Memory in separate mappings: its start, and its content in a forked process."""

import os
import subprocess
import sys

import pytest
import torch

from shardwise.tiers.host_memory import HUGE, PAGE, keep, mapped
from shardwise.tiers.staging import Staging


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, HUGE - 1, HUGE, 3 * HUGE + 5])
def test_starts_on_a_page_with_the_requested_length(nbytes: int) -> None:
    memory = mapped(nbytes)
    assert memory.data_ptr() % (HUGE if nbytes >= HUGE else PAGE) == 0
    assert memory.numel() == nbytes
    assert memory.untyped_storage().nbytes() == max(nbytes, 1)
    assert not memory.any()


def test_memory_is_returned_with_the_tensor() -> None:
    before = resident()
    memory = mapped(32 * HUGE).fill_(1)
    assert resident() - before > 31 * HUGE
    view = memory[5:]
    del memory
    assert resident() - before > 31 * HUGE
    del view
    assert resident() - before < HUGE


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_forked_process_has_a_copy_or_zeros_for_staging() -> None:
    kept, staging = mapped(PAGE).fill_(7), Staging(PAGE)
    staging.tensor.fill_(7)
    child = os.fork()
    if child == 0:
        right = (kept[0].item(), staging.tensor[0].item()) == (7, 0)
        kept.fill_(9)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool(kept.eq(7).all())
    assert bool(staging.tensor.eq(7).all())


def test_staging_view_and_tensor_share_bytes() -> None:
    staging = Staging(PAGE)
    staging.view[3] = 5
    assert staging.tensor[:5].tolist() == [0, 0, 0, 5, 0]
    assert torch.frombuffer(staging.view, dtype=torch.uint8).data_ptr() == staging.tensor.data_ptr()


STEPS = """
import os, resource, sys, torch
from shardwise.tiers.host_memory import keep

print(keep(os.environ))
for step in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(2 << 20) for _ in range(16)]  # 128 MB
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False)]
)
def test_heap_keeps_memory_for_the_next_step(environ: dict[str, str], kept: bool) -> None:
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):  # type: ignore[operator]
        pytest.skip("the C library is not glibc")
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name.upper()}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, env=clean | environ
    )
    said, faults = done.stdout.split()
    assert said == str(kept), done.stderr
    assert (int(faults) < 1000) == kept, "128 MB are 32768 pages"


def test_respects_settings_of_the_c_library() -> None:
    assert not keep({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"})
