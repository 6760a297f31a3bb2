"""Attributes of agents that are more than a place: hyperparameters, and names that other libraries use."""

from typing import Any

from evogrpo.hyperparameters import Hyperparameters


class HyperparameterAttribute:
    """A hyperparameter of an agent as an attribute: read from, validated by and replaced in its one frozen record."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: Any, owner: type) -> Any:
        return self if agent is None else getattr(agent.hyperparameters, self.name)

    def __set__(self, agent: Any, value: object) -> None:
        agent.hyperparameters = Hyperparameters.from_json({**agent.hyperparameters.to_json(), self.name: value})


class Misnomer:
    """An attribute that agents of other libraries have: whoever sets it learns what it is called here."""

    def __init__(self, own: str) -> None:
        self.own = own

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: Any, owner: type) -> Any:
        if agent is not None:
            raise self._error(owner)
        return self

    def __set__(self, agent: Any, value: object) -> None:
        raise self._error(type(agent))

    def _error(self, owner: type) -> AttributeError:
        return AttributeError(f"{owner.__name__} has no attribute {self.name!r}: it is called {self.own!r} here")
