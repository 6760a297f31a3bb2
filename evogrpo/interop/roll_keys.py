"""The keys of ROLL's RLVR configuration."""

from collections.abc import Mapping
from typing import Any

# What ROLL takes for the keys that mean something here and are left out.
DEFAULTS: Mapping[str, Any] = {
    "rollout_batch_size": None,
    "num_return_sequences_in_group": None,
    "prompt_length": None,
    "response_length": None,
    "sequence_length": None,
    "seed": None,
    "adv_estimator": "gae",
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "gamma": 1.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "target_kl": None,
    "kl_horizon": 10_000,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "importance_sampling": "token",
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "whiten_advantages": False,
    "advantage_clip": None,
    "reward_clip": None,
    "reward_norm": None,
    "reward_shift": False,
    "reward_scale": False,
    "norm_mean_type": None,
    "norm_std_type": None,
    "max_len_mask": False,
    "mask_type": "loss",
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    "train_infer_correction": None,
    "use_rollout_importance_sampling_ratio": False,
    "rollout_importance_sampling_ratio_upper_bound": 1.2,
    "actor_train": None,
    "actor_infer": None,
}
# Of actor_train.training_args.
TRAINING = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "per_device_train_batch_size": None,
    "gradient_accumulation_steps": None,
}
# Of actor_infer.generating_args; what follows them repeats other keys.
GENERATING = {
    "temperature": 0.95,
    "top_p": 0.7,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "num_beams": 1,
    "do_sample": True,
    "stop_strings": None,
}
REPEATED = (
    *("max_new_tokens", "max_length", "num_return_sequences", "logprobs", "length_penalty"),
    "include_stop_str_in_output",
)

# Terms of the loss and weights of samples that are not offered, each with the value at which ROLL leaves it out.
OTHER_TERMS = {
    "l2": 0.0,
    "postive_loss_coef": 0,
    "positive_loss_coef": 0,
    "pg_variant": "ppo",
    "use_topr_neg_loss_coef": 0.0,
    "use_topr_loss": False,
    "rl_loss_coef": 1.0,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "error_max_len_clip": False,
    "add_len_reward": False,
    "use_reward_scaling": False,
    "use_reward_norm": False,
    "whiten_rewards": False,
    "use_policy_loss_type": "PPO",
    "train_infer_ratio_mask": False,
    "train_infer_diff_mask": False,
    "train_infer_ratio_seq_mask": False,
    "train_infer_diff_seq_mask": False,
}
DISTILLATION = ("teacher", "student_train", "student_infer", "is_pure_opd", "use_opd")
CRITIC = ("lambd", "value_clip", "critic", "critic_warmup", "reward_pretrain")
ROLES = ("reference", "reward", "reward_model", "rewards", "validation")
INFRASTRUCTURE = (
    *("defaults", "hydra", "exp_name", "rpc_timeout", "output_dir", "base_dir", "logging_dir", "rollout_dump_dir"),
    *("track_with", "tracker_kwargs", "max_steps", "save_steps", "max_ckpt_to_keep", "logging_steps", "eval_steps"),
    *("val_batch_size", "local_rank", "resume_from_checkpoint", "checkpoint_config", "val_prompt_length"),
    *("val_sequence_length", "profiler_timeline", "profiler_memory", "report_length_and_rewards"),
    *("is_offload_states", "is_offload_optimizer_states_in_train_step", "length_profiler_dir"),
    *("profiler_output_dir", "system_envs", "model_update_buffer_size_mb", "num_nodes", "num_gpus_per_node"),
    *("model_download_type", "rollout_mock", "generate_opt_level", "is_num_return_sequences_expand"),
    *("max_running_requests", "is_use_additional_prompts", "max_additional_running_prompts"),
    *("user_defined_rollout_loop_cls", "pretrain", "async_generation_ratio", "enable_reference"),
    *("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute", "global_template", "dataset_filter"),
    *("vlm_filter", "save_logging_board_dir", "val_greedy", "val_n_sample", "balance_length", "router_args"),
    *("minibatch_data_iter_num", "offload_nccl", "tag_to_template", "transfer_backend", "otlp_output_dir"),
    *("reward_system_config", "pure_opd_pipeline_type", "error_max_len_threshold"),
    *("train_infer_ratio_threshold_low", "train_infer_ratio_threshold_high"),
    *("train_infer_diff_threshold_low", "train_infer_diff_threshold_high", "train_infer_ratio_seq_threshold_low"),
    *("train_infer_ratio_seq_threshold_high", "train_infer_diff_seq_threshold_low"),
    *("train_infer_diff_seq_threshold_high",),
)
