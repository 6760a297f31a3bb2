"""What making founders takes, whatever they are: a device that is there, and what every population is told."""

from typing import Any

import torch

from evogrpo.policies.devices import check_device, own_gpu
from evogrpo.training.configuration.sections import AnyConfig


def choose_device(wanted: str | None) -> str:
    """Return the device to use: the one asked for if it is there, else a GPU if there is one.

    Raises:
        ValueError: If the device does not exist here.
    """
    if wanted is None:
        return own_gpu() if torch.cuda.is_available() else "cpu"
    check_device(wanted)
    return own_gpu() if wanted == "cuda" else wanted


def founder_options(config: AnyConfig) -> dict[str, Any]:
    """Return the arguments of `GRPO.population` and its like that every configuration gives."""
    return {
        "samples_per_step": config.schedule.samples_per_step,
        "spread": config.population.spread,
        "founders": config.founders,
        "hp_config": config.evolve,
        "seed": config.seed,
        **config.hyperparameters.to_json(),
    }
