"""Layouts of models over ranks: the number of ranks, and settings of the trainer."""

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel": 2}),
}
MORE_LAYOUTS = {
    "tp2 with whole sequences": (2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "pp2 interleaved": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "microbatch_samples": 3}),
    "optimizer on every rank": (2, {"distributed_optimizer": False}),
    "recomputed": (
        1,
        {"transformer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
    "small microbatches": (2, {"pipeline_parallel": 2, "microbatch_tokens": 30}),
    "tp2 pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2 dp2": (4, {"tensor_parallel": 2}),
    "tp2 cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
    "cp2 pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
}
FSDP_LAYOUTS = {
    "cp2": (2, {"context_parallel": 2}),
    "cp4": (4, {"context_parallel": 4}),
    "cp2 dp2, two copies": (4, {"context_parallel": 2, "shard_ranks": 2}),
}
MOE_LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {"expert_parallel": 2}),
}
MORE_MOE_LAYOUTS = {
    "ep2 tp2": (2, {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}),
    "ep4 tp2 dp2": (4, {"expert_parallel": 4, "tensor_parallel": 2, "expert_tensor_parallel": 1}),
    "ep2 pp2": (4, {"expert_parallel": 2, "pipeline_parallel": 2}),
    "etp2": (2, {"tensor_parallel": 2}),
    "ep2 cp2": (2, {"expert_parallel": 2, "context_parallel": 2}),
}
