"""Lightning and Fabric on Shardwise engines: `import shardwise.lightning` registers the strategy.

    Trainer(strategy="shardwise")       Trainer(strategy=ShardwiseStrategy(zero=3))
    Fabric(strategy="shardwise")        Fabric(strategy=ShardwiseFabricStrategy(zero=3))

trees.py              registers the strategies in each of Lightning's packages
trainer_strategy.py   the Trainer's strategy: setup, training step, full states
fabric_strategy.py    Fabric's strategy
training.py           the engines of one Trainer or Fabric, and the parts of a step
empty_modules.py      modules whose memory has not been allocated yet
sharing.py            loaders that keep their order and do not repeat samples
environment.py        the rank of this process, and the devices that a script requests
adoption.py           runs unmodified scripts that use another strategy, or none
"""

from typing import TYPE_CHECKING, Any

from shardwise.lightning import trees

if TYPE_CHECKING:
    from shardwise.lightning.fabric_strategy import FabricStrategy as ShardwiseFabricStrategy
    from shardwise.lightning.trainer_strategy import TrainerStrategy as ShardwiseStrategy

__all__ = ["ShardwiseFabricStrategy", "ShardwiseStrategy"]

trees.register()


def __getattr__(name: str) -> Any:
    """Return the strategy `name` for the Lightning package that the script has imported."""
    if name == "ShardwiseStrategy":
        return trees.trainer_strategy(trees.in_use(trees.TRAINERS))
    if name == "ShardwiseFabricStrategy":
        return trees.fabric_strategy(trees.in_use(trees.FABRICS))
    raise AttributeError(f"module {__name__} has no attribute {name}")
