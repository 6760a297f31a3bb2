"""Names of other libraries, and hints for names that do not exist here."""

import difflib
from collections.abc import Iterable, Mapping

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
"""Names in other libraries, separated by spaces, by the name here. One name may have several meanings here."""

_TAKEN_BY: Mapping[str, str] = {
    "GRPO or GRPO.population": "lr clip_coef clip_low clip_high group_size beta update_epochs max_grad_norm batch_size "
    "entropy_coef gamma temperature advantage loss_type max_output_tokens min_output_tokens max_episode_tokens top_k "
    "top_p min_p repetition_penalty actor_network network normalise_observations hp_config lora_config objective "
    "optimizer seed device pad_token_id eos_token_ids",
    "GRPO.population": "size",
    "Tournament or another strategy": "elitism mutation",
    "Mutation": "probability resample",
    "HuggingFaceGym": "train_dataset validation_dataset test_dataset tokenizer reward_fn reward_funcs reward_weights "
    "max_prompt_length data_batch_size",
    "MultiTurnGym": "reply max_turns",
    "GymnasiumGroups": "env env_kwargs wrappers num_envs vectorization max_episode_steps",
    "evolve": "generations steps_per_generation samples_per_step max_timesteps max_tokens max_seconds target_fitness "
    "run_dir checkpoint_steps keep_checkpoints completions progress strategy experience fitness",
    "evogrpo.train": "total_timesteps reward_threshold",
}
"""Names here, separated by spaces, by the call that takes them."""

