#!/bin/sh
# SkyRL-v0's 7B recipe on its own learning backend, verl, with our environments: the numbers are those of ../swe-7b.yaml,
# stage two. $1 is the file of tasks, see docs/adapters/verl.md.
set -eu
exec python -m verl.trainer.main_ppo \
    data.train_files="$1" \
    data.val_files="$1" \
    data.train_batch_size=16 \
    data.max_prompt_length=8192 \
    data.max_response_length=32768 \
    actor_rollout_ref.model.path=SWE-Gym/OpenHands-7B-Agent \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.5 \
    actor_rollout_ref.rollout.max_model_len=32768 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path=recipes/verl/agent_loop.yaml \
    actor_rollout_ref.rollout.agent.default_agent_loop=skyenv \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token \
    trainer.total_training_steps=15 \
    trainer.save_freq=5 \
    trainer.test_freq=-1 \
    trainer.val_before_train=false
