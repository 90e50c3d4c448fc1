"""How the earlier system of this name failed, point by point, and the test that stands against it.

Most of these tests live beside the code that they test: here each is only called up by name, so
that none of them gets lost. What has no other place is tested below.
"""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator

from ups.config import UsageError, parse
from ups.data.make import make
from ups.latents import open_latents
from ups.models.codec import CodecConfig
from ups.stages import load_codec
from ups.train.run import RunConfig

TESTS = Path(__file__).parents[1]
AGAINST = {
    "1 every rank saw the same data": {
        "train/test_parity.py": ["test_ranks_see_disjoint_rows_of_one_global_batch"],
        "cache/test_cache_ranks.py": ["test_the_ranks_get_disjoint_slices_of_the_global_batch"]},
    "2 one rank ran out of memory and called a collective alone": {
        "faults/test_fault_step.py": [
            "test_out_of_memory_on_one_rank_splits_and_changes_nothing",
            "test_out_of_memory_everywhere_is_bounded_and_the_next_launch_goes_on",
            "test_all_ranks_enter_the_same_collectives"],
        "faults/test_fault_silence.py": [
            "test_out_of_memory_under_fsdp_fails_at_once_and_a_restart_takes_half"],
        "faults/test_fault_rules.py": ["test_no_hidden_end_and_no_collective_alone"]},
    "3 CUDA tensors in the cache, failures that looked like success": {
        "cache/test_store.py": ["test_latents_of_a_gpu_reach_the_disk_as_cpu_bytes",
                                "test_a_shard_is_a_header_and_plain_numbers"],
        "faults/test_fault_rules.py": ["test_no_hidden_end_and_no_collective_alone"],
        "faults/test_fault_kill.py": [
            "test_a_fault_in_a_loader_is_the_reason_whichever_rank_had_it",
            "test_a_death_costs_at_most_what_came_after_the_checkpoint"]},
    "4 DDP and FSDP died while the model was built": {
        "train/test_parallel_parts.py": ["test_a_part_trains_as_on_one_process"]},
    "5 W&B runs twice, stuck, or crashed after success": {
        "faults/test_fault_wandb.py": ["test_one_run_per_folder_with_its_true_end",
                                       "test_a_tracker_that_fails_or_blocks_is_left_alone"]},
    "6 a random encoder that was never saved": {
        "faults/test_fault_history.py": ["test_latents_are_the_same_in_every_stage"],
        "train/test_checkpoint.py": ["test_an_exported_model_knows_its_fingerprint"],
        "test_train_operator.py": ["test_other_data_under_an_old_run_is_refused"]},
    "7 metrics in latent space only": {
        "eval/test_rollout.py": ["test_measure_gives_the_errors_that_the_model_must_have"],
        "test_train_operator.py": [
            "test_from_nothing_to_a_table_and_the_same_command_again"]},
    "8 no change could not be expressed, parameters did not matter": {
        "models/test_latent_operator.py": ["test_starts_as_the_identity",
                                           "test_a_shuffled_parameter_raises_the_error",
                                           "test_dt_boundary_and_task_enter"]},
    "9 diffusion without noise, a student whose target was no drift": {
        "models/test_diffusion.py": [
            "test_samplers_follow_the_flow_of_a_mixture_at_second_order",
            "test_distillation_ends_in_one_call_where_the_sampler_ends"]},
    "10 unknown keys were accepted": {
        "test_config.py": ["test_wrong_use_is_one_sentence", "test_a_wrong_file_is_one_sentence"],
        "faults/test_fault_history.py": ["test_an_unknown_key_names_the_nearest"]},
    "11 a fixed port, NCCL only": {
        "faults/test_fault_history.py": ["test_every_config_on_one_machine_takes_a_free_port"],
        "train/test_parity.py": ["test_processes_and_micro_batches_do_not_change_the_weights"]},
    "12 a conservation penalty crashed mixed tasks": {
        "test_train_operator.py": [
            "test_several_tasks_and_a_family_in_one_run"]},
}


@pytest.mark.parametrize("point", AGAINST)
def test_a_test_stands_against(point):
    for file, names in AGAINST[point].items():
        tree = ast.parse((TESTS / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= there, (file, set(names) - there)


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    tasks: tuple[str, ...] = ("burgers1d",)
    stride_x: int = 1
    stride_t: int = 1
    codec: CodecConfig = CodecConfig()


def test_latents_are_the_same_in_every_stage(tmp_path):
    """The codec is fitted once; a later stage loads it, and its latents are the cached ones."""
    make("burgers1d", out=tmp_path / "data", samples=40, grid=32, frames=5)
    cfg = Config(run=str(tmp_path / "run"), data=(str(tmp_path / "data"),),
                 cache=str(tmp_path / "cache"))
    run = SimpleNamespace(accelerator=Accelerator(cpu=True))
    first, second = (open_latents(run, cfg, "train").tasks[0] for _ in range(2))
    assert first.fingerprint == second.fingerprint
    codec, mark = load_codec(tmp_path / "run" / "codec" / "burgers1d" / "model")
    assert mark == first.fingerprint
    u = first.fields.read(first.fields.split("train")[:3]).flatten(0, 1)
    for z in (first.codec.encode(u), codec.encode(u)):
        assert torch.equal(z, first.cache.z[0][:3].flatten(0, 1))
    other = Config(run=str(tmp_path / "other"), data=cfg.data, cache=cfg.cache,
                   codec=CodecConfig(patch=8))
    assert open_latents(run, other, "train").tasks[0].fingerprint != mark


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UsageError, match="no field --micro_bach; the nearest is --micro_batch"):
        parse(Config, ["--micro_bach", "3"])


def test_every_config_on_one_machine_takes_a_free_port():
    files = sorted((TESTS.parent / "accelerate_configs").glob("*.yaml"))
    configs = {file.name: yaml.safe_load(file.read_text()) for file in files}
    many = {name for name, c in configs.items() if c["num_processes"] > 1 == c["num_machines"]}
    assert {"2gpu.yaml", "2gpu_fsdp.yaml", "8gpu.yaml"} <= many
    assert {configs[name]["main_process_port"] for name in many} == {0}
