"""Draws an invalid input from a seed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from shardwise.config import FIELDS, SCHEDULES, flag
from tests.bad_input import values

SCRIPT = "ok.py"


@dataclass(frozen=True, kw_only=True)
class Input:
    """An invalid input to `target`: the command line, the script without a launcher, or an agent.

    `files` are created next to the script. `around` names unusual surroundings (see trying.py).
    """

    kind: str
    words: tuple[str, ...] = ("run", SCRIPT)
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    around: str = ""
    target: str = "command"
    stdin: bytes = b""

    def __str__(self) -> str:
        shown = [f"{name}={value[:80]!r}" for name, value in self.environ.items()]
        shown += [ascii(word)[1:-1][:80] for word in self.words]
        shown += [f"[{name}: {data[:120]!r}]" for name, data in self.files.items()]
        shown += [f"({self.around})"] if self.around else []
        return f"{self.kind}: {' '.join(shown)} {self.stdin[:120]!r}"


def draw(seed: int) -> Input:
    """Draw the input of `seed`."""
    rng = Random(seed)
    kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    return KINDS[kind][1](rng)


def _run(*words: str) -> tuple[str, ...]:
    return ("run", *words, SCRIPT)


def setting(rng: Random) -> Input:
    """Draw an invalid value of a setting, on the command line."""
    name = rng.choice([name for name, each in FIELDS.items() if each.metadata["metavar"]])
    return Input(kind="setting", words=_run(flag(name), rng.choice(values.of_setting(name))))


def launcher(rng: Random) -> Input:
    """Draw an invalid value of a flag of the launcher."""
    name = rng.choice(list(values.OF_FLAGS))
    words = [name, rng.choice(values.OF_FLAGS[name])]
    return Input(kind="launcher's flag", words=_run(*values.NEEDS.get(name, ()), *words))


def typo(rng: Random) -> Input:
    """Draw an unknown flag, command or script."""
    name = rng.choice(list(FIELDS))
    place = rng.randrange(1, len(name))
    broken = name[:place] + rng.choice("xq_-") + name[place:] + rng.choice(["", "x"])
    words: Any = rng.choice(
        [
            _run(f"--{broken}q", "1"),
            ("rum", SCRIPT),
            ("run",),
            ("run", "gone.py"),
            ("run", "."),
            ("run", values.LONG + ".py"),
            ("run", "plain"),
            ("run", "-m", "gone.module"),
            ("run", "-m", "..x"),
            ("run", "-m", ""),
            ("run", ""),
            _run("--zero"),
            _run("-H", "localhost:1", "-H", "localhost:2"),
        ]
    )
    return Input(kind="no such thing", words=words)


def other_command(rng: Random) -> Input:
    """Draw invalid arguments of another command."""
    name, bad = rng.choice(
        [
            ("-n", ("", "0", "x", "1,,2", "-1", "9" * 5000, "1,x", "²")),
            ("--warmup", values.NOT_WHOLE),
            ("--steps", (*values.NOT_WHOLE, "0")),
            ("--kind", ("", "x", "Strong")),
            ("--out", ("plain", "plain/x", values.LONG, "/proc/gone")),
        ]
    )
    several: list[tuple[str, ...]] = [
        ("scale", "-n", "1", name, rng.choice(bad), SCRIPT)
        if name != "-n"
        else ("scale", name, rng.choice(bad), SCRIPT),
        ("scale",),
        ("scale", "gone.py"),
        ("pipeline-plan", "--pipeline", rng.choice((*values.NOT_WHOLE, "0", "1")), SCRIPT),
        ("pipeline-plan", "--microbatches", rng.choice((*values.NOT_WHOLE, "0")), SCRIPT),
        ("pipeline-plan", "--by", rng.choice(("", "x")), SCRIPT),
        ("verify",),
        ("verify", "--steps", rng.choice((*values.NOT_WHOLE, "0")), SCRIPT),
        ("verify", "--also", rng.choice(("-n x", "--zer 3", '"', "gone.py", "-n 0")), SCRIPT),
        ("verify", "--against", rng.choice(("", "gone.py", "plain", '"')), SCRIPT),
        ("verify", "--json", "gone/x.json", SCRIPT),
        ("verify", rng.choice(("gone.py", "plain", "."))),
        ("checkpoint", rng.choice(("inspect", "verify", "accept")), rng.choice(values.NOT_FILE)),
        (
            "checkpoint",
            "export",
            rng.choice(("gone", ".", "plain")),
            "x.pt",
        ),
        ("checkpoint", "export", "."),
        ("timeline", rng.choice(("gone", ".", "plain", "notutf", "empty", "fifo", "[/x]"))),
        ("timeline",),
        ("doctor", "-n", rng.choice(values.NOT_WHOLE)),
        ("doctor", "--explain", "x"),
    ]
    return Input(kind="other command", words=rng.choice(several))


def variable(rng: Random) -> Input:
    """Draw an invalid value of a setting, in the environment."""
    name = rng.choice(list(FIELDS))
    bad = [text for text in values.of_setting(name) if "\0" not in text]
    environ = {f"SHARDWISE_{name.upper()}": rng.choice(bad)}
    if rng.random() < 0.25:
        environ = rng.choice(
            [
                {"SHARDWISE_ZERRO": "1"},
                {"SHARDWISE_ZERO": "1", "SHARDWISE_zero": "2"},
                {"SHARDWISE_CONFIG": "gone.toml"},
                {"SHARDWISE_CONFIG": values.NOT_TEXT},
                {"SHARDWISE_GRACE": "1"},
                {"HOROVOD_TIMELINE": "plain/x"},
                {"SHARDWISE_ZERO": "7"},
            ]
        )
    return Input(kind="variable", environ=environ)


def identity(rng: Random) -> Input:
    """Draw invalid variables of a launcher."""
    name = rng.choice(list(values.VARIABLES))
    environ = {name: "0"} | dict(values.VARIABLES[name])
    spoiled = rng.choice([each for each in environ if each not in values.NOT_NUMBERS])
    environ[spoiled] = rng.choice(["x", "", "-2", "9" * 30, "9" * 5000, "nan", "²"])
    if rng.random() < 0.2:
        environ[name] = "7"  # a rank above the number of ranks
    if rng.random() < 0.2:
        environ = {
            "SHARDWISE_FLAGS": rng.choice(["x", "[]", "[" * 5000, '{"a": 1}', '{"zero": 1}'])
        }
    return Input(kind="identity", environ=environ, target="script")


def toml(rng: Random) -> Input:
    """Draw an invalid TOML file."""
    name = rng.choice(list(FIELDS)).replace("_", "-")
    deep = rng.choice([3, 200, 5000])
    text = rng.choice(
        [
            f"{name} = [[1], [2]]",
            f"{name} = {{a = 1}}",
            f"[{name}]\nx = 1",
            f"{name} = 1979-05-27T07:32:00Z",
            f"{name} = {'[' * deep}{']' * deep}",
            f"{name} = ['a', 1]",
            f"{name} = nan",
            f"{name} = ",
            f"{name} = 1\n{name} = 2",
            f"{name}x = 1",
            "micro-batch-size = 2\nmicro_batch_size = 2",
            f'{name} = "\\u0000"',
            f"{name} = {'9' * rng.choice([30, 5000])}",
            f"grace = {rng.choice(['1', 'nan'])}",
            "zero = true",
            "zero = 1.0",
            'zero = "2',
            "= 1",
            "zero 1",
        ]
    )
    data = text.encode()
    if rng.random() < 0.3:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.choice([b"\xff", b"\xc3", b"\0", b"\xed\xa0\x80"]) + data[place:]
    if _is_harmless(data):
        data = b"zero = [[1]]"
    return Input(kind="TOML", words=_run("--config", "c.toml"), files={"c.toml": data})


def _is_harmless(data: bytes) -> bool:
    """Return whether the file is valid after all: an empty list."""
    try:
        (value,) = tomllib.loads(data.decode()).values()
    except Exception:
        return False
    return isinstance(value, list) and not value


def hostfile(rng: Random) -> Input:
    """Draw an invalid hostfile."""
    bad = [f"{each} slots=2" for each in values.NOT_HOSTS if each.strip() and "\n" not in each]
    bad += [
        f"a slots={each}" for each in ("", "x", "0", "-1", "²", "9" * 5000, "99999999", "1 slots=2")
    ]
    bad += ["a:2 slots=2", "a max_slots=1 slots=2", "a x=1", "a slots", "a:0", "\x1b[31m", "a\tb"]
    data = rng.choice(bad).encode("utf-8", "surrogateescape")
    if rng.random() < 0.2:
        data = rng.choice([b"", b"# nothing", b"\xff\xfe", b"a\0b", b"\n\n"])
    return Input(kind="hostfile", words=_run("--hostfile", "hosts"), files={"hosts": data})


def contradiction(rng: Random) -> Input:
    """Draw flags that contradict each other, or a flag that needs another one."""
    several: list[tuple[str, ...]] = [
        ("--sequence-parallel",),
        *(("--schedule", each) for each in SCHEDULES if each != "1f1b"),
        ("--microbatches", "4"),
        ("--stages", "1"),
        ("--shard-within", "host"),
        ("--equal-every", "10"),
        ("--outer", "nesterov:0.7,0.9"),
        ("--islands", "2"),
        ("--islands", "host", "--late", "30"),
        ("--behind", "3"),
        ("--islands", "2", "--behind", "3", "--late", "2"),
        ("--warn-after", "20", "--timeout", "10"),
        ("--zero", "1", "--shard", "gradients,optimizer"),
        ("--offload-params", "cpu"),
        ("--offload-params", "cpu", "--zero", "2"),
        ("--offload-gradients", "cpu", "--zero", "1"),
        ("--exact", "4", "--tensor", "2"),
        ("--tensor", "3"),
        ("--pipeline", "2"),
        ("--exact", "4", "--microbatches", "2"),
        ("-n", "2", "--nproc-per-node", "3"),
        ("-H", "a:1", "--hostfile", "plain"),
        ("-H", "a:1", "--nproc-per-node", "2"),
        ("-H", "a:1", "-n", "3"),
        ("--nnodes", "2"),
        ("--nnodes", "2", "-H", "a"),
        ("--nnodes", "1", "-n", "2"),
        ("--nnodes", "1", "--grace", "1"),
        ("--node-rank", "0"),
        ("--rdzv-endpoint", "a:1"),
        ("--rdzv-id", "x"),
        ("--ssh", "ssh"),
        ("--ssh-port", "22"),
        ("--python", "x"),
        ("--host-timeout", "20"),
        ("--rendezvous", "a:1"),
        ("-x", "A=1", "-x", "A=2"),
        ("--zero", "4"),
        ("--device", "cuda"),
        ("--units", "gone"),
        ("--pipeline", "2", "--stages", "gone"),
    ]
    words = rng.choice(several)
    if (
        rng.random() < 0.4
        and words[0].startswith("--")
        and words[0] != "--rendezvous"
        and words[0][2:].replace("-", "_") in FIELDS
    ):
        names = [word[2:].replace("-", "_").upper() for word in words if word.startswith("--")]
        settings = [word for word in words if not word.startswith("--")] or ["on"]
        if len(names) == len(settings):
            environ = {f"SHARDWISE_{n}": v for n, v in zip(names, settings, strict=True)}
            return Input(kind="contradiction", environ=environ, target="script")
    return Input(kind="contradiction", words=_run(*words))


_MESSAGES: dict[str, dict[str, Any]] = {
    "check": {
        "spec": {
            "words": [SCRIPT],
            "module": False,
            "flags": {},
            "passed": {},
            "size": 1,
            "shares": [
                {"host": {"name": "h", "slots": None, "user": None}, "first": 0, "count": 1}
            ],
            "port": 0,
            "interface": None,
            "folder": "",
            "python": "python",
            "ssh": ["ssh"],
            "ssh_port": None,
            "patience": 5.0,
            "grace": 5.0,
            "restarts": 0,
            "parts": 0,
            "agent": "shardwise.launch.ssh.agent",
            "shown": None,
            "log_dir": None,
            "run": "a",
            "secret": "b",
        },
        "listens": False,
        "address": "",
        "towards": "127.0.0.1",
    },
    "start": {"meeting": {}, "streams": {}},
    "signal": {"number": 15, "part": 0},
    "ask": {"number": 15, "part": 0},
    "ended": {"rank": 0, "part": 0},
    "resize": {"window": [1, 1]},
}
_ANSWERS: dict[str, dict[str, Any]] = {
    "hello": {
        "version": "0.1.0",
        "torch": "2",
        "python": "3",
        "time": 1.0,
        "address": "",
        "machine": None,
        "pid": 1,
    },
    "ready": {"address": "", "port": 1, "master_port": 2},
    "refused": {"why": "x"},
    "output": {"rank": 0, "stream": 1, "data": "x"},
    "end": {"end": {}, "how": "x", "report": None, "progress": None, "alone": True},
    "saves": {"number": 15},
}


def _garbled(rng: Random, messages: Mapping[str, Mapping[str, Any]]) -> bytes:
    kind = rng.choice(list(messages))
    message: dict[str, Any] = {"kind": kind, **messages[kind]}
    name = rng.choice([each for each in message if each != "kind"])
    other = rng.choice([{"a": [1]}, [[1]], 1e400, True, [{}]])
    change = rng.randrange(6)
    if change == 0:
        del message[name]
    elif change == 1:
        message[name] = other if type(other) is not type(message[name]) else ["x", {}]
    elif change == 2:
        message["more"] = 1
    elif change == 3:
        message["kind"] = rng.choice(["gone", "", 3, None, [], "run", "_tell"])
    text = json.dumps(message)
    if change == 4:
        text = text[: rng.randrange(len(text))]
    elif change == 5:
        text = rng.choice(["", "null", "[]", "3", '"x"', "[" * 5000, "\x1b[31m", "{}"])
    return b"@shardwise " + text.encode() + b"\n"


def to_agent(rng: Random) -> Input:
    """Draw an invalid message to an agent."""
    return Input(kind="to an agent", words=(), target="agent", stdin=_garbled(rng, _MESSAGES))


def from_agent(rng: Random) -> Input:
    """Draw an invalid message from an agent."""
    line = _garbled(rng, _ANSWERS)
    words = _run("-H", "node1,node2", "--ssh", "./says")
    return Input(kind="from an agent", words=words, files={"said": line})


def surroundings(rng: Random) -> Input:
    """Draw surroundings that make any run impossible."""
    around = rng.choice(["no folder", "no files", "stdout closed", "all closed", "stdout full"])
    words: Any = ("run", "-n", "2", SCRIPT)
    if around != "no files":
        words = rng.choice([words, ("scale", "-n", "1", SCRIPT)])
    if around == "stdout full":
        words = rng.choice([("run", "--help"), ("run", "--dry-run", SCRIPT), ("--version",)])
    return Input(kind="surroundings", words=words, around=around)


KINDS: dict[str, tuple[int, Callable[[Random], Input]]] = {
    "setting": (22, setting),
    "launcher's flag": (18, launcher),
    "no such thing": (5, typo),
    "other command": (8, other_command),
    "variable": (12, variable),
    "identity": (6, identity),
    "TOML": (14, toml),
    "hostfile": (6, hostfile),
    "contradiction": (10, contradiction),
    "to an agent": (4, to_agent),
    "from an agent": (2, from_agent),
    "surroundings": (3, surroundings),
}
"""Weight and drawing function of each kind of input."""
