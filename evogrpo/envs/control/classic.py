"""Five classic-control environments in numpy, bit for bit those of Gymnasium."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import pi
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.seeding import np_random
from numpy.typing import NDArray

from evogrpo.arrays import BoolArray, Float32Array, FloatArray, IntArray
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.single_env import Options
from evogrpo.envs.control.vector_env import PolicyInput, VectorEnv, VectorStep
from evogrpo.records import DEFAULT_POLICY

Start = tuple[tuple[float, ...], tuple[float, ...]]
"""State and first observation of an episode, as numbers."""
Outcome = tuple[FloatArray, BoolArray]
"""Rewards and terminations `[m]` of a step."""


class ClassicControl(VectorEnv):
    """Base class of environments whose episodes are stepped together in numpy.

    Every episode equals `gymnasium.make(id)` reset with the same seed, bit for bit: observations,
    rewards, termination and truncation. The formulas therefore keep Gymnasium's order of
    operations, its mixture of float32 and float64, and its library functions. For example, `x**2`
    of a numpy scalar is the C library's `pow`. `np.float_power` calls `pow`; `x * x` can differ
    from it.

    Args:
        max_episode_steps: Steps after which an episode is truncated, at least 1.

    Attributes:
        options: Supported keyword arguments of the Gymnasium environment.
        state_size: Number of quantities in the state of an episode.
        max_episode_steps: As passed.
    """

    options: ClassVar[tuple[str, ...]] = ()
    state_size: ClassVar[int]

    def __init__(self, *, max_episode_steps: int) -> None:
        self.max_episode_steps = max_episode_steps
        self._observations = np.empty((0, 0), dtype=np.float32)
        self._finished = np.empty(0, dtype=np.bool_)
        # One contiguous row per quantity, so that every formula reads and writes plain vectors.
        self._state = np.empty((self.state_size, 0))
        self._elapsed = np.empty(0, dtype=np.int64)

    def add(
        self, seeds: Sequence[int], replicas: Sequence[int], options: Sequence[Options]
    ) -> None:
        """See `VectorEnv`. Replicas and options are not used: there is no noise, and no option."""
        # The episodes of a group share their seed: draw its start once, as creating a generator
        # costs as much as a hundred steps.
        as_integers = np.asarray(seeds, dtype=np.int64)
        distinct, episode = np.unique(as_integers, return_inverse=True)
        starts = [self._start(int(seed)) for seed in distinct]
        states = np.array([state for state, _ in starts])
        state = states.T[:, episode]
        observations = np.array([observation for _, observation in starts], dtype=np.float32)
        initial = observations[episode]
        if len(self._elapsed):
            self._observations = np.concatenate([self._observations, initial])
        else:
            self._observations = initial
        self._state = np.concatenate([self._state, state], axis=1)
        count = len(episode)
        self._elapsed = np.concatenate([self._elapsed, np.zeros(count, dtype=np.int64)])
        self._finished = np.concatenate([self._finished, np.zeros(count, dtype=np.bool_)])

    def select(self, positions: IntArray) -> None:
        """See `VectorEnv`."""
        self._observations = self._observations[positions]
        self._state = self._state.take(positions, axis=1)
        self._elapsed = self._elapsed.take(positions)
        self._finished = self._finished.take(positions)

    def finished(self) -> BoolArray:
        """See `VectorEnv`."""
        return self._finished

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        return {DEFAULT_POLICY: PolicyInput([self._observations], None)}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        chosen = actions[DEFAULT_POLICY]
        rewards, terminated = self._advance(chosen)
        self._elapsed += 1
        truncated = self._elapsed >= self.max_episode_steps
        self._observations = self._observe()
        self._finished = terminated | truncated
        components = []
        if self.components is not None:
            # These environments have an empty info.
            steps = zip(self._observations, chosen, rewards, strict=True)
            for observation, action, reward in steps:
                components.append(self.components.values(observation, action, reward, {}))
        return VectorStep(rewards, terminated, truncated, components=components)

    def close(self) -> None:
        """Do nothing."""

    @staticmethod
    @abstractmethod
    def _start(seed: int) -> Start:
        """Return the state and the observation that `reset(seed=seed)` draws."""

    @abstractmethod
    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Replace the state by its successor, with the formulas and rounding of gymnasium.

        Args:
            actions: `[m]`, or `[m, 1]` for continuous actions.

        Returns:
            Rewards `[m]`, and terminations `[m]`.
        """

    def _observe(self) -> Float32Array:
        """Return the observations `[m, d]` of the state; by default the state itself."""
        return self._state.T.astype(np.float32, order="C")


