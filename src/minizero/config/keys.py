"""Chapter 26, config: every key DeepSpeed knows, and what becomes of it here.

One row per key: its path, the kind of value, its fate in minizero, the ZeRO stages in which DeepSpeed 0.19.8 reads it,
and why. `used` keys have a field in a model of `minizero.config`. `ignored` keys change neither what is computed nor
what must fit: they are named in a warning, whatever their value. `refused` keys would change it, and raise, unless they
have the value that leaves them off. Kind `tree` is a block whose inside nobody looks at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

DEEPSPEED = "0.19.8"

TABLE = """
train_batch_size                       | count | used | 0123 | samples per optimizer step, over all ranks
train_micro_batch_size_per_gpu         | count | used | 0123 | samples per rank and backward
gradient_accumulation_steps            | count | used | 0123 | backwards per optimizer step
managed_gradient_accumulation          | flag  | used | 0123 | false: every step() is an optimizer step
gradient_clipping                      | real  | used | 0123 | largest global norm; 0: any; without the key 1.0
dataloader_drop_last                   | flag  | used | 0123 | of the loader made from training_data=
communication_data_type                | text  | used | 0123 | of gradients on the wire; their sum is fp32 in any case
zero_allow_untested_optimizer          | flag  | used | 123  | true: take an optimizer not known to be element-wise
optimizer                              | block | used | 0123 | an optimizer=... in the program comes first
optimizer.type                         | text  | used | 0123 | Adam is AdamW unless adam_w_mode is false
optimizer.params                       | tree  | used | 0123 | what the optimizer's constructor takes
optimizer.legacy_fusion                | flag  | ignored | 0 | an implementation of DeepSpeed's fp16 optimizer
scheduler                              | block | used | 0123 | an lr_scheduler=... in the program comes first
scheduler.type                         | text  | used | 0123 | WarmupLR, WarmupDecayLR, WarmupCosineLR, or torch's
scheduler.params                       | tree  | used | 0123 | what the scheduler's constructor takes
fp16                                   | block | used | 0123 | in DeepSpeed not on CPUs without AVX512-FP16
fp16.enabled                           | flag  | used | 0123 | fp16 weights and activations, fp32 master weights
fp16.auto_cast                         | flag  | ignored | 0123 | floating-point inputs are always cast to fp16
fp16.loss_scale                        | real  | used | 0123 | 0: a scale that adapts
fp16.initial_scale_power               | size  | used | 0123 | the adapting scale begins at 2 to this power
fp16.loss_scale_window                 | count | used | 0123 | good steps until the scale doubles
fp16.hysteresis                        | count | used | 0123 | overflows until the scale halves
fp16.consecutive_hysteresis            | flag  | refused unless false | 0123 | not built
fp16.min_loss_scale                    | count | used | 0123 | the scale does not fall below
fp16.fp16_master_weights_and_grads     | flag  | refused unless false | 123 | the master weights are fp32
bf16                                   | block | used | 0123 |
bf16.enabled                           | flag  | used | 0123 | bf16 weights and activations, fp32 master weights
bf16.check_grad_overflow | flag | used | 123 | skip a step whose gradients are not finite; false: raise
bf16.immediate_grad_update             | flag  | ignored | 0 | gradients are added up in fp32 at once
bf16.bf16_master_weights_and_grads     | flag  | refused unless false | 123 | the master weights are fp32
bf16.bf16_optimizer_states             | flag  | refused unless false | 123 | the optimizer's states are fp32
bfloat16                               | tree  | refused | 0123 | the old name of bf16, which is there, too
zero_optimization                      | block | used | 0123 |
zero_optimization.stage                | size  | used | 0123 | 0: everything on every rank
zero_optimization.offload_optimizer    | block | used | 123  |
zero_optimization.offload_optimizer.device | text | used | 123 | master weights and optimizer states: none, cpu or nvme
zero_optimization.offload_optimizer.nvme_path  | text | used | 3 | a folder; read with device nvme
zero_optimization.offload_optimizer.pin_memory | flag | ignored | 123 | host memory is pinned wherever there is a GPU
zero_optimization.offload_optimizer.buffer_count | size | ignored | 3 | files are mapped into memory: no buffers
zero_optimization.offload_optimizer.{pipeline_read pipeline_write} | flag | ignored | 3 | the kernel reads ahead
zero_optimization.offload_optimizer.fast_init             | flag | ignored | 3 | memory-mapped files are made at once
zero_optimization.offload_optimizer.ratio | real | refused unless 1 | 3 | all states are offloaded, or none
zero_optimization.offload_optimizer.super_offload         | flag | refused unless false | 3 | for one kind of machine
zero_optimization.offload_optimizer.cpuadam_cores_perc    | real | ignored | 3 | of super_offload
zero_optimization.offload_param.device         | text | refused unless "none" | 3 | parameters stay where the model is
zero_optimization.offload_param.nvme_path      | text | ignored | 3 | of offload_param
zero_optimization.offload_param.{buffer_count buffer_size max_in_cpu} | size | ignored | 3 | of offload_param
zero_optimization.offload_param.pin_memory     | flag | ignored | 3 | of offload_param
zero_optimization.stage3_prefetch_bucket_size  | size | used | 3 | elements gathered ahead of use; no key: one unit
zero_optimization.allgather_partitions         | flag | ignored |   | read by no stage of DeepSpeed either
zero_optimization.allgather_bucket_size        | size | ignored | 12 | a unit is gathered at a time
zero_optimization.reduce_scatter | flag | ignored | 123 | always a true reduce-scatter: false only sends more
zero_optimization.reduce_bucket_size           | count | ignored | 123 | a unit is reduced at a time
zero_optimization.overlap_comm                 | flag | ignored | 123 | reductions always overlap with backward
zero_optimization.contiguous_gradients         | flag | ignored | 123 | a unit's gradients always share a buffer
zero_optimization.use_multi_rank_bucket_allreduce | flag | ignored | 12 | how DeepSpeed sums for several ranks
zero_optimization.compute_grad_norm            | flag | ignored | 12 | the norm is always there
zero_optimization.load_from_fp32_weights       | flag | ignored | 123 | a checkpoint holds the master weights
zero_optimization.elastic_checkpoint           | flag | ignored | 12 | a checkpoint loads on any number of ranks
zero_optimization.ignore_unused_parameters     | flag | ignored | 12 | an unused parameter's gradient is zero
zero_optimization.round_robin_gradients        | flag | ignored | 12 | how DeepSpeed shares gradients out
zero_optimization.parameter_alignment          | flag | ignored | 12 | where parameters begin in DeepSpeed's buffer
zero_optimization.legacy_stage1                | flag | refused unless false | 12 | DeepSpeed refuses it too
zero_optimization.sub_group_size               | size | ignored | 3 | the optimizer updates all slices in one step
zero_optimization.stage3_max_live_parameters   | size | ignored | 3 | a unit leaves as soon as it was used
zero_optimization.stage3_max_reuse_distance    | size | ignored | 3 | a unit leaves as soon as it was used
zero_optimization.{stage3_param_persistence_threshold stage3_model_persistence_threshold} | size | ignored | 3 | \
small parameters are sharded as well
zero_optimization.stage3_module_granularity_threshold     | size | ignored | 3 | units= of minizero.Zero says it
zero_optimization.leaf_module                             | tree | ignored | 3 | units= of minizero.Zero says it
zero_optimization.stage3_gather_16bit_weights_on_model_save | flag | ignored | 3 | full_state() is always there
zero_optimization.stage3_gather_fp16_weights_on_model_save  | flag | ignored | 3 | older name of the 16bit key
zero_optimization.{stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential} | flag | ignored | 3 | \
one all-gather for each unit
zero_optimization.memory_efficient_linear      | flag | ignored | 3 | torch.nn.functional.linear is left as it is
zero_optimization.override_module_apply        | flag | ignored | 3 | Module.apply is left as it is
zero_optimization.{log_trace_cache_warnings enable_sanity_checks} | flag | ignored | 3 | of DeepSpeed's own bookkeeping
zero_optimization.pipeline_loading_checkpoint  | flag | ignored | 3 | loading is unit by unit
zero_optimization.save_muon_momentum_buffer_in_memory     | flag | ignored | 3 | of the Muon optimizer
zero_optimization.zero_hpz_partition_size      | size | refused unless 0 1 | 3 | ZeRO++ is not built
zero_optimization.{zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients} | flag | \
refused unless false | 3 | ZeRO++ is not built
zero_optimization.zenflow                      | tree | refused | 123 | not built
zero_optimization.{cpu_offload cpu_offload_param} | flag | refused unless false | 123 | write offload_optimizer
zero_optimization.cpu_offload_use_pin_memory   | flag | ignored | | without effect in DeepSpeed, too
zero_optimization.{mics_shard_size mics_hierarchical_params_gather zeropp_loco_param} | tree | refused | | \
removed from DeepSpeed
zero_force_ds_cpu_optimizer                    | flag | ignored | 123 | there is no other CPU optimizer to be forced
steps_per_print                                | count | ignored | 0123 | minizero prints nothing
{wall_clock_breakdown memory_breakdown dump_state} | flag | ignored | 0123 | minizero prints nothing
log_level                                      | text | ignored | 0123 | minizero prints nothing
{tensorboard wandb csv_monitor comet}          | tree | ignored | 0123 | log engine.get_lr() and the like yourself
flops_profiler.{enabled detailed}              | flag | ignored | 0123 | minizero.overlap.trace measures times
flops_profiler.{profile_step module_depth top_modules output_file recompute_fwd_factor} | tree | ignored | 0123 | \
minizero.overlap.trace measures times
comms_logger.{enabled prof_all prof_ops verbose debug} | tree | ignored | 0123 | minizero.Ledger counts bytes
timers                                         | tree | ignored | 0123 | of DeepSpeed's throughput timer
disable_python_gc                              | flag | ignored | 0123 | of the interpreter, not of training
prescale_gradients                             | flag | ignored | 0123 | sums are fp32: when to divide is all the same
gradient_predivide_factor                      | real | ignored | 0123 | sums are fp32: when to divide is all the same
gradient_allreduce_op | text | refused unless "mean" | 012 | gradients are means over the ranks
disable_allgather                              | flag | ignored | | read by no stage of DeepSpeed either
vocabulary_size                                | count | ignored | 0123 | DeepSpeed warns if it is no multiple of 8
seq_parallel_communication_data_type           | text | ignored | 0123 | there is no sequence parallelism here
{sequence_parallel_size data_parallel_size}    | count | refused | 0123 | there is no sequence parallelism here
use_data_before_expert_parallelism             | flag | ignored | 0123 | there is no expert parallelism here
activation_checkpointing.{partition_activations contiguous_memory_optimization cpu_checkpointing profile \
synchronize_checkpoint_boundary}               | flag | ignored | 0123 | torch.utils.checkpoint works as always
activation_checkpointing.number_checkpoints    | tree | ignored | 0123 | torch.utils.checkpoint works as always
checkpoint.{checkpoint_serialization parallel_write writer} | tree | ignored | 0123 | how DeepSpeed writes its files
checkpoint.tag_validation                      | text | ignored | 0123 | tags that differ are always an error
checkpoint.{load_universal use_node_local_storage} | flag | refused unless false | 0123 | DeepSpeed's files are not read
datastates_ckpt                                | tree | ignored | 0123 | how DeepSpeed writes its files
aio.{block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds} | tree | ignored | 3 | \
files are mapped into memory
data_types.grad_accum_dtype | text | refused unless null "fp32" | 0123 | gradients are added up in fp32
data_types.{param_dtype buffer_dtype} | text | refused unless null | 0123 | fp16 or bf16 says it
data_types.keep_in_fp32_modules | tree | refused unless "auto" [] | 0123 | see minizero.precision.Precision
torch_autocast.enabled | flag | refused unless false | 0123 | torch.autocast around the forward, by hand
torch_autocast.{dtype lower_precision_safe_modules} | tree | ignored | 0123 | of torch_autocast
compile | tree | ignored | 0123 | torch.compile(model) before minizero.initialize
pipeline                                       | tree | refused | | there is no pipeline parallelism here
tensor_parallel | tree | refused unless off | 0123 | there is no tensor parallelism here
expert_parallel | tree | refused unless off | 0123 | there is no expert parallelism here
{autotuning data_efficiency hybrid_engine}     | tree | refused unless off | 0123 | not built
weight_quantization                            | tree | refused | 0123 | not built
{amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop \
quantize_training sparse_attention sparse_gradients} | tree | refused | | removed from DeepSpeed
"""


@dataclass(frozen=True)
class Key:
    """A row of the table: `off`: what a refused key may be; None stands for a block that is not enabled."""

    path: str
    kind: str
    fate: str
    off: tuple[Any, ...] | None
    stages: frozenset[int]
    why: str

    def is_off(self, value: Any) -> bool:
        """Whether a refused key may have this value, which asks for nothing."""
        if value is None:
            return True
        if self.off is None:
            is_block = isinstance(value, Mapping) and value.get("autotp_size", 0) in (0, 1)
            return is_block and not value.get("enabled", False)
        return any(isinstance(value, bool) is isinstance(each, bool) and value == each for each in self.off)


def read_table(text: str) -> dict[str, Key]:
    """The rows of `text` by path; `{a b}` in a path stands for several rows, a backslash continues a line."""
    keys: dict[str, Key] = {}
    for line in text.strip().splitlines():
        paths, kind, fate, stages, why = (cell.strip() for cell in line.split("|"))
        fate, _, off = fate.partition(" unless ")
        values = None if off == "off" else tuple(json.loads(value) for value in off.split())
        parts = [part.strip("{}").split() for part in re.findall(r"\{.*?\}|[^{}]+", paths)]
        for path in map("".join, product(*parts)):
            keys[path] = Key(path, kind, fate, values, frozenset(map(int, stages)), why)
            block = path.rpartition(".")[0]
            if block:
                keys.setdefault(block, Key(block, "block", fate, values, keys[path].stages, why))
    for key in [key for key in keys.values() if (key.kind, key.fate) == ("block", "ignored")]:
        if any(inner.fate != "ignored" for path, inner in keys.items() if path.startswith(f"{key.path}.")):
            keys[key.path] = replace(key, fate="refused")  # what is inside matters
    for key in [key for path, key in keys.items() if ".stage3_" in path and "_fp16_" not in path]:
        short = key.path.replace(".stage3_", ".")  # DeepSpeed takes these without prefix, too
        keys[short] = Key(short, key.kind, "refused", (), key.stages, f"write {key.path}")
    return keys


KEYS = read_table(TABLE)
