"""Answers to unknown names: the name here, the place where it belongs, or what to use instead."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from operator import attrgetter
from string import Formatter
from typing import TYPE_CHECKING, Any

from evogrpo.text import MAX_SHOWN, one_line, shown

_MAX_LISTED = 60  # names; a longer list is left out of the message
_MIN_LENGTH = 8  # letters of a name of another library that is also recognised with one edit

_SYNONYMS: Mapping[str, str] = {
    # Hyperparameters.
    "lr": "learning_rate lr_actor actor_lr actor_learning_rate",
    "clip_coef": (
        "epsilon eps_clip clip_range cliprange clip_ratio clip_epsilon clip_param clip_eps pg_clip"
    ),
    "clip_low": "epsilon_low clip_ratio_low pg_clip_low",
    "clip_high": "epsilon_high clip_ratio_high pg_clip_high",
    "group_size": (
        "num_generations num_return_sequences num_return_sequences_in_group n_samples "
        "n_samples_per_prompt rollout_n n"
    ),
    "beta": "kl_coef kl_loss_coef init_kl_coef kl_beta kl_coeff",
    "update_epochs": "num_iterations ppo_epochs n_epochs num_epochs num_sgd_iter max_epochs",
    "max_grad_norm": "grad_clip gradient_clip clip_grad clip_grad_norm max_norm",
    "batch_size": (
        "per_device_train_batch_size mini_batch_size minibatch_size ppo_mini_batch_size"
        " sgd_minibatch_size"
    ),
    "entropy_coef": "ent_coef entropy_loss_coef entropy_coeff",
    "gamma": "discount discount_factor",
    "advantage": "adv_estimator advantage_estimator",
    "advantage_clip": "clip_advantage",
    # The objective and the optimizer.
    "objective": "loss_config",
    "loss_type": "loss loss_fn policy_loss_type",
    "grpo": "ppo ppo_clip",
    "outcome": "grpo grpo_outcome group group_relative",
    "reinforce": "reinforce_plus_plus",
    "mask_truncated": "mask_truncated_completions",
    "aggregation": "loss_agg_mode",
    "kl_estimator": "kl_loss_type kl_penalty",
    "kl_bias_correction": "use_bias_correction_kl",
    "kl_target": "kl_ctrl",
    "delta": "loss_delta",
    "dual_clip": "dual_clip_loss clip_ratio_c",
    "reference_mixing": "ref_model_mixup_alpha",
    "reference_sync_steps": "ref_model_sync_steps",
    "sapo_tau_positive": "sapo_temperature_pos",
    "sapo_tau_negative": "sapo_temperature_neg",
    "importance_correction": "vllm_importance_sampling_mode",
    "importance_cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "dynamic_sampling": "dynamic_filtering",
    "eps": "adam_epsilon",
    "total_steps": "lr_decay_steps",
    # Completions.
    "max_output_tokens": (
        "max_completion_length max_new_tokens response_length max_response_length max_tokens "
        "generate_max_len"
    ),
    "min_output_tokens": "min_new_tokens",
    "stop_strings": "stop stop_words stop_sequences",
    "max_episode_tokens": "max_model_len max_seq_length max_length vllm_max_model_length",
    "micro_batch_tokens": "micro_batch_size_per_gpu micro_batch_size ppo_max_token_len_per_gpu",
    "gradient_checkpointing": "activation_checkpointing enable_gradient_checkpointing recompute",
    "data_batch_size": "data_batch_size_per_gpu",
    # Agents and populations.
    "observation_spaces": "observation_space",
    "action_spaces": "action_space",
    "size": (
        "pop_size num_agents n_agents num_members members population_size tournament_size"
        " tourn_size num_samples"
    ),
    "population": "pop agents",
    "actor_network": (
        "model base_model actor model_name_or_path pretrained_model_path pretrain model_name "
        "model_path policy_model"
    ),
    "model": (
        "model_name_or_path model_name base_model pretrained_model_path pretrain model_path "
        "base_model_name_or_path"
    ),
    "source": (
        "model_name_or_path model_name pretrained_model_name_or_path model_path"
        " base_model_name_or_path"
    ),
    "dtype": "torch_dtype precision",
    "precision": "dtype torch_dtype vllm_dtype",
    "hidden": "net_arch hidden_sizes hidden_size hidden_layers fcnet_hiddens",
    "activation": "activation_fn fcnet_activation",
    "log_std": "log_std_init action_std_init",
    "network": (
        "net_config network_config policy_kwargs net_arch hidden_sizes activation_fn log_std_init "
        "head_config policy_network"
    ),
    "normalise_observations": (
        "normalize_observations normalize_observation normalize normalise norm_obs vecnormalize"
    ),
    "hp_config": "hyperparameter_config hp_space param_space hyperparam_bounds",
    "lora_config": "peft_config",
    "full_finetuning": "full full_finetune",
    "lora": "lora_config peft_config",
    "r": "rank lora_r lora_rank",
    "seed": "rand_seed random_seed data_seed",
    "env_kwargs": "env_config env_args make_kwargs",
    # Evolution.
    "probability": "mut_p rl_hp rl_hp_mut mutation_probability",
    "mutation": "mutations custom_explore_fn hyperparam_mutations",
    "quantile": "quantile_fraction",
    "resample": "resample_probability",
    "factors": "perturbation_factors",
    "eta": "reduction_factor",
    "factor": "grow_factor shrink_factor",
    "min": "low minimum",
    "max": "high maximum",
    "choices": "values",
    "strategy": "tournament selection pruner scheduler search_alg",
    "search_space": "param_space hp_config hyperparam_bounds",
    "truncation_pbt": "pbt population_based_training populationbasedtraining pb2",
    "successive_halving": "asha hyperband sha",
    "tournament": "tournamentselection",
    "random_search": "random",
    "fixed": "none no_evolution",
    # Tasks and environments.
    "max_prompt_length": "prompt_length max_input_length prompt_max_len max_context_length",
    "reward_funcs": "reward_func reward_fn reward_functions reward_function rewards",
    "reward_fn": "reward_function compute_score custom_reward_function",
    "reward": (
        "reward_funcs reward_fn reward_func reward_function compute_score custom_reward_function"
    ),
    "conversation_template": "input_template",
    "environment_factory": "agent_func_path",
    "streaming": "dataset_streaming",
    "train_dataset": "dataset train_files prompt_data training_data data",
    "validation_dataset": "eval_dataset val_dataset valid_dataset dev_dataset val_files",
    "dataset": "train_dataset train_files prompt_data",
    "tokenizer": "processing_class",
    "max_turns": "num_turns n_turns max_rounds max_tool_calling_iterations",
    "wrappers": "wrapper env_wrapper wrapper_class",
    "validation": "val valid dev eval evaluation",
    "n": "num_return_sequences num_generations num_samples n_samples",
    "env": "env_id environment env_name",
    "num_envs": "n_envs",
    "vectorization": "vec_env_cls vec_env_class",
    "max_episode_steps": "max_episode_length episode_length time_limit horizon",
    "episodes": "n_eval_episodes",
    # Runs.
    "generations": "max_generations n_generations",
    "steps_per_generation": (
        "evo_steps perturbation_interval eval_steps eval_freq test_freq evaluation_interval "
        "eval_interval eval_every"
    ),
    "samples_per_step": "generation_batch_size",
    "total_timesteps": "max_timesteps n_timesteps num_timesteps timesteps",
    "max_timesteps": "total_timesteps n_timesteps num_timesteps timesteps",
    "checkpoint_steps": "save_steps save_freq checkpoint_interval checkpoint checkpoint_frequency",
    "keep_checkpoints": "save_total_limit num_to_keep",
    "completions": "num_completions_to_print log_completions",
    "max_seconds": "timeout max_time time_budget time_budget_s",
    "target_fitness": "target target_reward target_score reward_threshold max_reward",
    "run_dir": (
        "tensorboard_log tb_log_name log_dir log_path save_path exp_name output_dir storage_path"
        " logging_dir run_name experiment_name default_local_dir local_dir ckpt_path"
        " checkpoint_path elite_path best_model_save_path"
    ),
    "progress": "progress_bar verbose disable_tqdm",
    "callbacks": "callback",
    "trackers": "report_to log_with logger loggers tracker tensorboard",
    # Methods and public names.
    "save_checkpoint": "save save_pretrained save_model",
    "load_checkpoint": "load_model load_state_dict",
    "predict": "act",
    "test": "evaluate",
    "finish": "train fit run",
    "fitness": "scores",
    "steps": "num_timesteps",
    "members": "member individuals",
    "load": "from_pretrained load_agent",
    "SuccessiveHalving": "ashascheduler asha hyperband hyperbandscheduler",
    "TruncationPBT": "populationbasedtraining pbt pb2",
    "Tournament": "tournamentselection",
    "HyperparameterConfig": "hyperparametersconfig searchspace",
    "RLParameter": "rlhyperparameter",
    "MultiAgentGRPO": "mappo ippo multiagentppo maddpg matd3",
    "load_base": "create_model load_model automodelforcausallm",
    "GymnasiumGroups": "make_vec_env make_vect_envs dummyvecenv subprocvecenv gymnasiumenv",
    "PettingZooGroups": "make_multi_agent_vect_envs pettingzooenv",
    "VLLMSampler": "vllmclient vllmconfig",
    "HuggingFaceGym": "reasoninggym",
    # Hooks of callbacks, and columns of datasets.
    "on_run_start": (
        "on_train_begin on_train_start on_training_start _on_training_start on_begin on_start"
    ),
    "on_run_end": "on_train_end on_training_end _on_training_end on_end on_finish",
    "on_step": (
        "_on_step on_step_end on_step_begin on_log on_batch_end on_train_batch_end on_train_result "
        "on_rollout_end _on_rollout_end on_rollout_start"
    ),
    "on_generation": "on_evaluate on_epoch_end on_epoch_begin on_generation_end on_save on_eval",
    "question": "instruction problem query input text",
    "answer": "output solution response target label ground_truth final_answer expected_answer",
    "prompt": "messages conversations conversation chat question problem query instruction",
    # Data types.
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "int8": "8bit",
    "nf4": "4bit int4 fp4",
}
"""Names in other libraries, in small letters and separated by spaces, by the name here; any may
occur repeatedly.
"""

_ADVICE: Mapping[str, str] = {
    # Length of a run, and sizes.
    "a run has {generations} times {steps_per_generation} learning steps": (
        "max_steps num_train_epochs total_epochs total_training_steps training_steps num_episodes"
        " epochs training_iteration num_updates max_t"
    ),
    "a learning step has {samples_per_step} completions, or whole episodes": (
        "n_steps learn_step data_batch_size "
        "train_batch_size rollout_batch_size rollout_fragment_length max_samples"
    ),
    "{batch_size} samples make an optimizer step, and passes are divided to fit in memory": (
        "gradient_accumulation_steps micro_train_batch_size micro_rollout_batch_size"
        " ppo_micro_batch_size_per_gpu use_dynamic_bsz gradient_checkpointing*"
        " activation_checkpointing_* auto_find_batch_size per_device_eval_batch_size"
        " use_memory_efficient_params packing_samples"
    ),
    # The objective.
    "there is no critic, so leave it out": (
        "vf_coef gae_lambda clip_range_vf vf_clip_param lam lambda "
        "lambda_ gae use_gae use_critic critic critic_* value_* cliprange_value cliprange_vf"
    ),
    "set {advantage} to 'outcome' to divide by the group's standard deviation, or to 'mean_only'": (
        "scale_rewards normalize_advantage norm_adv_by_std_in_grpo norm_mean_type norm_std_type "
        "normalize_reward norm_reward whiten_rewards"
    ),
    "set {advantage} to 'gdpo' to normalise each reward function by itself": (
        "multi_objective_aggregation"
    ),
    "set {loss_type} to 'gspo' for one ratio per completion": "importance_sampling_level",
    "set {reference} to 'snapshot', and {reference_sync_steps}": "sync_ref_model",
    "a {beta} above 0 adds the KL to the reference": (
        "use_kl_loss use_kl_in_reward add_token_level_kl "
        "use_separate_reference_adapter set_reference_policy_adapter"
    ),
    "{entropy_coef} is constant, or evolves": "use_adaptive_entropy entropy_coef_* entropy_target",
    # The optimizer.
    "the optimizer is AdamW, with {betas}, {eps} and {weight_decay}": (
        "optim optim_* adam_beta1 adam_beta2 optimizers optimizer optimizer_class optimizer_kwargs"
    ),
    "set {total_steps} and the schedule beside it": (
        "lr_scheduler lr_scheduler_type lr_scheduler_kwargs "
        "warmup_ratio cosine_lr_schedule_config lr_schedule lr_warmup_steps_ratio lr_warmup_ratio"
    ),
    "its keys are settings here, such as {stop_strings}, {top_p} and {max_output_tokens}": (
        "generation_kwargs sampling_params generation_config"
    ),
    # Records.
    "members are evaluated after each generation, on {validation_questions} questions": (
        "eval_* do_eval n_eval_episodes include_for_metrics batch_eval_metrics val_before_train"
        " metric_for_best_model greater_is_better load_best_model_at_end callback_on_new_best"
        " callback_after_eval save_elite metric num_generations_eval"
    ),
    "each learning step is logged in {run_dir}": (
        "logging_* log_* wandb wandb_* wb use_wandb project project_name trackio_*"
        " stats_window_size monitor_* tensorboard use_tensorboard logger"
    ),
    "{run_dir} keeps the newest checkpoints and the best member, and can be resumed": (
        "save_* "
        "overwrite_checkpoints resume_mode resume_from_checkpoint reset_num_timesteps name_prefix"
    ),
    # Models and engines.
    "vLLM samples completions through {sampler|VLLMSampler}": "use_vllm vllm_* vllm",
    "set {precision|dtype}, such as 'bfloat16'": (
        "bf16 fp16 bf16_full_eval fp16_full_eval load_in_8bit load_in_4bit quantization_config"
    ),
    "it is a setting of {lora|lora_config}": (
        "r lora_r lora_rank lora_alpha target_modules exclude_modules use_rslora"
    ),
    "{lora|lora_config} has only r, lora_alpha, target_modules, exclude_modules and use_rslora": (
        "lora_* rank_pattern alpha_pattern use_dora use_qalora use_bdlora"
        " init_lora_weights revision task_type peft_* auto_mapping inference_mode fan_in_fan_out"
        " bias layers_* layer_replication megatron_* loftq_config"
        " eva_config corda_config velora_config alora_* qalora_* monteclora_config runtime_config"
        " arrow_config kasa_config target_parameters ensure_weight_tying"
    ),
    "members share one frozen base; set {full_finetuning} to train its embeddings or head too": (
        "modules_to_save trainable_token_indices"
    ),
    "set {model}": "actor_network",
    "use {tokenizer}": "processing_class",
    "the tokenizer is loaded with the model, so leave it out": "processing_class tokenizer",
    "several processes are started by torchrun": "accelerator",
    "set {network}, or {evolve_network} to let architectures evolve": (
        "arch_mut new_layer architecture new_layer_prob act_mut activation_selection policy_kwargs"
    ),
    # Search.
    "ranges of values that evolve are set by {search_space|hp_config}": (
        "min_lr max_lr min_batch_size "
        "max_batch_size min_learn_step max_learn_step hyperparam_mutations"
    ),
    "selection and mutation are settings of {strategy}": (
        "no_mut no_mutation mut params_mut mut_sd mutation_sd mutate_elite parameters elitism"
        " mutation quantile_fraction resample_probability perturbation_factors custom_explore_fn"
        " reduction_factor grace_period rl_hp rl_hp_mut mut_p mode quantile resample"
    ),
    "give its values by name, as arguments of {GRPO} and {evolve}": (
        "init_hp args config training_args trainer_config"
    ),
    "give its values by name, in the sections of the configuration": (
        "init_hp args config training_args"
    ),
    "set {target_fitness} to end a run early": "stop early_stopping_patience",
    # Rewards, data and environments.
    "write a function that calls the model, for {reward|reward_funcs}": (
        "reward_model reward_pretrain reward_processing_classes remote_rm_url"
    ),
    "name the columns question and answer, or prompt": (
        "input_key label_key prompt_key reward_fn_key dataset_text_field"
    ),
    "{dataset} has the keys train, validation and test": (
        "val_files eval_dataset validation_dataset test_dataset val_dataset"
    ),
    "prompts are formatted by the chat template, so leave it out": (
        "apply_chat_template apply_chat_template_fn"
    ),
    "prompts longer than {max_prompt_length} are left out": (
        "truncation filter_overlong_prompts filter_overlong_prompts_workers"
    ),
    "conversations have {max_turns} and {environment_factory}": "rollout_func",
    "set {clip_low} and {clip_high}": "eps_clip_low_high",
    "{wrappers} takes names with options": "wrapper_kwargs",
    "callbacks are an argument of evolve and train, in Python": "callback callbacks",
    "progress is shown on terminals, so leave it out": "verbose progress_bar disable_tqdm",
    "networks are built from the spaces of the environment; {network} changes them": "policy",
    "there is one algorithm, GRPO, so leave it out": "algo algorithm alg",
    "its keys are in the sections task, agent, hyperparameters and schedule here": (
        "actor_rollout_ref data trainer rollout actor"
    ),
    "set {base_parts|parts} to shard the base model (FSDP2)": (
        "fsdp fsdp_size fsdp_config zero_stage"
    ),
    # Settings of other engines and of their infrastructure.
    "it has no counterpart here, so leave it out": (
        "dataloader_* ddp_* fsdp* hub_* deepspeed* ds3_* torch_compile* torch_empty_* use_*"
        " zero_stage n_gpus_per_node nnodes num_gpus num_rollout_workers tensor_model_parallel_size"
        " gpu_memory_utilization param_offload truncation_side resources_per_trial"
        " max_concurrent_trials synch require_attrs burn_in_period time_attr rollout_buffer_*"
        " sde_sample_freq custom_objects print_system_info force_reset memory_size double"
        " channels_last swap_channels torch_compiler eps_start eps_decay tau tf32 flash_attn"
        " disable_dropout label_smoothing_factor cache_implementation pad_to_multiple_of"
        " transformers_* log_on_each_node push_to_hub remove_unused_columns dataset_num_proc"
        " accelerator_config parallelism_config data_collator label_names trust_remote_code"
        " off_policy_mask_threshold router_aux_loss_coef neftune_noise_alpha liger_kernel_config"
        " shuffle_dataset vespo_* start_index vec_env_kwargs clip_obs clip_reward norm_obs_keys"
        " full_determinism local_rank do_train do_predict skip_memory_metrics"
        " average_tokens_across_devices length_column_name train_sampling_strategy ignore_data_skip"
        " debug restore_callback_states_from_checkpoint enable_jit_checkpoint prediction_loss_only"
        " include_num_input_tokens_seen model_init_kwargs cast_lm_head_to_fp32 adam_offload"
        " colocate_* return_raw_completions wrap"
    ),
}
"""Names in other libraries, in small letters, by what to write here. A `*` stands for any letters.

