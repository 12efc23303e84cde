"""What docs/lightning.md says of every name of Lightning 2.6; see docs/lightning.py."""

from typing import NamedTuple


class Row(NamedTuple):
    names: str
    """One or several, in the order in which they are called."""
    verdict: str
    tests: str
    """``file::test``, both without their ``test_``."""
    note: str = ""


WORKS, REFUSED, BOTH, WARNS = "works", "refused", "works, but", "warns"

_OPTIONS = "data_agreement::a_trainers_options_take_the_steps_and_samples_of_one_process"
_MANY = "lightning_table::many_options_at_once_do_what_they_do_in_one_process"
_CALLBACKS = "trainer_limits::many_callbacks_at_once_do_what_they_do_in_one_process"
_LIMITS = "lightning_table::limits_of_test_and_predict_count_batches_as_in_one_process"
_NODES = "lightning_table::nodes_and_devices_of_a_users_environment_make_the_world"
_HOOKS = "lightning_table::every_hook_runs_as_often_and_in_the_order_of_one_process"
_TALK = "lightning_table::ranks_talk_to_each_other_through_module_and_strategy"
_WHOLE = "trainer_limits::what_needs_the_whole_module_on_one_rank_is_refused"
_PLUGINS = "trainer_limits::a_checkpoint_plugin_writes_one_file_and_one_that_reads_by_itself_is_refused"
_LAYERS = "trainer_limits::layers_are_synchronized_before_they_are_sharded"
_SCRIPTS = "scripts::a_script_that_only_names_the_strategy_trains_as_one_process"
_SAMPLER = "data_agreement::a_sampler_gives_each_share_its_samples_and_a_cp_group_the_same"
_RESUME = "strategy::fit_validate_save_and_resume_on_another_layout"
_WEIGHTS_ONLY = "trainer_limits::a_checkpoint_is_read_with_weights_only_as_the_trainer_is_told"
_ONE_FILE = "lightning_table::a_checkpoint_of_one_file_is_loaded_without_a_trainer"
_BY_HAND = "step_gradient::what_is_optimized_by_hand_ends_as_under_a_plain_trainer"
_TOGGLED = "projects::manual_optimization_whose_two_optimizers_take_turns"
_MEANS = "logged_means::logged_means_are_per_label_on_every_layout"
_TOP_K = "checkpoint_save::top_k_and_a_linked_last_checkpoint_are_directories_and_the_folder_is_tidy"
_STOP = "logged_means::early_stopping_and_the_best_checkpoint_are_the_same_on_all_ranks"
_AVERAGES = "ema::lightnings_own_averages_are_refused_with_the_name_of_ours"
_CONFIGURE = "models_in_use::configure_model_is_called_again_for_every_stage"
_ACCUMULATE = "strategy::two_accumulated_micro_batches_equal_one_of_twice_the_size"
_GRADIENT = "strategy::every_gradient_equals_one_process_on_every_layout"
_CLIPPING = "projects::a_module_that_clips_its_own_way_and_logs_gradient_norms"
_FREEZE = "trainer_limits::what_is_frozen_and_unfrozen_in_between_trains_as_in_one_process"
_PRECISION = "precision::names_and_aliases_are_those_of_lightning"
_NOT_OFFERED = "precision::what_is_not_offered_is_refused_in_the_same_words_when_the_trainer_is_built"

