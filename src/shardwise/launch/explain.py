"""Which variables told this process who it is. Pure."""

from collections.abc import Mapping

from shardwise.launch.identity import Identity


def words(identity: Identity, environ: Mapping[str, str]) -> str:
    """A line for each number of `identity`, with the variable that it was read from."""
    lines = [f"started by {identity.launcher}"]
    for name in ("rank", "size", "local_rank", "local_size", "node"):
        value, variable = getattr(identity, name), identity.variables.get(name)
        if value is not None:
            source = f"{variable}={environ[variable]}" if variable else "not told"
            lines.append(f"  {name.replace('_', ' '):<12}{value:<6}{source}")
    if identity.port is not None:
        meet = f"rank 0 listens at {identity.address}, port {identity.port}"
    elif identity.size == 1:
        meet = "there are no others"
    else:
        meet = "rank 0 leaves a note: nobody told its address"
    return "\n".join([*lines, f"  {'meeting':<12}{meet}"])