In braces are names of settings, which are replaced by the place where the setting is given; of
several, separated by bars, the first one that has a place.
"""

_CALLS: Mapping[str, str] = {
    "{evolve}(population, env) trains": (
        "grpotrainer trainer rloo* ppotrainer sfttrainer dpotrainer train_llm finetune_llm"
        " finetune_llm_* llmppo llmreinforce rayppotrainer train_on_policy train_off_policy"
        " train_multi_agent_* tuner train fit run step training_step rolloutworker localtrainer"
    ),
    "pass its settings to {GRPO} and {evolve}, or use evogrpo.from_trl(config)": (
        "grpoconfig trainingarguments ppoconfig"
    ),
    "GRPO.population(size, ...) makes one": "create_population population agents makepopulation",
    "{train}('CartPole-v1', total_timesteps=...) trains a small network": (
        "ppo a2c dqn sac td3 ddpg"
    ),
    "strategies of {evolve} mutate, such as Tournament(mutation=...)": (
        "mutations mutation mutate select"
    ),
    "evaluate_policy(agent, env) of Stable-Baselines3 works unchanged, as does agent.test(env)": (
        "evaluate_policy"
    ),
    "pass the environment to {evolve}, or to agent.test(env)": "set_env get_env env",
    "subclass {Callback}; every generation is evaluated anyway": "*callback add_callback callbacks",
    "import it from peft": "loraconfig peftmodel get_peft_model prompttuningconfig",
    "save_checkpoint writes a folder that peft can load": "push_to_hub merge_and_unload export",
    "records are in the run_dir of {evolve}": "logger set_logger log log_metrics history",
    "rewards are functions: HuggingFaceGym(reward_fn=...)": (
        "rewardmodel rewardfunction rewardmanager rewardfunc reward_fn"
    ),
    "set_training_mode(False) ends sampling": "eval",
    "get_policy returns it as a module; that of a small network is a copy": (
        "policy actor model actor_network q_net net state_dict parameters "
        "named_parameters get_parameters network"
    ),
    "to begin with weights of your own, pass a module as GRPO(actor_network=...)": (
        "set_parameters set_policy set_weights load_weights"
    ),
    "set GRPO.population(normalise_observations=True)": (
        "vecnormalize runningmeanstd get_vec_normalize_env"
    ),
    "set {evolve}(target_fitness=...) to end a run early": "stoptraining*",
    "runs, agents and environments take a seed, such as GRPO(seed=...)": "set_random_seed",
    "every episode is counted anyway, so leave it out": "monitor vecmonitor",
    "members learn from samples of their current policy, so leave it out": (
        "*replaybuffer replaymemory rolloutbuffer"
    ),
    "it is not needed here, so leave it out": "wrap_models clean_up registry algo mut",
    "pass it to {evolve}, which plays the episodes; gymnasium.make returns a single one": "reset",
    "give it a function that makes one: GymnasiumGroups(lambda: ...)": "vecenv make_env",
}
"""Names of classes, functions and methods in other libraries, by what to use here; in the form of
`_ADVICE`.
"""

_OTHER_NAMES = {name: tuple(others.split()) for name, others in _SYNONYMS.items()}
_HOLDERS = """
    evolve GRPO.population GRPO HuggingFaceGym GymnasiumGroups Objective Optimizer load_base train
    MultiAgentGRPO MultiTurnGym EnvironmentGym PettingZooGroups NetworkConfig ArchitectureLimits
    FitnessConfig TruncationPBT SuccessiveHalving