TRAINER = (
    Row(
        "accelerator", WORKS, _SCRIPTS, "`cpu` and `cuda`; Lightning itself refuses `mps` for strategies of many ranks"
    ),
    Row("strategy", WORKS, _SCRIPTS, "the name, or an instance with degrees"),
    Row("devices num_nodes", WORKS, _NODES, "their product is the world that the degrees are laid out on"),
    Row("precision", WORKS, _PRECISION, "`32-true`, `bf16-mixed` (FP32 masters, no autocast), `bf16-true`"),
    Row("precision", REFUSED, _NOT_OFFERED, "FP16, FP64, FP8, quantized weights"),
    Row("logger", WORKS, _MANY),
    Row("logger", REFUSED, _WHOLE, "`log_graph=True`: rank 0 alone would run the model"),
    Row(
        "callbacks", WORKS, _MANY, "in their order, before those of the strategy; checkpoint callbacks last; see below"
    ),
    Row("fast_dev_run max_epochs max_steps max_time", WORKS, _OPTIONS),
    Row("min_epochs min_steps", WORKS, _MANY),
    Row("limit_train_batches limit_val_batches overfit_batches", WORKS, _OPTIONS, "of the shortest loader"),
    Row("limit_test_batches limit_predict_batches", WORKS, _LIMITS),
    Row("val_check_interval check_val_every_n_epoch num_sanity_val_steps", WORKS, _OPTIONS),
    Row("val_check_interval", WORKS, "data_agreement::the_clock_of_rank_0_says_when_validation_is_due", "as a time"),
    Row("log_every_n_steps", WORKS, _MANY),
    Row("enable_checkpointing enable_progress_bar enable_model_summary", WORKS, _MANY, "shards count as whole weights"),
    Row("accumulate_grad_batches", WORKS, _ACCUMULATE, "weighed by labels"),
    Row(
        "gradient_clip_val", WORKS, "strategy::the_clipped_norm_is_the_norm_of_the_whole_gradients", "over both meshes"
    ),
    Row("gradient_clip_algorithm", WORKS, "strategy::values_are_clipped_on_both_meshes", "`norm` and `value`"),
    Row("deterministic benchmark", WORKS, _MANY),
    Row(
        "inference_mode",
        BOTH,
        "lightning_table::a_module_that_was_validated_in_inference_mode_can_be_trained",
        "`torch.no_grad` is used for both values: weights gathered in inference mode cannot be trained afterwards",
    ),
    Row("use_distributed_sampler", WORKS, _SAMPLER, "shares by dp; the ranks of a cp group read the same"),
    Row("profiler", WORKS, _MANY),
    Row(
        "detect_anomaly",
        WORKS,
        "lightning_table::anomalies_are_detected_on_every_rank",
        "an all-reduce a sharded gradient",
    ),
    Row("barebones", WORKS, "lightning_table::barebones_takes_the_steps_of_one_process"),
    Row("plugins", WORKS, "precision::a_users_own_plugin_is_the_one_that_runs", "a precision of `MeshPrecision`"),
    Row(
        "plugins",
        REFUSED,
        "precision::a_plugin_whose_hooks_would_not_run_is_refused",
        "any other precision of one's own",
    ),
    Row("plugins", WORKS, _NODES, "a cluster environment"),
    Row("plugins", WORKS, _LAYERS, "a layer synchronization"),
    Row("plugins", WORKS, _PLUGINS, "a checkpoint plugin with `save_distributed_checkpoint=False`"),
    Row("plugins", REFUSED, _WHOLE, "a checkpoint plugin where all ranks write a directory"),
    Row("sync_batchnorm", WORKS, _LAYERS, "statistics over all ranks; torch has it on GPUs only, and says so on CPUs"),
    Row("reload_dataloaders_every_n_epochs", WORKS, _OPTIONS),
    Row("default_root_dir enable_autolog_hparams", WORKS, _MANY),
    Row("model_registry", REFUSED, _WHOLE, "uploads of checkpoints that all ranks write were never run"),
)

RUNS = (
    Row(
        "model",
        WORKS,
        "projects::fit_validate_test_and_predict_with_one_trainer",
        "one Trainer for all stages, or several",
    ),
    Row("model", REFUSED, "trainer_limits::a_whole_module_is_not_compiled_but_its_blocks", "`torch.compile(module)`"),
    Row("train_dataloaders val_dataloaders dataloaders datamodule", WORKS, _HOOKS),
    Row(
        "train_dataloaders val_dataloaders dataloaders",
        WORKS,
        "data_agreement::uneven_loaders_of_every_other_stage_stop_together",
    ),
    Row("ckpt_path", WORKS, _RESUME, "on any layout"),
    Row("weights_only", WORKS, _WEIGHTS_ONLY),
    Row("verbose return_predictions", WORKS, _LIMITS),
)

