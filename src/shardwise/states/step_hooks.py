"""Defines the hooks that an engine calls around its steps if groups of ranks step independently.

An engine whose ranks all step together has no hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.comm import Collectives
from shardwise.config import Settings
from shardwise.model.buffers import Buffers
from shardwise.model.loss_scale import LossScale
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.step_totals import StepStats, StepTotals
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.world.world import World

Kept = Mapping[str, Mapping[nn.Parameter, Tensor]]
"""Full tensors to restore in a new layout of the states, by key and then by parameter."""


class HookedWeighting(Protocol):
    """The methods of the engine's gradient weighting that hooks use."""

    def divisor(self, denominator: float) -> float:
        """Return the divisor that turns summed gradients into their mean."""

    def follow_step(self, totals: StepTotals) -> None:
        """Adopt the kind of losses (means or sums) that the step with these `totals` used."""


class HookedEngine(Protocol):
    """The attributes and methods of an engine that its hooks use."""

    @property
    def number(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def world(self) -> World: ...
    @property
    def buffers(self) -> Buffers: ...
    @property
    def scale(self) -> LossScale: ...
    @property
    def weighting(self) -> HookedWeighting: ...

    @property
    def replicas(self) -> int:
        """Number of model replicas that step together."""

    @property
    def is_between_steps(self) -> bool:
        """True if the engine can be saved now."""

    def squared_norm(self) -> float:
        """Return the squared norm of the current gradient sums. Collective."""


class HookedCheckpoints(Protocol):
    """The methods of an engine's checkpoints that `Returns` uses."""

    def leave_folder(self) -> None:
        """Release the checkpoint folder, because another rank becomes the main rank."""

    def save_for_return(self) -> dict[str, Any] | None:
        """Save a checkpoint in the user's folder, for ranks that rejoin the run.

        Collective. Returns the data that the rejoining ranks need, or None if the save failed.
        """

    def come_back(self, about: Mapping[str, Any]) -> None:
        """Resume from the checkpoint of `save_for_return`. Collective over the rejoining ranks.

        Args:
            about: The data that `save_for_return` returned.
        """


class Returns(Protocol):
    """Lets a group of ranks rejoin the other groups after its processes were restarted."""

    def are_expected(self) -> None:
        """Tell the launcher that this group can rejoin the run if its processes fail."""

    @property
    def is_due(self) -> bool:
        """True if this group was restarted and has not rejoined the other groups yet."""

    def come_back(self) -> None:
        """Wait until the other groups admit this one, and load the checkpoint that they saved."""


class StepHooks:
    """The hooks that an engine calls. Each does nothing unless a subclass overrides it.

    Here, a *group* is a step group: the ranks that step together.

    A single object serves an engine through all layouts of its states. It must not refer to the
    engine: an engine that the user drops must be freed at once, without waiting for the garbage
    collector.

    Args:
        settings: The engine's settings.
        world_group: All ranks of all groups.
        step_group: The ranks of this group.
        peers: The ranks with the same position in their groups, one from each group.
        shard_group: The ranks across which states are sharded.
    """

    replaces_sums = False
    """True if `after_exchange` replaces a step's gradient sums with those of an earlier step."""
    bytes_name = ""
    """Name of the memory that the hooks occupy on top of the three states."""
    copies = 0
    """Number of copies of the parameters that the hooks hold."""

    def __init__(
        self,
        settings: Settings,
        world_group: Collectives,
        step_group: Collectives,
        peers: Collectives,
        shard_group: Collectives,
    ) -> None:
        self.settings = settings
        self.world_group = world_group
        self.step_group = step_group
        self.peers = peers
        self.shard_group = shard_group
        self.scattered = settings.placement.is_sharded("optimizer")

    # -- layouts of the states --------------------------------------------------------------

    def lay_out(
        self,
        parameters: Parameters,
        gradients: Gradients,
        optimizer: OptimizerState,
        factory: StorageFactory,
        kept: Kept | None,
    ) -> None:
        """Prepare for a new layout of the states. `kept` is what `take_apart` returned."""

    def take_apart(self, parameters: Parameters, gathering: IntervalGather) -> Kept | None:
        """Discard messages in transit, and return the tensors that the next layout needs.

        Collective.
        """

    def write_common_values(self, kept: Kept | None, optimized: Set[nn.Parameter]) -> None:
        """Reset parameters that are no longer in any optimizer to their last common values.

        The groups have changed these parameters differently, and nothing will average them again.
        """

    def finish(self) -> None:
        """Finish the run: wait for messages in transit. Collective across all ranks.

        Raises UsageError if groups have run different numbers of steps.
        """

    def restore_common_weights(self) -> None:
        """Reset the weights to their last common value, and discard messages in transit.

        Collective within each group.
        """

    # -- around a step ----------------------------------------------------------------------

    def before_step(self, engine: HookedEngine) -> None:
        """Run before the first gradient of a step is reduced."""

    def after_exchange(self, engine: HookedEngine, totals: StepTotals) -> StepTotals:
        """Run once the ranks of this group have agreed on the totals of their gradient sums.

        Returns the totals of the gradient sums that the update will apply.
        """
        return totals

    def after_update(
        self, engine: HookedEngine, totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        """Run after the update.

        Returns the step's totals and statistics, extended with the other groups' values.
        """
        return totals, stats

    def returns(self, engine: HookedEngine, checkpoints: HookedCheckpoints) -> Returns | None:
        """Return the object that lets restarted groups rejoin, or None if they cannot."""
        return None

    # -- queries ------------------------------------------------------------------------------

    @property
    def have_own_weights(self) -> bool:
        """True if the weights currently differ between groups."""
        return False

    def common_weights(self) -> AbstractContextManager[None]:
        """Return a context manager inside which the parameters hold the last common weights.

        Collective within each group.
        """
        return nullcontext()

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory that the hooks occupy on top of the three states."""
        return 0

    def count_in_words(self) -> str:
        """Return the number of groups in words."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a line that describes the exchange, for the startup summary."""
        raise NotImplementedError