"""
"""Public names whose arguments are searched for a setting, in this order."""

OTHER_MEANINGS = {
    "strategy": ", which selects and mutates members. base_parts shards the base model (FSDP2)"
}
"""Notes on keys whose names have another meaning in other libraries, by key."""

Where = Callable[[str], str | None]
"""Function of a setting's name. Returns the place where the setting is given; None if there is
none.
"""


def counterpart(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name for a name of another library or in capitals, or None.

    A long name may have one edit.
    """
    names = list(valid)
    key = name.lower()
    if name not in names and key in names:
        return key
    # Of several names here, the first one counts.
    others: dict[str, str] = {}
    for candidate in names:
        for other in _OTHER_NAMES.get(candidate, ()):
            others.setdefault(other, candidate)
    if key in others:
        return others[key]
    long_names = [other for other in others if len(other) >= _MIN_LENGTH]
    similar = one_edit_match(key, long_names)
    return None if similar is None else others[similar]


def close_match(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that differs by one edit, or else the most similar one.

    None if none is similar.
    """
    names = list(valid)
    match = one_edit_match(name, names)
    if match is not None:
        return match
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return similar[0] if similar else None


def one_edit_match(name: str, valid: Iterable[str]) -> str | None:
    """Return the first valid name that differs by one edit, or None."""
    return next((candidate for candidate in valid if _is_one_edit(name, candidate)), None)


def _is_one_edit(typed: str, name: str) -> bool:
    """Return True if one letter was changed, added or left out, or two neighbours were swapped."""
    shorter = min(len(typed), len(name))
    start = 0  # of the part that differs
    while start < shorter and typed[start] == name[start]:
        start += 1
    rest = typed[start:]
    other = name[start:]
    # Another digit, or another name of one letter, is no typing error.
    changed = rest[1:] == other[1:] and shorter > 1 and not rest[:1].isdigit()
    added_or_left_out = rest[1:] == other or rest == other[1:]
    swapped = rest[:2] == other[:2][::-1] and rest[2:] == other[2:]
    return changed or added_or_left_out or swapped


def public_place(setting: str) -> str | None:
    """Return the public call with an argument of this name, or the public name itself, or None."""
    package = import_module("evogrpo")
    if setting in package.__all__:
        return f"evogrpo.{setting}"
    for holder in _HOLDERS.split():
        if setting in inspect.signature(attrgetter(holder)(package)).parameters:
            return f"{holder}({setting}=...)"
    return None


def advice(
    name: str, where: Where, *, patterns: bool, table: Mapping[str, str] = _ADVICE
) -> str | None:
    """Return what to use here instead of a name of another library, or None.

    Args:
        name: The name.
        where: Finds the place of a setting. Advice about a setting without a place is left out.
        patterns: Also compare the name with patterns such as "vllm_*".
        table: Advice by names.
    """
    key = name.lower()
    for text, others in table.items():
        for other in others.split():
            if key == other or (patterns and fnmatchcase(key, other)):
                filled = _filled(text, where)
                if filled is not None:
                    return filled
    return None


def _filled(text: str, where: Where) -> str | None:
    """Return advice with its settings replaced by their places, or None if one has no place."""
    result = ""
    for literal, settings, _, _ in Formatter().parse(text):
        result += literal
        if settings is not None:
            place = _first_place(settings.split("|"), where)
            if place is None:
                return None
            result += place
    return result


def _first_place(settings: Iterable[str], where: Where) -> str | None:
    """Return the place of the first setting that has one, or None."""
    for setting in settings:
        place = where(setting)
        if place is not None:
            return place
    return None


def unknown_name_error(
    kind: str, name: object, valid: Iterable[str], where: Where | None = None
) -> ValueError:
    """Return the error for an unknown name.

    It has the name here, what to use instead, a similar name, or all valid names.

    Args:
        kind: Kind of name, such as "hyperparameter".
        name: The unknown name.
        valid: The names that exist.
        where: Finds the place of a setting that belongs elsewhere. None = for arguments, those of
            public calls; nothing for other kinds.
    """
    typed = one_line(name, MAX_SHOWN)
    answer = _answer(typed, list(valid), where, is_argument=kind.startswith("argument"))
    return ValueError(f"unknown {kind} {shown(name)}{answer}")


def _answer(name: str, names: Sequence[str], where: Where | None, *, is_argument: bool) -> str:
    """Return the end of the message for an unknown name; see `unknown_name_error`.

    `where` finds the place of a setting, such as a section or an argument of a public call.
    """
    # 1. The same setting under another name.
    name_here = counterpart(name, names)
    if name_here is not None:
        return f": it is called {name_here!r} here"
    # 2. A misspelt key of a configuration is answered without a search for its place, which imports
    #    torch.
    match = one_edit_match(name, names)
    if match is not None and not is_argument and not _is_known(name):
        return f": did you mean {match!r}?"
    # 3. What to use instead: exact names first, then patterns such as "vllm_*". Arguments are
    #    looked up in all public calls.
    if where is None and is_argument:
        where = public_place
    if where is not None:
        instead = answer_elsewhere(name, names, where)
        if instead is None and match is None:
            instead = advice(name, _or_here(names, where), patterns=True)
        if instead is not None:
            return f": {instead}."
    # 4. A similar name, or all names.
    match = close_match(name, names)
    if match is not None:
        return f": did you mean {match!r}?"
    if len(names) <= _MAX_LISTED:
        return f". Valid names: {', '.join(names) or '(none)'}"
    return ""


def _is_known(name: str) -> bool:
    """Return True if another library has a setting of this name."""
    key = name.lower()
    names = [*_OTHER_NAMES.values(), *map(str.split, _ADVICE.values())]
    return any(key in others for others in names)


def answer_elsewhere(name: str, valid: Iterable[str], where: Where) -> str | None:
    """Return what to use instead of a name that belongs elsewhere, or None.

    Args:
        name: The unknown name.
        valid: The names that exist where it was given.
        where: Finds the place of a setting.
    """
    key = name.lower()
    place = where(key)
    if place is None:
        instead = advice(name, _or_here(valid, where), patterns=False)
        if instead is not None:
            return instead
        names_here = [here for here, others in _OTHER_NAMES.items() if key in others]
        place = _first_place(names_here, where)
    return None if place is None else f"use {place}"


def _or_here(valid: Iterable[str], where: Where) -> Where:
    """Return `where`, except that a valid name is its own place."""
    names = set(valid)
    return lambda setting: setting if setting in names else where(setting)


def _missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):  # not one that Python looks up, such as __deepcopy__
        names = [each for each in dir(type(owner)) if not each.startswith("_")]
        answer = _instead_of_attribute(name, names)
        if answer is not None:
            message = f"{message}: {answer}"
    # With the name and the object, Python adds the most similar attribute to a message.
    return AttributeError(message, name=name, obj=owner)


def _instead_of_attribute(name: str, names: Sequence[str]) -> str | None:
    """Return the name of an attribute here, or what to use instead."""
    name_here = counterpart(name, names)
    if name_here is not None:
        return f"it is called {name_here!r} here"
    if "best" in names:  # of a run or a population, whose best member is an agent
        agent = import_module("evogrpo").GRPO
        of_agent = name if hasattr(agent, name) else counterpart(name, dir(agent))
        if of_agent is not None:
            return f"use best.{of_agent}"
    return advice(name, public_place, patterns=True, table=_CALLS)


def missing_public_name(name: str, valid: Iterable[str]) -> str:
    """Return the message for a name that evogrpo does not have, with what to use instead."""
    message = f"evogrpo has no {name!r}"
    lower = {each.lower(): each for each in valid}
    names = list(lower.values())
    name_here = lower.get(name.lower()) or counterpart(name, names)
    if name_here is not None:
        return f"{message}: it is called {name_here!r} here"
    instead = advice(name, _or_here(names, public_place), patterns=True, table=_CALLS)
    if instead is not None:
        return f"{message}: {instead}"
    match = close_match(name.lower(), lower)
    if match is not None:
        return f"{message}: did you mean {lower[match]!r}?"
    return message


class NamesMissing:
    """Base class of objects whose errors about a missing attribute say what to use instead."""

    __slots__ = ()

    # Type checkers see the declared attributes only.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that failed, whose error is raised again
                return super().__getattribute__(name)
            raise _missing_attribute(self, name)

        def __setattr__(self, name: str, value: object) -> None:
            try:
                super().__setattr__(name, value)
            except AttributeError:
                if hasattr(type(self), name):  # such as a property without a setter
                    raise
                raise _missing_attribute(self, name) from None