_CARTPOLE_GRAVITY = 9.8
_MASS_POLE = 0.1
_TOTAL_MASS = 0.1 + 1.0
_LENGTH = 0.5  # half the pole
_POLE_MASS_LENGTH = _MASS_POLE * _LENGTH
_CARTPOLE_FORCE = 10.0
_CARTPOLE_SECONDS = 0.02
_MAX_ANGLE = 12 * 2 * math.pi / 360
_MAX_POSITION = 2.4


class CartPole(ClassicControl):
    """A cart that balances a pole; see `ClassicControl`.

    State: position, velocity, angle, angular velocity.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        sutton_barto_reward: 0 per step and -1 at the fall, rather than 1 per step.
    """

    options = ("sutton_barto_reward",)
    state_size = 4

    def __init__(self, *, max_episode_steps: int, sutton_barto_reward: bool = False) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        # Rewards of a step.
        self._upright = 1.0
        self._fallen = 1.0
        if sutton_barto_reward:
            self._upright = 0.0
            self._fallen = -1.0

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        rng, _ = np_random(seed)
        state = rng.uniform(low=-0.05, high=0.05, size=(4,))
        observation = state.astype(np.float32)
        return tuple(state.tolist()), tuple(observation.tolist())

    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Advance by one Euler step of the equations of motion; see `ClassicControl._advance`."""
        x, x_dot, theta, theta_dot = self._state
        force = np.where(actions == 1, _CARTPOLE_FORCE, -_CARTPOLE_FORCE)
        cos = np.cos(theta)
        sin = np.sin(theta)
        # The acceleration that the cart would have without the pole's angular acceleration.
        centrifugal = _POLE_MASS_LENGTH * np.square(theta_dot) * sin
        temp = (force + centrifugal) / _TOTAL_MASS
        moment = _LENGTH * (4.0 / 3.0 - _MASS_POLE * np.square(cos) / _TOTAL_MASS)
        theta_acc = (_CARTPOLE_GRAVITY * sin - cos * temp) / moment
        x_acc = temp - _POLE_MASS_LENGTH * theta_acc * cos / _TOTAL_MASS
        state = np.empty_like(self._state)
        np.add(x, _CARTPOLE_SECONDS * x_dot, out=state[0])
        np.add(x_dot, _CARTPOLE_SECONDS * x_acc, out=state[1])
        np.add(theta, _CARTPOLE_SECONDS * theta_dot, out=state[2])
        np.add(theta_dot, _CARTPOLE_SECONDS * theta_acc, out=state[3])
        self._state = state
        has_left = np.abs(state[0]) > _MAX_POSITION
        has_fallen = np.abs(state[2]) > _MAX_ANGLE
        terminated = has_left | has_fallen
        return np.where(terminated, self._fallen, self._upright), terminated


_ACROBOT_SECONDS = 0.2
_ACROBOT_GRAVITY = 9.8
_ACROBOT_MAX_SPEED = (4 * pi, 9 * pi)
_TORQUE = np.array([-1.0, 0.0, 1.0])

# Both links have length 1, mass 1, their centre of mass in the middle and a moment of inertia of 1.
_HALF = 0.5


class Acrobot(ClassicControl):
    """Two links that swing up; see `ClassicControl`. State: two angles, two angular velocities.

    The dynamics are those of Sutton and Barto's book, Gymnasium's default, integrated by one
    fourth-order Runge-Kutta step.
    """

    state_size = 4

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        # The first state is rounded to float32, and the first observation is computed in float32.
        rng, _ = np_random(seed)
        state = rng.uniform(low=-0.1, high=0.1, size=(4,)).astype(np.float32)
        a, b, a_dot, b_dot = state
        observation = (np.cos(a), np.sin(a), np.cos(b), np.sin(b), a_dot, b_dot)
        return tuple(state.tolist()), tuple(map(float, observation))

    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Advance by one step of the fourth-order Runge-Kutta method.

        See `ClassicControl._advance`.
        """
        torque = _TORQUE[actions.astype(np.int64)]
        # 1. Derivatives at the beginning, twice in the middle, and at the end of the step.
        before = tuple(self._state)
        half = _ACROBOT_SECONDS / 2.0
        k1 = _derivatives(before, torque)
        k2 = _derivatives(_moved(before, k1, half), torque)
        k3 = _derivatives(_moved(before, k2, half), torque)
        k4 = _derivatives(_moved(before, k3, _ACROBOT_SECONDS), torque)
        # 2. Their mean, with weights 1, 2, 2, 1, leads to the next state.
        state = np.empty_like(self._state)
        for number, old in enumerate(before):
            slopes = k1[number] + 2 * k2[number] + 2 * k3[number] + k4[number]
            np.add(old, _ACROBOT_SECONDS / 6.0 * slopes, out=state[number])
        # 3. Keep angles and speeds in their ranges.
        for angle in state[:2]:
            _wrap(angle)
        for speed, limit in zip(state[2:], _ACROBOT_MAX_SPEED, strict=True):
            np.clip(speed, -limit, limit, out=speed)
        self._state = state
        # The height of the free end above the axis.
        height = -np.cos(state[0]) - np.cos(state[1] + state[0])
        terminated = height > 1.0
        return np.where(terminated, 0.0, -1.0), terminated

    def _observe(self) -> Float32Array:
        a, b, a_dot, b_dot = self._state
        columns = [np.cos(a), np.sin(a), np.cos(b), np.sin(b), a_dot, b_dot]
        return np.stack(columns, axis=1).astype(np.float32)


