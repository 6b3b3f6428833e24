"""Invalid values, by type of setting and by flag."""

from __future__ import annotations

from shardwise.config import FIELDS, values

NOT_TEXT = "\udcff"
"""A byte that is not UTF-8, as Python decodes it."""

LONG = "a" * 300
WORDS = ("x", "", " ", NOT_TEXT, "\x1b[31mred", "[/x]", "[lr=0.1]", "-", "None", "\u0661", "²")
NOT_WHOLE = (
    *WORDS,
    "1.5",
    "-1",
    "1e3",
    "0x10",
    "1,2",
    "nan",
    "9" * 30,
    "9" * 5000,
    "1__0",
    "+",
    "[1]",
)
NOT_NUMBER = (*WORDS, "nan", "inf", "-inf", "1e999", "1,5", "-1", "1e300", "1 2")
NOT_FILE = ("", " ", "gone/", LONG, "plain/x", ".", "gone/x/y", "a/" * 3000 + "x", NOT_TEXT)
NOT_FOLDER = ("", " ", LONG, "plain", "plain/x", "/proc/gone", NOT_TEXT)
NOT_NAMES = ("", ",", " , ", "gone", "0,gone", "*.*.*.*", "0.weight", NOT_TEXT)
NOT_TIERS = ("", "disk", "nvme", "nvme:", "cpu:", "nvme:plain", "nvme:/proc/gone", "nvme:" + LONG)
NOT_MEETING = ("", "a", "a:0", "a:99999", ":1", "a:²", "a:" + "9" * 5000, "a:-1", LONG + "/")
NOT_HOSTS = (
    *("", ",", "a:0", "a:x", "a b", "-oProxyCommand=x", "::1", "[::1", "a:", "a:1:2", "a;b"),
    *(LONG, "a:99999999999", "a:" + "9" * 5000, "a@b@c", "$(x)", "a\nb", "a:-1", "[zz]", "@a"),
)
NOT_RANKS = ("", "x", "0-", "-1", "7", "1-0", "0-99999999999", "9" * 5000, "0,,0", "²")
NOT_COUNTS = ("", "x", "0", "2:1", "1:2:3", "9" * 5000, "-1", "0:2", "²")
NOT_PLACES = ("", "a", "a:0", "a:99999", ":1", "a:²", "[::1]", "a:" + "9" * 5000)

OF_SETTINGS = {
    values.switch: ("maybe", "2", "", "yess", NOT_TEXT),
    values.fraction: ("", "x", "0", "1", "-1", "nan", "inf", "1e-999", "2"),
    values.file: NOT_FILE,
    values.folder: NOT_FOLDER,
    values.patterns: NOT_NAMES,
    values.states: ("weights", "parameters", "optimizer,x", "gradients"),
    values.tier: NOT_TIERS,
    values.rendezvous: NOT_MEETING,
}


def of_setting(name: str) -> tuple[str, ...]:
    """Return invalid values of the setting `name`, for the script on one worker."""
    parse, default = FIELDS[name].metadata["parse"], FIELDS[name].default
    if parse in OF_SETTINGS:
        return OF_SETTINGS[parse]
    if isinstance(default, float):
        return (*NOT_NUMBER, "0")
    if isinstance(default, str):
        return ("", "x", default.upper(), f"{default} ", f"{default},{default}", NOT_TEXT)
    low = () if name in ("zero", "seed", "late", "behind", "survive", "spares") else ("0",)
    return (*NOT_WHOLE, *low)


OF_FLAGS = {
    "-n": (*NOT_WHOLE, "0", "9999"),
    "--nproc-per-node": (*NOT_WHOLE, "0", "99999"),
    "-H": NOT_HOSTS,
    "--hostfile": ("gone", ".", "", LONG, "notutf", "empty", "fifo", NOT_TEXT),
    "-x": (
        "",
        "=",
        "=1",
        "GONE_VARIABLE",
        "RANK=1",
        "SHARDWISE_FLAGS=x",
        "SHARDWISE_LAUNCH_RANK=0",
    ),
    "--ssh": ("'x", '"', "", "\\"),
    "--ssh-port": (*NOT_WHOLE, "0", "70000"),
    "--nnodes": NOT_COUNTS,
    "--rdzv-endpoint": NOT_PLACES,
    "--node-rank": NOT_WHOLE,
    "--port": (*NOT_WHOLE, "70000"),
    "--interface": ("gone", "", LONG, NOT_TEXT),
    "--config": ("gone.toml", ".", LONG, "notutf", "fifo", "/proc/self/mem"),
    "--restarts": NOT_WHOLE,
    "--log-dir": ("", "plain", "plain/x", LONG, "/proc/gone"),
    "--show": NOT_RANKS,
    "--host-timeout": (*NOT_NUMBER, "1", "0"),
    "--grace": NOT_NUMBER,
}
"""Invalid values by flag of the launcher."""

NEEDS = {
    "--node-rank": ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29500"),
    "--rdzv-endpoint": ("--nnodes", "2"),
    "--ssh": ("-H", "node1,node2"),
    "--ssh-port": ("-H", "node1,node2"),
    "--host-timeout": ("-H", "node1,node2"),
}
"""Flags that another flag needs, so that only its value is wrong."""

VARIABLES = {
    "RANK": {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "OMPI_COMM_WORLD_RANK": {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "PMI_RANK": {"PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    "HOROVOD_RANK": {"HOROVOD_SIZE": "2"},
    "SHARDWISE_LAUNCH_RANK": {"SHARDWISE_LAUNCH_SIZE": "2", "SHARDWISE_LAUNCH_PORT": "1"},
    "SHARDWISE_RANK": {"SHARDWISE_SIZE": "2", "SHARDWISE_RENDEZVOUS": "127.0.0.1:29500"},
    "SLURM_PROCID": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
    "PALS_RANKID": {"PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2"},
    "FLUX_TASK_RANK": {"FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "a"},
    "JSM_NAMESPACE_RANK": {"JSM_NAMESPACE_SIZE": "2"},
    "LSF_PM_TASKID": {"LSB_DJOB_NUMPROC": "2", "LSB_JOBID": "1"},
    "_CONDOR_PROCNO": {"_CONDOR_NPROCS": "2"},
    "SKYPILOT_NODE_RANK": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1"},
    "PET_NODE_RANK": {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1"},
    "SM_CURRENT_HOST": {"SM_HOSTS": '["0", "1"]'},
}
"""Other variables that a launcher sets, by its variable for the rank."""

NOT_NUMBERS = {"MASTER_ADDR", "SHARDWISE_RENDEZVOUS", "PET_MASTER_ADDR", "SKYPILOT_NODE_IPS"}
NOT_NUMBERS |= {"SLURM_STEP_ID", "FLUX_JOB_ID", "LSB_JOBID"}
"""Variables that may hold any text."""