MODULE = (
    Row("prepare_data setup configure_callbacks configure_model configure_optimizers teardown", WORKS, _HOOKS),
    Row("configure_model", WORKS, _CONFIGURE, "built on the meta device, filled shard by shard"),
    Row(
        "configure_sharded_model",
        WORKS,
        "lightning_table::what_configure_sharded_model_builds_trains_as_in_one_process",
    ),
    Row("train_dataloader val_dataloader test_dataloader predict_dataloader", WORKS, _HOOKS),
    Row(
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
        WORKS,
        _HOOKS,
        "before the cp split",
    ),
    Row("on_fit_start on_train_start on_train_epoch_start on_train_batch_start training_step", WORKS, _HOOKS),
    Row("on_before_zero_grad optimizer_zero_grad on_before_backward backward on_after_backward", WORKS, _HOOKS),
    Row("on_before_optimizer_step configure_gradient_clipping clip_gradients", WORKS, _CLIPPING, "norms are whole"),
    Row(
        "optimizer_step lr_scheduler_step on_train_batch_end on_train_epoch_end on_train_end on_fit_end", WORKS, _HOOKS
    ),
    Row("on_validation_model_zero_grad on_validation_model_eval on_validation_model_train", WORKS, _HOOKS),
    Row("on_validation_start on_validation_epoch_start on_validation_batch_start validation_step", WORKS, _HOOKS),
    Row("on_validation_batch_end on_validation_epoch_end on_validation_end", WORKS, _HOOKS),
    Row("on_test_model_eval on_test_model_train on_test_start on_test_epoch_start on_test_batch_start", WORKS, _HOOKS),
    Row("test_step on_test_batch_end on_test_epoch_end on_test_end", WORKS, _HOOKS),
    Row("on_predict_model_eval on_predict_start on_predict_epoch_start on_predict_batch_start", WORKS, _HOOKS),
    Row("predict_step on_predict_batch_end on_predict_epoch_end on_predict_end", WORKS, _HOOKS),
    Row("predict_step", WORKS, "strategy::predictions_are_restored_to_the_order_of_the_sequence"),
    Row(
        "training_step", REFUSED, "data_agreement::a_step_that_reads_batches_by_itself_is_refused", "`dataloader_iter`"
    ),
    Row(
        "on_save_checkpoint on_load_checkpoint", WORKS, _HOOKS, "weights are loaded when `on_load_checkpoint` is called"
    ),
    Row("load_from_checkpoint", WORKS, "checkpoint_load::load_from_checkpoint_takes_a_directory", "of a directory"),
    Row("load_from_checkpoint", WORKS, _ONE_FILE, "of one file (`save_distributed_checkpoint=False`)"),
    Row(
        "strict_loading",
        WORKS,
        "checkpoint_load::strict_loading_of_the_module_decides_whether_a_part_is_enough",
        "False: what only one of them has is skipped and named",
    ),
    Row("automatic_optimization manual_backward optimizers lr_schedulers", WORKS, _BY_HAND),
    Row("toggle_optimizer untoggle_optimizer toggled_optimizer", WORKS, _TOGGLED),
    Row("freeze unfreeze", WORKS, _FREEZE, "at any time"),
    Row("log log_dict", WORKS, _MEANS, "means per label; `sync_dist_group=strategy.sample_group` for samples"),
    Row("all_gather print device_mesh global_rank local_rank", WORKS, _TALK, "over all ranks, those of a cp group too"),
    Row("example_input_array", WORKS, _TALK, "with cp=1"),
    Row(
        "example_input_array",
        REFUSED,
        "trainer_limits::an_example_input_is_refused_where_sequences_are_split",
        "with cp > 1",
    ),
)