def _moved(
    state: Sequence[FloatArray], derivatives: Sequence[FloatArray], seconds: float
) -> list[FloatArray]:
    """Return a state after some time at constant derivatives."""
    pairs = zip(state, derivatives, strict=True)
    return [value + seconds * derivative for value, derivative in pairs]


def _derivatives(state: Sequence[FloatArray], torque: FloatArray) -> tuple[FloatArray, ...]:
    """Return the time derivative of the two angles and the two angular velocities."""
    theta1, theta2, dtheta1, dtheta2 = state
    cos2 = np.cos(theta2)
    sin2 = np.sin(theta2)
    # d1: moment of inertia of both links about the first joint; d2: coupling of the joints.
    d1 = _HALF**2 + (1.0 + _HALF**2 + 2 * _HALF * cos2) + 1.0 + 1.0
    d2 = (_HALF**2 + _HALF * cos2) + 1.0
    angle = theta1 + theta2 - pi / 2.0
    phi2 = _HALF * _ACROBOT_GRAVITY * np.cos(angle)
    centrifugal = -_HALF * np.float_power(dtheta2, 2) * sin2
    coriolis = dtheta2 * dtheta1 * sin2
    gravity = (_HALF + 1.0) * _ACROBOT_GRAVITY * np.cos(theta1 - pi / 2)
    phi1 = centrifugal - coriolis + gravity + phi2
    reaction = _HALF * np.float_power(dtheta1, 2) * sin2
    numerator = torque + d2 / d1 * phi1 - reaction - phi2
    denominator = _HALF**2 + 1.0 - np.float_power(d2, 2) / d1
    ddtheta2 = numerator / denominator
    ddtheta1 = -(d2 * ddtheta2 + phi1) / d1
    return dtheta1, dtheta2, ddtheta1, ddtheta2


