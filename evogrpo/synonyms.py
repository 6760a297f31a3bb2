"""Suggestions for unknown names: names of other libraries, and similar names."""

import difflib
from collections.abc import Iterable, Mapping

_MAX_LISTED = 60  # names; a longer list is left out of the message
_MIN_LENGTH = 8  # letters of a name of another library that is also recognised with one edit

_SYNONYMS: Mapping[str, str] = {
    # Hyperparameters.
    "lr": "learning_rate lr_actor actor_lr LR",
    "clip_coef": "epsilon eps_clip clip_range cliprange clip_ratio clip_epsilon clip_param clip_eps pg_clip",
    "clip_low": "epsilon_low clip_ratio_low pg_clip_low",
    "clip_high": "epsilon_high clip_ratio_high pg_clip_high",
    "group_size": "num_generations num_return_sequences num_return_sequences_in_group n_samples",
    "beta": "kl_coef kl_loss_coef init_kl_coef kl_beta kl_coeff",
    "update_epochs": "num_iterations ppo_epochs n_epochs num_epochs num_sgd_iter",
    "max_grad_norm": "grad_clip gradient_clip clip_grad clip_grad_norm",
    "batch_size": "per_device_train_batch_size mini_batch_size minibatch_size ppo_mini_batch_size BATCH_SIZE "
    "sgd_minibatch_size",
    "entropy_coef": "ent_coef entropy_loss_coef entropy_coeff",
    "gamma": "discount discount_factor",
    "advantage": "adv_estimator",
    # Completions.
    "max_output_tokens": "max_completion_length max_new_tokens response_length max_response_length max_tokens",
    "min_output_tokens": "min_new_tokens",
    "max_episode_tokens": "max_model_len max_seq_length max_length",
    "micro_batch_tokens": "micro_batch_size_per_gpu micro_batch_size",
    "data_batch_size": "data_batch_size_per_gpu",
    # Agents and populations.
    "observation_spaces": "observation_space",
    "action_spaces": "action_space",
    "size": "pop_size num_agents n_agents num_members members population_size POP_SIZE POPULATION_SIZE "
    "tournament_size TOURN_SIZE",
    "actor_network": "model base_model actor model_name_or_path",
    "model": "model_name_or_path model_name base_model",
    "hidden": "net_arch hidden_sizes hidden_size hidden_layers fcnet_hiddens",
    "activation": "activation_fn fcnet_activation",
    "log_std": "log_std_init",
    "network": "net_config network_config policy_kwargs net_arch hidden_sizes activation_fn log_std_init",
    "normalise_observations": "normalize_observations normalize_observation normalize normalise norm_obs",
    "hp_config": "hyperparameter_config HP_CONFIG",
    "lora_config": "peft_config",
    "full_finetuning": "full full_finetune",
    "lora": "lora_config peft_config",
    "r": "rank lora_r",
    "objective": "loss_config",
    "loss_type": "loss loss_fn",
    "mask_truncated": "mask_truncated_completions",
    # Evolution.
    "elitism": "ELITISM",
    "probability": "mut_p MUT_P rl_hp RL_HP_MUT mutation_probability",
    "mutation": "mutations custom_explore_fn hyperparam_mutations",
    "quantile": "quantile_fraction",
    "resample": "resample_probability",
    "factors": "perturbation_factors",
    "factor": "grow_factor shrink_factor",
    "min": "low minimum",
    "max": "high maximum",
    "choices": "values",
    "strategy": "tournament selection pruner scheduler",
    "search_space": "param_space",
    "truncation_pbt": "pbt PBT population_based_training PopulationBasedTraining pb2 PB2",
    "successive_halving": "asha ASHA hyperband sha",
    "random_search": "random",
    "fixed": "none no_evolution",
    # Tasks and environments.
    "max_prompt_length": "prompt_length max_input_length",
    "reward_funcs": "reward_func reward_fn reward_functions reward_function rewards",
    "reward_fn": "reward_function",
    "reward": "reward_funcs reward_fn reward_func reward_function",
    "train_dataset": "dataset",
    "validation_dataset": "eval_dataset val_dataset valid_dataset dev_dataset",
    "tokenizer": "processing_class",
    "max_turns": "num_turns n_turns max_rounds",
    "wrappers": "wrapper env_wrapper wrapper_class",
    "validation": "val valid dev eval evaluation",
    "n": "num_return_sequences num_generations num_samples n_samples",
    "env": "env_id environment",
    "num_envs": "n_envs",
    "vectorization": "vec_env_cls vec_env_class",
    "max_episode_steps": "max_episode_length episode_length time_limit horizon",
    "env_kwargs": "env_config env_args make_kwargs",
    # Runs.
    "generations": "max_generations n_generations",
    "steps_per_generation": "evo_steps EVO_STEPS",
    "samples_per_step": "generation_batch_size rollout_batch_size",
    "total_timesteps": "max_timesteps n_timesteps num_timesteps timesteps",
    "max_timesteps": "total_timesteps n_timesteps num_timesteps timesteps",
    "checkpoint_steps": "save_steps save_freq checkpoint_interval CHECKPOINT",
    "keep_checkpoints": "save_total_limit num_to_keep",
    "completions": "num_completions_to_print",
    "max_seconds": "timeout max_time time_budget time_budget_s",
    "target_fitness": "target target_reward TARGET_SCORE reward_threshold",
    "reward_threshold": "target_fitness callback_on_new_best",
    "run_dir": "tensorboard_log tb_log_name log_dir log_path save_path exp_name output_dir storage_path",
    "progress": "progress_bar verbose",
    # Data types.
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "int8": "8bit",
    "nf4": "4bit int4 fp4",
}
"""Names in other libraries, separated by spaces, by the name here. The same name may occur more than once."""

_OTHER_NAMES = {name: tuple(others.split()) for name, others in _SYNONYMS.items()}


def counterpart(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name for a name of another library, or None; a long name may have one edit."""
    others = {other: candidate for candidate in reversed(list(valid)) for other in _OTHER_NAMES.get(candidate, ())}
    similar = (other for other in others if len(other) >= _MIN_LENGTH and _is_one_edit(name, other))
    return others.get(name) or others.get(next(similar, ""))


def close_match(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that differs by one edit, or else the most similar one; None if none is similar."""
    names = list(valid)
    one_edit = [candidate for candidate in names if _is_one_edit(name, candidate)]
    return next(iter(one_edit or difflib.get_close_matches(name, names, n=1, cutoff=0.8)), None)


def _is_one_edit(typed: str, name: str) -> bool:
    """Return True if one letter was changed, added or left out, or two neighbouring letters were swapped."""
    start = next((position for position, (a, b) in enumerate(zip(typed, name, strict=False)) if a != b), None)
    start = min(len(typed), len(name)) if start is None else start
    rest, other = typed[start:], name[start:]
    swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
    return swapped or rest[1:] == other[1:] or rest == other[1:] or rest[1:] == other


def unknown_name_error(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """Return the error for an unknown name, with the name used in evogrpo, a similar name, or all valid names.

    Args:
        kind: Kind of name, such as "hyperparameter".
        name: The unknown name.
        valid: The names that exist.
    """
    names = list(valid)
    if (name_here := counterpart(str(name), names)) is not None:
        return ValueError(f"unknown {kind} {name!r}: it is called {name_here!r} here")
    if (match := close_match(str(name), names)) is not None:
        return ValueError(f"unknown {kind} {name!r}: did you mean {match!r}?")
    listed = f". Valid names: {', '.join(names) or '(none)'}" if len(names) <= _MAX_LISTED else ""
    return ValueError(f"unknown {kind} {name!r}{listed}")
