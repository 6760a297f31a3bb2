"""Ranges to search where a caller names none: wide on purpose, with where each comes from."""

from collections.abc import Mapping

from evogrpo.hyperparameters.parameter import RLParameter

SEARCHED = ("lr", "clip_coef", "group_size", "update_epochs")
"""What evolves where a caller leaves open what does: what decides most, and has no value that is good everywhere."""

_COMMON = {
    "clip_coef": RLParameter(min=0.1, max=0.4, scale="log"),  # RL Zoo: 0.1 to 0.4; PPO's paper 0.1 to 0.3
    "clip_low": RLParameter(min=0.1, max=0.4, scale="log"),
    "clip_high": RLParameter(min=0.1, max=0.6, scale="log"),  # DAPO: 0.28 beside 0.2
    "group_size": RLParameter(min=4, max=32),  # TRL: 8; DeepSeekMath: 64. Its divisors of a learning step's samples
    "beta": RLParameter(choices=[0.0, 0.001, 0.004, 0.01, 0.04]),  # TRL: 0; AgileRL: 0.001; DeepSeekMath: 0.04
    "temperature": RLParameter(min=0.6, max=1.4, scale="log"),  # TRL: 1; DeepSeek-R1: 0.6 to 1
    "advantage_clip": RLParameter(min=1.0, max=10.0, scale="log"),  # ROLL: 2 to 10
}

LANGUAGE_RANGES: Mapping[str, RLParameter] = {
    **_COMMON,
    # TRL: 1e-6, for all weights; adapters take about ten times the rate of all weights (Schulman et al., LoRA Without
    # Regret, 2025), so the optimum is looked for a decade around 1e-4 and one further down.
    "lr": RLParameter(min=1e-6, max=1e-3, scale="log"),
    "update_epochs": RLParameter(min=1, max=4, scale="log"),  # TRL: 1; every further one costs a learning step's time
    "max_grad_norm": RLParameter(min=0.1, max=2.0, scale="log"),  # AgileRL: 0.1; TRL: 1
    "batch_size": RLParameter(min=8, max=256, scale="log"),
    "entropy_coef": RLParameter(choices=[0.0, 0.0003, 0.001, 0.003]),  # verl: 0.001
    "gamma": RLParameter(min=0.95, max=1.0),
    "loss_type": RLParameter(choices=["grpo", "dapo", "dr_grpo", "cispo"]),  # each with a loss per action
    "advantage": RLParameter(choices=["outcome", "mean_only", "rloo"]),
}
"""Of language models: adapters that learn from completions."""

NETWORK_RANGES: Mapping[str, RLParameter] = {
    **_COMMON,
    "lr": RLParameter(min=1e-4, max=1e-1, scale="log"),  # RL Zoo: 1e-5 to 1; its tuned values: 1e-4 to 1e-2
    "update_epochs": RLParameter(min=1, max=8, scale="log"),  # PPO: 3 to 10; RL Zoo: 1 to 20
    "max_grad_norm": RLParameter(min=0.3, max=5.0, scale="log"),  # RL Zoo: the same
    "batch_size": RLParameter(min=64, max=4096, scale="log"),  # transitions; RL Zoo: 8 to 512 of 8 to 2,048
    "entropy_coef": RLParameter(choices=[0.0, 0.001, 0.003, 0.01, 0.03]),  # RL Zoo: up to 0.1
    "gamma": RLParameter(min=0.9, max=1.0),  # RL Zoo: 0.9 to 0.9999
    "loss_type": RLParameter(choices=["dapo", "bnpo", "cispo"]),  # what weighs single transitions
    "advantage": RLParameter(choices=["return_to_go_timestep", "return_to_go_group"]),
}
"""Of small networks that take steps in an environment.

Source: RL Zoo is the search of rl-baselines3-zoo's PPO, `hyperparams_opt.py`.
"""