DATA = (
    Row("prepare_data setup teardown state_dict load_state_dict", WORKS, _HOOKS),
    Row("train_dataloader val_dataloader test_dataloader predict_dataloader", WORKS, _HOOKS),
    Row(
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
        WORKS,
        _HOOKS,
        "before the cp split",
    ),
    Row("on_exception", WORKS, "lightning_table::an_error_on_every_rank_reaches_its_hooks"),
)

CALLBACK = (
    Row("setup teardown state_dict load_state_dict on_save_checkpoint on_load_checkpoint", WORKS, _HOOKS),
    Row("on_fit_start on_sanity_check_start on_sanity_check_end on_train_start on_train_epoch_start", WORKS, _HOOKS),
    Row("on_train_batch_start on_before_zero_grad on_before_backward on_after_backward", WORKS, _HOOKS),
    Row("on_before_optimizer_step on_train_batch_end on_train_epoch_end on_train_end on_fit_end", WORKS, _HOOKS),
    Row("on_validation_start on_validation_epoch_start on_validation_batch_start", WORKS, _HOOKS),
    Row("on_validation_batch_end on_validation_epoch_end on_validation_end", WORKS, _HOOKS),
    Row("on_test_start on_test_epoch_start on_test_batch_start", WORKS, _HOOKS),
    Row("on_test_batch_end on_test_epoch_end on_test_end", WORKS, _HOOKS),
    Row("on_predict_start on_predict_epoch_start on_predict_batch_start", WORKS, _HOOKS),
    Row("on_predict_batch_end on_predict_epoch_end on_predict_end", WORKS, _HOOKS),
    Row(
        "on_exception",
        WORKS,
        "lightning_table::an_error_on_every_rank_reaches_its_hooks",
        "nothing there may need another rank",
    ),
)

STRATEGY = (
    Row("connect setup_environment setup setup_optimizers setup_precision_plugin teardown", WORKS, _CONFIGURE),
    Row("accelerator launcher parallel_devices num_processes root_device process_group_backend", WORKS, _NODES),
    Row("precision_plugin", WORKS, _PRECISION),
    Row("tensor_init_context", WORKS, "strategy::trainer_init_module_builds_on_meta_and_takes_the_seed"),
    Row(
        "model_sharded_context", WORKS, "lightning_table::what_configure_sharded_model_builds_trains_as_in_one_process"
    ),
    Row("process_dataloader distributed_sampler_kwargs batch_to_device", WORKS, _SAMPLER),
    Row("training_step pre_backward backward post_backward optimizer_step post_training_step", WORKS, _GRADIENT),
    Row("block_backward_sync handles_gradient_accumulation", WORKS, _ACCUMULATE),
    Row("validation_step test_step predict_step", WORKS, _HOOKS),
    Row("on_train_start on_train_batch_start on_train_end on_validation_start on_validation_end", WORKS, _HOOKS),
    Row("on_test_start on_test_end on_predict_start on_predict_end", WORKS, _HOOKS),
    Row("on_exception", WORKS, "lightning_table::an_error_on_every_rank_reaches_its_hooks"),
    Row("all_gather barrier broadcast reduce reduce_boolean_decision", WORKS, _TALK),
    Row("is_global_zero global_rank local_rank node_rank world_size device_mesh set_world_ranks", WORKS, _TALK),
    Row(
        "save_checkpoint load_checkpoint remove_checkpoint",
        WORKS,
        _RESUME,
        "without `storage_options`: Lightning refuses them",
    ),
    Row("lightning_module_state_dict optimizer_state load_model_state_dict load_optimizer_state_dict", WORKS, _RESUME),
    Row("restore_checkpoint_after_setup lightning_restore_optimizer", WORKS, _RESUME),
    Row("checkpoint_io", WORKS, _PLUGINS),
    Row("register_strategies", WORKS, "autoload::a_trainer_takes_the_name_and_gets_a_strategy_of_its_own_flavour"),
)