def _wrap(angle: FloatArray) -> None:
    """Bring angles into [-pi, pi] in place, by adding full turns one at a time."""
    while (above := angle > pi).any():
        angle[above] -= 2 * pi
    while (below := angle < -pi).any():
        angle[below] += 2 * pi


_LOWEST = -1.2
_HIGHEST = 0.6
_CAR_MAX_SPEED = 0.07
_CAR_FORCE = 0.001
_CAR_GRAVITY = 0.0025
_GOAL = 0.5
_POWER = 0.0015
_GOAL_CONTINUOUS = 0.45


@lru_cache(maxsize=8192)
def _car_start(seed: int) -> Start:
    rng, _ = np_random(seed)
    position = rng.uniform(low=-0.6, high=-0.4)
    return (float(position), 0.0), (float(np.float32(position)), 0.0)


def _cosines(angles: FloatArray) -> FloatArray:
    """Return cosines, rounded as by gymnasium."""
    # gymnasium calls math.cos here, and numpy's own cosine may differ from it in the last bit on
    # some processors.
    return np.fromiter(map(math.cos, angles.tolist()), np.float64, len(angles))


class MountainCar(ClassicControl):
    """A car that rocks itself out of a valley; see `ClassicControl`. State: position, velocity.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        goal_velocity: Minimum velocity at the flag to reach the goal.
    """

    options = ("goal_velocity",)
    state_size = 2

    def __init__(self, *, max_episode_steps: int, goal_velocity: float = 0) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        self._goal_velocity = goal_velocity

    _start = staticmethod(_car_start)

    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Change the velocity by force and gravity, then the position.

        See `ClassicControl._advance`.
        """
        position, velocity = self._state
        push = actions.astype(np.int64) - 1
        push_acceleration = push * _CAR_FORCE
        acceleration = push_acceleration + _cosines(3 * position) * -_CAR_GRAVITY
        velocity = np.clip(velocity + acceleration, -_CAR_MAX_SPEED, _CAR_MAX_SPEED)
        position = np.clip(position + velocity, _LOWEST, _HIGHEST)
        # The left wall stops the car.
        velocity[(position == _LOWEST) & (velocity < 0)] = 0
        self._state = np.stack([position, velocity])
        rewards = np.full(len(self._elapsed), -1.0)
        terminated = (position >= _GOAL) & (velocity >= self._goal_velocity)
        return rewards, terminated


class MountainCarContinuous(ClassicControl):
    """MountainCar with a continuous force and a cost of force; see `ClassicControl`.

    State: position, velocity.

    In gymnasium the first step of an episode computes in float64. It stores float32, so that every
    later step computes in float32, constants included; a force outside [-1, 1] becomes a Python
    float, whose push is a float64 again.
    """

    state_size = 2

    _start = staticmethod(_car_start)

    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Change the velocity by force and gravity, then the position.

        See `ClassicControl._advance`.
        """
        position, velocity = self._state
        first = self._elapsed == 0
        # 1. Velocity.
        force = np.asarray(actions, dtype=np.float32)[:, 0]
        single = position.astype(np.float32)  # exact except in first steps
        steepness = np.where(first, 3 * position, 3 * single)
        pull = _CAR_GRAVITY * _cosines(steepness)
        inside = np.clip(force, -1.0, 1.0)
        push_of_float32 = inside * np.float32(_POWER) - pull.astype(np.float32)
        push_of_float64 = inside.astype(float) * _POWER - pull
        push = np.where(inside == force, push_of_float32, push_of_float64)
        later_velocity = velocity.astype(np.float32) + push.astype(np.float32)
        velocity = np.where(first, velocity + push, later_velocity)
        slowest = _rounded(first, -_CAR_MAX_SPEED)
        fastest = _rounded(first, _CAR_MAX_SPEED)
        velocity = np.clip(velocity, slowest, fastest)
        # 2. Position. The left wall stops the car.
        later_position = single + velocity.astype(np.float32)
        position = np.where(first, position + velocity, later_position)
        lowest = _rounded(first, _LOWEST)
        position = np.clip(position, lowest, _rounded(first, _HIGHEST))
        velocity[(position == lowest) & (velocity < 0)] = 0
        at_goal = position >= _rounded(first, _GOAL_CONTINUOUS)
        terminated = at_goal & (velocity >= 0)
        # float32 as gymnasium stores it; widened again so that one array serves first and later
        # steps.
        state = np.stack([position, velocity]).astype(np.float32)
        self._state = state.astype(np.float64)
        # 3. Rewards. The square of a float32 is exact in float64, so this is what math.pow returns.
        effort = np.square(force.astype(np.float64)) * 0.1
        rewards = np.where(terminated, 100.0, 0.0) - effort
        return rewards, terminated


