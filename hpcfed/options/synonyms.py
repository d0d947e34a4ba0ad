"""What other tools and papers call our options, to guess what a user means."""

from collections.abc import Iterable

from hpcfed.errors import did_you_mean, plain_name

SYNONYMS = {
    "lr": "learning_rate eta local_lr client_lr step_size learningrate "
    "local_learning_rate client_learning_rate init_lr",
    "lr_decay": "decay gamma learning_rate_decay",
    "lr_schedule": "scheduler lr_scheduler learning_rate_schedule",
    "lr_warmup": "warmup warmup_rounds warmup_steps warm_up num_warmup_steps",
    "lr_min": "min_lr eta_min lr_end",
    "lr_step_size": "lr_step decay_steps milestones",
    "lr_step_factor": "lr_gamma",
    "optimiser": "optimizer optim local_optimizer client_optimizer opt optimizer_name",
    "adam_epsilon": "eps adam_eps",
    "beta1": "betas adam_beta1 beta_1",
    "beta2": "adam_beta2 beta_2",
    "participation": "fraction fraction_fit frac sample_rate sampling_rate join_ratio "
    "client_fraction client_frac participation_rate C fraction_train train_fraction "
    "participation_ratio selection_ratio",
    "cohort": "cohort_size clients_per_round num_sampled sampled_clients min_fit_clients "
    "client_num_per_round num_participants participants num_selected_clients",
    "init": "init_from pretrained load_model initial_weights init_model load_from "
    "model_path",
    "epochs": "local_epochs local_ep num_epochs E local_num_epochs epochs_per_round "
    "max_epochs client_epochs",
    "clients": "num_clients n_clients number_of_clients num_users users nodes n N K "
    "client_num_in_total num_supernodes num_parties total_clients "
    "min_available_clients",
    "rounds": "num_rounds n_rounds number_of_rounds global_rounds comm_rounds "
    "communication_rounds global_epochs iterations T num_server_rounds "
    "server_rounds comm_round central_num_iterations num_iterations max_rounds "
    "total_rounds federated_rounds",
    "batch_size": "batch bs batchsize local_bs local_batch_size minibatch b B "
    "train_batch_size",
    "classes_per_client": "shards shards_per_client num_classes_per_client "
    "labels_per_client num_shards",
    "aggregation": "aggregate defense defence aggregation_rule robust",
    "weights": "weighting weighted client_weights weighted_average aggregation_weights "
    "fed_avg_weighting",
    "devices": "device_profile device_capacity system_heterogeneity",
    "dropout_rate": "client_dropout drop_rate dropout_probability failure_rate",
    "deadline": "round_deadline round_timeout timeout",
    "oversample": "over_selection overcommit overcommitment over_sample",
    "dataset": "data data_set dataset_name",
    "dataset_options": "dataset_kwargs dataset_args data_options data_args data_kwargs",
    "data_seed": "partition_seed split_seed dataset_seed",
    "text_length": "block_size context_length context seq_len seq_length sequence_length "
    "window max_length",
    "text_tokens": "tokens tokenizer tokenization",
    "data_root": "data_dir data_path datadir dataset_dir data_folder root dataset_path "
    "data_cache_dir root_dir",
    "out": "output output_dir out_dir outdir outputs save save_dir save_path log_dir "
    "logdir folder o results_dir result_dir output_path log_path checkpoint_dir",
    "device": "gpu gpus cuda use_cuda accelerator gpu_id gpu_ids device_id cuda_device ngpu "
    "num_gpus no_cuda",
    "method": "algorithm algo strategy aggregator m federated_optimizer gradient_policy "
    "fl_algorithm",
    "model": "network arch architecture net backbone model_name",
    "alpha": "heterogeneity beta concentration dirichlet dirichlet_alpha dir_alpha non_iid "
    "noniid partition_alpha",
    "partition": "split partitioning partitioner distribution partition_method iid "
    "data_distribution",
    "weight_decay": "wd l2 l2_reg regularization",
    "clip": "grad_clip max_grad_norm gradient_clipping clip_value clipping_norm "
    "clipping_bound",
    "seed": "random_seed rng_seed manual_seed s seed_value",
    "seeds": "repeats num_seeds trials times",
    "evaluate_every": "eval_every eval_interval eval_gap test_every eval_freq "
    "frequency_of_the_test evaluation_frequency rounds_per_eval test_interval",
    "evaluate_clients": "eval_clients num_eval_clients fraction_evaluate min_evaluate_clients "
    "test_clients val_cohort_size",
    "metrics": "metric measures eval_metrics",
    "checkpoint_every": "checkpoint save_every checkpoint_interval save_freq",
    "snapshot_every": "snapshots snapshot_interval",
    "resume": "continue restart from_checkpoint load_checkpoint resume_from",
    "target_accuracy": "target target_acc",
    "stop_at_target": "target_stop",
    "early_stop": "early_stopping patience es_patience early_stop_patience",
    "attackers": "malicious byzantine num_attackers num_byzantine malicious_clients "
    "adversaries f num_malicious",
    "attack_strength": "strength attack_scale",
    "tolerance": "trim trim_ratio byzantine_fraction",
    "precision": "dtype amp fp16 bf16 half mixed_precision",
    "augment": "augmentation data_augmentation transforms",
    "overwrite": "force exist_ok",
    "validation": "val val_size validation_size",
    "new_clients": "novel_clients unseen_clients num_new_clients",
    "deterministic": "reproducible",
    "server": "server_size",
    "server_ranks": "servers num_servers",
    "server_lr": "global_lr eta_g server_learning_rate global_learning_rate central_lr",
    "server_momentum": "server_beta1",
    "server_tau": "tau",
    "prox_mu": "mu proximal_mu fedprox_mu proximal_term proxy_mu",
    "dyn_alpha": "alpha_coef feddyn_alpha",
    "ditto_lambda": "lambda lamda lam",
    "local_steps": "num_local_steps max_steps",
    "local_rounds": "R",
    "attack": "attack_type attack_method",
    "backend": "dist_backend",
    "compress": "compression compressor quantization sparsification",
    "compress_down": "compress_downlink downlink_compression server_compression",
    "keep": "sparsity topk_ratio keep_ratio compression_ratio",
    "levels": "quantization_levels",
    "compress_rank": "powersgd_rank matrix_approximation_rank low_rank",
    "feedback": "error_feedback ef",
}
"""What other tools and papers call our options; words are separated by spaces."""
WITHOUT_A_MATCH = {
    "config_file",
    "eval_batch_size",
    "num_classes",
    "num_workers",
    "test_batch_size",
    "workers",
}
"""Names of other tools that are spelt nearly like an option which means something else.
"""


def suggest_option(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean '--lr'?` where a known option means the same as the word
    or is spelt nearly so, else nothing.
    """
    # By meaning first: `cohort` is spelt nearly like `smooth`, which misleads.
    names = list(known)
    by_plain = {plain_name(name): name for name in names}
    plain = plain_name(word)
    if plain in WITHOUT_A_MATCH:
        return ""
    for option, words in SYNONYMS.items():
        # Papers tell E, epochs, from e; tools do not tell --LR from --lr.
        means = plain in words.split() or plain.lower() in words.split()
        if means and option in by_plain:
            return f"; did you mean '{by_plain[option]}'?"
    return did_you_mean(word, names)
