"""EnvProcess: a Gymnasium environment in a process of its own."""

import importlib
import pickle  # noqa: TID251 (messages between our own processes, never a file)
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import load_env_creator

from evogrpo.envs.control.single_env import EndForkedChildren, EnvResult, MakeEnv, Method, call_env
from evogrpo.envs.worker_process import PackedCode, WorkerError, WorkerProcess, pack_code

if TYPE_CHECKING:
    from evogrpo.envs.control.reward_components import RewardComponents

CLOSE_SECONDS = 1.0
"""Seconds in which a process can close its environment before it is killed."""
_MAIN = "__main__:"


class EnvProcessError(RuntimeError):
    """The process of an environment ended or sent a wrong reply. The run can be resumed."""


class EnvHandler:
    """Calls an environment in a worker process; see `evogrpo.envs.worker_process.Handler`.

    The environment is created before its first reset.

    Args:
        packed: A function that creates an environment, and reward components or None.
        registered: Pickled specs of environments that user code has registered, by id.
        recreate_env: Create a new environment for every episode.
    """

    def __init__(
        self, packed: PackedCode, registered: Mapping[str, bytes], *, recreate_env: bool
    ) -> None:
        self._packed = packed
        self._registered = registered
        self._recreate_env = recreate_env
        self._make: Any = None
        self._components: RewardComponents | None = None
        self._env: Any = None

    def answer(self, request: bytes) -> bytes:
        """Return the pickled result of a call, and its traceback if it failed."""
        method, value, training = pickle.loads(request)  # noqa: S301 (of our own parent process)
        try:
            reply = (self._call(method, value, training), None)
            try:
                return pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
            except pickle.PicklingError:
                # cloudpickle sends a class of the user's script with its code.
                return bytes(cloudpickle.dumps(reply))
        except (Exception, SystemExit):  # noqa: BLE001 (raised again by the parent process)
            return pickle.dumps((None, traceback.format_exc()))

    def close(self) -> None:
        """Close the environment, if there is one."""
        env = self._env
        self._env = None
        if env is not None:
            env.close()

    def _call(self, method: Method, value: Any, training: bool) -> EnvResult:
        """Reset or step the environment; see `call_env`."""
        with EndForkedChildren():
            if self._make is None:
                self._make = self._load()
            if self._env is None or (self._recreate_env and method == "reset"):
                self.close()
                self._env = self._make()
        components = self._components if training else None
        return call_env(self._env, method, value, components)

    def _load(self) -> Any:
        """Return the function that creates the environment, which may need registrations."""
        make, self._components = self._packed.load()
        # Modules register their environments when they are imported, and Gymnasium warns of a
        # second registration.
        env_id = getattr(make, "env", None)
        if isinstance(env_id, str) and ":" in env_id:
            importlib.import_module(env_id.rpartition(":")[0])
        for name, spec in self._registered.items():
            if name not in gymnasium.registry:
                gymnasium.registry[name] = pickle.loads(spec)  # noqa: S301 (as above)
        return make


def env_handler(
    make: MakeEnv, *, recreate_env: bool, components: "RewardComponents | None" = None
) -> EnvHandler:
    """Return the handler of environment processes.

    Args:
        make: Creates an environment.
        recreate_env: Create a new environment for every episode.
        components: Reward components that training computes after each step; None = none.

    Raises:
        ValueError: If `make` cannot be pickled.
    """
    advice = 'Create what it needs in the environment itself, or set vectorization="serial".'
    packed = pack_code((make, components), "The environment", advice)
    return EnvHandler(packed, _registrations(), recreate_env=recreate_env)


def _registrations() -> dict[str, bytes]:
    """Return the specs of environments that are not Gymnasium's own, pickled, by id.

    Specs that cannot be pickled are omitted.
    """
    pickled = {}
    for name, spec in gymnasium.registry.items():
        entry_point = spec.entry_point
        if isinstance(entry_point, str) and entry_point.startswith("gymnasium."):
            continue
        with suppress(Exception):
            # The program itself does not run in the process: its classes are sent with their code.
            if isinstance(entry_point, str) and entry_point.startswith(_MAIN):
                spec = copy(spec)  # noqa: PLW2901
                spec.entry_point = load_env_creator(entry_point)  # type: ignore[assignment]
            pickled[name] = cloudpickle.dumps(spec)
    return pickled


class EnvProcess:
    """Environment in a process of its own, which ends with this one.

    Args:
        handler: Calls the environment; see `env_handler`.

    Raises:
        ValueError: If this is an environment process itself.
    """

    def __init__(self, handler: EnvHandler) -> None:
        self._worker = WorkerProcess(handler)
        self._deadline = 0.0

    @property
    def running(self) -> bool:
        """True until the process ends."""
        return self._worker.running

    def send(self, method: Method, value: Any, *, training: bool = False) -> None:
        """Start a call; see `call_env`. Reward components are computed in training only."""
        self._worker.send(pickle.dumps((method, value, training)))

    def receive(self) -> EnvResult:
        """Return the result of the call.

        Raises:
            RuntimeError: If the environment raised an exception.
            EnvProcessError: If the process has ended, or sent the reply to another call.
        """
        try:
            reply = self._worker.receive()
        except WorkerError as error:
            raise EnvProcessError(
                f"The process of an environment {error}. Lower num_envs if memory is short, or set"
                ' vectorization="serial" to see the error.'
            ) from error
        result, traceback_text = pickle.loads(reply)  # noqa: S301 (of our own process)
        if traceback_text is not None:
            raise RuntimeError(f"An environment failed in its process:\n{traceback_text}")
        return result  # type: ignore[no-any-return]  # of `call_env`

    def end(self) -> None:
        """Let the process close its environment and end."""
        self._deadline = time.monotonic() + CLOSE_SECONDS
        self._worker.end()

    def close(self) -> None:
        """Kill the process if it does not end by itself within `CLOSE_SECONDS` of `end`."""
        self._worker.close(max(0.0, self._deadline - time.monotonic()))