def _rounded(first: BoolArray, constant: float) -> FloatArray:
    """Return a constant: in float64 for first steps, and rounded to float32 for later steps."""
    return np.where(first, constant, float(np.float32(constant)))


_PENDULUM_MAX_SPEED = 8
_MAX_TORQUE = 2.0
_PENDULUM_SECONDS = 0.05


class Pendulum(ClassicControl):
    """A pendulum to swing up and hold; see `ClassicControl`. State: angle, angular velocity.

    It never terminates.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        g: Acceleration of gravity.
    """

    options = ("g",)
    state_size = 2

    def __init__(self, *, max_episode_steps: int, g: float = 10.0) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        self._pull = 3 * g / (2 * 1.0)

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        high = np.array([np.pi, 1.0])
        rng, _ = np_random(seed)
        state = rng.uniform(low=-high, high=high)
        theta, speed = state
        observation = np.array([np.cos(theta), np.sin(theta), speed], dtype=np.float32)
        return tuple(state.tolist()), tuple(observation.tolist())

    def _advance(self, actions: NDArray[np.generic]) -> Outcome:
        """Change the speed by gravity and torque, then the angle.

        See `ClassicControl._advance`.
        """
        theta, speed = self._state
        chosen = np.asarray(actions, dtype=np.float32)[:, 0]
        torque = np.clip(chosen, -_MAX_TORQUE, _MAX_TORQUE)
        # A float32 scalar's ** is powf, which no numpy function on arrays calls on every processor.
        effort = np.fromiter((value**2 for value in torque), np.float32, len(torque))
        angle = ((theta + np.pi) % (2 * np.pi)) - np.pi
        costs = np.float_power(angle, 2) + 0.1 * np.float_power(speed, 2) + 0.001 * effort
        acceleration = self._pull * np.sin(theta) + 3.0 * torque
        speed = speed + acceleration * _PENDULUM_SECONDS
        speed = np.clip(speed, -_PENDULUM_MAX_SPEED, _PENDULUM_MAX_SPEED)
        self._state = np.stack([theta + speed * _PENDULUM_SECONDS, speed])
        return -costs, np.zeros(len(self._elapsed), dtype=np.bool_)

    def _observe(self) -> Float32Array:
        theta, speed = self._state
        columns = [np.cos(theta), np.sin(theta), speed]
        return np.stack(columns, axis=1).astype(np.float32)


NATIVE_IDS = (
    "Acrobot-v1",
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
)
"""Newest ids of the environments of this file."""

_NATIVE: Mapping[object, type[ClassicControl]] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": CartPole,
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": Acrobot,
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": MountainCar,
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": (
        MountainCarContinuous
    ),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": Pendulum,
}


def native_class(spec: EnvSpec, env_kwargs: Mapping[str, Any]) -> type[ClassicControl] | None:
    """Return the native environment that equals a registered one; None if there is none.

    The entry point decides, not the id. Further wrappers, or arguments that the native environment
    does not support such as render_mode, exclude it.
    """
    native = _NATIVE.get(spec.entry_point)
    if native is None or spec.additional_wrappers:
        return None
    arguments = {*spec.kwargs, *env_kwargs}
    return native if arguments <= set(native.options) else None
