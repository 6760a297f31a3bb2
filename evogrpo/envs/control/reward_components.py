"""Reward components: terms of the training reward beside the environment's own reward."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evogrpo.arrays import FloatArray, IntArray
from evogrpo.config.task_settings import TaskSettings
from evogrpo.envs.fingerprint import canonical, code_hash
from evogrpo.text import class_name, one_line, pluralize, shown, user_line
from evogrpo.validation import FLOAT32_LIMIT, float32_number, refuse_unknown

if TYPE_CHECKING:
    from evogrpo.envs.control.vector_env import VectorStep

Component = str | Callable[[Any, Any, Any, Mapping[str, Any]], Any]
"""A key of the step's info, or a function (observation after the step, action, reward, info) -> a
number.
"""

OWN_REWARD = "reward"
"""Name of the environment's own reward among the weights."""


@dataclass(frozen=True, kw_only=True)
class RewardComponents:
    """Terms of the training reward: the environment's own reward, and components.

    The training reward of a step is the weighted sum of all terms. Reported rewards and held-out
    episodes use the environment's own reward alone.

    Attributes:
        components: Components by name.
        weights: Configured weight of each term, `OWN_REWARD` first.
    """

    components: Mapping[str, Component]
    weights: Mapping[str, float]

    @classmethod
    def of(
        cls, rewards: Mapping[str, Component] | None, reward_weights: Mapping[str, float] | None
    ) -> "RewardComponents":
        """Check the arguments `rewards` and `reward_weights` of an environment.

        Raises:
            ValueError: If a component is neither a key nor a function, or a weight has no term.
        """
        # 1. Check the components.
        if not isinstance(rewards, Mapping | None):
            raise ValueError(
                "rewards must be a mapping of names to functions or keys of info, got"
                f" {shown(rewards)}."
            )
        components = dict(rewards or {})
        for name, component in components.items():
            if not isinstance(name, str) or not name or name == OWN_REWARD:
                raise ValueError(
                    f"The name of a reward component must be text other than {OWN_REWARD!r}, got"
                    f" {shown(name)}."
                )
            if not isinstance(component, str) and not callable(component):
                raise ValueError(
                    f"rewards: {name} must be a function of (observation, action, reward, info) or"
                    f" a key of info, got {shown(component)}."
                )
        # 2. Check the weights; the default is 1.
        if not isinstance(reward_weights, Mapping | None):
            raise ValueError(f"reward_weights must be a mapping, got {shown(reward_weights)}.")
        terms = (OWN_REWARD, *components)
        refuse_unknown("reward in reward_weights", reward_weights or {}, terms)
        given = TaskSettings({"reward_weights": reward_weights or {}}).weights("reward_weights")
        return cls(components=components, weights=dict.fromkeys(terms, 1.0) | given)

    @property
    def is_default(self) -> bool:
        """True if the training reward is the environment's own reward."""
        return self.weights == {OWN_REWARD: 1.0}

    def values(self, observation: Any, action: Any, reward: Any, info: Any) -> list[Any]:
        """Return the value of each component in one step, as the user's code gives it.

        Raises:
            ValueError: If the info lacks a key, or a function raises an exception.
        """
        result = []
        for name, component in self.components.items():
            if isinstance(component, str):
                if component not in info:
                    raise ValueError(
                        f"rewards: {name} is {component!r}, but info has"
                        f" {', '.join(map(repr, info)) or 'no keys'}. For a key that some steps"
                        " lack, use a function that reads info.get(...)."
                    )
                result.append(info[component])
                continue
            try:
                # A copy, since a function may compute in place, as in `observation -= goal`.
                result.append(component(deepcopy(observation), action, reward, info))
            except (Exception, SystemExit) as error:
                raise ValueError(
                    f"rewards: {name} raised {class_name(error)}: {one_line(error)}"
                    f"{user_line(error)}. It gets (observation, action, reward, info)."
                ) from error
        return result

    def terms(self, step: "VectorStep", seeds: IntArray, t: IntArray) -> FloatArray:
        """Return the terms `[k, f]` of the training rewards of a step, in the order of `weights`.

        Args:
            step: `[k]` rewards of the environment, with the values of the components.
            seeds: `[m]` reset seeds of all episodes.
            t: `[m]` number of the step in each episode, from 0.

        Raises:
            ValueError: If a component is not a finite number.
        """
        result = np.empty((len(step.rewards), len(self.weights)))
        # The first term is the reward of the environment.
        result[:, 0] = step.rewards
        for row, values in enumerate(step.components):
            pairs = zip(self.components, values, strict=True)
            for column, (name, value) in enumerate(pairs, start=1):
                number = float32_number(value)
                if number is None:
                    position = row if step.positions is None else step.positions[row]
                    steps = pluralize(int(t[position]) + 1, "step")
                    raise ValueError(
                        f"rewards: {name} must be a finite number of at most {FLOAT32_LIMIT:g} in"
                        f" size, got {shown(value)} after {steps} from"
                        f" reset(seed={seeds[position]})."
                    )
                result[row, column] = number
        return result

    def identity(self) -> dict[str, str]:
        """Return short texts that identify the components and weights, for a fingerprint."""
        if self.is_default:
            return {}
        parts = []
        for name, component in self.components.items():
            kind = f"key {component}" if isinstance(component, str) else code_hash(component)
            parts.append(f"{name}: {kind}")
        return {"rewards": "; ".join(parts), "reward_weights": canonical(self.weights)}


def weighted_sum(terms: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the training rewards `[k]` of terms `[k, f]` with weights `[k, f]`.

    Terms are added in their order, so that the rounding of a row does not depend on other rows.
    """
    products = terms * weights
    total = products[:, 0]
    for column in products.T[1:]:
        total = total + column
    return total