_ADVICE: Mapping[str, str] = {
    "INIT_HP": "give its entries by name, such as lr and group_size",
    "dtype": "leave it out; the type follows from the hyperparameter's name",
    "eval_loop": "leave it out; fitness is measured on a whole split",
    "tokenizer processing_class": "give pad_token_id to the agent, and the tokenizer to the environment",
    "num_generations": "give generations to evolve for the length of a run; TRL's is group_size of GRPO",
    "n_trials num_samples": "give size to GRPO.population, the number of members, and generations to evolve",
    "epochs": "give generations to evolve, or update_epochs to GRPO",
    "direction metric mode": "leave it out; fitness is the mean reward and is maximised",
    "n_jobs num_workers gpus num_gpus n_gpus": "leave it out; all members train together. Start several processes with "
    "torchrun",
    "wandb wandb_project wandb_run_name": "leave it out; every learning step is recorded in run_dir",
    "render_mode": "give env_kwargs={'render_mode': ...}; to record episodes use `evogrpo video RUN_DIR`",
    "do_sample": "leave it out; temperature=0 takes the most likely tokens",
    "ref_model": "leave it out; the reference is the model without adapters (see reference of Objective)",
    "env env_id total_timesteps max_timesteps n_timesteps": "an agent is made for spaces, "
    "GRPO(env.observation_space, env.action_space); to train, write evogrpo.train(env, total_timesteps=...)",
    "vf_coef vf_loss_coeff value_coef value_loss_coef clip_range_vf clip_vloss gae_lambda lambda_ lam GAE_LAMBDA "
    "use_gae lr_critic critic_lr critic critic_network share_features_extractor vf_share_layers": "leave it out; there "
    "is no critic, since episodes of a group are compared with each other",
    "n_steps num_steps rollout_fragment_length train_batch_size learn_step": "give samples_per_step, the number of "
    "whole episodes of each member per learning step",
    "num_minibatches n_minibatches": "give batch_size, the transitions of an optimizer step",
    "buffer_size learning_starts train_freq gradient_steps tau memory_size replay_buffer_class replay_buffer_kwargs "
    "optimize_memory_usage rollout_buffer_class rollout_buffer_kwargs target_update_interval": "leave it out; there is "
    "no replay buffer, since members learn from the episodes that they have just played",
    "exploration_fraction exploration_initial_eps exploration_final_eps use_sde sde_sample_freq action_noise": "leave "
    "it out; actions are sampled from the policies (see temperature and entropy_coef)",
    "policy ortho_init": "leave it out; the network follows from the spaces. Set its layers with "
    "network=NetworkConfig(hidden=(64, 64))",
    "features_extractor_class features_extractor_kwargs normalize_images": "give a torch module as actor_network",
    "eval_env eval_freq n_eval_episodes n_eval_envs best_model_save_path": "leave it out; fitness is measured after "
    "every generation on validation_size held-out starts. For your own environment use evogrpo.EvalCallback",
    "callback callbacks callback_on_new_best callback_after_eval": "put it into the body of a loop over evolve(...), "
    "or give it to train(callback=...)",
    "log_interval stats_window_size monitor_dir track reset_num_timesteps": "leave it out; every learning step is "
    "recorded",
    "verbose progress_bar": "give progress to evolve, resume or train",
    "tensorboard_log tb_log_name log_path": "give run_dir to evolve or train; it contains TensorBoard's logs",
    "n_envs num_envs": "leave it out; episodes run side by side (see num_envs of GymnasiumGroups)",
    "max_steps MAX_STEPS num_train_epochs total_episodes num_episodes": "give generations and steps_per_generation; a "
    "run takes their product in learning steps",
    "logging_steps logging_strategy logging_first_step report_to run_name log_completions": "leave it out; every "
    "learning step is recorded in run_dir",
    "eval_strategy eval_steps do_eval eval_on_start": "leave it out; fitness is measured after every generation",
    "save_strategy save_only_model": "leave it out; a checkpoint is written after every generation (see "
    "checkpoint_steps)",
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio cosine_lr_schedule_config": "give "
    "optimizer=Optimizer(schedule='cosine', warmup_steps=..., total_steps=...), in YAML agent.optimizer",
    "anneal_lr": "give optimizer=Optimizer(schedule='linear', total_steps=...), in YAML agent.optimizer",
    "weight_decay adam_beta1 adam_beta2 adam_epsilon adam_eps optim optimizer_kwargs optimizer_class": "give "
    "optimizer=Optimizer(weight_decay=..., betas=..., eps=...), in YAML agent.optimizer",
    "scale_rewards": "give advantage: 'outcome', 'batch_std' or, for False, 'mean_only'",
    "gradient_accumulation_steps gradient_checkpointing per_device_eval_batch_size": "give batch_size, the samples of "
    "an optimizer step; it is split into micro-batches that fit into memory",
    "bf16 fp16 tf32 torch_dtype model_init_kwargs load_in_4bit load_in_8bit": "load the model with "
    "evogrpo.load_base(..., dtype='bfloat16'), in YAML precision: bfloat16",
    "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha": "give objective=Objective(reference='snapshot', "
    "reference_sync_steps=..., reference_mixing=...), in YAML agent.objective",
    "mask_truncated_completions": "give objective=Objective(mask_truncated=True), in YAML agent.objective",
    "importance_sampling_level": "give loss_type='gspo' for one ratio per completion",
    "use_liger_kernel use_liger_loss use_flash_attention": "leave it out",
    "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_gpu_memory_utilization vllm_tensor_parallel_size": "for "
    "your own engine use Population.sample_with",
    "normalize_advantage norm_adv": "leave it out; advantage decides how the episodes of a group are compared",
    "norm_reward": "leave it out; rewards are compared within a group (see reward_norm of Objective)",
    "deterministic": "leave it out; training samples actions, predict(..., deterministic=True) takes the likeliest",
    "cuda": "give device='cuda'",
}
"""Advice by names, separated by spaces, that have no counterpart where they are given."""

_ELSEWHERE = {own: tuple(names.split()) for own, names in _SYNONYMS.items()}
_CALLS = {name: call for call, names in _TAKEN_BY.items() for name in names.split()}
_ADVICE_BY_NAME = {name: advice for names, advice in _ADVICE.items() for name in names.split()}


def counterpart(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name for what another library calls `name`, or None."""
    return next((candidate for candidate in valid if name in _ELSEWHERE.get(candidate, ())), None)


def hint(name: str, valid: Iterable[str]) -> str | None:
    """Return advice about an unknown name, or None.

    In this order: a synonym among the valid names, advice, a synonym that another call takes, a close match, and a
    name that another call takes.
    """
    names = list(valid)
    if (name_here := counterpart(name, names)) is not None:
        return f"it is called {name_here!r} here"
    if name in _ADVICE_BY_NAME:
        return _ADVICE_BY_NAME[name]
    if (name_here := counterpart(name, _CALLS)) is not None:
        return f"it is called {name_here!r} here; give it to {_CALLS[name_here]}"
    if (match := close_match(name, names)) is not None:
        return f"did you mean {match!r}?"
    return f"give it to {_CALLS[name]}" if name in _CALLS else None


def close_match(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that differs by one edit, or else the most similar one; None if all differ much."""
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