CALLBACKS = (
    Row("ModelCheckpoint", WORKS, _TOP_K, "with `async_save`, removals and links wait for what replaces them"),
    Row("ModelCheckpoint", REFUSED, _WHOLE, "`save_on_exception=True`, see `OnExceptionCheckpoint`"),
    Row("OnExceptionCheckpoint", REFUSED, _WHOLE, "an error may be one rank's, and a checkpoint needs all"),
    Row("EarlyStopping", WORKS, _STOP),
    Row("LearningRateMonitor", WORKS, _CALLBACKS),
    Row(
        "LearningRateFinder",
        WORKS,
        "trainer_limits::a_learning_rate_is_found_for_all_ranks_and_training_starts_from_the_beginning",
        "and `Tuner.lr_find`; from the losses of rank 0",
    ),
    Row("BatchSizeFinder", REFUSED, _WHOLE, "and `Tuner.scale_batch_size`: Lightning's rule for several ranks"),
    Row("DeviceStatsMonitor", WORKS, _CALLBACKS),
    Row("RichProgressBar", WORKS, _CALLBACKS),
    Row("TQDMProgressBar ProgressBar", WORKS, "lightning_table::a_progress_bar_counts_on_rank_0_alone"),
    Row("RichModelSummary", WORKS, _CALLBACKS),
    Row("ModelSummary", WORKS, _MANY, "sizes of whole weights"),
    Row("Timer", WORKS, _CALLBACKS, "rank 0's clock decides"),
    Row("GradientAccumulationScheduler", WORKS, _CALLBACKS),
    Row("StochasticWeightAveraging", REFUSED, _AVERAGES, "`ShardedEMA` averages shards"),
    Row("EMAWeightAveraging WeightAveraging", REFUSED, _AVERAGES, "`ShardedEMA` averages shards"),
    Row("ModelPruning", REFUSED, _WHOLE, "compares whole weights"),
    Row("BackboneFinetuning", REFUSED, _WHOLE, "compares parameters by value"),
    Row("BaseFinetuning", REFUSED, _WHOLE, "`requires_grad_(...)` at any time works instead"),
    Row("LambdaCallback", WORKS, _CALLBACKS),
    Row(
        "BasePredictionWriter",
        WORKS,
        "trainer_limits::a_prediction_writer_is_told_whose_predictions_it_gets",
        "a rank's part of each sequence",
    ),
    Row("SpikeDetection", WORKS, "trainer_limits::a_spike_on_one_rank_ends_the_training_of_all", "any rank's loss"),
    Row(
        "ThroughputMonitor",
        WARNS,
        "trainer_limits::lightnings_throughput_monitor_is_said_to_count_samples_cp_times",
        "samples are counted cp times; `lightning_moe_strategy.ThroughputMonitor`, always there, counts tokens once",
    ),
    Row("Callback Checkpoint", WORKS, _HOOKS, "one's own; see the hooks"),
)

SECTIONS = {
    "Trainer": ("Arguments of `Trainer`", TRAINER),
    "Runs": ("Arguments of `fit`, `validate`, `test` and `predict`", RUNS),
    "LightningModule": ("`LightningModule`", MODULE),
    "LightningDataModule": ("`LightningDataModule`", DATA),
    "Callback": ("`Callback`", CALLBACK),
    "Callbacks": ("Lightning's callbacks", CALLBACKS),
    "Strategy": ("`Strategy`", STRATEGY),
}

_HPARAMS = {"hparams", "hparams_initial", "save_hyperparameters", "remove_ignored_hparams"}
_HPARAMS |= {f"CHECKPOINT_HYPER_PARAMS_{word}" for word in ("KEY", "NAME", "TYPE")}
UNCONCERNED = {
    "LightningModule": _HPARAMS
    | {"forward", "trainer", "fabric", "logger", "loggers", "current_epoch", "global_step", "on_gpu", "device", "dtype"}
    | {"to", "cpu", "cuda", "type", "half", "float", "double", "to_onnx", "to_torchscript", "to_tensorrt"},
    "LightningDataModule": _HPARAMS | {"name", "from_datasets", "load_from_checkpoint"},
    "Callback": {"state_key"},
    "Strategy": {"lightning_module", "model", "optimizers", "model_to_device"},
}
