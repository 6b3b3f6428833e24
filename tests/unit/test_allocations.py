"""The hosts that `shardwise run` uses inside a batch job, for each scheduler."""

from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import allocations
from shardwise.net.hosts import Host

TWO = (Host("n1", 2), Host("n2", 2))
NAMES = (Host("n1"), Host("n2"))


@pytest.mark.parametrize(
    ("variable", "text", "hosts"),
    [
        # -l select=2:mpiprocs=2 of PBS Pro, -l nodes=2:ppn=2 of Torque
        ("PBS_NODEFILE", "n1\nn1\nn2\nn2\n", TWO),
        # chunks of a host need not stand in a row
        ("PBS_NODEFILE", "n1\nn2\nn1\nn2\n", TWO),
        ("PBS_NODEFILE", "x3005c0s13b0n0.hsn.cm\n", (Host("x3005c0s13b0n0.hsn.cm", 1),)),
        ("COBALT_NODEFILE", "n1\nn2\n", NAMES),
        ("LSB_DJOB_HOSTFILE", "n1\nn1\nn2\nn2\n", TWO),
        # a host stands on a line for each of its queues
        (
            "PE_HOSTFILE",
            "n1 1 all.q@n1 UNDEFINED\nn2 2 all.q@n2 <NULL>\nn1 1 gpu.q@n1 0,0:0,1\n",
            TWO,
        ),
        ("OAR_NODEFILE", "n1\nn1\nn2\nn2\n", TWO),
        ("OAR_NODE_FILE", "n1\nn1\nn2\nn2\n", TWO),
    ],
)
def test_reads_hosts_from_file(
    tmp_path: Path, variable: str, text: str, hosts: tuple[Host, ...]
) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    found = allocations.find({variable: str(file)})
    assert found is not None
    assert (found.variable, found.hosts) == (variable, hosts)


@pytest.mark.parametrize(
    ("variable", "text", "hosts"),
    [
        ("LSB_HOSTS", "n1 n1 n2 n2", TWO),
        ("LSB_MCPU_HOSTS", "n1 2 n2 2 ", TWO),
        ("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2", (Host("10.0.0.1"), Host("10.0.0.2"))),
        ("SKYPILOT_NODE_IPS", "fd00::1\nfd00::2", (Host("fd00::1"), Host("fd00::2"))),
    ],
)
def test_reads_hosts_from_variable(variable: str, text: str, hosts: tuple[Host, ...]) -> None:
    found = allocations.find({variable: text})
    assert found is not None
    assert found.hosts == hosts


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PBS_JOBID": "1"},
        {"NSLOTS": "1", "SGE_ROOT": "/opt/sge"},
        {"LSB_HOSTS": " "},
    ],
)
def test_no_allocation_without_list(environ: dict[str, str]) -> None:
    assert allocations.find(environ) is None


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({"SLURM_TASKS_PER_NODE": "1(x3)"}, [None] * 3),  # the job has not requested tasks
        ({"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5"}, [2, 2, 1]),
    ],
)
def test_hosts_of_slurm(environ: dict[str, str], slots: list[int | None]) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-2],m3"}
    found = allocations.find(job | environ)
    assert found is not None
    assert [host.name for host in found.hosts] == ["n1", "n2", "m3"]
    assert [host.slots for host in found.hosts] == slots


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE='/nowhere'.*No such file"),
        ({"LSB_MCPU_HOSTS": "n1 2 n2"}, "LSB_MCPU_HOSTS='n1 2 n2', set by LSF, is not a list"),
        ({"LSB_MCPU_HOSTS": "n1 two"}, "is not a list of hosts as LSF writes it"),
        ({"LSB_HOSTS": "n1 -oProxyCommand=x"}, "is not a list of hosts"),
    ],
)
def test_message_quotes_malformed_list(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        allocations.find(environ)


@pytest.mark.parametrize(
    ("slots", "gpus", "ranks"),
    [
        ((2, 2), 0, [2, 2]),
        ((None, None), 0, [1, 1]),
        # batch systems count cores: no more ranks than GPUs
        ((32, 32), 4, [4, 4]),
        # as many as were asked for
        ((2, 2), 4, [2, 2]),
        # nothing was asked for
        ((1, 1), 4, [4, 4]),
        ((None, None), 4, [4, 4]),
        ((2, 1), 4, [2, 1]),
    ],
)
def test_ranks_by_slots_and_devices(
    slots: tuple[int | None, ...], gpus: int, ranks: list[int]
) -> None:
    hosts = tuple(Host(f"n{number}", each) for number, each in enumerate(slots))
    found = allocations.Allocation("PBS", "PBS_NODEFILE", hosts).with_ranks(gpus)
    assert [host.slots for host in found] == ranks
