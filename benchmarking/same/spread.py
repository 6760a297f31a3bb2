"""A team of agents evolves on MPE2's simple_spread, through the public names: `spread.py RUN_DIR GENERATIONS`.

A folder that already holds a run is resumed. What is refused is one line and exit code 2, as on the command line.
"""

import sys
from pathlib import Path

from mpe2 import simple_spread_v3

import evogrpo
from evogrpo import ArchitectureLimits, HyperparameterConfig, NetworkConfig, PettingZooGroups, RLParameter, Tournament

folder, generations = Path(sys.argv[1]), int(sys.argv[2])
env = PettingZooGroups(
    simple_spread_v3.parallel_env,
    env_kwargs={"N": 3, "local_ratio": 0.5, "max_cycles": 25, "continuous_actions": False, "dynamic_rescaling": True},
    validation_size=8,
    test_size=8,
)
try:
    if folder.exists():
        run = evogrpo.resume(folder, env, generations=generations)
    else:
        population = evogrpo.MultiAgentGRPO.population(
            3,
            env.observation_spaces,
            env.action_spaces,
            policies="independent",
            hp_config=HyperparameterConfig(
                lr=RLParameter(min=1e-3, max=1e-2, scale="log"),
                update_epochs=RLParameter(min=1, max=4),
            ),
            network=NetworkConfig(hidden=(32,)),
            evolve_network=ArchitectureLimits(min_units=16, max_units=64, unit_steps=(16,), probability=0.5),
            normalise_observations=True,
            batch_size=512,
            beta=0.01,
        )
        run = evogrpo.evolve(
            population,
            env,
            strategy=Tournament(z=0.0),
            run_dir=folder,
            generations=generations,
            steps_per_generation=2,
            samples_per_step=16,
        )
    for report in run:
        print(f"generation {report.generation}: {report.best.fitness:.4g}")
except ValueError as error:
    print(f"error: {error}")
    sys.exit(2)
