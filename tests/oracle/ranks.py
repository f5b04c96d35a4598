"""What one rank after the other of a job holds, by the real megatron-core: `python -m oracle.ranks < jobs > answers`.

No job runs: every process group is fake, so one process can build the model of any rank of any layout. A job is a JSON
object with `layout` (fields of Layout) and `model` (fields of TransformerConfig, `tied`, `vocab`).
The answer of a job is a list of `[rank, key, global offset, local shape, global shape, replica]`, factories applied,
and what stopped it if something did.
"""

import contextlib
import json
import sys

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from oracle import cpu

cpu.install()

from megatron.core import mpu, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank  # noqa: E402

from oracle.models import shards  # noqa: E402

cpu.after_import()
if not isinstance(multi_latent_attention.TELinear, type):  # it asks whether something is one
    multi_latent_attention.TELinear = type("NoTransformerEngine", (), {})


class Attention(DotProductAttention):
    """Megatron's own, which multi-latent attention gives sizes that only TransformerEngine's takes."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


def build(layout, model, vp):
    """The chunk `vp` of this rank's model."""
    model = dict(model)
    tied, vocab = model.pop("tied"), model.pop("vocab")
    kind = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    vpp = mpu.get_virtual_pipeline_model_parallel_world_size()
    config = kind(
        **model,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        virtual_pipeline_model_parallel_size=None if layout["pp_layout"] else vpp,
        # context parallelism is left out: it changes who holds what through the process groups alone, and Megatron's
        # own attention refuses it
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
        num_layers_in_first_pipeline_stage=layout["first_layers"],
        num_layers_in_last_pipeline_stage=layout["last_layers"],
        account_for_embedding_in_pipeline_split=layout["account_for_embedding"],
        account_for_loss_in_pipeline_split=layout["account_for_loss"],
        pipeline_model_parallel_layout=layout["pp_layout"],
        hidden_dropout=0.0,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        moe_token_dispatcher_type="allgather",
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    if model.get("num_moe_experts"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp)
    else:
        spec = get_gpt_layer_local_spec(
            multi_latent_attention=bool(model.get("multi_latent_attention")), qk_layernorm=config.qk_layernorm
        )
        spec.submodules.self_attention.submodules.core_attention = Attention
    mtp = None
    if config.mtp_num_layers and mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp):
        layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") and spec.layer_specs else spec
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp)
    return GPTModel(
        config,
        spec,
        vocab_size=vocab,
        max_sequence_length=16,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=vp,
    )


@contextlib.contextmanager
def standing_as(job, rank):
    """This process is that rank of the job."""
    layout = job["layout"]
    torch.distributed.init_process_group("fake", rank=rank, world_size=job["world"], store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            layout["tp"],
            layout["pp"],
            layout["vpp"],
            context_parallel_size=layout["cp"],
            expert_model_parallel_size=layout["ep"],
            expert_tensor_parallel_size=layout["etp"],
            order=layout["order"],
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def chunks(job):
    """The model chunks of this rank, each with its sharded state."""
    vpp = job["layout"]["vpp"]
    for vp in range(vpp or 1):
        model = build(job["layout"], job["model"], vp if vpp else None)
        metadata = {
            "non_homogeneous_layers": True,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        yield model, model.sharded_state_dict(metadata=metadata)


def held(job, rank):
    """What a rank holds, as rows of the answer."""
    with standing_as(job, rank):
        for _, sharded in chunks(job):
            for shard in shards(sharded):
                yield [
                    rank,
                    shard.key,
                    list(shard.global_offset),
                    list(shard.local_shape),
                    list(shard.global_shape),
                    list(shard.replica_id),
                ]


def main():
    answers = []
    for job in json.load(sys.stdin):
        rows, stopped = [], None
        try:
            with contextlib.redirect_stdout(sys.stderr):
                for rank in range(job["world"]):
                    rows += held(job, rank)
        except Exception as error:
            stopped = f"{type(error).__name__}: {error}"[:500]
        answers.append({"rows": rows, "stopped": stopped})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
